"""What meshrun says and returns when ranks fail."""

import glob
import os
import re
import signal
import tempfile
import time

import pytest
from launching import all_gone, finish, meshrun, reported, slow_networkx, start_meshrun, write_script

from meshdist import core
from meshdist.launch.agent import _other_failures
from meshdist.launch.failures import Failure


@pytest.fixture(autouse=True)
def no_file_left(monkeypatch):
    # Short, since sockets are made in it; not that of all, since other tests run at the same time.
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield
        assert glob.glob(os.path.join(directory, "meshdist-*")) == []


def test_a_rank_that_does_not_join_is_named_with_its_pid(tmp_path):
    body = """
if rank == 1:
    tell("pid", os.getpid())
    time.sleep(30)
hear("pid")
import meshdist
meshdist.init_process_group(timeout=2)
"""
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "-n", "2", "script.py")
    assert status == 1
    pid = (tmp_path / "pid").read_text()
    assert re.search(
        rf"1 of 2 ranks joined within 2 s; rank 1 is missing: meshrun started it \(pid {pid} on \S+\), but it has not"
        r" called init_process_group\n",
        err,
    )
    assert "MESHDIST_SECRET" not in err


# Longer than the report may take, and nearly as long.
@pytest.mark.parametrize("seconds", [2.5, 1.1])
def test_a_timeout_on_a_busy_machine_shows_who_waits_for_whom(tmp_path, seconds):
    body = """
import numpy as np
import meshdist as dist
dist.init_process_group()
group = dist.new_group(timeout=1)
group.barrier()
if rank == 1:
    hear("failed")
try:
    group.all_reduce(np.ones(4))
except dist.DistTimeoutError:
    tell("failed")
    raise
"""
    write_script(tmp_path, body)
    _, _, err = meshrun(tmp_path, "-n", "2", "script.py", variables=slow_networkx(tmp_path, seconds))
    assert re.search(r"DistTimeoutError: .* timed out after 1 s waiting for rank 1 .*\n  who is waiting for whom", err)
    assert "rank 1 has not reached all_reduce(float64[4], op=sum), call 2" in err


def test_traceback_of_the_first_failure_is_shown_once_first_and_whole(tmp_path):
    body = """
def inner():
    raise ValueError("first line\\nsecond line")
if rank == 2:
    try:
        {}["key"]
    except KeyError as error:
        inner()
time.sleep(30)
"""
    write_script(tmp_path, body)
    began = time.monotonic()
    status, out, err = meshrun(tmp_path, "--nproc-per-node", "4", "script.py")
    assert time.monotonic() - began < 10
    assert (status, out) == (1, "")
    lines = err.splitlines()
    assert lines[0].startswith("meshrun: first failure: rank 2 (pid ")
    assert lines[0].endswith("exited with status 1:")
    assert os.uname().nodename in lines[0]
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2].startswith(f'  File "{tmp_path}/script.py", line ')
    assert err.count("ValueError: first line\nsecond line\n") == 1
    assert "During handling of the above exception" in err
    assert err.count("Traceback") == 2  # the KeyError's and the ValueError's
    assert "worker.py" not in err
    assert lines[-1] == "meshrun: terminated ranks 0, 1, 3 after the first failure"


ERRORS = """
import numpy as np
import meshdist as dist
import meshdist.errors

def call():
    if what == "argument":
        dist.all_reduce(np.ones(3), op="none")
    elif what == "keyword":
        dist.new_group(rank=[0])
    elif what == "keyword of recv":
        dist.recv(np.ones(3), source=0)
    elif what == "keyword of probe":
        dist.probe(source=0)
    elif what == "keyword of a method":
        dist.group.WORLD.recv(np.ones(3), source=0)
    elif what == "name":
        dist.allreduce(np.ones(3))
    elif what == "between ranks":
        dist.all_reduce(np.ones(1 + rank))
    elif what == "async":
        dist.all_reduce(np.ones(1 + rank), async_op=True).wait()
    elif what == "cause":
        try:
            dist.all_reduce(np.ones(3), op="none")
        except ValueError as error:
            raise KeyError("mine") from error
    elif what == "mistake":  # of the package: not what it raises on purpose
        found = {}
        exec(compile("def fails():\\n    return None + 1", meshdist.errors.__file__, "exec"), found)
        found["fails"]()

dist.init_process_group()
call()
"""


