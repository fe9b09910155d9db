"""Receipts: what a rank expects from others, and the messages that came unasked.

Where they come from, a channel or the wire, is the matter of inboxes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from meshdist.arrays import Array, as_bytes, describe_array
from meshdist.backends.base import Incoming
from meshdist.backends.gloo.channel import Header
from meshdist.backends.matching import Matching, there_are
from meshdist.errors import DistBackendError
from meshdist.waiting import Doorbell

LEFT_OUT = "sending a message"
"""What a rank has not done that is gone."""


class Sleepable(Protocol):
    """Something that rings a bell when a message has come."""

    def arm(self, bell: Doorbell) -> bool:
        """Ask for `bell` to be rung; return False, and do nothing, where nothing can come yet."""

    def disarm(self, bell: Doorbell) -> None:
        """Take back `arm`."""


class Unwritten(Sleepable, Protocol):
    """Messages on their way to a rank, for which there has been no room so far."""

    def advance(self) -> None:
        """Write what there is room for."""


class Expected:
    """What a rank expects from all others: the receipts and messages without a partner, and the lock over them.

    Attributes:
        lock: Held by who looks for a partner.
        matching: The receipts and messages without one.
        unwritten: What this rank still has to write for others. They may wait for it before they send what this rank
            waits for, so whoever waits for anything in the group writes on.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.matching: Matching[Parcel, Receipt] = Matching()
        self.unwritten: set[Unwritten] = set()

    def write_on(self) -> None:
        """Write what there is room for by now."""
        for messages in tuple(self.unwritten):
            messages.advance()

    def tags_instead(self, tag: int, source: int | None) -> str:
        """Return, for the end of a message, a tag that is waited for, and those of messages that nobody asked for."""
        if tag < 0:  # of a collective's own messages
            return ""
        with self.lock:
            kept = sorted({parcel.header.tag for parcel in self.matching.kept(source) if parcel.header.tag >= 0})
        return f" with tag {tag}{there_are(kept)}"


class Parcel:
    """A message that nobody asked for when it came.

    Attributes:
        source: The rank in the group that sent it.
        header: Its header.
        data: Its bytes, once it is complete.
        complete: All of it is there.
        receipt: Who asked for it before it was.
    """

    def __init__(self, source: int, header: Header) -> None:
        self.source = source
        self.header = header
        self.data = np.empty(header.num_bytes, np.uint8)
        self.complete = False
        self.receipt: Receipt | None = None


class Origin(Protocol):
    """Where a message comes from: one rank, or any.

    Attributes:
        description: What messages call it.
        looking_s: How long it pays to look before sleeping.
    """

    description: str
    looking_s: float

    def move(self, receipt: Receipt) -> None:
        """Read on until `receipt` has its message, or there is nothing more to read."""

    def check(self) -> None:
        """Raise DistBackendError if nothing more can come."""

    def look_again(self) -> None:
        """Have the next `move` ask the store for new channels, however short ago that was done."""

    def inboxes(self) -> Sequence[Sleepable]:
        """Return the inboxes of the ranks that have sent something, and maybe of others."""

    def tags_instead(self, tag: int) -> str:
        """Return what other tags messages from there have that nobody asked for, for the end of a message."""


class Receipt(Incoming):
    """A message that is asked for.

    Args:
        array: Where to.
        dtype_name: The dtype that it must have.
        origin: Where it comes from.
        tag: The tag that it must have.
        expected: What this rank expects from all.
    """

    def __init__(self, array: Array, dtype_name: bytes, origin: Origin, tag: int, expected: Expected) -> None:
        self.done = False
        self.source = -1
        self.looking_s = origin.looking_s
        self._array = array
        self._dtype_name = dtype_name
        self._origin = origin
        self._tag = tag
        self._expected = expected
        self._error: DistBackendError | None = None
        self._bell: Doorbell | None = None
        self._armed: list[Sleepable] = []

    def fit(self, source: int, header: Header, describe: Callable[[], str]) -> Array | None:
        """Return the bytes of the array for a message; None where the message does not fit, which ends the receipt.

        Args:
            source: The rank in the group that sent it.
            header: What it says of itself.
            describe: Returns what messages call that rank.
        """
        self.source = source
        num_bytes, dtype = header.num_bytes, header.dtype
        if num_bytes == self._array.nbytes and dtype == self._dtype_name:
            return as_bytes(self._array)
        name = dtype.rstrip(bytes(1)).decode()
        self._error = DistBackendError(
            f"the message from {describe()} is {num_bytes} bytes of {name},"
            f" the array to receive it is {describe_array(self._array)}, {self._array.nbytes} bytes"
        )
        self.finish()
        return None

    def finish(self) -> None:
        """Say that it is there, to the thread that waits for it as well: another one may have moved the channel."""
        self.done = True
        if self._bell is not None:
            self._bell.ring()

    def ready(self) -> bool:
        if not self.done:
            self._expected.write_on()
            self._origin.move(self)
        if self._error is not None:
            raise self._error
        return self.done

    def check(self) -> None:
        try:
            self._origin.check()
        except DistBackendError as error:
            self._origin.move(self)  # what was sent right before the end
            if self.done:
                return
            instead = self._origin.tags_instead(self._tag)
            if str(error).endswith(LEFT_OUT) and instead != f" with tag {self._tag}":
                error.args = (f"{error}{instead}",)
            raise

    def arm(self, bell: Doorbell) -> None:
        self._bell = bell
        if not self.done:
            # A channel that is found only later would not know that somebody sleeps.
            self._origin.look_again()
            self._origin.move(self)
        places = (*self._origin.inboxes(), *self._expected.unwritten)
        self._armed = [place for place in places if place.arm(bell)]

    def disarm(self, bell: Doorbell) -> None:
        self._bell = None
        for place in self._armed:
            place.disarm(bell)

    def missing(self) -> str:
        return f"a message from {self._origin.description}{self._origin.tags_instead(self._tag)}"
