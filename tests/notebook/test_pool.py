"""The workers of a notebook: what cells find, what is shown of them, and what becomes of those that go wrong."""

import _thread
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from until import loaded

from meshdist import DistError
from meshdist.notebook.pool import Pool

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]


class Shown:
    """What workers have printed, and an event for a line that is waited for."""

    def __init__(self):
        self.lines = []
        self.when = {}

    def __call__(self, rank, line):
        self.lines.append((rank, line))
        self.when.get(line, int)()

    def take(self):
        lines, self.lines = sorted(self.lines), []
        return lines


@pytest.fixture(scope="module")
def shown():
    return Shown()


@pytest.fixture(scope="module")
def workers(shown):
    pool = Pool(3, "gloo", 30.0, shown, grace_s=2.0)
    yield pool
    pids = pool.pids
    pool.close()
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


@pytest.fixture
def pool(workers, shown):
    shown.lines.clear()
    shown.when.clear()
    return workers


def statuses(outcome):
    return [outcome.answers[rank].status if rank in outcome.answers else "ended" for rank in range(3)]


def test_a_cell_runs_on_all_ranks_and_finds_what_it_needs(pool, shown):
    outcome = pool.run("x = 10 * rank\nprint(world_size, mesh['tp'].size())\nnp.float64(x) + 1", (("dp", 1), ("tp", 3)))
    assert outcome.is_good
    assert shown.take() == [(rank, text) for rank in range(3) for text in ("3 3", f"np.float64({10 * rank + 1}.0)")]


def test_variables_and_the_mesh_stay(pool, shown):
    assert pool.run("y = np.array([rank])", (("row", 3),)).is_good
    assert pool.run("first = mesh\ndist.all_reduce(y)\nprint(y[0], mesh.mesh_dim_names)", (("row", 3),)).is_good
    assert pool.run("print(mesh is first)", (("row", 3),)).is_good
    assert shown.take() == [(rank, text) for rank in range(3) for text in ("3 ('row',)", "True")]


def test_variables_come_and_go(pool):
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    outcome = pool.run(
        "total = a + b * rank\ndouble = lambda x: 2 * x", (), pickle.dumps({"a": 1, "b": 2}), ("total", "double")
    )
    values = outcome.values()
    assert values["total"] == [1, 3, 5]
    assert [double(4) for double in values["double"]] == [8, 8, 8]


def test_a_variable_that_is_not_there_is_said(pool):
    outcome = pool.run("pass", (), None, ("nothing_of_this_name",))
    assert statuses(outcome) == ["raised"] * 3
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    assert "this rank has no variable 'nothing_of_this_name'" in outcome.answers[1].summary


def test_a_later_cell_starts_at_once(pool):
    pool.run("pass")
    took = []
    for _ in range(5):
        began = time.perf_counter()
        assert pool.run("pass").is_good
        took.append(time.perf_counter() - began)
    assert min(took) < 1.0  # processes that begin take longer


def test_all_that_is_printed_is_shown_in_whole_lines(pool, shown):
    source = """
if rank == 0:
    import subprocess
    subprocess.run(["echo", "from another process"])
    print("x" * 100_000)
    print("without an end", end="")
"""
    assert pool.run(source).is_good
    assert shown.take() == [(0, "from another process"), (0, "without an end"), (0, "x" * 100_000)]


def test_a_syntax_error_is_said_once_and_nothing_runs(pool, shown):
    with pytest.raises(SyntaxError, match="mesh cell"):
        pool.run("print(1)\nif")
    assert shown.lines == []


def test_an_exception_ends_the_cell_of_the_others_and_the_next_one_works(pool, shown):
    pool.run("kept = 7")
    outcome = pool.run("dist.barrier()\nif rank == 1:\n    raise KeyError('lost')\ndist.barrier()")
    assert not outcome.is_good
    assert statuses(outcome) == ["raised"] * 3
    assert outcome.answers[1].text.splitlines()[-2:] == ["    raise KeyError('lost')", "KeyError: 'lost'"]
    assert [outcome.answers[rank].is_consequence for rank in range(3)] == [True, False, True]
    assert "meshdist/" not in outcome.answers[0].text
    assert pool.run("total = np.array([rank])\ndist.all_reduce(total)\nprint(total[0] + kept)").is_good
    assert shown.take() == [(rank, "10") for rank in range(3)]


def test_variables_of_the_world_are_named_also_if_they_are_the_mesh(pool):
    outcome = pool.run("line = mesh['x']\nif rank: missing", (("x", pool.size),))
    assert not outcome.keeps_world
    assert "line" in outcome.of_the_world()
    assert "mesh" not in outcome.of_the_world()
    pool.run("del line, mesh")


def test_a_rank_that_waits_for_one_that_has_ended_the_cell_raises_at_once(pool, shown):
    began_s = time.monotonic()
    outcome = pool.run("dist.barrier()\nif rank != 1:\n    dist.all_reduce(np.ones(2))", name="In [7]")
    assert time.monotonic() - began_s < loaded(5.0)
    assert statuses(outcome) == ["raised", "done", "raised"]
    words = (
        r"rank 1 has finished the cell, but this rank is still waiting for it in"
        r" all_reduce\(float64\[2\], op=sum\), call \d on"
        r" 'world', at In \[7\], line 3"
    )
    # Each of them notices it, or that the other one has failed for it.
    answers = {rank: outcome.answers[rank] for rank in (0, 2)}
    own = {rank: re.search(rf"\(rank {rank} of 3\): {words}$", answer.summary) for rank, answer in answers.items()}
    assert any(own.values())
    for rank, answer in answers.items():
        assert answer.is_consequence == (own[rank] is None)
        assert own[rank] or re.search(rf"rank {2 - rank} \(.*\) failed: {words}; this is call", answer.summary)
    # A message that was sent before the end of the cell is no reason.
    source = "if rank == 1:\n    dist.send(np.ones(1), 0)\nelif rank == 0:\n    x = np.zeros(1)\n    dist.recv(x, 1)"
    assert pool.run(source).is_good


