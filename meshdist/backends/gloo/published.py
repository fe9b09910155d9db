"""What one rank publishes in the store and others wait for: where its shared memory is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshdist.deadline import Deadline
from meshdist.doorbells import SocketDoorbells
from meshdist.errors import DistBackendError, DistError, DistNetworkError
from meshdist.farewell import DESTROYED_GROUP, ENDED_WITH_STORE, ORDERLY, peer_gone
from meshdist.waiting import Doorbell, Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import BackendOptions

# The store is another process: it is not asked more often than this.
_PAUSE_S = 0.001
# The one who waits has told nobody on which of its doorbells it sleeps: the first few are rung.
_BELLS = 4
_END_S = 0.2


def publish(options: BackendOptions, key: str, value: str, readers: list[int]) -> None:
    """Put `value` into the group's store, and wake the ranks (of the group) that wait for it."""
    options.store.set(key, value)
    assert isinstance(options.bells, SocketDoorbells)
    for rank in readers:
        card = options.peers.card(options.ranks[rank])
        for number in range(1, _BELLS + 1):
            options.bells.ring(card.bells, number)


def mark_told(options: BackendOptions, rank: int) -> None:
    """Say in the store that this rank has told all that it is connected with that it leaves the group; see `fate`."""
    with contextlib.suppress(DistError):
        options.store.set(_told_key(rank), "")


def _says_itself(options: BackendOptions, rank: int, what: str | None) -> bool:
    # One that has made no use of the group, but is heard in others, says that it has destroyed it to the store alone.
    if what == DESTROYED_GROUP:
        return options.store.check([_told_key(rank)])
    return what is None or what in ORDERLY


def _told_key(rank: int) -> str:
    return f"told/{rank}"


def fate(options: BackendOptions, rank: int, *, is_listened_to: bool = False) -> str | None:
    """Return what became of a rank of the group: what it said as it went away, or that its process has ended.

    None where it is there, as far as can be seen. One that is listened to says itself, behind all else it has sent,
    that it has left, and its end shows there as well: what the store says may come before. Not so where it gave up.

    Raises:
        DistBackendError: The store is gone, with another rank; or what the group rests on is broken, so that the rank
            may never come.
        DistNetworkError: The store is gone, and nobody knows with whom.
    """
    try:
        options.check_premises()
        what = options.gone(rank)
        if is_listened_to and _says_itself(options, rank, what):
            return None
        if what is None and options.peers.ended(options.ranks[rank]):
            # Its last word may have come between the two looks.
            what = options.gone(rank) or options.peers.how_ended(options.ranks[rank])
        return what
    except DistNetworkError:
        ended = _who_ended(options, rank)
        if ended is None:
            raise
        if ended != rank:
            raise _ended_with_store(options, ended) from None
        return ENDED_WITH_STORE


def check_withdrawn(options: BackendOptions, rank: int, left_out: str, *, is_listened_to: bool = False) -> None:
    """Raise DistBackendError if a rank of the group is gone, without `left_out`; see `fate`."""
    what = fate(options, rank, is_listened_to=is_listened_to)
    if what is not None:
        raise peer_gone(options.describe(rank), what, left_out)


@contextlib.contextmanager
def told_who_ended(options: BackendOptions, first: int = 0) -> Iterator[None]:
    """Where the store is lost in the block because a rank of the group has ended, raise DistBackendError, naming it.

    Args:
        options: What the group is.
        first: The rank in the group that is looked at first.
    """
    try:
        yield
    except DistNetworkError:
        ended = _who_ended(options, first)
        if ended is None:
            raise
        raise _ended_with_store(options, ended) from None


def _look_up(options: BackendOptions, key: str, publisher: int) -> str | None:
    with told_who_ended(options, publisher):
        return options.store.get(key).decode() if options.store.check([key]) else None


def _who_ended(options: BackendOptions, first: int) -> int | None:
    """Return a rank whose process has ended, `first` if it is one; None where there is none.

    The store may have gone with a rank that held it. That rank is the news; its end shows a moment later.
    """
    deadline = Deadline(_END_S)
    ranks: list[int] = [first, *range(len(options.ranks))]
    while not deadline.expired():
        for rank in ranks:
            if options.peers.ended(options.ranks[rank]):
                return rank
        threading.Event().wait(deadline.slice_s(_PAUSE_S))
    return None


def _ended_with_store(options: BackendOptions, rank: int) -> DistBackendError:
    return peer_gone(options.describe(rank), ENDED_WITH_STORE, "")


def channel_key(src: int, dst: int) -> str:
    """Return the key under which the channel from one rank to another is published."""
    return f"mail/{src}/{dst}"


def publish_channel(options: BackendOptions, src: int, dst: int, place: str) -> None:
    """Publish a channel, and wake the rank that may wait for it."""
    with told_who_ended(options, dst):
        # The list comes first: who finds the channel without it has asked for this sender, who finds it there waits.
        options.store.append(_senders_key(dst), f"{src} ")
        publish(options, channel_key(src, dst), place, [dst])


class Senders:
    """Who has begun to send to this rank; for those who take a message of any rank."""

    def __init__(self, options: BackendOptions, rank: int) -> None:
        self._options = options
        self._key = _senders_key(rank)
        self._found: set[int] = set()
        self._next_s = 0.0

    def look_again(self) -> None:
        """Have the next `find` ask the store, however short ago that was done."""
        self._next_s = 0.0

    def find(self) -> list[int]:
        """Return those that were not found before."""
        others = len(self._options.ranks) - 1
        if len(self._found) == others or time.monotonic() < self._next_s:
            return []
        new: set[int] = set()
        # Where the store is gone nobody new is found; with whom it went is for the look at those who are gone.
        with contextlib.suppress(DistNetworkError):
            if self._options.store.check([self._key]):
                new = set(map(int, self._options.store.get(self._key).split())) - self._found
                self._found |= new
        self._next_s = time.monotonic() + _PAUSE_S
        return sorted(new)


def _senders_key(dst: int) -> str:
    return f"mail/to/{dst}"


class Published(Waitable):
    """A key that a rank of the group has published.

    Args:
        options: What the group is.
        key: The key.
        publisher: The rank.
        left_out: What the rank has not done where it is gone without publishing it.

    Attributes:
        value: What it is, once ready.
    """

    def __init__(self, options: BackendOptions, key: str, publisher: int, left_out: str) -> None:
        self.value: str | None = None
        self._left_out = left_out
        self._options = options
        self._key = key
        self._publisher = publisher
        self._next_s = 0.0

    def ready(self) -> bool:
        if self.value is None and time.monotonic() >= self._next_s:
            return self.look()
        return self.value is not None

    def look(self) -> bool:
        """Return whether it is there now, however short a time ago it was not."""
        if self.value is None:
            self.value = _look_up(self._options, self._key, self._publisher)
            self._next_s = time.monotonic() + _PAUSE_S
        return self.value is not None

    def check(self) -> None:
        check_withdrawn(self._options, self._publisher, self._left_out)

    def arm(self, bell: Doorbell) -> None:
        # A ring may have come within the pause after the last look: the look before the sleep is never left out.
        self.look_again()

    def look_again(self) -> None:
        """Have the next `ready` ask the store, however short ago that was done."""
        self._next_s = 0.0

    def disarm(self, bell: Doorbell) -> None:
        return

    def missing(self) -> str:
        return self._options.describe(self._publisher)
