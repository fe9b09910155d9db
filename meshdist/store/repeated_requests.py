"""Slots: what the server keeps of connections that may be made again, so that it carries out each request once.

A slot is one connection of a client, under a random name, whose requests are numbered; one is under way at a time. When
the connection is reset, the client makes it again under this name, with the number of its attempt, and sends the last
request once more. If that had been carried out, it gets the same reply again. These are the slots of NFSv4.1 sessions
(RFC 8881, section 2.10.6.1).

A client that closes a connection, or whose process ends, does so in order: then the slot is forgotten at once.
"""

from __future__ import annotations

import os
import struct

from meshdist.store import keepalive
from meshdist.store.session import Session
from meshdist.store.table import Status

SLOT_CLAIM = struct.Struct("!16sI")
"""What a client says of a new connection: the name of its slot, and the number of the attempt, 0 for the first."""

GRACE_S = 1.0


def resumption_s() -> float:
    """Return for how long a connection that was reset can be made again: a silent host has as long, and a second."""
    return keepalive.KEEP_ALIVE.silence_s + GRACE_S


def is_reset(error: BaseException) -> bool:
    """Return whether a connection was reset, while the processes at both ends may run."""
    # EPIPE: a reset after the orderly end.
    return isinstance(error, ConnectionError) and not isinstance(error, (BrokenPipeError, ConnectionRefusedError))


class Slot:
    """The requests of one connection of a client, over one session after the other.

    `last_will` holds alternating keys and values, to be set if missing when the client has gone.
    """

    __slots__ = ("_number", "_reply", "attempt", "last_will", "name", "num_begun", "session")

    def __init__(self, name: bytes, session: Session) -> None:
        self.name = name
        self.attempt = 0
        self.session: Session | None = session  # None from a reset on, until the client comes again
        self.last_will: list[bytes] = []
        self.num_begun = 0  # the last request with a lasting effect before its reply
        self._number = 0
        self._reply: tuple[Status, list[bytes]] | None = None

    def reply_to(self, number: int) -> tuple[Status, list[bytes]] | None:
        """Return the reply to request `number` if it has been carried out; None if it is new.

        Raises:
            ValueError: It is neither the last request nor the next one.
        """
        if number == self._number and self._reply is not None:
            return self._reply
        if number != self._number + 1:
            raise ValueError(f"not a request: number {number} after {self._number}")
        return None

    def keep(self, status: Status, reply: list[bytes]) -> None:
        """Keep the reply to the next request; the one before has arrived, or there would be no next request."""
        self._number += 1
        self._reply = status, reply


class Slots:
    """The slots of a server by name, among them those whose connection was reset."""

    def __init__(self) -> None:
        self.server_id = os.urandom(16)  # tells this server from a later one on the same port
        self._by_name: dict[bytes, Slot] = {}

    def enter(self, session: Session, claim: bytes) -> tuple[Slot | None, Session | None]:
        """Return the slot that a new session goes on with, and the session that it replaces.

        The slot is None if the client claims one that has been forgotten, or has come again since.
        """
        name, attempt = SLOT_CLAIM.unpack_from(claim)
        slot = self._by_name.get(name)
        if attempt == 0:
            if slot is not None:  # a name is used once
                return None, None
            slot = Slot(name, session)
            if any(name):  # without a name it ends with its connection
                self._by_name[name] = slot
            return slot, None
        if slot is None or attempt <= slot.attempt:
            return None, None
        before, slot.session, slot.attempt = slot.session, session, attempt
        return slot, before

    def can_resume(self, slot: Slot) -> bool:
        return slot.name in self._by_name

    def forget(self, slot: Slot) -> list[bytes]:
        """Forget a slot whose client has gone; return its last will."""
        self._by_name.pop(slot.name, None)
        will, slot.last_will = slot.last_will, []
        return will

    def revoke_wills(self) -> None:
        """Have no last will carried out any more: the store ends, not its clients."""
        for slot in self._by_name.values():
            slot.last_will = []

    def has_waiting(self) -> bool:
        """Return whether the client of some slot may come again."""
        return any(slot.session is None for slot in self._by_name.values())
