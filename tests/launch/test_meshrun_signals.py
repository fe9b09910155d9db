"""Ctrl-C, SIGTERM, kill -9: however a job ends, nothing of it is left."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time

import pytest
from launching import all_gone, environment, finish, is_alive, reported, slow_networkx, start_meshrun, write_script
from until import until

WAIT = """
tell(f"pid{rank}", os.getpid())
time.sleep(60)
"""

# Each rank starts a process of its own, which would run on.
WITH_CHILDREN = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
tell(f"pid{rank}", f"{os.getpid()} {child.pid}")
"""


def started(directory, num_ranks):
    return [int(pid) for rank in range(num_ranks) for pid in reported(directory, f"pid{rank}").split()]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: str(value),
)
def test_signal_at_the_launcher_ends_all_ranks(tmp_path, number, status):
    write_script(tmp_path, WITH_CHILDREN + "time.sleep(60)")
    process = start_meshrun(tmp_path, "--nproc-per-node", "3", "script.py")
    pids = started(tmp_path, 3)
    process.send_signal(number)
    err = finish(process)
    assert process.returncode == status
    assert err == f"meshrun: stopped by {number.name}\n"
    all_gone(pids)


HANGS = """
import numpy as np
import meshdist as dist
dist.init_process_group()
dist.barrier()
tell(f"pid{rank}", os.getpid())
if rank == 1:
    time.sleep(60)
dist.recv(np.empty(4), 1)
"""


@pytest.mark.parametrize("after_s", [1.0, 3.5])
def test_ctrl_c_on_a_job_that_hangs_shows_who_waits_for_whom(tmp_path, after_s):
    write_script(tmp_path, HANGS)
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    started(tmp_path, 2)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    lines = finish(process).splitlines()
    assert lines[0].startswith("meshrun: rank 1 has not sent the message that rank 0 is waiting for in recv(float64[4]")
    assert re.search(r"rank 0 has been in recv\(.*, at script.py:\d+, for \d.\d s, waiting for rank 1", lines[1])
    assert lines[-1] == "meshrun: stopped by SIGINT"
    assert process.returncode == 130


@pytest.mark.parametrize("loads_slowly", [False, True])
def test_sigterm_on_a_job_that_hangs_shows_who_waits_for_whom(tmp_path, loads_slowly):
    write_script(tmp_path, HANGS)
    variables = slow_networkx(tmp_path, 1.5) if loads_slowly else {}
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", "script.py", variables=variables)
    pids = started(tmp_path, 2)

    def waits():
        # Ranks that have answered once have imported what the answer needs: the next one takes milliseconds.
        command = [sys.executable, "-m", "meshdist.debug", "attach", "--pid", str(pids[0])]
        asked = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
        return re.search(r"rank 0 has been in recv\(.* for (0\.[5-9]|[1-9]).* s, waiting for rank 1", asked.stdout)

    until(waits, "rank 0 has waited for long")
    process.send_signal(signal.SIGTERM)
    lines = finish(process).splitlines()
    assert lines[0].startswith("meshrun: rank 1 has not sent the message that rank 0 is waiting for in recv(float64[4]")
    assert lines[-1] == "meshrun: stopped by SIGTERM"
    assert process.returncode == 143


def test_sigterm_ends_a_job_whose_ranks_do_not_answer(tmp_path):
    write_script(tmp_path, HANGS)
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    pids = started(tmp_path, 2)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    assert finish(process).endswith("meshrun: stopped by SIGTERM\n")
    all_gone(pids)


def test_ctrl_c_on_ranks_that_are_threads_shows_who_waits_for_whom(tmp_path):
    body = """
import time
import numpy as np
import meshdist as dist
def main():
    if dist.get_rank() == 1:
        time.sleep(3.5)  # until the wait is long enough to be reported
        print("late", flush=True)
        time.sleep(60)
    dist.recv(np.empty(4), 1)
dist.run(main, 2)
"""
    (tmp_path / "script.py").write_text(body)
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "late\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    lines = [line for line in err.splitlines() if line.startswith("run: ")]
    assert lines[0].startswith("run: rank 1 has not sent the message that rank 0 is waiting for in recv(float64[4]"), (
        err
    )
    assert any(re.search(r"rank 0 has been in recv\(.*, at script.py:\d+, for \d.\d s", line) for line in lines)
    assert err.rstrip().endswith("KeyboardInterrupt")
    frames = re.findall(r'File ".*?([^/"]+)", line', err.partition("Traceback")[2])
    assert frames == ["script.py", "user_traceback.py"], err
    assert process.returncode == -signal.SIGINT