def traceback_under_meshrun(directory, what, **variables):
    write_script(directory, f"what = {what!r}\n{ERRORS}")
    status, _, err = meshrun(directory, "--nproc-per-node", "2", "script.py", variables=variables)
    assert status == 1
    return err


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("argument", "ValueError: all_reduce on group 'world' "),
        ("keyword", "TypeError: new_group() got an unexpected keyword argument 'rank'; did you mean ranks=?"),
        ("keyword of recv", "TypeError: recv() got an unexpected keyword argument 'source'; did you mean src=?"),
        ("keyword of probe", "TypeError: probe() got an unexpected keyword argument 'source'; did you mean src=?"),
        ("keyword of a method", "TypeError: recv() got an unexpected keyword argument 'source'; did you mean src=?"),
        ("name", "AttributeError: module 'meshdist' has no attribute 'allreduce'; did you mean 'all_reduce'?"),
        ("between ranks", "meshdist.errors.DistBackendError: all_reduce on group 'world' "),
        ("async", "meshdist.errors.DistBackendError: all_reduce on group 'world' "),
    ],
)
def test_a_traceback_ends_at_the_line_of_the_user(tmp_path, what, words):
    err = traceback_under_meshrun(tmp_path, what)
    files = re.findall(r'^  File "([^"]*)"', err, re.MULTILINE)
    assert files == [f"{tmp_path}/script.py"] * 2, err
    assert f"\n{words}" in err


def test_a_traceback_keeps_causes_mistakes_of_the_package_and_all_at_level_detail(tmp_path):
    cause = traceback_under_meshrun(tmp_path, "cause")
    assert "ValueError: all_reduce on group 'world'" in cause
    assert "direct cause of the following exception" in cause
    assert "KeyError: 'mine'" in cause
    assert set(re.findall(r'^  File "([^"]*)"', cause, re.MULTILINE)) == {f"{tmp_path}/script.py"}
    mistake = traceback_under_meshrun(tmp_path, "mistake")
    assert re.search(r'script\.py", line \d+, in call\n.*\n  File ".*meshdist/errors\.py", line 2, in fails\n', mistake)
    detail = traceback_under_meshrun(tmp_path, "argument", MESHDIST_DEBUG="DETAIL")
    assert re.search(r'script\.py", line \d+, in call\n(.*\n)*?  File ".*meshdist/collectives/all_reduce\.py"', detail)


@pytest.mark.parametrize(
    ("imports", "mistake", "words"),
    [
        ("", "size_x = 3\nprint(size_y)", "NameError: name 'size_y' is not defined. Did you mean: 'size_x'?"),
        (
            "import meshdist as dist",
            "try:\n    1 / 0\nexcept ZeroDivisionError:\n    'text'.isdigits()",
            "AttributeError: 'str' object has no attribute 'isdigits'. Did you mean: 'isdigit'?",
        ),
    ],
)
def test_the_name_that_python_suggests_is_shown(tmp_path, imports, mistake, words):
    write_script(tmp_path, f"{imports}\n{mistake}")
    err = meshrun(tmp_path, "-n", "1", "script.py")[2]
    assert f"\n{words}\n" in err


@pytest.mark.parametrize("ending", ["", "sys.exit()", "dist.destroy_process_group()"])
def test_a_save_that_fails_at_the_end_is_a_failure(tmp_path, ending):
    body = f"""
import sys
import meshdist as dist
from meshdist.checkpoint import save

dist.init_process_group()
save("saves", {{}}, step=1)
save("saves", {{}}, step=1, asynchronous=True)
{ending}
"""
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    assert status == 1, err
    assert len(re.findall(r"^FileExistsError: asynchronous save to .*/saves/step-1 ", err, re.MULTILINE)) == 1, err


