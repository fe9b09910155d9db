"""What waits for something of the wire, and what it looks at."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING

from meshdist.backends.gloo.published import check_withdrawn
from meshdist.backends.gloo.wire.bag import Bag
from meshdist.backends.gloo.wire.frames import LEFT
from meshdist.backends.gloo.wire.link import Link
from meshdist.backends.gloo.wire.parts import NUMBER
from meshdist.doorbells import SocketDoorbell
from meshdist.errors import DistBackendError
from meshdist.farewell import ORDERLY, gave_up, peer_gone
from meshdist.waiting import Doorbell, Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import BackendOptions
    from meshdist.backends.gloo.wire.connection import Outgoing
    from meshdist.backends.gloo.wire.wire import Wire


# The store is another process, and all who wait may ask it.
_PAUSE_S = 0.2


# A peer that is under way takes some tens of microseconds. Who looks longer keeps others from computing,
# and is given less of the processor when there is something to do.
LOOKING_S = 0.0001


class WireWait(Waitable):
    """Something of the wire that is waited for."""

    looking_s = LOOKING_S

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._bell: Doorbell | None = None

    @abstractmethod
    def is_done(self) -> bool:
        """Return True once there is nothing to wait for."""

    def ready(self) -> bool:
        if not self.is_done():
            self._wire.drive()
        return self.is_done()

    def ring(self) -> None:
        """Wake the thread that waits for this: another one may have moved the wire."""
        if self._bell is not None:
            self._bell.ring()

    def arm(self, bell: Doorbell) -> None:
        self._bell = bell
        watch(self._wire, bell)

    def disarm(self, bell: Doorbell) -> None:
        self._bell = None
        unwatch(self._wire, bell)


class OutgoingWait(WireWait):
    """Something on its way out: waits until the system has it.

    Args:
        wire: The wire.
        outgoing: What is on its way.
    """

    def __init__(self, wire: Wire, outgoing: Outgoing) -> None:
        super().__init__(wire)
        self.outgoing = outgoing

    def is_done(self) -> bool:
        """Return True once the array that it is sent from may be changed."""
        return self.outgoing.done

    def arm(self, bell: Doorbell) -> None:
        self.outgoing.then = self.ring
        super().arm(bell)


def watch(wire: Wire, bell: Doorbell) -> None:
    """Have whoever sleeps on `bell` wake up when the wire can be moved on."""
    assert isinstance(bell, SocketDoorbell)
    bell.watch(wire.fd)


def unwatch(wire: Wire, bell: Doorbell) -> None:
    """Take back `watch`."""
    assert isinstance(bell, SocketDoorbell)
    bell.unwatch(wire.fd)


def check_rank(bag: Bag, link: Link, rank: int, left_out: str) -> None:
    """Raise DistBackendError if a rank of a group, on another host, has said or shown that it is gone."""
    said = bag.said.get(rank)
    if said is not None:
        state, text = said
        raise peer_gone(link.describe(bag), text if state == LEFT else gave_up(text), left_out)
    end = link.end()
    if end is not None:
        # Who fails says so in the groups that it has used, and to the store; the end of its connections says little.
        raise peer_gone(link.describe(bag), (end in ORDERLY and link.farewell()) or end, left_out)


class Inquiry:
    """Asks the store now and then what became of a rank: one that cannot be heard, or whose last word is held up.

    Args:
        options: The group's.
        left_out: What the rank has not done where it is gone.
    """

    def __init__(self, options: BackendOptions, left_out: str) -> None:
        self._options = options
        self._left_out = left_out
        self._next_s = 0.0

    def is_due(self) -> bool:
        """Return True now and then: it is time to ask."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + _PAUSE_S
        return True

    def ask(self, rank: int, link: Link) -> None:
        """Raise DistBackendError if a rank of the group, at the other end of `link`, is gone."""
        check_withdrawn(self._options, rank, self._left_out, is_listened_to=link.is_listened_to)

    def check(self, rank: int, link: Link) -> None:
        """Ask if it is time."""
        if self.is_due():
            self.ask(rank, link)


def check_all(options: BackendOptions, bag: Bag, wire: Wire) -> None:
    """Raise DistBackendError if a collective cannot come to its end: a rank of the group gave it up, or has died."""
    for rank, (state, text) in list(bag.said.items()):
        # What one does after its part in this collective does not keep the others from completing it.
        if state != LEFT and bag.through.get(rank, 0) < bag.parts.word & NUMBER:
            raise peer_gone(options.describe(rank), gave_up(text), "")
    for link in wire.links_of(bag):
        end = link.end()
        if end is not None and end not in ORDERLY:
            raise DistBackendError(f"{link.describe(bag)} {end}", peer_failed=True)
