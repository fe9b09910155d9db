"""macOS and Windows, as far as that can be tried here: with what they lack taken away, and their name said."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="takes away from Linux what other systems lack"),
]

# Before anything else of the program. Of the standard library, `selectors` looks what there is when it is loaded; what
# asks for the name of the system has to be loaded before that is said.
MACOS = """
import select
del select.epoll, select.EPOLLIN, select.EPOLLRDHUP, select.EPOLLOUT
import ctypes, multiprocessing.context, multiprocessing.popen_spawn_posix, os, subprocess, sys, tempfile
import numpy
for name in ("memfd_create", "pidfd_open", "eventfd", "eventfd_read", "eventfd_write", "posix_fallocate"):
    delattr(os, name)
for name in ("sched_getaffinity", "sched_setaffinity"):
    delattr(os, name)
sys.platform = "darwin"
"""

WINDOWS = """
import select
del select.epoll, select.poll
import ctypes, multiprocessing.connection, os, signal, socket, subprocess, sys, tempfile
import networkx, numpy
for module in ("fcntl", "grp", "pwd", "resource", "termios", "_posixshmem"):
    sys.modules[module] = None
missing = {
    os: ["fork", "getegid", "geteuid", "getpgid", "getuid", "killpg", "setsid", "sysconf", "statvfs", "mkfifo"],
    signal: ["SIGCHLD", "SIGHUP", "SIGKILL", "SIGURG", "SIGUSR1", "SIGUSR2", "pthread_sigmask"],
    socket: ["AF_UNIX"],
}
missing[os] += [name for name in dir(os) if name.startswith(("sched_", "memfd", "pidfd", "eventfd", "posix_"))]
missing[os] += ["O_CLOEXEC", "O_NONBLOCK"]
for module, names in missing.items():
    for name in names:
        delattr(module, name)
sys.platform = "win32"
"""


def run(system, program, tmp_path, *arguments):
    """Run a program in a Python that passes for one of that system; return what it prints."""
    path = tmp_path / "program.py"
    path.write_text(system + textwrap.dedent(program))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, path, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(temporary.iterdir()) == []
    return done.stdout


def test_ranks_are_processes_on_macos(tmp_path):
    program = """
    import numpy as np
    import meshdist as dist

    def main(rank):
        dist.init_process_group("gloo")
        for count in (1, 100_000):
            x = np.full(count, rank + 1.0)
            assert (dist.all_reduce(x) == 3.0).all()
            y = np.full(count, -1.0)
            work = dist.isend(x, dst=1 - rank)
            dist.recv(y, src=1 - rank)
            work.wait()
            assert (y == 3.0).all()
        dist.all_reduce(x, async_op=True).wait()
        dist.all_gather_object([None, None], {"rank": rank})
        print(f"rank {rank} is done", flush=True)
        dist.destroy_process_group()

    if __name__ == "__main__":
        dist.spawn(main, nprocs=2)
    """
    assert sorted(run(MACOS, program, tmp_path).splitlines()) == ["rank 0 is done", "rank 1 is done"]


def test_a_rank_that_is_killed_on_macos_is_missed(tmp_path):
    program = """
    import signal
    import numpy as np
    import meshdist as dist

    def main(rank):
        dist.init_process_group("gloo", timeout=30)
        dist.barrier()
        if rank == 1:
            dist.destroy_process_group()  # which takes its file away
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.barrier()
        except dist.DistError as error:
            print(type(error).__name__)
        dist.destroy_process_group()

    if __name__ == "__main__":
        context = dist.spawn(main, nprocs=2, join=False)
        context.processes[0].join(60)  # to join the context would end rank 0, maybe before it has noticed
        try:
            context.join()
        except Exception as error:
            print(str(error).partition(" (")[0])
    """
    assert run(MACOS, program, tmp_path).splitlines() == ["DistBackendError", "rank 1"]


def test_hosts_of_macos_are_not_connected(tmp_path):
    program = """
    import meshdist as dist

    def main(rank):
        os.environ["MESHDIST_DISABLE_SHM"] = "1"
        dist.init_process_group("gloo")
        try:
            dist.barrier()
        except dist.DistError as error:
            print(error)

    if __name__ == "__main__":
        dist.spawn(main, nprocs=2)
    """
    said = run(MACOS, program, tmp_path).splitlines()
    assert [line for line in said if "connections between hosts need Linux (epoll), and this system is darwin" in line]


def test_on_windows_ranks_are_threads(tmp_path):
    program = """
    import numpy as np
    import meshdist as dist

    def main():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = mesh["tp"].all_reduce(np.array([1.0 + dist.get_rank()]))
        work = dist.isend(x, dst=(dist.get_rank() + 1) % 4)
        dist.recv(np.empty(1), src=(dist.get_rank() - 1) % 4)
        work.wait()
        with dist.profile() as p:
            dist.barrier()
        timeline = p.merged()
        return x.item(), timeline is not None and len(timeline.tracks)

    print(dist.run(main, 4))
    with dist.dry_run(64, 5):
        print(dist.init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp")).get_coordinate())
    """
    assert run(WINDOWS, program, tmp_path).splitlines() == [
        "[(3.0, 4), (3.0, False), (7.0, False), (7.0, False)]",
        "(0, 5)",
    ]


REFUSED = {
    "the 'gloo' backend is not available": "dist.init_process_group('gloo', 'tcp://127.0.0.1:0', rank=0, world_size=1)",
    "spawn": "dist.spawn(print, nprocs=2)",
    "%%mesh": "from meshdist.notebook.pool import Pool; Pool(2, 'gloo', 30.0, print)",
    "meshrun": "from meshdist.launch.meshrun import main; main(['--nproc-per-node', '2', 'x.py'])",
}


@pytest.mark.parametrize("name", REFUSED)
def test_on_windows_it_says_that_ranks_cannot_be_processes(tmp_path, name):
    program = f"""
    import meshdist as dist

    sys.stderr = sys.stdout
    try:
        {REFUSED[name]}
    except dist.DistError as error:
        print(error)
    except SystemExit as error:
        print(error)
    """
    said = run(WINDOWS, program, tmp_path)
    assert f"{name}: ranks that are processes need Linux or macOS; on Windows, run them as threads" in said


DOCTORS = {"darwin: jobs on one host only": MACOS, "use meshdist.run here": WINDOWS}


@pytest.mark.parametrize("said", DOCTORS)
def test_the_doctor_knows_other_systems(tmp_path, said):
    program = """
    from meshdist.doctor.__main__ import main

    main([])
    """
    assert said in run(DOCTORS[said], program, tmp_path)


OTHER_PROCESSOR = """
import platform

platform.machine = lambda: "aarch64"
import numpy as np
import meshdist as dist
from meshdist.backends.gloo.shm import segment

assert not segment.KEEPS_ORDER
dist.init_process_group("gloo")
rank = dist.get_rank()
for count in (1, 1000, 100_000, 700_000):
    x = np.full(count, rank + 1.0)
    dist.all_reduce(x)
    assert (x == 3).all()
    for trip in range(3):
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        else:
            dist.recv(x, 0)
            dist.send(x + 1, 0)
    assert rank == 1 or (x == 6).all(), x
print("all right")
dist.destroy_process_group()
"""


def test_on_a_processor_that_reorders_loads_and_stores(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(OTHER_PROCESSOR)
    command = [sys.executable, "-m", "meshdist.launch.meshrun", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("all right") == 2
