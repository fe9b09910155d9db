"""A rank that computes, or is stopped, answers through its kernel: its peers wait, whatever they send it."""

from __future__ import annotations

import re
import signal
import sys
import threading

import numpy as np
import pytest
from worlds import report

import meshdist as dist
from meshdist.backends.gloo.tcp import connector
from meshdist.store import keepalive

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo runs on Linux only"),
]
SHORT = keepalive.KeepAlive(idle_s=1, interval_s=1, num_probes=1)
BUSY_S = 3.0 * SHORT.silence_s
MESSAGE_BYTES = 60_000
# Together more than the buffers of the system hold.
NUM_MESSAGES = 500
COUNT = 1_000_000


def shorten():
    keepalive.KEEP_ALIVE = SHORT


@pytest.fixture
def short_workers(tcp_workers):
    """Make a world whose connections are watched with short clocks."""

    def make(size, timeout_s=60.0):
        workers = tcp_workers(size, join=False, timeout_s=timeout_s)
        workers.start(shorten)
        workers.gather()
        workers.join()
        return workers

    return make


def be_busy():
    threading.Event().wait(BUSY_S)


def send_messages(dst=1):
    works = [dist.isend(np.full(MESSAGE_BYTES, number % 256, np.uint8), dst) for number in range(NUM_MESSAGES)]
    works[-1].wait()


def receive_messages(src=0):
    message = np.zeros(MESSAGE_BYTES, np.uint8)
    for number in range(NUM_MESSAGES):
        dist.recv(message, src)
        assert (message == number % 256).all(), (message[0], number)


def exchange(call):
    rank, size, x = dist.get_rank(), dist.get_world_size(), np.full(COUNT, dist.get_rank() + 1.0)
    if call == "send":
        if rank == 0:
            send_messages()
        elif rank == 1:
            receive_messages()
    elif call == "broadcast":
        dist.broadcast(x, 0)
        assert (x == 1).all()
    elif call == "gather":
        rows = [np.zeros(COUNT) for _ in range(size)] if rank == 1 else None
        dist.gather(x, rows, 1)
        assert rows is None or [set(row) for row in rows] == [{1.0}, {2.0}, {3.0}]
    elif call == "reduce":
        dist.reduce(x, 1)
        assert rank != 1 or (x == 6).all()
    else:
        assert (dist.all_reduce(x) == 6).all()


def be_late(call):
    dist.barrier()
    if dist.get_rank() == 1:
        be_busy()
    exchange(call)
    dist.barrier()


@pytest.mark.parametrize("call", ["send", "broadcast", "gather", "reduce", "all_reduce"])
def test_peers_wait_for_a_rank_that_computes_for_longer_than_a_host_may_be_silent(short_workers, call):
    workers = short_workers(3)
    workers.start(be_late, call)
    workers.gather()


def send_to_a_stopped_rank():
    works = [dist.isend(np.zeros(MESSAGE_BYTES, np.uint8), 1) for _ in range(NUM_MESSAGES)]
    report("sent")
    with pytest.raises(dist.DistTimeoutError, match=r"waiting for rank 1 \(pid"):
        works[-1].wait(BUSY_S)
    report("timed out")
    works[-1].wait()


def receive_after(num_messages):
    message = np.zeros(MESSAGE_BYTES, np.uint8)
    for _ in range(num_messages):
        dist.recv(message, 0)


def meet():
    dist.barrier()


def test_a_stopped_rank_is_waited_for_until_the_timeout(short_workers):
    workers = short_workers(2)
    workers.start(meet)
    workers.gather()
    workers.signal(1, signal.SIGSTOP)
    workers.start(send_to_a_stopped_rank, ranks=[0])
    assert workers.reported(0) == "sent"
    assert workers.reported(0) == "timed out"
    workers.signal(1, signal.SIGCONT)
    workers.start(receive_after, NUM_MESSAGES, ranks=[1])
    assert [workers.outcome(rank) for rank in range(2)] == [None, None]


def shorten_patience():
    connector.PATIENCE_S = connector.HANDSHAKE_TIMEOUT_S = SHORT.silence_s / 4


def pass_on(src, dst):
    rank = dist.get_rank()
    if rank == src:
        dist.send(np.ones(1), dst)
    elif rank == dst:
        dist.recv(np.zeros(1), src)


def connect_to_a_stopped_rank():
    work = dist.isend(np.ones(1), 1)
    with pytest.raises(dist.DistTimeoutError, match=r"waiting for rank 1 \(pid"):
        work.wait(BUSY_S)
    report("timed out")
    work.wait()


def test_a_rank_that_is_stopped_before_its_peer_connects_is_waited_for(short_workers):
    """Its kernel takes the connection; the handshake comes later."""
    workers = short_workers(3)
    workers.start(shorten_patience)
    workers.gather()
    workers.start(pass_on, 1, 2)  # from then on rank 1 listens
    workers.gather()
    workers.signal(1, signal.SIGSTOP)
    workers.start(connect_to_a_stopped_rank, ranks=[0])
    assert workers.reported(0) == "timed out"
    workers.signal(1, signal.SIGCONT)
    workers.start(pass_on, 0, 1, ranks=[1])
    assert [workers.outcome(rank) for rank in range(2)] == [None, None]


def wait_for_a_message(src):
    report("waits")
    with pytest.raises(dist.DistBackendError) as caught:
        dist.recv(np.zeros(1), src)
    return str(caught.value)


def flood_and_wait():
    works = [dist.isend(np.zeros(MESSAGE_BYTES, np.uint8), 1) for _ in range(NUM_MESSAGES)]
    words = wait_for_a_message(1)
    assert not works[-1].is_success()
    return words


def test_a_killed_rank_that_has_not_read_all_it_was_sent_has_died(short_workers):
    """Its kernel resets a connection with unread bytes, as a rank does that gives it up."""
    workers = short_workers(2)
    workers.start(meet)
    workers.gather()
    workers.signal(1, signal.SIGSTOP)
    workers.start(flood_and_wait, ranks=[0])
    assert workers.reported(0) == "waits"
    workers.until_asleep(0)
    workers.signal(1, signal.SIGKILL)
    assert re.search(r"rank 1 \(pid \d+ on [^)]*\) has died", workers.outcome(0))


def find_silent_and_wait(src):
    """Wait for a message from a rank whose host seems to have vanished."""
    keepalive.SilenceMonitor.is_silent = lambda monitor: True
    return wait_for_a_message(src)


def test_a_rank_whose_peer_gave_up_the_connection_is_not_told_that_the_peer_has_died(short_workers):
    workers = short_workers(2)
    workers.start(meet)
    workers.gather()
    workers.start(wait_for_a_message, 0, ranks=[1])
    assert workers.reported(1) == "waits"
    workers.until_asleep(1)
    workers.start(find_silent_and_wait, 1, ranks=[0])
    assert workers.reported(0) == "waits"
    assert re.search(r"rank 1 \(pid \d+ on [^)]*\) does not answer: nothing has come from its", workers.outcome(0))
    assert re.search(
        r"rank 0 \(pid \d+ on [^)]*\) (failed: .*does not answer|has died, or its connection was reset)",
        workers.outcome(1),
    )
