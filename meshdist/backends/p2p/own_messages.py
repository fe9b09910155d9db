"""The messages of a rank to itself: they are copied when they are sent, and stay in the match queue."""

from __future__ import annotations

import threading
from typing import Any

from meshdist.arrays.host import Array, as_bytes
from meshdist.backends.p2p.eager_messages import DtypeNames
from meshdist.backends.p2p.match_queue import MatchQueue
from meshdist.backends.p2p.requests import NO_ARRAY, NO_TAG, Probing, RecvRequest, UnexpectedMessage, arrive, post
from meshdist.runtime.waiting import Doorbell, Incoming, Probe, Waitable


class OwnMessages:
    """Sends, receives and probes of the rank `rank` to and from itself.

    With the `queue` of a backend, its receives and probes of any source find these messages as well.
    """

    def __init__(self, rank: int, queue: MatchQueue[Any, Any] | None = None) -> None:
        self._rank = rank
        self._queue: MatchQueue[Any, Any] = MatchQueue(threading.RLock()) if queue is None else queue
        self._names = DtypeNames()

    def send(self, array: Array, tag: int) -> Waitable:
        message = UnexpectedMessage(self._queue, self._rank, tag, array.nbytes, self._names[array.dtype])
        message.allocate()[...] = as_bytes(array)
        message.arrived()
        arrive(message)
        return Sent(self._rank)

    def recv(self, array: Array, tag: int) -> Incoming:
        request = _Request(array, self._names[array.dtype], self._rank, tag, self._queue)
        post(request, pulls=False)
        return request

    def probe(self, tag: int | None) -> Probe:
        return _Probe(self._rank, tag, self._queue)

    def awaits(self, tag: int) -> bool:
        """Return whether a receive is posted that the next message with this tag matches."""
        with self._queue.lock:
            return self._queue.has_posted(self._rank, tag)


class Sent(Incoming):
    """A message that is complete at once."""

    def __init__(self, source: int) -> None:
        self.source = source

    def ready(self) -> bool:
        return True

    def check(self) -> None: ...

    def arm(self, bell: Doorbell) -> None: ...

    def disarm(self, bell: Doorbell) -> None: ...

    def missing(self) -> str:
        return "nobody"


class _Request(RecvRequest):
    def progress(self) -> None:
        """Do nothing: the sender, another call of this rank, delivers the message."""

    def check(self) -> None: ...

    def arm(self, bell: Doorbell) -> None:
        self._bell = bell

    def disarm(self, bell: Doorbell) -> None:
        self._bell = None


class _Probe(Probing, _Request):
    def __init__(self, rank: int, tag: int | None, queue: MatchQueue[Any, Any]) -> None:
        self.wanted_tag = tag
        super().__init__(*NO_ARRAY, rank, NO_TAG if tag is None else tag, queue)
