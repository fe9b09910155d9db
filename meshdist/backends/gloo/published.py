"""Keys that ranks publish in the group's store (where shared memory is), and how ranks have left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from meshdist.backends.backend_options import BackendOptions
from meshdist.errors import DistBackendError, DistError, DistNetworkError, PeerConnectionError
from meshdist.runtime.departure import Departure, LeftOut, PeerExit, peer_gone
from meshdist.runtime.doorbells import SocketDoorbells
from meshdist.runtime.waiting import Doorbell, Waitable
from meshdist.system.deadline import Deadline

# Shortest time between two requests of one wait to the store.
_PAUSE_S = 0.001
# The publisher does not know on which of its doorbells a reader sleeps: it rings the first few.
_BELLS = 4
_END_S = 0.2
# How long a rank takes at most to record its departure after it has removed its memory.
_RECORD_S = 2.0


def publish(options: BackendOptions, key: str, value: str, readers: list[int]) -> None:
    options.store.set(key, value)
    assert isinstance(options.bells, SocketDoorbells)
    for rank in readers:
        card = options.peers.card(options.ranks[rank])
        for number in range(1, _BELLS + 1):
            options.bells.ring(card.bells, number)


def publish_departed(options: BackendOptions, rank: int) -> None:
    """Record that this rank has sent all connected peers its departure from the group; see `find_departure`."""
    with contextlib.suppress(DistError):
        options.store.set(_departed_key(rank), "")


def _announces_itself(options: BackendOptions, rank: int, departure: Departure | None) -> bool:
    # A rank that never used the group, but has connections through other groups, destroys it in the store alone.
    if departure is not None and departure.exit is PeerExit.DESTROYED_GROUP:
        return options.store.check([_departed_key(rank)])
    return departure is None or departure.exit.is_orderly


def _departed_key(rank: int) -> str:
    return f"told/{rank}"


def find_departure(options: BackendOptions, rank: int, *, is_read: bool = False) -> Departure | None:
    """Return how a rank left the group or died; None while it appears to be alive.

    With `is_read`, an orderly departure also arrives on the connection, behind the rank's last messages, so the
    store's record is ignored: it may come first. A rank that gave the group up is reported all the same.

    Raises:
        DistBackendError: The store was lost because another rank ended, or a precondition of the group is broken.
        DistNetworkError: The store was lost, and no ended rank was found.
    """
    try:
        options.check_preconditions()
        departure = options.gone(rank)
        if is_read and _announces_itself(options, rank, departure):
            return None
        if departure is None and options.peers.ended(options.ranks[rank]):
            # The rank may have published its departure between the two checks.
            departure = options.gone(rank) or options.peers.how_ended(options.ranks[rank])
        return departure
    except DistNetworkError:
        ended = _find_ended_rank(options, rank)
        if ended is None:
            raise
        if ended != rank:
            raise _ended_with_store(options, ended) from None
        return Departure(PeerExit.ENDED_WITH_STORE)


def check_withdrawn(options: BackendOptions, rank: int, left_out: LeftOut, *, is_read: bool = False) -> None:
    """Raise DistBackendError, which names `left_out`, if a rank of the group is gone; see `find_departure`."""
    departure = find_departure(options, rank, is_read=is_read)
    if departure is not None:
        raise peer_gone(options.describe(rank), departure, left_out, rank=options.ranks[rank])


def check_still_there(options: BackendOptions, rank: int) -> None:
    """Before the first message to a rank: raise DistBackendError if it has left, and will not open the channel."""
    departure = None
    with contextlib.suppress(DistNetworkError):  # the message may need no store
        departure = options.gone(rank)
    if departure is not None:
        raise peer_gone(options.describe(rank), departure, LeftOut.RECEIVE, rank=options.ranks[rank])


def check_why_removed(options: BackendOptions, ranks: Iterable[int], left_out: LeftOut, error: DistError) -> None:
    """After a peer's memory could not be opened: raise DistBackendError if one of `ranks` is gone.

    A rank that fails or ends removes its memory a moment before that is recorded, which is waited for.
    """
    is_removed = isinstance(error.__cause__, FileNotFoundError)
    ranks, deadline, pause = list(ranks), Deadline(_RECORD_S if is_removed else 0), threading.Event()
    while True:
        for rank in ranks:
            check_withdrawn(options, rank, left_out)
        if deadline.expired():
            return
        pause.wait(deadline.slice_s(_PAUSE_S))


@contextlib.contextmanager
def naming_ended_rank(options: BackendOptions, first: int = 0) -> Iterator[None]:
    """Turn the loss of the store into a DistBackendError that names the ended rank, checking `first` first."""
    try:
        yield
    except PeerConnectionError:
        raise  # not of the store
    except DistNetworkError:
        ended = _find_ended_rank(options, first)
        if ended is None:
            raise
        raise _ended_with_store(options, ended) from None


def _get(options: BackendOptions, key: str, publisher: int) -> str | None:
    with naming_ended_rank(options, publisher):
        return options.store.get(key).decode() if options.store.check([key]) else None


def _find_ended_rank(options: BackendOptions, first: int) -> int | None:
    """Return a rank whose process has ended, preferably `first`; None if there is none.

    The store may be lost together with the rank that hosted it; that rank's end becomes visible a moment later.
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
    return peer_gone(options.describe(rank), Departure(PeerExit.ENDED_WITH_STORE), rank=options.ranks[rank])


