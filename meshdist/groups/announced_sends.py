"""Long sends that the core has announced: their receivers copy the messages from the senders' arrays."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from meshdist import core
from meshdist.groups.deferred_receives import DeferredReceives, DeferredWork, PersistentRequest
from meshdist.runtime.work import PlannedWork, Work


class AnnouncedWork(Work):
    """The Work of an `isend` that the core has announced; `word` is the number of its message.

    The core makes it, and waits for a moment until the message is taken.
    """

    __slots__ = ()

    if core.module is not None:
        wait = core.Handle._wait

    @property
    def request(self) -> PersistentRequest:
        request: PersistentRequest = self.kind
        return request

    def is_completed(self) -> bool:
        self._post()
        return super().is_completed()

    def add_callback(self, callback: Callable[[], object]) -> None:
        self._post()
        super().add_callback(callback)

    def complete(self, error: BaseException | None) -> None:
        self._release()
        super().complete(error)

    def _post(self) -> None:
        if isinstance(self.queue, AnnouncedSends):
            self.queue.post_all()


class AnnouncedSends:
    """The announced sends of a group that are not done, and have no request yet.

    Nothing has to be done for them on this rank. They get a request, which `post` makes, where a wait takes longer, or
    something else than `wait` asks for one; so do the deferred receives then, which the peer may wait for.
    """

    def __init__(self, post: Callable[[AnnouncedWork], None], deferral: DeferredReceives) -> None:
        self._post = post
        self._deferral = deferral
        self._lock = threading.RLock()
        self.works: deque[AnnouncedWork] = deque()

    def carry(self, work: Work) -> None:
        """Leave `work` to its request, and carry that on for a moment."""
        self._deferral.post_all()
        self.post_all()
        if work.queue is not None and work.queue is not self:
            work.queue.carry(work)

    def post_all(self) -> None:
        with self._lock:
            while self.works:
                work = self.works.popleft()
                work.queue = None
                self._post(work)

    def hasten(self) -> None:
        """Post all: a callback waits for the send."""
        self.post_all()

    def wait_for(self, work: Work, error_prefix: str, limit_s: float) -> None:
        raise AssertionError("`carry` comes before, which posts the send")


if core.module is not None:
    core.module.handles(
        PlannedWork,
        DeferredWork,
        AnnouncedWork,
        PlannedWork,
        Work.wait,
        DeferredReceives.MOST,
        DeferredReceives.MOST_BYTES,
        DeferredReceives.LONG_BYTES,
    )
