"""A process that does not read, of the store or of a client, is waited for: its kernel answers."""

from __future__ import annotations

import signal
import sys
import threading

import pytest
from worlds import WorkerSet, report

from meshdist.store import TCPStore, keepalive

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' limit on unacknowledged bytes"),
]
LOOPBACK = "127.0.0.1"
SHORT = keepalive.KeepAlive(idle_s=1, interval_s=1, num_probes=1)
STOPPED_S = 3.0 * SHORT.silence_s
# More than the buffers of the system hold.
VALUE = bytes(32 << 20)
STORES = []


@pytest.fixture
def processes(worlds):
    """Two processes, the first of which is to host a store."""
    with WorkerSet(worlds.nursery, 2) as workers:
        yield workers


def host_a_store():
    keepalive.KEEP_ALIVE = SHORT
    STORES.append(TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False))
    return STORES[0].port


def connect(port):
    keepalive.KEEP_ALIVE = SHORT
    STORES.append(TCPStore(LOOPBACK, port))


def exchange(call, *args):
    report("calls")
    return getattr(STORES[0], call)(*args)


def be_stopped(processes, rank):
    processes.signal(rank, signal.SIGSTOP)
    threading.Event().wait(STOPPED_S)
    processes.signal(rank, signal.SIGCONT)


def start(processes):
    processes.start(host_a_store, ranks=[0])
    processes.start(connect, processes.outcome(0), ranks=[1])
    assert processes.outcome(1) is None


def test_a_request_to_a_stopped_store_is_answered_later(processes):
    start(processes)
    processes.signal(0, signal.SIGSTOP)
    processes.start(exchange, "set", "key", VALUE, ranks=[1])
    assert processes.reported(1) == "calls"
    be_stopped(processes, 0)
    assert processes.outcome(1) is None


def test_a_stopped_client_gets_its_reply_later(processes):
    start(processes)
    processes.start(exchange, "get", "key", ranks=[1])
    assert processes.reported(1) == "calls"
    processes.until_asleep(1)
    processes.signal(1, signal.SIGSTOP)
    processes.start(exchange, "set", "key", VALUE, ranks=[0])
    assert processes.reported(0) == "calls"
    assert processes.outcome(0) is None
    be_stopped(processes, 1)
    assert processes.outcome(1) == VALUE
