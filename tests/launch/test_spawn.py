"""spawn: the same job as meshrun's, from a function."""

import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from launching import all_gone, environment, reported
from until import until

import meshdist as dist
from meshdist.errors import DistBackendError
from meshdist.launch.spawn import (
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    SpawnContext,
    spawn,
)

METHODS = ["spawn", "fork", "forkserver"]


def test_a_script_without_a_guard_is_told_in_one_sentence(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import meshdist\nmeshdist.spawn(print, nprocs=2)\n")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith(
        "ProcessExitedException: each rank imports this script, and calls spawn again: put the code "
        "that starts the ranks under "
        '`if __name__ == "__main__":`\n'
    )


# What a program of its own puts on its path to import this module.
HERE = [str(Path(__file__).parents[0]), str(Path(__file__).parents[1])]


def tell(directory, name, what=""):
    part = Path(directory, f"{name}.part{os.getpid()}")
    part.write_text(str(what))
    part.rename(Path(directory, name))


def hear(directory, name):
    return until(Path(directory, name).exists, f"somebody tells {name}", 30)


def note_environment(rank, directory):
    tell(directory, f"env{rank}", json.dumps(dict(os.environ)))


def meet_in_store(rank, directory, word):
    from meshdist.store import TCPStore

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set(f"from{rank}", word)
    store.get(f"from{1 - rank}")
    tell(directory, f"met{rank}")


def raise_in_one(rank, directory):
    tell(directory, f"pid{rank}", os.getpid())
    for other in range(3):
        hear(directory, f"pid{other}")
    if rank == 1:
        raise ValueError("from rank 1\nsecond line")
    time.sleep(60)


def follow_peer(rank, directory):
    if rank == 0:
        tell(directory, "noticed")
        raise DistBackendError("rank 1 is gone", peer_failed=True)
    hear(directory, "noticed")
    raise KeyError("the cause")


def end_by(rank, how):
    if rank == 0:
        time.sleep(60)
    how, number = how
    how(number) if how is not os.kill else os.kill(os.getpid(), number)


def wait_for(rank, directory, name):
    tell(directory, f"pid{rank}", os.getpid())
    hear(directory, name)


def put_in_queue(rank, queue):
    queue.put(rank)


def start_child(rank, directory):
    child = subprocess.Popen(["sleep", "60"])
    tell(directory, f"pid{rank}", child.pid)


def linger_after_error(rank):
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("yet a thread runs on")


def save_at_ctrl_c(rank, directory):
    try:
        wait_for(rank, directory, "never")
    except KeyboardInterrupt:
        tell(directory, f"saved{rank}")


def hang(rank, directory):
    dist.init_process_group()
    dist.barrier()
    tell(directory, f"pid{rank}", os.getpid())
    if rank == 1:
        time.sleep(60)
    dist.recv(np.empty(4), 1)