def test_ctrl_c_in_a_terminal_shows_one_line(tmp_path):
    write_script(tmp_path, WAIT)
    keyboard, terminal = os.openpty()

    def own_terminal():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-m", "meshdist.launch.meshrun", "--nproc-per-node", "3", "script.py"],
        cwd=tmp_path,
        env=environment(),
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=own_terminal,
    )
    os.close(terminal)
    pids = started(tmp_path, 3)
    os.write(keyboard, b"\x03")
    out, _ = process.communicate(timeout=20)
    os.close(keyboard)
    assert (process.returncode, out) == (130, "meshrun: stopped by SIGINT\n")
    all_gone(pids)


def test_rank_can_handle_ctrl_c(tmp_path):
    body = """
try:
    tell(f"pid{rank}", os.getpid())
    time.sleep(60)
except KeyboardInterrupt:
    tell(f"saved{rank}")
"""
    write_script(tmp_path, body)
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    started(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    finish(process)
    assert process.returncode == 130
    assert [reported(tmp_path, f"saved{rank}") for rank in range(2)] == ["", ""]


def test_second_ctrl_c_does_not_wait_for_the_grace(tmp_path):
    body = """
signal.signal(signal.SIGINT, lambda number, frame: tell(f"asked{rank}"))
tell(f"pid{rank}", os.getpid())
while True:
    time.sleep(60)
"""
    write_script(tmp_path, body)
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", "--grace", "100", "script.py")
    pids = started(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    reported(tmp_path, "asked0")
    reported(tmp_path, "asked1")
    process.send_signal(signal.SIGINT)
    err = finish(process)
    assert process.returncode == 130
    assert "ranks 0, 1 had to be killed" in err
    all_gone(pids)


def test_launcher_killed_with_9_leaves_nothing(tmp_path):
    write_script(tmp_path, WITH_CHILDREN + "time.sleep(60)")
    process = start_meshrun(tmp_path, "--nproc-per-node", "3", "script.py", variables={"TMPDIR": str(tmp_path)})
    pids = started(tmp_path, 3)
    assert all(is_alive(pid) for pid in pids)
    process.kill()
    all_gone(pids)
    process.communicate(timeout=20)
    until(lambda: not processes_mentioning(str(tmp_path)), "no reaper is left")
    assert not list(tmp_path.glob("meshdist-*"))


def test_launcher_killed_after_a_failure_leaves_no_file(tmp_path):
    body = """
signal.signal(signal.SIGTERM, lambda number, frame: tell("asked"))
tell(f"pid{rank}", os.getpid())
if rank == 0:
    hear("pid1")
    raise ValueError("the end")
while True:
    time.sleep(60)
"""
    write_script(tmp_path, body)
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", "script.py", variables={"TMPDIR": str(tmp_path)})
    pids = started(tmp_path, 2)
    reported(tmp_path, "asked")
    assert list(tmp_path.glob("meshdist-*"))
    process.kill()
    all_gone(pids)
    until(lambda: not list(tmp_path.glob("meshdist-*")), "the error directory is gone")
    process.communicate(timeout=20)


def test_everything_killed_at_once_leaves_no_file(tmp_path):
    write_script(tmp_path, WAIT)
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", "script.py", variables={"TMPDIR": str(tmp_path)})
    pids = started(tmp_path, 2)
    reapers = processes_mentioning(str(tmp_path))
    assert len(reapers) == 1
    for pid in [*reapers, process.pid, *pids]:
        os.kill(pid, signal.SIGKILL)
    all_gone([*pids, *reapers])
    process.communicate(timeout=20)
    assert not list(tmp_path.glob("meshdist-*"))


def test_job_outlives_its_reaper(tmp_path):
    write_script(tmp_path, "tell(f'pid{rank}')\nhear('go on')\nsys.exit(rank)")
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", "script.py", variables={"TMPDIR": str(tmp_path)})
    reported(tmp_path, "pid0")
    reported(tmp_path, "pid1")
    reapers = processes_mentioning(str(tmp_path))
    os.kill(reapers[0], signal.SIGKILL)
    all_gone(reapers)
    (tmp_path / "go on").touch()
    finish(process)
    assert process.returncode == 1


def test_kernel_ends_the_ranks_where_the_reaper_is_gone(tmp_path):
    write_script(tmp_path, WAIT)
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", "script.py", variables={"TMPDIR": str(tmp_path)})
    pids = started(tmp_path, 2)
    reapers = processes_mentioning(str(tmp_path))
    os.kill(reapers[0], signal.SIGKILL)
    all_gone(reapers)
    process.kill()
    all_gone(pids)
    process.communicate(timeout=20)


@pytest.mark.parametrize("ending", ["", "raise ValueError", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_children_of_a_rank_end_with_it(tmp_path, ending):
    write_script(tmp_path, WITH_CHILDREN + "hear('pid0'), hear('pid1')\n" + ending)
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    pids = started(tmp_path, 2)
    finish(process)
    assert (process.returncode == 0) == (ending == "")
    all_gone(pids, timeout_s=2.0)


def test_children_that_ignore_sigterm_end_too(tmp_path):
    body = """
import subprocess
child = subprocess.Popen(["sh", "-c", "trap '' TERM; echo > trapped; sleep 60; sleep 60"])
tell("pid0", f"{os.getpid()} {child.pid}")
hear("trapped")
"""
    write_script(tmp_path, body)
    process = start_meshrun(tmp_path, "script.py")
    pids = started(tmp_path, 1)
    finish(process)
    assert process.returncode == 0
    all_gone(pids, timeout_s=2.0)


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_shared_memory_of_a_killed_rank_is_cleaned_up(tmp_path, victim):
    body = """
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64)
tell("name", memory.name)
tell("pid0", os.getpid())
time.sleep(60)
"""
    write_script(tmp_path, body)
    process = start_meshrun(tmp_path, "script.py")
    pids = started(tmp_path, 1)
    segment = "/dev/shm/" + reported(tmp_path, "name")
    assert os.path.exists(segment)
    os.kill(pids[0] if victim == "rank" else process.pid, signal.SIGKILL)
    finish(process)
    until(lambda: not os.path.exists(segment), "multiprocessing's own cleaner has removed it")


def test_ended_ranks_are_no_zombies_of_a_running_launcher(tmp_path):
    write_script(tmp_path, "tell(f'pid{rank}', os.getpid())\nif rank == 0: hear('go on')")
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    pid = int(reported(tmp_path, "pid1"))
    until(lambda: not os.path.exists(f"/proc/{pid}"), "rank 1 is reaped while rank 0 runs")
    assert process.poll() is None
    (tmp_path / "go on").touch()
    finish(process)
    assert process.returncode == 0


def processes_mentioning(text):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if text.encode() in file.read() and is_alive(int(pid)):
                    found.append(int(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def started_without_rank_1(directory, after="time.sleep(60)"):
    """Start a job in which all ranks but rank 1 wait in init_process_group."""
    body = f"""
import meshdist as dist
tell(f"pid{{rank}}", os.getpid())
if rank == 1:
    {after}
else:
    dist.init_process_group(timeout=60)
"""
    write_script(directory, body)
    return start_meshrun(directory, "--nproc-per-node", "3", "script.py")


def test_ctrl_c_ends_a_job_that_waits_in_init(tmp_path):
    process = started_without_rank_1(tmp_path)
    pids = started(tmp_path, 3)
    waiting = f"{pids[0]}"

    def attached():
        command = [sys.executable, "-m", "meshdist.debug", "attach", "--pid", waiting]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=30, check=False)
        return done.stdout if "ranks 0, 2 wait" in done.stdout else ""

    assert until(attached, "two ranks wait") == (
        "ranks 0, 2 wait in init_process_group, which rank 1 has not called.\n"
    )
    process.send_signal(signal.SIGINT)
    err = finish(process)
    assert process.returncode == 130
    assert "meshrun: ranks 0, 2 wait in init_process_group, which rank 1 has not called\n" in err
    assert err.endswith("meshrun: stopped by SIGINT\n")
    all_gone(pids)


def test_a_rank_that_ends_before_init_is_missed_at_once(tmp_path):
    process = started_without_rank_1(tmp_path, "sys.exit(0)")
    pids = started(tmp_path, 3)
    err = finish(process)
    assert process.returncode == 1
    assert re.search(
        rf"init_process_group \(rank [02] of 3\): rank 1 \(pid {pids[1]} on \S+\) has ended, with exit status 0,"
        r" without calling init_process_group",
        err,
    ), err
    all_gone(pids)
