"""A connection between two ranks that is reset, while both processes go on: it is made again."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct
import sys

import numpy as np
import pytest

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]


def sockets(address):
    """Return the descriptors of this process's TCP connections, except those with the store, and of its listeners."""
    connections, listeners = [], []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:  # not a socket, or the descriptor of the listing
            continue
        with sock:
            if sock.family != socket.AF_INET:
                continue
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listeners.append(fd)
                continue
            try:
                host, port = sock.getpeername()[:2]
            except OSError:
                continue
            if f"{host}:{port}" != address:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connections.append(fd)
    return connections, listeners


def reset_all(address):
    """Reset all connections of this process with other ranks; the system does not tell it."""
    connect, nowhere = ctypes.CDLL(None, use_errno=True).connect, struct.pack("=H14x", socket.AF_UNSPEC)
    connections, _ = sockets(address)
    for fd in connections:
        # One that another rank has reset meanwhile has that error, or is closed, and its number another file's.
        if connect(fd, nowhere, len(nowhere)) != 0:
            assert ctypes.get_errno() in (errno.ECONNRESET, errno.EBADF, errno.ENOTSOCK)


def exchange(number):
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 1000, 300_000):
        x = np.arange(count) + rank + number
        assert (dist.all_reduce(x.copy()) == size * (np.arange(count) + number) + sum(range(size))).all()
        got = np.empty_like(x)
        works = [dist.isend(x, other) for other in range(size) if other != rank]
        for other in range(size):
            if other != rank:
                dist.recv(got, other)
                assert (got == np.arange(count) + other + number).all()
        for work in works:
            work.wait()


def exchange_and_reset(address, resetting):
    for number in range(4):
        exchange(number)
        dist.barrier()
        # This discards what the kernel has for this rank, which is little here, and still kept by its sender.
        if dist.get_rank() in resetting:
            reset_all(address)


@pytest.mark.parametrize("resetting", [(0,), (1,), (0, 1, 2)], ids=str)
def test_calls_go_on_over_connections_that_were_reset(tcp_workers, resetting):
    workers = tcp_workers(3)
    workers.start(exchange_and_reset, workers.address, resetting)
    workers.gather()


def vanish_on_rank_1(call, address):
    x = np.ones(4)
    dist.all_reduce(x)
    dist.barrier()
    if dist.get_rank() == 1:
        connections, listeners = sockets(address)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (*connections, *listeners):
            os.dup2(nothing, fd)  # closes the socket, and the peer gets a reset
        signal.pause()
    with pytest.raises(dist.DistNetworkError, match="rank 1 .*has died, or its connection was reset") as caught:
        dist.recv(x, 1) if call == "recv" else dist.all_reduce(x)
    assert isinstance(caught.value, dist.DistBackendError)


@pytest.mark.parametrize("call", ["recv", "all_reduce"])
def test_a_connection_that_cannot_be_made_again_is_a_network_error(tcp_workers, call):
    workers = tcp_workers(2)
    workers.start(vanish_on_rank_1, call, workers.address)
    assert workers.outcome(0) is None