def test_failures_that_follow_from_a_peers_are_not_the_cause(tmp_path):
    # Rank 1 closes what the others hear of before it gets to write its error, as a `finally` of a user's script may.
    body = """
from meshdist.errors import DistBackendError
if rank == 1:
    try:
        raise KeyError("the cause")
    finally:
        tell("dead")
        hear("noticed0"), hear("noticed2")
hear("dead")
try:
    tell(f"noticed{rank}")
    raise DistBackendError("rank 1 is gone", peer_failed=True)
except DistBackendError as error:
    raise RuntimeError(f"step 7 failed on rank {rank}") from error
"""
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "3", "script.py")
    assert status == 1
    assert err.startswith("meshrun: first failure: rank 1 ")
    assert err.count("Traceback") == 1
    assert "KeyError: 'the cause'" in err
    for rank in (0, 2):
        summary = [line for line in err.splitlines() if line.startswith(f"meshrun: rank {rank} (pid ")]
        assert not summary or f"RuntimeError: step 7 failed on rank {rank}" in summary[0]


@pytest.mark.parametrize("later_s", [0, 0.7])  # on a busy machine, a process ends late
def test_killed_rank_is_the_cause_of_what_its_peers_report(tmp_path, later_s):
    body = (
        f"later_s = {later_s}"
        + """
from meshdist.errors import DistNetworkError
if rank == 2:
    hear("noticed0"), hear("noticed1")
    time.sleep(later_s)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    raise DistNetworkError("rank 2 is gone", peer_failed=True)
finally:
    tell(f"noticed{rank}")
"""
    )
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "3", "script.py")
    assert status == 128 + signal.SIGKILL
    assert err.startswith("meshrun: first failure: rank 2 (pid ")
    first, second = err.splitlines()[:2]
    assert "was killed by SIGKILL" in first
    assert "run out of memory" in second
    assert err.count("dmesg") == 1
    assert "Traceback" not in err


def failed(rank, kind, message, *, secondary=False):
    return Failure(rank, 100 + rank, "here", 1, 0.0, float(rank), secondary, kind, message, traceback=message)


def test_the_same_error_of_several_ranks_is_told_once():
    failures = [
        failed(rank, "DistBackendError", f"barrier on group 'world' (rank {rank} of 4): they disagree")
        for rank in range(3)
    ]
    another = failed(3, "KeyError", "'another'")
    same = "ranks 1, 2: the same as rank 0"
    assert _other_failures([another, *failures], shown=3) == [failures[0].headline(), same]
    assert _other_failures([*failures, another], shown=0) == [same, another.headline()]


def test_errors_that_differ_in_the_own_rank_alone_are_told_once():
    itself = "send on group 'world' (rank {0} of 8): dst is this rank, {0}, which has posted no receive with tag 0"
    for kind, text in (("ValueError", itself), ("FileNotFoundError", "no such file: 'shard-{0}.npy'")):
        failures = [failed(rank, kind, text.format(rank)) for rank in range(8)]
        assert _other_failures(failures, shown=1) == ["ranks 0, 2-7: the same as rank 1"]
    failures = [failed(rank, "KeyError", f"'{rank + 1}'") for rank in range(2)]
    assert _other_failures(failures, shown=0) == [failures[1].headline()]


def test_a_reason_that_ranks_name_in_different_calls_is_told_once():
    calls = [("ValueError", "mesh"), ("RuntimeError", "all_reduce on 'a'"), ("ValueError", "all_reduce on 'b'")]
    failures = [
        failed(rank, kind, f"{call}: the meshes of ranks 0, 1 and 2 are not equal")
        for rank, (kind, call) in enumerate(calls)
    ]
    assert _other_failures(failures, shown=0) == ["ranks 1, 2: the same as rank 0, or an error that follows from it"]


