"""Connecting to the server of a TCPStore: once, or until its process has started."""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshdist.errors import DistNetworkError
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, HandshakeBroken, connect_handshake
from meshdist.store.address import Address
from meshdist.store.keepalive import tune
from meshdist.store.session import PURPOSE
from meshdist.system.deadline import Deadline, Reminder

if TYPE_CHECKING:
    from meshdist.security.encryption import Encryption

_log = logging.getLogger("meshdist")
ATTEMPT_S = 5.0
FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.2
_SHORTEST_ATTEMPT_S = 0.05
# An attempt to make a connection again that is given up is reset: closed in order, it would be the end of the client.
_RESET, _IN_ORDER = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)

Resolver = Callable[[], list[Address]]


class NotReachedError(DistNetworkError):
    """Report that no store answered within the timeout, and why the last attempt failed."""

    def __init__(self, what: str, reason: Exception) -> None:
        super().__init__(what)
        self.reason = reason


def connect_patiently(
    name: str,
    resolver: Resolver,
    secret: bytes,
    encryption: Encryption | None,
    deadline: Deadline,
    claim: Callable[[], bytes],
) -> socket.socket:
    """Return a connection as soon as a store of this job listens; its process may start later than this one.

    Raises:
        DistNetworkError: There was none until the deadline, or it is not a store of this job.
    """
    pause_s, reminder = FIRST_PAUSE_S, Reminder()
    while True:
        failure: HandshakeBroken | OSError
        try:
            return connect_once(name, resolver(), secret, encryption, deadline, claim())
        except HandshakeBroken as error:
            failure = error
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise DistNetworkError(f"no file descriptor left to connect to {name}: raise `ulimit -n`") from error
            failure = error
        # Make no attempt with hardly any time left: its error would be less clear than this one.
        is_last = deadline.remaining_s() < pause_s + _SHORTEST_ATTEMPT_S
        waited_s = reminder.due_s()
        if waited_s is not None:
            words = "no store answers at %s after %.0f s (%s); trying for %.0f s more"
            if not _log.hasHandlers():  # before a world, Python itself prints the message alone
                words = f"meshdist: {words}"
            _log.warning(words, name, waited_s, failure, deadline.remaining_s())
        time.sleep(deadline.remaining_s() if is_last else pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if is_last and isinstance(failure, HandshakeBroken):
            raise NotReachedError(f"{failure} (for {round(deadline.timeout_s, 2):g} s)", failure) from None
        if is_last:
            raise NotReachedError(
                f"no store answered at {name} within {round(deadline.timeout_s, 2):g} s (last error: {failure}); "
                "is the host up, and are the address and port correct?",
                failure,
            ) from None


def connect_once(
    name: str,
    addresses: list[Address],
    secret: bytes,
    encryption: Encryption | None,
    deadline: Deadline,
    claim: bytes,
    attempt_s: float = ATTEMPT_S,
    handshake_s: float | None = None,
) -> socket.socket:
    """Return a connection to the first of `addresses` that accepts one and proves to be a store of this job.

    With `handshake_s`, the connection replaces one that was reset, and the store has so long to answer.
    """
    last_error: OSError | None = None
    for address in addresses:
        sock = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline.slice_s(attempt_s), 1e-3))
            sock.connect(address.sockaddr)
            if sock.getsockname() == sock.getpeername():
                # If no process listens, a TCP socket may connect to itself, on the same port.
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            tune(sock)
            if handshake_s is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            grace_s = handshake_s or max(HANDSHAKE_TIMEOUT_S, deadline.timeout_s / 10)  # for a busy server
            patience = Deadline(deadline.slice_s(grace_s))
            binding = b""
            if encryption is not None and encryption.covers(str(address.sockaddr[0])):
                from meshdist.security.tls import connect_tls

                sock = tls = connect_tls(sock, encryption.client, PURPOSE, name, patience)
                binding = tls.binding()
            connect_handshake(sock, secret, PURPOSE, name, patience, claim, binding)
            if handshake_s is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _IN_ORDER)
            return sock
        except OSError as error:
            sock.close()
            last_error = error
        except BaseException:
            sock.close()
            raise
    raise last_error or OSError(f"{name} has no address")
