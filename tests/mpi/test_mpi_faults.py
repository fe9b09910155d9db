"""The end of an MPI job when a rank is killed, exits early, or Ctrl-C is pressed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
import time

import mpi_worlds
import pytest
from mpi_jobs import environment, job

from meshdist.launch.mpirun import mpirun_command

pytestmark = pytest.mark.timeout(120)
LIBRARY = mpi_worlds.LIBRARIES[0]
BEGIN = """
import os, signal, sys, threading, time
import numpy as np
import meshdist as dist

def say(*words):
    os.write(1, (" ".join(map(str, words)) + chr(10)).encode())

dist.init_process_group("mpi", timeout=60)
rank = dist.get_rank()
dist.barrier()
"""


@pytest.fixture
def run(tmp_path):
    def run(text, size=2):
        path = tmp_path / "script.py"
        path.write_text(BEGIN + textwrap.dedent(text))
        began_s = time.monotonic()
        return job(LIBRARY, size, str(path)), time.monotonic() - began_s

    mpi_worlds.environment(LIBRARY)
    return run


KILLED = """
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(np.ones(3))
    say("went on")
"""


def test_a_rank_that_is_killed_ends_the_job(run):
    done, took_s = run(KILLED, 3)
    assert done.returncode != 0
    assert "went on" not in done.stdout
    assert took_s < 30, done.stderr  # of which most is the start


ENDS_EARLY = """
    for step in range(17):
        dist.all_reduce(np.ones(3))
    if rank == 1:
        sys.exit(0)
    try:
        dist.all_reduce(np.ones(3))
    except dist.DistBackendError as error:
        say(error)
"""


def test_an_early_end_is_told_with_the_numbers_of_the_calls(run):
    done, _ = run(ENDS_EARLY)
    words = r"rank 1 has ended without destroy_process_group\(\).*this is call 19, at script.py:\d+"
    assert re.search(words, done.stdout), (done.stdout, done.stderr)


CIRCLES = """
    names = ("pair", "rows", "columns", "new rows", "new columns", "posted")
    groups = [dist.new_group([0, 1], group_desc=name) for name in names]
    for group in groups[:3]:
        group.barrier()

    def receives():
        groups[0].recv(np.ones(4), 1 - rank)

    def two_orders(rows, columns):
        first, second = (rows, columns) if rank == 0 else (columns, rows)
        first.all_reduce(np.ones(3))
        second.all_reduce(np.ones(3))

    def posted():
        groups[5].irecv(np.ones(4), 1 - rank).wait()

    for circle in (receives, lambda: two_orders(*groups[1:3]), lambda: two_orders(*groups[3:5]), posted):
        try:
            circle()
        except dist.DistBackendError as error:
            say(rank, str(error).partition(": ")[2].replace("\\n ", ";"))
"""


@pytest.mark.slow
def test_every_rank_of_a_circle_raises_it(run):
    done, _ = run(CIRCLES)
    words = "deadlock: the ranks wait for each other, and none can proceed; rank 0 waits for rank 1 in "
    lines = done.stdout.splitlines()
    assert len(lines) == 8, done.stderr
    for rank in ("0", "1"):
        told = [line[2:] for line in lines if line[0] == rank]
        assert [line.startswith(words) for line in told] == [True] * 4, told
        starts = [re.match(r"\w+.*?'", line.removeprefix(words)) for line in told]
        assert [start[0].partition("(")[0] for start in starts] == ["recv", "all_reduce", "all_reduce", "irecv"]


INTERRUPTED = """
    def late_s(call, to_main):
        pressed = []

        def press():
            pressed.append(time.monotonic())
            if to_main:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                signal.raise_signal(signal.SIGINT)  # to this thread

        timer = threading.Timer(0.3, press)
        timer.start()
        try:
            call()
        except KeyboardInterrupt:
            return time.monotonic() - pressed[0]
        finally:
            timer.join()

    if rank == 0:
        x = np.ones(3)
        for to_main in (True, False):
            for name, call in (
                ("all_reduce", lambda group: group.all_reduce(x)),
                ("recv", lambda group: group.recv(x, 1)),
                ("wait", lambda group: group.all_reduce(x, async_op=True).wait()),
            ):
                late = min(late_s(lambda: call(dist.new_group()), to_main) for _ in range(2))
                say(name, to_main, round(late, 3))
        sys.exit(5)
    time.sleep(60)
"""


def test_ctrl_c_in_a_wait(run):
    done, _ = run(INTERRUPTED)
    assert done.returncode == 5, done.stderr
    late = {tuple(line.split()[:2]): float(line.split()[2]) for line in done.stdout.splitlines()}
    assert len(late) == 6, done.stdout
    assert max(late.values()) < 2.0, late  # the waits themselves last for a minute


HANGS = """
    if rank == 1:
        say("absent", 0)
        threading.Event().wait(60)
    say("calling", 0 if rank else os.getpid())
    dist.all_reduce(np.ones(4))
"""
NOTICED_S = 2.0  # a wait of a second is one that a rank reports


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
@pytest.mark.parametrize("library", mpi_worlds.LIBRARIES)
def test_ctrl_c_on_a_job_that_hangs_names_the_absent_rank_alone(tmp_path, library, backend):
    script = tmp_path / "script.py"
    script.write_text(BEGIN.replace('"mpi"', f'"{backend}"') + textwrap.dedent(HANGS))
    python = str(mpi_worlds.environment(library))
    command, pipe = [*mpirun_command(python, 3), python, str(script)], subprocess.PIPE
    mpirun = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    try:
        told = sorted(mpirun.stdout.readline().split() for _ in range(3))
        assert [what for what, _ in told] == ["absent", "calling", "calling"]
        rank_0 = max(int(pid) for _, pid in told)
        time.sleep(NOTICED_S)
        if library == "openmpi":
            # Its mpirun sends this to the ranks, and SIGKILL half a second later: too soon for a busy machine.
            os.kill(rank_0, signal.SIGTERM)
        else:
            mpirun.send_signal(signal.SIGINT)
        _, said = mpirun.communicate(timeout=30)
    finally:
        mpirun.kill()
        mpirun.wait()
    assert mpirun.returncode != 0
    lines = re.findall(r"meshdist rank 0: .*" if library == "openmpi" else r"meshdist rank [02]: .*", said)
    assert lines, said
    for line in lines:
        assert re.search(r"in all_reduce\(.*\), call 2 on 'world', .*, waiting for rank 1\b", line), said


def test_the_traceback_of_a_wrong_call_ends_at_the_line_of_the_script(run):
    done, _ = run("dist.recv(np.ones(3), 7)")
    assert "src must be a rank in the group" in done.stderr
    assert set(re.findall(r'File "([^"]*)"', done.stderr)) == {path for path in done.args if path.endswith("script.py")}