def test_errors_that_follow_from_that_of_a_rank_are_told_once():
    following = [
        failed(rank, "DistBackendError", f"on {group}: rank 3 failed: it raised KeyError", secondary=True)
        for rank, group in enumerate(["columns", "rows", "rows"])
    ]
    lines = _other_failures([failed(3, "KeyError", "'the cause'"), *following], shown=3)
    assert lines == [following[0].headline(), "ranks 1, 2: the same as rank 0, or an error that follows from it"]


@pytest.mark.skipif(core.module is None, reason="without the core, the error of a call hides what was handled")
@pytest.mark.parametrize("call", ["all_reduce(np.ones(1))", "recv(np.ones(1), src=1)"])
def test_an_exception_whose_handler_makes_a_call_is_the_first_failure(tmp_path, call):
    body = f"""
import numpy as np, meshdist as dist
dist.init_process_group()
try:
    if rank == 1:
        raise ValueError("bad input")
    dist.{call}
finally:
    dist.barrier()
"""
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    assert status == 1
    assert err.startswith("meshrun: first failure: rank 1 (pid ")
    assert err.index("ValueError: bad input") < err.index("During handling of the above exception")


@pytest.mark.skipif(core.module is None, reason="without the core, the error of a call hides what was handled")
def test_the_cause_may_come_after_the_end_of_the_rank_that_waited_for_it(tmp_path):
    body = """
import os, pathlib, time
import numpy as np, meshdist as dist
dist.init_process_group()
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
try:
    if rank == 1:
        raise ValueError("bad input")
    dist.recv(np.ones(1), src=1)
finally:
    try:
        dist.barrier()
    except dist.DistError:
        while rank == 1 and pathlib.Path(f"/proc/{pids[0]}").exists():
            time.sleep(0.01)
        raise
"""
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    assert status == 1
    assert err.startswith("meshrun: first failure: rank 1 (pid ")


def test_peers_error_is_shown_where_no_cause_comes_to_light(tmp_path):
    body = """
from meshdist.errors import DistBackendError
if rank == 0:
    sys.exit(0)
raise DistBackendError("rank 0 has left", peer_failed=True)
"""
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    assert status == 1
    assert err.startswith("meshrun: first failure: rank 1 ")
    assert "DistBackendError: rank 0 has left" in err


def test_error_of_ones_own_is_a_cause(tmp_path):
    write_script(tmp_path, "from meshdist.errors import DistBackendError\nraise DistBackendError('shapes disagree')")
    status, _, err = meshrun(tmp_path, "script.py")
    assert status == 1
    assert "DistBackendError: shapes disagree" in err


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ("sys.exit(3)", 3, "exited with status 3"),
        ("os._exit(9)", 9, "exited with status 9"),
        ("sys.exit('a last word')", 1, "a last word"),
        ("os.abort()", 128 + signal.SIGABRT, "was killed by SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", 128 + signal.SIGSEGV, "was killed by SIGSEGV"),
        ("1 +", 1, "SyntaxError"),
        ("raise KeyboardInterrupt", 130, "exited with status 130"),
        ("class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd", 1, "Odd"),
    ],
)
def test_exit_status_is_the_failed_ranks(tmp_path, body, status, says):
    write_script(tmp_path, body)
    found, _, err = meshrun(tmp_path, "--nproc-per-node", "1", "script.py")
    assert found == status
    assert says in err
    assert "launch" not in err


def test_sys_exit_without_failure_is_success(tmp_path):
    write_script(tmp_path, "sys.exit(0 if rank else None)")
    assert meshrun(tmp_path, "--nproc-per-node", "2", "script.py") == (0, "", "")


def test_excepthook_of_the_script_is_called_and_nothing_is_printed_twice(tmp_path):
    body = """
before = sys.excepthook
def hook(kind, error, traceback):
    tell("hooked", kind.__name__)
    before(kind, error, traceback)
sys.excepthook = hook
raise ValueError("once")
"""
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "script.py")
    assert (status, err.count("ValueError: once")) == (1, 1), err
    assert reported(tmp_path, "hooked") == "ValueError"


