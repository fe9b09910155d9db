"""Strangers at the port where a rank listens for its peers."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from contextlib import ExitStack, suppress

import numpy as np
import pytest
from listening import listening_at, num_fds
from strangers import delay_nobody, is_hung_up

import meshdist as dist
from meshdist.errors import DistNetworkError
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, connect_handshake

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(4096),
    "a frame": struct.pack("<2sBxIQqQQ16s", b"mf", 1, 0, 0, 0, 1 << 50, 0, b""),
    "noise": os.urandom(4096),
    "magic and garbage": b"MESHDIST" + b"\xff" * 4096,
    "much": bytes(4 << 20),
}


def meet():
    x = np.ones(3)
    dist.all_reduce(x)
    return x.tolist()


def call(port):
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    sock.settimeout(30)
    return sock


@pytest.fixture
def world(tcp_workers):
    """Two ranks that have met; without a secret, as all are on this machine."""
    workers = tcp_workers(2)
    workers.start(meet)
    workers.gather()
    return workers


def port_of(workers, rank):
    [(host, port)] = listening_at(workers.pids[rank])
    assert host == "127.0.0.1"
    return port


def test_ranks_of_one_machine_listen_on_loopback_alone(world):
    for pid in world.pids:
        assert [host for host, _ in listening_at(pid)] == ["127.0.0.1"]


def test_who_shares_memory_listens_nowhere(worlds):
    workers = worlds.workers("gloo", 2)
    workers.start(meet)
    workers.gather()
    assert [listening_at(pid) for pid in workers.pids] == [[], []]


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_hung_up_on_at_once(world, garbage):
    with call(port_of(world, 0)) as stranger:
        began_s = time.monotonic()
        with suppress(ConnectionError):  # hung up on before it had said all
            stranger.sendall(garbage)
        assert is_hung_up(stranger)
        assert time.monotonic() - began_s < HANDSHAKE_TIMEOUT_S
    world.start(meet)
    assert world.gather() == [[2.0] * 3] * 2


def test_300_silent_slow_and_half_open_strangers_delay_nobody(world):
    fds = [num_fds(pid) for pid in world.pids]
    with ExitStack() as stack:
        port = port_of(world, 0)
        strangers = [stack.enter_context(call(port)) for _ in range(300)]
        for stranger in strangers[100:200]:
            with suppress(ConnectionError):  # the first ones may have made room
                stranger.sendall(b"MESHDIST\x01")
        for stranger in strangers[200:]:
            stranger.shutdown(socket.SHUT_WR)

        def ask():
            world.start(meet)
            world.gather()

        delay_nobody(strangers, lambda: call(port), ask)
    # A thread that slept for the first time has a doorbell since.
    assert all(num_fds(pid) < before + 5 for pid, before in zip(world.pids, fds, strict=True))


def test_stranger_of_another_job_is_refused(world):
    with call(port_of(world, 0)) as stranger, pytest.raises(DistNetworkError, match="belongs to another job"):
        connect_handshake(stranger, b"another secret", "rank's wire", "the rank")


@pytest.mark.parametrize("claim", [b"", bytes(8) + struct.pack("<I", 1), b"12345678" + struct.pack("<I", 7)])
def test_who_knows_the_secret_and_not_the_rank_that_listens_is_let_go(world, claim):
    with call(port_of(world, 0)) as stranger:
        connect_handshake(stranger, b"", "rank's wire", "the rank", claim=claim)
        stranger.settimeout(30)
        assert is_hung_up(stranger)
    world.start(meet)
    assert world.gather() == [[2.0] * 3] * 2


def test_store_is_no_wire(world):
    with call(port_of(world, 0)) as stranger, pytest.raises(DistNetworkError, match="serves another purpose"):
        connect_handshake(stranger, b"", "store", "the rank")
