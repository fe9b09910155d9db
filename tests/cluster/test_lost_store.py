"""The host of the store vanishes behind the faulty link, or its process is stopped and goes on."""

import re
import signal
import time

import pytest
from test_gloo_between_hosts import finish, start_ranks
from two_hosts import MESHRUN
from until import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
exhaustive = pytest.mark.exhaustive

# Rank 0 keeps the store; the ranks of the other host are in calls that need it, or one another alone.
CALLS = """
import os, sys
import numpy as np
import meshdist as dist
rank, x = int(os.environ["RANK"]), np.zeros(1000)
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
own_store = dist.TCPStore(*address, 3, is_master=rank == 0, timeout=60)
dist.init_process_group("gloo", store=own_store, rank=rank, world_size=3, timeout=60)
own = dist.new_group([1, 2])
dist.all_reduce(x)
store = dist.PrefixStore("test", own_store)
print("there", flush=True)

def message():
    if rank == 1:
        dist.recv(x, 2)
    else:
        store.get("never")

def group_of_those_here():
    for _ in range(100):
        own.all_reduce(x)
    dist.new_group([1, 2]).all_reduce(x)

calls = {
    "get": lambda: store.get("never"),
    "wait": lambda: store.wait(["never"]),
    "set": lambda: [store.set("key", bytes(1000)) for _ in iter(int, 1)],
    "all_reduce": lambda: dist.all_reduce(x),
    "new group": group_of_those_here,
    "message": message,
}
try:
    if rank == 0:
        sys.stdin.readline()
    else:
        calls[sys.argv[1]]()
except dist.DistError as error:
    print(type(error).__name__, str(error).replace("\\n", " "), flush=True)
"""
# As in test_faulty_links.py.
NOTICED_S = 25.0


@pytest.mark.parametrize(
    "call",
    ["get", *(pytest.param(name, marks=exhaustive) for name in ("wait", "set", "all_reduce", "new group", "message"))],
)
def test_the_host_of_the_store_vanishes(faulty_hosts, tmp_path, call):
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    processes = start_ranks(faulty_hosts, (1, 2), script, tmp_path, arguments=[call])
    for process in processes:
        assert process.stdout.readline() == "there\n"
    began_s = time.monotonic()
    faulty_hosts.link.cut()
    lines = [process.stdout.readline() for process in processes[1:]]
    assert time.monotonic() - began_s < NOTICED_S, lines
    for line in lines:
        assert re.match(r"(Dist(Backend|Network)|PeerConnection)Error ", line), line
        waits_for_another = call == "message" and "rank 2 (" in line
        assert faulty_hosts.addresses[0] in line or "rank 0" in line or waits_for_another, line
        assert re.search("does not answer|cut|nothing has come|gone|lost|cannot be reached", line), line
    faulty_hosts.link.mend()
    processes[0].stdin.write("\n")
    processes[0].stdin.flush()
    ended = [finish(process) for process in processes]
    assert [status for status, _, _ in ended] == [0, 0, 0], ended


STEADY = """
import os, time
import numpy as np
import meshdist as dist
dist.init_process_group("gloo", timeout=60)
rank, size = dist.get_rank(), dist.get_world_size()
x, enough, number = np.ones(1000), np.zeros(1), 0
while not enough[0]:
    assert set(dist.all_reduce(x.copy()).tolist()) == {size}
    group = dist.new_group()  # needs the store
    assert group.all_reduce(np.ones(3)).sum() == 3 * size
    dist.destroy_process_group(group)
    number += 1
    open(f"round{rank}-{number}", "w").close()
    enough[0] = os.path.exists("enough")
    dist.broadcast(enough, 0)
    time.sleep(0.02)
dist.destroy_process_group()
print("all is right", flush=True)
"""


@exhaustive
@pytest.mark.parametrize("frozen_s", [3.0, 20.0], ids=["3 s", "20 s"])
def test_the_launcher_with_the_store_is_stopped_and_goes_on(faulty_hosts, tmp_path, frozen_s):
    """Its host answers, so nothing is taken for dead: calls that need the store wait."""
    (tmp_path / "steady.py").write_text(STEADY)
    command = [*MESHRUN, "--nnodes", "2", "--rdzv-endpoint", f"{faulty_hosts.addresses[0]}:29400", "steady.py"]
    both = [faulty_hosts.start(host, command, tmp_path, MESHDIST_SECRET="s") for host in (0, 1)]

    def rounds():
        return len(list(tmp_path.glob("round1-*")))

    until(lambda: rounds() > 2, "calls go on", 40)
    both[0].send_signal(signal.SIGSTOP)
    time.sleep(frozen_s)  # the fault itself
    before = rounds()
    both[0].send_signal(signal.SIGCONT)
    until(lambda: rounds() > before + 3, "calls go on again", 30)
    (tmp_path / "enough").touch()
    ended = [finish(process) for process in both]
    assert [(status, err) for status, _, err in ended] == [(0, "")] * 2
    assert all("all is right" in out for _, out, _ in ended)
