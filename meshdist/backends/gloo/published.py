"""What one rank publishes in the store and others wait for: where its shared memory is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from meshdist.doorbells import SocketDoorbells
from meshdist.errors import DistBackendError
from meshdist.waiting import Doorbell, Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import BackendOptions

# The store is another process: it is not asked more often than this.
_PAUSE_S = 0.001
# The one who waits has told nobody on which of its doorbells it sleeps: the first few are rung.
_BELLS = 4


def publish(options: BackendOptions, key: str, value: str, readers: list[int]) -> None:
    """Put `value` into the group's store, and wake the ranks (of the group) that wait for it."""
    options.store.set(key, value)
    assert isinstance(options.bells, SocketDoorbells)
    for rank in readers:
        card = options.peers.card(options.ranks[rank])
        for number in range(1, _BELLS + 1):
            options.bells.ring(card.bells, number)


def channel_key(src: int, dst: int) -> str:
    """Return the key under which the channel from one rank to another is published."""
    return f"mail/{src}/{dst}"


def publish_channel(options: BackendOptions, src: int, dst: int, place: str) -> None:
    """Publish a channel, and wake the rank that may wait for it."""
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

    def find(self) -> list[int]:
        """Return those that were not found before."""
        others = len(self._options.ranks) - 1
        if len(self._found) == others or time.monotonic() < self._next_s:
            return []
        new: set[int] = set()
        if self._options.store.check([self._key]):
            new = set(map(int, self._options.store.get(self._key).split())) - self._found
            self._found |= new
        self._next_s = time.monotonic() + _PAUSE_S
        return sorted(new)


def _senders_key(dst: int) -> str:
    return f"mail/to/{dst}"


class Published(Waitable):
    """A key that a rank of the group has published.

    Attributes:
        value: What it is, once ready.
    """

    def __init__(self, options: BackendOptions, key: str, publisher: int) -> None:
        self.value: str | None = None
        self._options = options
        self._key = key
        self._publisher = options.ranks[publisher]
        self._next_s = 0.0

    def ready(self) -> bool:
        if self.value is None and time.monotonic() >= self._next_s:
            if self._options.store.check([self._key]):
                self.value = self._options.store.get(self._key).decode()
            self._next_s = time.monotonic() + _PAUSE_S
        return self.value is not None

    def check(self) -> None:
        if self._options.peers.ended(self._publisher):
            raise DistBackendError(f"{self._options.peers.describe(self._publisher)} has died", peer_failed=True)

    def arm(self, bell: Doorbell) -> None:
        return

    def disarm(self, bell: Doorbell) -> None:
        return

    def missing(self) -> str:
        return self._options.peers.describe(self._publisher)