@pytest.mark.parametrize("method", METHODS)
def test_ranks_find_what_meshrun_sets(tmp_path, monkeypatch, method):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert spawn(note_environment, (str(tmp_path),), nprocs=2, start_method=method) is None
    found = [json.loads(reported(tmp_path, f"env{rank}")) for rank in range(2)]
    for rank, variables in enumerate(found):
        assert (variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert variables["MESHDIST_AGENT_STORE"] == f"127.0.0.1:{variables['MASTER_PORT']}"
        assert len(variables["MESHDIST_SECRET"]) == 64
        assert variables["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert "OMP_NUM_THREADS" not in os.environ
    assert "RANK" not in os.environ
    assert os.environ["MASTER_PORT"] == "29500"


@pytest.mark.parametrize("method", METHODS)
def test_ranks_meet_in_the_store(tmp_path, method):
    spawn(meet_in_store, (str(tmp_path), "hello"), nprocs=2, start_method=method)
    assert sorted(path.name for path in tmp_path.glob("met*")) == ["met0", "met1"]


@pytest.mark.parametrize("method", METHODS)
def test_failing_rank_ends_the_others_and_is_raised(tmp_path, method):
    with pytest.raises(ProcessRaisedException) as caught:
        spawn(raise_in_one, (str(tmp_path),), nprocs=3, start_method=method)
    error = caught.value
    pids = [int(reported(tmp_path, f"pid{rank}")) for rank in range(3)]
    assert (error.error_index, error.error_pid) == (1, pids[1])
    assert str(error).startswith(f"rank 1 (pid {pids[1]} on {os.uname().nodename}) exited with status 1:\nTraceback")
    assert "in raise_in_one\n" in str(error)
    assert str(error).endswith("ValueError: from rank 1\nsecond line\n")
    assert "meshdist/launch" not in str(error)
    all_gone(pids, timeout_s=0.1)


def test_failure_that_follows_from_a_peers_is_not_the_cause(tmp_path):
    with pytest.raises(ProcessRaisedException, match="KeyError: 'the cause'") as caught:
        spawn(follow_peer, (str(tmp_path),), nprocs=2, start_method="fork")
    assert caught.value.error_index == 1


@pytest.mark.parametrize(
    ("method", "how", "status", "name", "says"),
    [
        ("fork", (sys.exit, 3), 3, None, "exited with status 3"),
        ("spawn", (os._exit, 5), 5, None, "exited with status 5"),
        *[(method, (os.kill, signal.SIGKILL), -9, "SIGKILL", "was killed by SIGKILL") for method in METHODS],
    ],
    ids=["fork-exit", "spawn-_exit", *[f"{method}-kill" for method in METHODS]],
)
def test_rank_that_exits_badly(method, how, status, name, says):
    began = time.monotonic()
    with pytest.raises(ProcessExitedException, match=says) as caught:
        spawn(end_by, (how,), nprocs=2, start_method=method)
    assert time.monotonic() - began < 20
    assert (caught.value.error_index, caught.value.exit_code, caught.value.signal_name) == (1, status, name)


def test_errors_can_be_pickled():
    raised = ProcessRaisedException("it did", 1, 77)
    exited = ProcessExitedException("it did", 1, 77, -9)
    for error in (raised, exited):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
        assert isinstance(copy, ProcessException)


def test_join_false_returns_what_can_be_joined(tmp_path):
    context = spawn(wait_for, (str(tmp_path), "go on"), nprocs=2, join=False)
    assert isinstance(context, SpawnContext)
    pids = [int(reported(tmp_path, f"pid{rank}")) for rank in range(2)]
    assert context.pids() == pids
    assert all(process.is_alive() for process in context.processes)
    assert context.join(timeout=0.05) is False
    assert context.join(0) is False
    tell(tmp_path, "go on")
    assert context.join() is True
    assert context.join() is True
    assert [process.exitcode for process in context.processes] == [0, 0]


def test_join_raises_the_same_again(tmp_path):
    context = spawn(follow_peer, (str(tmp_path),), nprocs=2, join=False, start_method="fork")
    for _ in range(2):
        with pytest.raises(ProcessRaisedException, match="the cause"):
            context.join(timeout=30)


def test_ranks_outlive_the_thread_that_started_them(tmp_path):
    contexts = []
    starter = threading.Thread(
        target=lambda: contexts.append(spawn(wait_for, (str(tmp_path), "go on"), nprocs=2, join=False))
    )
    starter.start()
    starter.join()
    reported(tmp_path, "pid0"), reported(tmp_path, "pid1")
    assert contexts[0].join(timeout=0.05) is False
    tell(tmp_path, "go on")
    assert contexts[0].join(timeout=30) is True


@pytest.mark.parametrize("method", METHODS)
def test_arguments_may_be_what_only_a_new_process_can_get(method):
    queue = multiprocessing.get_context(method).Queue()
    spawn(put_in_queue, (queue,), nprocs=2, start_method=method)
    assert sorted(queue.get(timeout=10) for _ in range(2)) == [0, 1]
    queue.close()


def test_what_cannot_be_pickled_is_an_error_here():
    words = r"^spawn: fn, .*<lambda>, cannot be pickled .*; pass data, and a function"
    with pytest.raises(TypeError, match=words) as caught:
        spawn(lambda rank: None, nprocs=2)
    assert isinstance(caught.value.__cause__, (pickle.PicklingError, AttributeError))
    with pytest.raises(TypeError, match="^spawn: args cannot be pickled .*lock"):
        spawn(print, (threading.Lock(),), nprocs=2)
    assert not multiprocessing.active_children()


def test_children_of_ranks_end_with_them(tmp_path):
    spawn(start_child, (str(tmp_path),), nprocs=2, start_method="fork")
    all_gone([int(reported(tmp_path, f"pid{rank}")) for rank in range(2)], timeout_s=2.0)


def test_failed_rank_that_cannot_end_is_noticed():
    with pytest.raises(ProcessRaisedException, match="yet a thread runs on"):
        spawn(linger_after_error, nprocs=1, start_method="fork")


def test_no_descriptor_thread_or_variable_is_left(tmp_path):
    def held():
        return {f"descriptor {number}" for number in os.listdir("/proc/self/fd")} | set(threading.enumerate())

    spawn(put_nothing, nprocs=2)  # starts the resource tracker, which stays
    before, variables = held(), dict(os.environ)
    for _ in range(3):
        spawn(put_nothing, nprocs=2, start_method="fork")
    until(lambda: held() <= before, "nothing is held that was not before")
    assert os.environ == variables


def put_nothing(rank):
    """End at once."""


def meet_late(rank, directory):
    tell(directory, f"pid{rank}", os.getpid())
    hear(directory, "last line")
    meet_in_store(rank, directory, "hello")


@pytest.mark.parametrize("daemon", [False, True])
def test_program_that_ends_without_join(tmp_path, daemon):
    text = f"""
import sys, multiprocessing.util
sys.path[:0] = {HERE!r}
from meshdist.launch.spawn import spawn
import test_spawn
if __name__ == "__main__":
    spawn(test_spawn.meet_late, ({str(tmp_path)!r},), nprocs=2, join=False, daemon={daemon})
    test_spawn.hear({str(tmp_path)!r}, "pid0"), test_spawn.hear({str(tmp_path)!r}, "pid1")
    if not {daemon}:
        test_spawn.tell({str(tmp_path)!r}, "last line")
"""
    (tmp_path / "parent.py").write_text(text)
    ran = subprocess.run(
        [sys.executable, "parent.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(list(tmp_path.glob("met*"))) == (0 if daemon else 2)
    all_gone([int(reported(tmp_path, f"pid{rank}")) for rank in range(2)], timeout_s=2.0)


PARENT = """
import sys
sys.path[:0] = {here!r}
from meshdist.launch.spawn import spawn
import test_spawn
if __name__ == "__main__":
    spawn(test_spawn.{function}, ({directory!r}, "never")[:{num_args}], nprocs=2, start_method={method!r})
"""


def start_parent(directory, method, function="wait_for", num_args=2):
    text = PARENT.format(here=HERE, directory=str(directory), method=method, function=function, num_args=num_args)
    (directory / "parent.py").write_text(text)
    parent = subprocess.Popen(
        [sys.executable, "parent.py"],
        cwd=directory,
        env=environment(TMPDIR=str(directory)),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return parent, [int(reported(directory, f"pid{rank}")) for rank in range(2)]


@pytest.mark.parametrize("method", METHODS)
def test_ranks_die_with_their_parent(tmp_path, method):
    parent, pids = start_parent(tmp_path, method)
    parent.kill()
    all_gone(pids)
    parent.communicate(timeout=20)
    assert not list(tmp_path.glob("meshdist-*"))


@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_reaches_the_ranks_and_shows_one_traceback(tmp_path, method):
    parent, pids = start_parent(tmp_path, method, "save_at_ctrl_c", 1)
    parent.send_signal(signal.SIGINT)
    _, err = parent.communicate(timeout=20)
    assert parent.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1
    assert [reported(tmp_path, f"saved{rank}") for rank in range(2)] == ["", ""]
    all_gone(pids)


def test_ctrl_c_before_the_wait_begins_ends_the_ranks(tmp_path, monkeypatch):
    pids = []

    def interrupted(context):
        pids.extend(context.pids())
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(SpawnContext, "join", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # of tests in the background, it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            spawn(wait_for, (str(tmp_path), "never"), nprocs=2, start_method="fork")
    finally:
        signal.signal(signal.SIGINT, before)
    all_gone(pids)


def test_ctrl_c_on_ranks_that_hang_shows_who_waits_for_whom(tmp_path):
    parent, _ = start_parent(tmp_path, "spawn", "hang", 1)
    time.sleep(3.5)  # a wait that is long enough to be reported
    parent.send_signal(signal.SIGINT)
    _, err = parent.communicate(timeout=20)
    lines = [line for line in err.splitlines() if line.startswith("spawn: ")]
    assert lines[0].startswith(
        "spawn: rank 1 has not sent the message that rank 0 is waiting for in recv(float64[4]"
    ), err
    assert any(re.search(r"rank 0 has been in recv\(.*, for \d.\d s, waiting for rank 1", line) for line in lines)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fn": 3}, TypeError, "fn must be callable, got int"),
        ({"fn": print, "args": 3}, TypeError, r"spawn: args must be a tuple, such as \(3,\), got int"),
        ({"fn": print, "args": "ab"}, TypeError, r"spawn: args must be a tuple, such as \('ab',\), got str"),
        ({"fn": print, "nprocs": 0}, ValueError, "nprocs must be at least 1, got 0"),
        ({"fn": print, "nprocs": 500_000_000}, ValueError, "500000000 processes take at least 3,906,250 GiB of memory"),
        ({"fn": print, "nprocs": "2"}, TypeError, "nprocs must be an integer, got str"),
        ({"fn": print, "start_method": "thread"}, ValueError, "must be one of fork, spawn, forkserver, got 'thread'"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        spawn(**arguments)