def test_excepthook_of_the_script_goes_on_while_the_ranks_are_terminated(tmp_path):
    body = """
def terminated(number, frame):
    tell("terminated")
    sys.exit()
def hook(kind, error, traceback):
    hear("terminated")
    tell("hooked", kind.__name__)
if rank == 1:
    signal.signal(signal.SIGTERM, terminated)
    tell("ready")
    time.sleep(30)
hear("ready")
sys.excepthook = hook
raise ValueError("once")
"""
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    assert (status, err.count("ValueError: once")) == (1, 1), err
    assert (tmp_path / "hooked").read_text() == "ValueError"


def test_failed_rank_that_cannot_end_is_noticed(tmp_path):
    body = """
import threading
threading.Thread(target=lambda: time.sleep(60)).start()
raise ValueError("yet a thread runs on")
"""
    write_script(tmp_path, body)
    began = time.monotonic()
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    assert time.monotonic() - began < 20
    assert status == 1
    assert err.count("ValueError: yet a thread runs on\n") >= 1


def test_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    body = """
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell("pid", os.getpid())
    time.sleep(60)
hear("pid")
raise ValueError("the end")
"""
    write_script(tmp_path, body)
    began = time.monotonic()
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "--grace", "0.5", "script.py")
    assert 0.5 < time.monotonic() - began < 10
    assert status == 1
    assert "ValueError: the end" in err
    assert "rank 1 had to be killed" in err
    all_gone([int(reported(tmp_path, "pid"))])


def test_rank_may_save_its_work_within_the_grace(tmp_path):
    body = """
if rank == 1:
    def save(number, frame):
        tell("saved")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    tell("ready")
    time.sleep(60)
hear("ready")
os._exit(6)
"""
    write_script(tmp_path, body)
    assert meshrun(tmp_path, "--nproc-per-node", "2", "script.py")[0] == 6
    assert reported(tmp_path, "saved") == ""


def test_stopped_rank_is_ended(tmp_path):
    body = """
if rank == 1:
    tell("pid", os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
hear("pid")
while " T" not in pathlib.Path(f"/proc/{hear('pid')}/stat").read_text():
    time.sleep(0.005)
raise ValueError("the end")
"""
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    assert status == 1
    assert "had to be killed" not in err


def test_failing_job_shows_the_failure_before_the_grace_is_over(tmp_path):
    body = """
if rank == 1:
    signal.signal(signal.SIGTERM, lambda number, frame: tell("asked"))
    tell("ready", os.getpid())
    while True:
        time.sleep(60)
hear("ready")
raise ValueError("the end")
"""
    write_script(tmp_path, body)
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", "--grace", "60", "script.py")
    reported(tmp_path, "asked")
    assert process.stderr.readline().startswith("meshrun: first failure: rank 0 ")
    process.send_signal(signal.SIGINT)  # whoever does not want to wait any longer
    finish(process)
    assert process.returncode == 1
    all_gone([int(reported(tmp_path, "ready"))])


def test_error_directory_that_cannot_be_made_loses_no_traceback(tmp_path):
    write_script(
        tmp_path, "os.environ['MESHDIST_ERROR_FILE'] = '/proc/nowhere/rank0.json'\nraise ValueError('still seen')"
    )
    status, _, err = meshrun(tmp_path, "script.py")
    assert status == 1
    assert err.count("ValueError: still seen") == 1
    assert "rank 0 (pid " in err


ENDS = """
import meshdist as dist
dist.init_process_group()
dist.barrier()
{end}
"""


@pytest.mark.parametrize(
    ("end", "is_said"), [("", True), ("sys.exit()", True), ("sys.exit(3)", False), ("raise ValueError('bad')", False)]
)
def test_a_missing_destroy_is_told_of_a_process_that_did_not_fail(tmp_path, end, is_said):
    write_script(tmp_path, ENDS.format(end=end))
    _, _, err = meshrun(tmp_path, "-n", "2", "script.py")
    said = "call it at the end of the program: otherwise, errors of pending calls are only logged"
    assert (said in err) == is_said
