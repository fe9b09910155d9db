"""A connection between two ranks that is reset, while both processes go on."""

from __future__ import annotations

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


def connections(address):
    """Return the descriptors of this process's TCP connections, except those with the store at `address`."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:  # not a socket, or the descriptor of the listing
            continue
        with sock:
            try:
                host, port = sock.getpeername()[:2]
            except (OSError, ValueError):
                continue
            if sock.family == socket.AF_INET and f"{host}:{port}" != address:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                found.append(fd)
    return found


def reset_on_rank_1(call, address):
    x = np.ones(4)
    dist.all_reduce(x)
    dist.barrier()
    if dist.get_rank() == 1:
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in connections(address):
            os.dup2(nothing, fd)  # closes the socket, and the peer gets a reset
        signal.pause()
    with pytest.raises(dist.DistNetworkError, match="rank 1 .*has died, or its connection was reset") as caught:
        dist.recv(x, 1) if call == "recv" else dist.all_reduce(x)
    assert isinstance(caught.value, dist.DistBackendError)


@pytest.mark.parametrize("call", ["recv", "all_reduce"])
def test_a_reset_connection_is_a_network_error(tcp_workers, call):
    workers = tcp_workers(2)
    workers.start(reset_on_rank_1, call, workers.address)
    assert workers.outcome(0) is None
