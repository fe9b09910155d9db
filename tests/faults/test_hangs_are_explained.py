"""What a timeout says of a hang, what a rank says to SIGUSR1, what `attach` finds: who waits for whom, and where."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from trying import attempt
from worlds import tell

import meshdist as dist
from meshdist.debug.attach import attach
from meshdist.debug.story import story
from meshdist.debug.waits import who_waits

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
TIMEOUT_S = 4.0


def timed_out(*failures):
    """Return the first failure that is a timeout; the ranks that it tells fail with another error."""
    timeouts = [failure for failure in failures if failure.kind is dist.DistTimeoutError]
    return min(timeouts, key=lambda failure: failure.ended_s)


def busy_in_own_code(enough):
    end = time.monotonic() + 60
    while time.monotonic() < end and not os.path.exists(enough):
        sum(range(1000))


def one_computes(enough):
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    group.barrier()
    if dist.get_rank() == 1:
        busy_in_own_code(enough)
        return None
    failure = attempt(lambda: group.all_reduce(np.ones(4)))
    open(enough, "w").close()
    return failure


def test_a_timeout_shows_where_the_absent_rank_computes(new_crew, tmp_path):
    crew = new_crew(3)
    crew.start(one_computes, str(tmp_path / "enough"))
    first = timed_out(crew.outcome(0), crew.outcome(2))
    assert first.took_s >= TIMEOUT_S
    message = first.message
    assert f"timed out after {TIMEOUT_S:g} s waiting for rank 1 (pid {crew.pids[1]} on " in message
    assert "rank 1 has not come to all_reduce(float64[4], op=sum), call 2 on 'short of time'" in message
    assert re.search(r"ranks 0, 2 are in all_reduce\(.* at test_hangs_are_explained.py:\d+, for \d\.\d s", message)
    assert re.search(r"rank 1 is in no call, at test_hangs_are_explained.py:\d+ in busy_in_own_code", message)
    assert "its last call was barrier(), call 1 on 'short of time'" in message
    assert re.search(r"rank 1 stands at .* in one_computes > .* in busy_in_own_code", message)


def two_orders():
    one = dist.new_group(timeout=TIMEOUT_S, group_desc="one")
    other = dist.new_group(timeout=TIMEOUT_S, group_desc="other")
    for group in (one, other):
        group.barrier()
    first, second = (one, other) if dist.get_rank() == 0 else (other, one)

    def calls():
        first.all_reduce(np.ones(4))
        second.all_reduce(np.ones(4))

    return attempt(calls)


@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp"])
def test_a_timeout_shows_the_circle_and_the_first_call_that_differs(new_crew, backend):
    if backend == "threads":
        outcomes = dist.run(two_orders, 2)
    else:
        crew = new_crew(2, backend)
        crew.start(two_orders)
        outcomes = [crew.outcome(0), crew.outcome(1)]
    assert all(outcome.kind in (dist.DistTimeoutError, dist.DistBackendError) for outcome in outcomes)
    message = timed_out(*outcomes).message
    assert (
        "the ranks wait for each other: rank 0 waits for rank 1 in all_reduce(float64[4], op=sum), call 2 on 'one'"
        in (message)
    )
    assert "rank 1 waits for rank 0 in all_reduce(float64[4], op=sum), call 2 on 'other'" in message
    assert "after barrier(), call 1 on 'other'" in message


def test_the_lowest_waiting_rank_warns_in_the_log(caplog):
    free = threading.Event()

    def main():
        group = dist.new_group(timeout=8.0, group_desc="patient")
        group.barrier()
        if dist.get_rank() == 1:
            free.wait(20)
        group.barrier()

    class Frees(logging.Handler):
        def emit(self, record):
            if "has waited for" in record.getMessage():
                free.set()

    handler = Frees()
    logging.getLogger("meshdist").addHandler(handler)
    try:
        dist.run(main, 3)
    finally:
        logging.getLogger("meshdist").removeHandler(handler)
    warnings = [record for record in caplog.records if "has waited for" in record.getMessage()]
    assert {record.levelno for record in warnings} == {logging.WARNING}
    assert 1 <= len(warnings) <= 2  # on a busy machine, the other one may not have heard of the lowest yet
    assert warnings[0].rank in (0, 2)
    assert (warnings[0].group, warnings[0].sequence) == ("patient", 2)
    assert "rank 1 has not come to barrier(), call 2" in warnings[0].getMessage()


def async_and_wait(enough):
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    group.barrier()
    if dist.get_rank() == 1:
        busy_in_own_code(enough)
        return None
    work = group.all_reduce(np.ones(4), async_op=True)
    failure = attempt(work.wait)
    open(enough, "w").close()
    return failure


def test_an_async_call_that_times_out_says_it_as_well(tmp_path):
    failure = dist.run(async_and_wait, 2, (str(tmp_path / "enough"),))[0]
    assert failure.kind is dist.DistTimeoutError
    assert "rank 1 has not come to all_reduce(float64[4], op=sum), call 2 on 'short of time'" in failure.message
    assert "in busy_in_own_code" in failure.message


def test_64_ranks_that_are_stuck():
    late = 17

    def main():
        group = dist.new_group(timeout=6.0)
        group.barrier()
        if dist.get_rank() == late:
            done.wait(60)
            return None
        failure = attempt(group.barrier)
        done.set()
        return failure

    done = threading.Event()
    failures = [failure for failure in dist.run(main, 64, timeout=60.0) if failure is not None]
    first = timed_out(*failures)
    assert "rank 17 has not come to barrier(), call 2" in first.message
    assert "ranks 0-16, 18-63 are in barrier()" in first.message
    assert "rank 17 is in no call" in first.message


def wait_for_the_stopped():
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    group.barrier()
    if dist.get_rank() == 1:
        tell("stop me")
        time.sleep(60)
        return None
    return attempt(group.barrier)


def test_a_stopped_rank_is_told_of_as_stopped(new_crew):
    # That a process is stopped is seen on its host.
    crew = new_crew(2)
    crew.start(wait_for_the_stopped)
    crew.told(1)
    crew.signal(1, signal.SIGSTOP)
    failure = crew.outcome(0)
    assert failure.kind is dist.DistTimeoutError
    assert "rank 1 has not come to barrier(), call 2 on 'short of time'" in failure.message
    assert f"rank 1 is stopped by a signal; `kill -CONT {crew.pids[1]}` on " in failure.message


def frozen_in_a_library():
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)  # zeros: as PTHREAD_MUTEX_INITIALIZER
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def wait_for_the_frozen():
    group = dist.new_group(timeout=TIMEOUT_S, group_desc="short of time")
    group.barrier()
    if dist.get_rank() == 1:
        frozen_in_a_library()
    return attempt(group.barrier)


def test_a_rank_that_is_frozen_in_a_library_shows_the_line_that_called_it(new_crew):
    crew = new_crew(2)
    crew.start(wait_for_the_frozen)
    failure = crew.outcome(0)
    assert failure.kind is dist.DistTimeoutError
    assert "rank 1 has not come to barrier(), call 2 on 'short of time'" in failure.message
    words = r"rank 1 has not answered: it is inside something that does not come back to Python, called at .*"
    assert re.search(words + r"test_hangs_are_explained.py:\d+ in frozen_in_a_library", failure.message), failure


def wait_and_answer():
    group = dist.new_group(timeout=20.0, group_desc="patient")
    group.barrier()
    tell("waits")
    if dist.get_rank() == 1:
        end = time.monotonic() + 60
        while time.monotonic() < end and not os.environ.get("NEVER"):
            sum(range(1000))
    group.all_reduce(np.ones(4))


def test_attach_asks_a_running_job(new_crew):
    crew = new_crew(3, timeout_s=20.0)
    crew.start(wait_and_answer)
    for rank in range(3):
        crew.told(rank)
    for rank in (0, 2):
        crew.until_asleep(rank)
    found = attach(crew.address)
    assert sorted(found.states) == [0, 1, 2]
    assert found.world_size == 3
    text = "\n".join(story(who_waits(found.states, found.gone), found.world_size))
    assert "rank 1 has not come to all_reduce(float64[4], op=sum), call 2 on 'patient'" in text
    assert re.search(r"rank 1 is in no call, at test_hangs_are_explained.py:\d+ in wait_and_answer", text)
    # A rank that dies meanwhile is told of as dead.
    crew.signal(1, signal.SIGKILL)
    assert crew.ended(1)
    again = attach(crew.address)
    assert again.gone == {1: "has died"}


def test_attach_by_the_command_line(new_crew):
    crew = new_crew(2, timeout_s=20.0)
    crew.start(wait_and_answer)
    for rank in range(2):
        crew.told(rank)
    command = [sys.executable, "-m", "meshdist.debug", "attach", "--store", crew.address, "--stacks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Flight records of all 2 ranks" in done.stdout
    assert "in wait_and_answer" in done.stdout


def shrink_twice_and_wait():
    rank = dist.get_rank()
    if rank in (0, 2):
        tell("excluded")
        return
    dist.shrink_group([2])
    dist.shrink_group([0])
    tell(dist.get_rank())
    if rank == 3:
        end = time.monotonic() + 60
        while time.monotonic() < end and not os.environ.get("NEVER"):
            sum(range(1000))
    dist.new_group(timeout=20.0, group_desc="patient").barrier()


def test_attach_finds_a_world_that_was_shrunk(new_crew, capsys):
    from meshdist.debug.__main__ import main

    crew = new_crew(5, timeout_s=20.0)
    crew.start(shrink_twice_and_wait)
    assert [crew.told(rank) for rank in range(5)] == ["excluded", 0, "excluded", 1, 2]
    for rank in (1, 4):
        crew.until_asleep(rank)
    found = attach(crew.address)
    assert sorted(found.states) == [0, 1, 2]
    assert (found.world_size, found.gone, list(found.joined_as)) == (3, {}, [1, 3, 4])
    assert [found.states[rank].pid for rank in range(3)] == [crew.pids[rank] for rank in (1, 3, 4)]
    assert main(["attach", "--store", crew.address]) == 0
    said = capsys.readouterr().out
    assert said.startswith("The world was shrunk: its ranks 0 to 2 joined as ranks 1, 3, 4.\n")
    assert "rank 1 has not come to barrier(), call 1 on 'patient'" in said
    crew.signal(4, signal.SIGKILL)
    assert crew.ended(4)
    assert attach(crew.address).gone == {2: "has died"}


def shrink_by_some():
    if dist.get_rank() == 2:
        tell("late")
        end = time.monotonic() + 60
        while time.monotonic() < end and not os.environ.get("NEVER"):
            sum(range(1000))
    if dist.get_rank() != 1:
        dist.shrink_group([1])
        tell("shrunk")
        dist.barrier()


def test_attach_says_who_has_not_come_to_shrink_the_world(new_crew):
    crew = new_crew(3, timeout_s=20.0)
    crew.start(shrink_by_some)
    assert (crew.told(0), crew.told(2)) == ("shrunk", "late")
    crew.until_asleep(0)
    found = attach(crew.address)
    assert sorted(found.states) == [0]
    assert re.search(
        r"has not come to shrink_group: as rank 2, it is in no call, at .*:\d+ in shrink_by_some", found.gone[1]
    )


RANK = """
import sys, time
import meshdist as dist
dist.init_process_group(timeout=60)
print("ready", flush=True)
sys.stdin.readline()
dist.destroy_process_group()
"""


def test_attach_to_the_job_of_a_process(tmp_path, monkeypatch, capsys):
    from meshdist.debug.__main__ import main

    (tmp_path / "secret").write_text("nobody knows")
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.delenv("MESHDIST_SECRET", raising=False)
    for name in ("MESHDIST_SECRET", "MESHDIST_SECRET_FILE", "MESHDIST_INSECURE"):
        monkeypatch.setenv(name, "")  # so that what attach sets is taken back
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **place, "MESHDIST_SECRET_FILE": "secret"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", RANK], cwd=tmp_path, env=environment, **pipes) as rank:
        try:
            assert rank.stdout.readline() == "ready\n"
            assert main(["attach", "--pid", str(rank.pid)]) == 0
            assert "Flight records of all 1 ranks" in capsys.readouterr().out
            rank.communicate("go on\n", timeout=30)
        finally:
            rank.kill()
    assert main(["attach", "--pid", str(rank.pid)]) == 1
    assert f"there is no process {rank.pid} on this host" in capsys.readouterr().err


def test_attach_to_a_process_that_is_no_rank(capsys):
    from meshdist.debug.__main__ import main

    variables = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    with subprocess.Popen(["sleep", "60"], env=variables) as sleeper:
        assert main(["attach", "--pid", str(sleeper.pid)]) == 1
        sleeper.kill()
    assert "has no MASTER_ADDR and MASTER_PORT in its environment; give the pid of a rank" in capsys.readouterr().err


CHILD = "import os, sys; print(os.getpid(), flush=True); sys.stdin.readline()"


def test_attach_to_the_parent_of_the_ranks_names_them(capsys):
    from meshdist.debug.__main__ import main

    variables = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    shell = ["sh", "-c", 'RANK=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 "$0" -c "$1"; exit', sys.executable, CHILD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(shell, env=variables, **pipes) as parent:
        child = parent.stdout.readline().strip()
        assert main(["attach", "--pid", str(parent.pid)]) == 1
        parent.communicate("end\n", timeout=30)
    assert f"process {parent.pid} is no rank" in (words := capsys.readouterr().err)
    assert f"it has started ranks: give --pid {child} (rank 3), or --store" in words


@pytest.mark.parametrize(
    ("secret", "words"), [("", "MESHDIST_SECRET is missing for the job"), ("b", "MESHDIST_SECRET here is not that of")]
)
def test_attach_without_the_secret_says_so(monkeypatch, capsys, secret, words):
    from meshdist.debug.__main__ import main

    monkeypatch.delenv("MESHDIST_SECRET_FILE", raising=False)
    monkeypatch.setenv("MESHDIST_SECRET", secret)
    with dist.TCPStore("127.0.0.1", 0, is_master=True, secret=b"a") as store:
        assert main(["attach", "--store", f"127.0.0.1:{store.port}"]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert "port" not in said


@pytest.mark.parametrize(
    ("address", "message"),
    [("nowhere", "must be host:port"), ("127.0.0.1:1", "no store answered at 127.0.0.1:1")],
)
def test_attach_to_no_store(capsys, monkeypatch, address, message):
    from meshdist.debug.__main__ import main

    monkeypatch.setattr("meshdist.debug.attach.CONNECT_S", 0.5)
    assert main(["attach", "--store", address]) == 1
    assert message in capsys.readouterr().err


def test_attach_to_a_store_without_a_world(capsys):
    from meshdist.debug.__main__ import main

    with dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        assert main(["attach", "--store", f"127.0.0.1:{store.port}"]) == 1
    assert "has no world: no rank has called init_process_group there yet" in capsys.readouterr().err


# ---- SIGUSR1: crews have a handler of faulthandler for it, so these are processes of their own.

SCRIPT = """
import os, signal, sys, time
import numpy as np
import meshdist as dist
{before}
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0?rank=0&world_size=1")
dist.all_reduce(np.ones(4))
print("ready", flush=True)
sys.stdin.readline()
print(signal.getsignal(signal.SIGUSR1), flush=True)
dist.destroy_process_group()
print(signal.getsignal(signal.SIGUSR1) == {after}, flush=True)
"""


def signalled(tmp_path, before="", after="signal.SIG_DFL", **variables):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(before=before, after=after))
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        said = process.stderr.readline()
        out, err = process.communicate("go on\n", timeout=30)
    finally:
        process.kill()
        process.wait()
    assert out.endswith("True\n"), (out, err)
    return said + err


def test_sigusr1_writes_the_file(tmp_path):
    said = signalled(tmp_path, MESHDIST_FLIGHT_RECORDER_DIR=str(tmp_path / "dumps"))
    assert said.startswith(f"meshdist rank 0: its last calls are in {tmp_path / 'dumps' / 'rank_0.json'}")
    state = json.loads((tmp_path / "dumps" / "rank_0.json").read_text())
    assert [record["text"] for record in state["records"]] == ["all_reduce(float64[4], op=sum)"]
    assert state["place"].startswith(str(tmp_path / "script.py"))


def test_sigusr1_shows_where_the_rank_is(tmp_path):
    said = signalled(tmp_path)
    assert said.startswith("meshdist rank 0: it is in no call, at script.py:9 in <module>, for ")
    assert "its last call was all_reduce(float64[4], op=sum), call 1 on 'world', at script.py:7" in said


def test_a_handler_that_the_script_sets_later_stays(tmp_path):
    script = SCRIPT.replace('print("ready"', 'signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nprint("ready"')
    path = tmp_path / "script.py"
    path.write_text(script.format(before="", after="signal.SIG_IGN"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(path)], input="\n", capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.endswith("True\n"), (done.stdout, done.stderr)


def test_a_handler_of_the_script_is_left_alone(tmp_path):
    before = "def mine(*args): print('my own', file=sys.stderr, flush=True)\nsignal.signal(signal.SIGUSR1, mine)"
    assert signalled(tmp_path, before, after="mine") == "my own\n"