def channel_key(src: int, dst: int) -> str:
    return f"mail/{src}/{dst}"


def publish_channel(options: BackendOptions, src: int, dst: int, place: str) -> None:
    with naming_ended_rank(options, dst):
        # Append to the list first: a receiver from any source that finds no channel yet waits for this sender.
        options.store.append(_senders_key(dst), f"{src} ")
        publish(options, channel_key(src, dst), place, [dst])


class Senders:
    """The ranks that have begun to send to this one, for receives from any source."""

    def __init__(self, options: BackendOptions, rank: int) -> None:
        self._options = options
        self._key = _senders_key(rank)
        self.found: set[int] = set()
        self._next_s = 0.0
        self.has_asked = False  # the store has answered the last request: those found are all that had begun by then

    def poll_now(self) -> None:
        self._next_s = 0.0

    def find(self) -> list[int]:
        """Return the senders that are new since the last call."""
        others = len(self._options.ranks) - 1
        if len(self.found) == others or time.monotonic() < self._next_s:
            return []
        new: set[int] = set()
        self.has_asked = False
        # Without a store no new senders are found; another check reports which rank it was lost with.
        with contextlib.suppress(DistNetworkError):
            if self._options.store.check([self._key]):
                new = set(map(int, self._options.store.get(self._key).split())) - self.found
                self.found |= new
            self.has_asked = True
        self._next_s = time.monotonic() + _PAUSE_S
        return sorted(new)


def _senders_key(dst: int) -> str:
    return f"mail/to/{dst}"


class Published(Waitable):
    """Waits for the `value` that `publisher` stores under `key`.

    If one of `needed` is gone, by default the publisher, the error names `left_out`.
    """

    def __init__(
        self,
        options: BackendOptions,
        key: str,
        publisher: int,
        left_out: LeftOut,
        needed: Sequence[int] | None = None,
    ) -> None:
        self.value: str | None = None
        self._left_out = left_out
        self._options = options
        self._key = key
        self._publisher = publisher
        self._needed = needed or [publisher]
        self._next_s = 0.0

    def ready(self) -> bool:
        if self.value is None and time.monotonic() >= self._next_s:
            return self.read_now()
        return self.value is not None

    def read_now(self) -> bool:
        if self.value is None:
            self.value = _get(self._options, self._key, self._publisher)
            self._next_s = time.monotonic() + _PAUSE_S
        return self.value is not None

    def check(self) -> None:
        for rank in self._needed:
            check_withdrawn(self._options, rank, self._left_out)

    def arm(self, bell: Doorbell) -> None:
        # The bell may have rung during the pause after the last request: always ask once more before sleeping.
        self.poll_now()

    def poll_now(self) -> None:
        self._next_s = 0.0

    def disarm(self, bell: Doorbell) -> None:
        return

    def missing(self) -> str:
        return self._options.describe(self._publisher)

    def awaits(self) -> list[int]:
        return [] if self.value is not None else [self._options.ranks[self._publisher]]
