"""The cards of the processes, and the detection of their ends."""

import os
import signal
import subprocess
import sys

import pytest

from meshdist.runtime.departure import Departure, describe
from meshdist.runtime.host_identity import Card, host_id, my_card
from meshdist.system import processes
from meshdist.system.processes import ProcessWatch, fields_of, started_at

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.skipif(sys.platform != "linux", reason="start times are read from /proc"),
]


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def watch_of(process):
    return ProcessWatch(process.pid, started_at(process.pid))


def test_a_card_survives_the_store():
    card = my_card("meshdist-bells")
    assert Card.decode(card.encode().encode()) == card
    assert (card.pid, card.bells) == (os.getpid(), "meshdist-bells")
    assert card.started == started_at(os.getpid()) > 0


def test_the_host_is_the_same_for_processes_that_can_share_memory(monkeypatch):
    monkeypatch.delenv("MESHDIST_HOST_ID", raising=False)
    code = "from meshdist.runtime.host_identity import host_id; print(host_id())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert other.strip() == host_id()
    monkeypatch.setenv("MESHDIST_HOST_ID", "my host")
    assert host_id() == "my host"


@pytest.mark.parametrize("with_pidfd", [True, False])
@pytest.mark.parametrize("reaped", [True, False])
def test_the_end_of_a_process_is_seen(child, monkeypatch, with_pidfd, reaped):
    """Also while its parent has not asked for its exit status."""
    if not with_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    watch = watch_of(child)
    assert not watch.ended()
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    if reaped:
        child.wait()
    assert watch.ended()
    assert watch.ended()
    watch.close()
    watch.close()


def test_the_status_of_another_users_zombie_is_unknown_where_the_kernel_says_0(child, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    watch = watch_of(child)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert watch.status() == -signal.SIGKILL
    hidden = [*fields_of(child.pid)[:-1], "0"]
    monkeypatch.setattr(processes, "fields_of", lambda pid: hidden)
    assert watch.status() == 0
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert watch.status() is None


@pytest.mark.parametrize("reaped", [True, False])
@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("os._exit(3)", "exited with status 3"),
        ("os._exit(0)", "exited with status 0, without destroy_process_group()"),
    ],
)
def test_how_a_process_ended(end, how, reaped):
    code = f"import os; input(); {end}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        watch = watch_of(child)
        child.stdin.write(b"\n")
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if reaped:
            child.wait()
        assert watch.ended()
        status = watch.status()
        watch.close()
    if reaped and not tells_of_the_reaped():
        assert status is None
    else:
        assert describe(Departure.of_status(status)) == how


def tells_of_the_reaped():
    version = os.uname().release.split(".")
    return (int(version[0]), int(version[1].partition("-")[0])) >= (6, 15)


def test_a_process_that_ended_before(child):
    pid, started = child.pid, started_at(child.pid)
    child.kill()
    child.wait()
    assert ProcessWatch(pid, started).ended()
    assert started_at(child.pid) == 0


def test_a_pid_that_went_to_another_process():
    mine = my_card("bells")
    watch = ProcessWatch(mine.pid, mine.started - 1)
    assert watch.ended()
    watch.close()


def test_no_descriptors_are_left(child):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        watch_of(child).close()
    assert len(os.listdir("/proc/self/fd")) == before