@pytest.mark.parametrize(
    ("end", "how"), [("os._exit(7)", "exit status 7"), ("os.kill(os.getpid(), 9)", "killed by SIGKILL")]
)
def test_a_worker_that_ends_is_replaced(pool, shown, end, how):
    pool.run("import os\nkept = 7")
    pids = pool.pids
    outcome = pool.run(f"if rank == 2:\n    {end}\ndist.barrier()")
    assert outcome.ended == {2: how}
    assert pool.run("dist.barrier()\nprint('kept' in globals())").is_good
    assert shown.take() == [(0, "True"), (1, "True"), (2, "False")]
    assert [old == new for old, new in zip(pids, pool.pids, strict=True)] == [True, True, False]


def test_a_worker_that_ends_between_two_cells_is_replaced(pool, shown):
    pool.run("pass")
    pid = pool.pids[0]
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    os.close(pidfd)
    assert pool.ended == {0: "killed by SIGKILL"}
    assert pool.run("dist.barrier()\nprint('there')").is_good
    assert shown.take() == [(rank, "there") for rank in range(3)]
    assert pool.pids[0] != pid
    assert pool.replaced[-1] == (0, "killed by SIGKILL")
    assert pool.ended == {}


def test_a_worker_that_ends_before_it_takes_up_a_cell_is_not_said_to_have_ended_in_it(pool, shown):
    pool.run("pass")
    pid = pool.pids[0]
    shown.when["begun"] = lambda: os.kill(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGSTOP)  # the cell lies there, and it does not read it any more
    outcome = pool.run("if rank == 2: print('begun')\ndist.barrier()")
    assert (outcome.ended, outcome.not_begun) == ({0: "killed by SIGKILL"}, {0})
    outcome = pool.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert (outcome.ended, outcome.not_begun) == ({1: "killed by SIGKILL"}, set())


@pytest.mark.parametrize(
    "busy", ["while True: pass", "dist.recv(np.zeros(1), src=(rank + 1) % 3)", "import time; time.sleep(60)"]
)
def test_an_interrupt_ends_the_cell_on_all_ranks(pool, shown, busy):
    shown.when["begun"] = _interrupt_at(3)
    began = time.monotonic()
    outcome = pool.run(f"kept = 5\nprint('begun')\n{busy}")
    assert time.monotonic() - began < 10
    assert outcome.interrupted
    assert "interrupted" in statuses(outcome)
    assert pool.run("dist.barrier()\nprint(kept)").is_good
    assert shown.take() == [(rank, text) for rank in range(3) for text in ("5", "begun")]


def _interrupt_at(count):
    """Return a function that interrupts the main thread when it is called for the `count`th time."""
    left = iter(range(count - 1, -1, -1))

    def called():
        if next(left) == 0:
            _thread.interrupt_main()

    return called


def test_an_interrupt_of_ranks_that_hang_shows_who_waits_for_whom(pool, shown):
    shown.when["late"] = _interrupt_at(1)
    late = "import time\nif rank == 1:\n    time.sleep(3.5)\n    print('late')\n    time.sleep(60)\n"
    outcome = pool.run(f"{late}dist.recv(np.empty(4), 1)", name="In [9]")  # the waits are long enough to be reported
    assert outcome.interrupted
    assert outcome.hang_report[0].startswith(
        "rank 1 has not sent the message that rank 0 is waiting for in recv(float64[4]"
    )
    (waits,) = [line for line in outcome.hang_report if line.startswith("ranks 0, 2 have been in recv(")]
    assert re.search(r"at In \[9\], line 6, for \d\.\d s, waiting for rank 1$", waits)
    shown.when["late"] = _interrupt_at(1)
    assert pool.run("if rank == 0: print('late')\nwhile True: pass").hang_report == []  # none waits


def test_a_worker_that_does_not_hear_an_interrupt_is_killed(pool, shown):
    shown.when["deaf"] = _interrupt_at(1)
    source = "import signal, time\nif rank == 0:\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    print('deaf')\n"
    outcome = pool.run(source + "    while True: time.sleep(1)")
    assert outcome.interrupted
    assert outcome.ended == {0: "killed by SIGKILL"}
    assert pool.run("dist.barrier()").is_good


def test_workers_that_cannot_meet_say_why_once():
    pool = Pool(2, "carrier-pigeon", 30.0, print)
    try:
        with pytest.raises(DistError, match="^the workers could not join their world: rank 0: ValueError: unknown"):
            pool.run("pass")
    finally:
        pool.close()


def test_workers_end_with_their_notebook():
    code = """
import os, sys
from until import loaded

from meshdist import DistError
from meshdist.notebook.pool import Pool
pool = Pool(2, "gloo", 30.0, print)
pool.run("pass")
print(*pool.pids, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    end = time.monotonic() + 10
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < end:
        threading.Event().wait(0.01)
    assert [pid for pid in pids if _is_alive(pid)] == []


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
