"""Clients of a server that never prove themselves."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress


def is_hung_up(stranger: socket.socket) -> bool:
    """Return True once the server has closed the connection; raise TimeoutError if it does not."""
    with suppress(ConnectionError):
        while stranger.recv(4096):
            pass
    return True


def delay_nobody(
    strangers: Sequence[socket.socket], call: Callable[[], socket.socket], ask: Callable[[], object]
) -> None:
    """Assert that the server answers `ask` before it gives a stranger up, and hangs up on all in the end."""
    outlasted = []
    for _ in range(5):
        with call() as last:
            ask()
            outlasted.append(not select.select([last], [], [], 0)[0])  # what is not readable has not been closed
    assert any(outlasted), "the server has given the strangers up first"
    assert all(map(is_hung_up, strangers))
