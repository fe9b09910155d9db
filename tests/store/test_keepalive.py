"""A host is silent once nothing has come from it for so long, in a process that read all the time."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterator

import pytest

from meshdist.store import keepalive
from meshdist.store.keepalive import KEEP_ALIVE, SilenceMonitor

STEP_S = 0.1
SHORT_CUT_S = 5.0


class Kernel:
    """Time, the number of segments that have come, and how often the same bytes were sent in vain."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.num_segments: int | None = 7
        self.num_repeats = self.num_acknowledged = 0

    def monotonic(self) -> float:
        return self.now_s

    def tcp_info(self, sock: socket.socket, offset: int) -> int | None:
        if offset == keepalive.STATE:
            return self.num_repeats << 16
        return self.num_acknowledged if offset == keepalive.NUM_ACKNOWLEDGED else self.num_segments

    def run(self, monitor: SilenceMonitor, for_s: float) -> bool:
        """Let time pass, in which the process looks all the time; return whether the host became silent."""
        end_s = self.now_s + for_s
        is_silent = False
        while self.now_s < end_s:
            self.now_s += STEP_S
            is_silent = is_silent or monitor.is_silent()
        return is_silent


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr("meshdist.store.keepalive.time", kernel)
    monkeypatch.setattr("meshdist.store.keepalive.tcp_info", kernel.tcp_info)
    return kernel


@pytest.fixture
def monitor() -> Iterator[SilenceMonitor]:
    with socket.socket() as sock:
        yield SilenceMonitor(sock)


def test_a_short_cut_does_not_hide_all_probes_of_an_idle_connection():
    between_the_first_and_the_last_s = (KEEP_ALIVE.num_probes - 1) * KEEP_ALIVE.interval_s
    assert between_the_first_and_the_last_s >= SHORT_CUT_S


def test_a_host_that_sends_nothing_is_silent_in_time(kernel: Kernel, monitor: SilenceMonitor) -> None:
    assert not kernel.run(monitor, KEEP_ALIVE.silence_s - 1)
    assert kernel.run(monitor, 2)


def test_a_host_that_is_not_reached_is_silent_although_segments_come(kernel: Kernel, monitor: SilenceMonitor) -> None:
    assert not kernel.run(monitor, 1)
    kernel.num_repeats = 1
    for _ in range(KEEP_ALIVE.silence_s - 1):
        kernel.num_segments = (kernel.num_segments or 0) + 1
        assert not kernel.run(monitor, 1)
    kernel.num_segments = (kernel.num_segments or 0) + 1
    assert kernel.run(monitor, 2)


def test_a_host_that_acknowledges_on_a_bad_link_is_not_silent(kernel: Kernel, monitor: SilenceMonitor) -> None:
    for _ in range(3 * KEEP_ALIVE.silence_s):
        kernel.num_repeats = 2
        kernel.num_segments = (kernel.num_segments or 0) + 1
        kernel.num_acknowledged += 1000
        assert not kernel.run(monitor, 1)


def test_a_probe_now_and_then_is_enough(kernel: Kernel, monitor: SilenceMonitor) -> None:
    for number in range(10):
        kernel.num_segments = number
        assert not kernel.run(monitor, KEEP_ALIVE.idle_s + KEEP_ALIVE.interval_s)


def test_time_in_which_the_process_did_not_read_does_not_count(kernel: Kernel, monitor: SilenceMonitor) -> None:
    assert not kernel.run(monitor, KEEP_ALIVE.silence_s - 1)
    kernel.now_s += 10 * KEEP_ALIVE.silence_s
    assert not kernel.run(monitor, KEEP_ALIVE.silence_s - 1)
    monitor.restart()
    assert not kernel.run(monitor, KEEP_ALIVE.silence_s - 1)
    assert kernel.run(monitor, 2)


def test_without_a_count_of_segments_no_host_is_silent(kernel: Kernel, monitor: SilenceMonitor) -> None:
    kernel.num_segments = None
    assert not kernel.run(monitor, 10 * KEEP_ALIVE.silence_s)


def test_the_error_has_the_errno_of_a_failed_network(kernel: Kernel, monitor: SilenceMonitor) -> None:
    monitor.check()
    kernel.run(monitor, KEEP_ALIVE.silence_s)
    kernel.now_s += 1
    with pytest.raises(TimeoutError, match="nothing has come from its host for 8 s") as caught:
        monitor.check()
    assert caught.value.errno == errno.ETIMEDOUT


@pytest.mark.skipif(sys.platform != "linux", reason="the count of segments is Linux'")
def test_what_comes_is_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs, _ = listener.accept()
        with theirs:
            counts = []
            for _ in range(3):
                theirs.send(b"x")
                ours.recv(1)
                counts.append(keepalive.tcp_info(ours, keepalive.NUM_SEGMENTS))
            assert counts == sorted(set(counts))
