"""Messages that are not posted before that is needed: receives of a known kind, and long sends.

A receive of few bytes is deferred. A long send is announced by the core: its receiver copies the message from the
sender's array.
"""

from __future__ import annotations

import math
import pickle
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from types import CodeType
from typing import Any, TypeAlias

import numpy as np

from meshdist import core
from meshdist.arrays.host import Array, dtype_of_objects
from meshdist.backends.base import FastPath
from meshdist.core import Record
from meshdist.errors import DistError
from meshdist.runtime.flight_recorder import clock
from meshdist.runtime.handover import hand_over
from meshdist.runtime.job import Job
from meshdist.runtime.object_messages import ObjectMessage, ObjectsWork, pickle_of, unpickle
from meshdist.runtime.progress import NAP_S, JobQueue, Progress
from meshdist.runtime.waiting import Waitable, WithoutBell, Wrapped
from meshdist.runtime.work import PlannedWork, ReceiptWork, Work

# The facts of a message in the flight recorder: the user's function, group name and label, dtype, shape, peer, tag,
# timeout, and whether it is sent.
Facts: TypeAlias = "tuple[str, str, str, np.dtype[Any], tuple[int, ...], int | None, int, float, bool]"

# How long a receive is left to a thread that may wait for it, and to one that takes messages while it waits.
_NEW_NS, _AWAITED_NS = 250_000, 20_000_000
# How long the progress thread looks for more of them: to wake it for each would take a tenth of an exchange's time.
_QUIET_NS = 20_000_000
# The longest time between two of its looks. It grows to that while threads wait for all in time: a look costs a rank
# that exchanges messages of 1 MiB a tenth of the time.
_LONGEST_PAUSE_S = 0.008


class Guarded(Wrapped):
    """Also checks the group of a waitable, which another call may break meanwhile."""

    def __init__(self, waitable: Waitable, check: Any) -> None:
        super().__init__(waitable)
        self._check = check

    def check(self) -> None:
        self._check()
        super().check()


def message_steps(guarded: Waitable, waitable: Waitable, arrive: Any) -> Iterator[Waitable]:
    """Wait for a message, and then call `arrive` with what it was awaited in."""
    yield guarded
    if arrive is not None:
        arrive(waitable)


class MessageQueue(JobQueue):
    """Messages to one rank, or receives of one kind, in their order.

    A peer may need a receive of this rank before it takes the message that a thread waits for, so receives that are
    deferred are posted first.
    """

    def __init__(self, progress: Progress, deferral: DeferredReceives) -> None:
        super().__init__(progress)
        self._deferral = deferral

    def carry(self, work: Work) -> None:
        self._deferral.post_all()
        super().carry(work)


class PersistentRequest:
    """The messages of one tag, dtype and shape to, or from, one rank or any, whose arguments have been checked.

    The core makes one of another tag or shape by setting the same attributes.
    """

    __slots__ = ("caller", "facts", "fast_path", "label", "source")

    def __init__(self, facts: Facts, fast_path: FastPath | None, source: int, label: str = "") -> None:
        self.facts = facts  # for the flight recorder
        self.fast_path = fast_path  # that of the backend, if it has one for them
        self.source = source  # the global rank of the peer; -1 for any
        self.label = label  # of the messages; see `labelled_dtype`
        self.caller: CodeType | None = None  # the code that sent or received the last one

    def room(self) -> Array:
        """Return a new array for such a message."""
        return np.empty(self.facts[4], self.facts[3])

    def move(self, array: Array) -> bool:
        """Send or receive by the fast path, if it can now; an array with strides by way of a contiguous one."""
        assert self.fast_path is not None
        if array.flags.c_contiguous:
            return self.fast_path(array)
        if self.facts[-1]:
            return self.fast_path(np.ascontiguousarray(array))
        room = self.room()
        if not self.fast_path(room):
            return False
        array[...] = room
        return True


class Unposted(ABC):
    """The messages of a group that were begun, and are not posted yet; the queue of their works until then."""

    works: deque[Any]
    _lock: Any
    _post: Callable[[Any], None]

    def disown(self, error: DistError) -> None:
        """In a forked child: fail the messages, also if a thread that the child does not have was posting them."""
        self._lock = threading.RLock()
        while self.works:
            work = self.works.popleft()
            work.queue = None
            work.complete(error)

    @abstractmethod
    def post_all(self) -> None:
        """Post the messages, in their order."""

    @contextmanager
    def _first_in_hand(self) -> Iterator[Any]:
        """Give the work of the first message, and take it out at the end; None if that has been dealt with.

        Meanwhile it has no queue: what is done with it may come back here. If that raises, such as for Ctrl-C, or gives
        it the queue again, it stays.
        """
        first = self.works[0]
        is_mine = first.queue is self and not first._is_done
        try:
            if is_mine:
                first.queue = None
            yield first if is_mine else None
        except BaseException:
            if is_mine and first.queue is None and not first._is_done:
                first.queue = self
            raise
        if first.queue is not self and self.works and self.works[0] is first:
            self.works.popleft()

    def _post_each(self) -> None:
        while self.works:
            with self._first_in_hand() as work:
                if work is not None:
                    self._post(work)

    def hasten(self) -> None:
        """Post all: a callback waits for a message."""
        self.post_all()

    def wait_for(self, work: Work, error_prefix: str, limit_s: float) -> None:
        raise AssertionError("`carry` comes before, which posts the message")

    def await_done(self, work: Work, error_prefix: str) -> None:
        work.await_done(None, error_prefix)

    def cause_of_delay(self, work: Work) -> str:
        return ""

    def awaiting(self, works: Sequence[Work], *, is_limited: bool = False) -> AbstractContextManager[None]:
        raise AssertionError("asked of works that have been posted")


class UnpostedWork(Work):
    """The Work of a message that may not be posted yet: `wait` does without, and all else posts it."""

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

    def is_success(self) -> bool:
        self._post()
        return super().is_success()

    def add_callback(self, callback: Callable[[], object]) -> None:
        self._post()
        super().add_callback(callback)

    def _post(self) -> None:
        queue = self.queue
        if isinstance(queue, Unposted):
            queue.post_all()


class DeferredWork(UnpostedWork, ReceiptWork):
    """The Work of an `irecv` of few bytes, which may not be posted yet.

    The core makes it as well, of a receive that is known, and takes its message while a thread waits for it.
    """

    __slots__ = ()

    def __init__(self, error_prefix: str, tensor: Array, request: PersistentRequest, record: Record) -> None:
        super().__init__(error_prefix, tensor)
        self.kind = request
        self.record = record

    @property
    def awaited(self) -> Array:
        """The array, or what says in its place what is awaited."""
        array: Array = self._value
        return array

    @property
    def nbytes(self) -> int:
        return self.awaited.nbytes

    def take(self) -> bool:
        """Receive the message by the fast path, if it comes within moments; return whether it has."""
        return self.request.fast_path is not None and self.request.move(self.awaited)


class DeferredObjects(UnpostedWork, ObjectsWork):
    """The Work of an `irecv_object_list`, which may not be posted yet.

    The core makes it of a receive that is known, and takes its message; without the core, the message is expected to be
    like the last one, for which `room` is.
    """

    __slots__ = ("room",)

    if core.module is not None:
        result = core.Handle._objects

    def __init__(
        self, error_prefix: str, message: ObjectMessage, room: Array, request: PersistentRequest, record: Record
    ) -> None:
        super().__init__(error_prefix, message)
        self.room = room
        self.kind = request
        self.record = record

    @property
    def awaited(self) -> Array:
        return self.message.array

    @property
    def nbytes(self) -> int:
        return self.room.nbytes

    def take(self) -> bool:
        """Receive the message by the fast path; see `DeferredWork.take`."""
        if self.request.fast_path is None or not self.request.fast_path(self.room):
            return False
        self.message.take(self.room)
        return True


Deferred: TypeAlias = "DeferredWork | DeferredObjects"


class _IsQuiet(WithoutBell):
    """No receive has been deferred for a while; until then, those that nobody has waited for soon are posted.

    A receive whose message is being taken is not among those that are deferred, so messages are counted as well.
    """

    def __init__(self, receives: DeferredReceives) -> None:
        self._receives = receives
        self._num_messages, self._seen_ns = 0, clock()

    def ready(self) -> bool:
        receives, now_ns = self._receives, clock()
        first, num_messages = receives.first(), receives.calls().num_messages
        if first is not None or num_messages != self._num_messages:
            self._num_messages, self._seen_ns = num_messages, now_ns
        left_ns = _AWAITED_NS if receives.calls().num_waits else _NEW_NS
        if first is not None and (first.created < now_ns - left_ns or receives.is_closed):
            receives.post_late()
        return receives.is_closed or now_ns - self._seen_ns > _QUIET_NS

    def check(self) -> None:
        return

    def missing(self) -> str:
        return ""

    def poll_interval_s(self) -> float:
        since_s = (clock() - self._receives.posted_late_ns) * 1e-9
        return min(max(NAP_S, since_s / 4), _LONGEST_PAUSE_S)


class DeferredReceives(Unposted):
    """Receives of few bytes that are not posted yet, in their order.

    Most are waited for before anything else is received: then their messages go from the transport straight into their
    arrays, without a request. All are posted before any other receive of the group, when one is asked for in another
    way than by `wait`, and when they are so many that their messages might fill the buffers of the transport. A sender
    may wait for the receive of a long message, or of many: the progress thread posts those that this rank has not
    waited for soon.

    `take` receives the message of a work, if it comes within moments, and returns whether it has; `post` posts its
    receive; `calls` returns the numbers of the group's calls.
    """

    MOST, LONG_BYTES = 64, 64 << 10

    def __init__(
        self,
        take: Callable[[Deferred], bool],
        post: Callable[[Deferred], None],
        calls: Callable[[], core.Calls],
        progress: Progress,
    ) -> None:
        self._take, self._post, self.calls = take, post, calls
        self._queue = JobQueue(progress)
        self._is_watched = False
        self.posted_late_ns = clock()  # when the progress thread has posted receives, at last
        self.is_closed = False  # the group ends
        self._lock = threading.RLock()
        # Taken by a thread that changes `works`: the core, which changes it without the lock, then leaves it alone.
        self.taking = core.TryLock()
        self.works: deque[Deferred] = deque()  # those that are not posted

    def takes(self, request: PersistentRequest, tensor: Array) -> bool:
        """Return whether a receive may be deferred; the core has more room for messages than other transports."""
        in_core = core.module is not None and isinstance(request.fast_path, core.Ring)
        has_room = in_core or tensor.nbytes * (len(self.works) + 1) <= self.LONG_BYTES
        return has_room and len(self.works) < self.MOST

    def add(self, work: Deferred, forgotten: list[Any]) -> Deferred:
        work.queue, work.forgotten = self, forgotten
        self.works.append(work)
        if work.nbytes * len(self.works) > self.LONG_BYTES:
            self.watch()
        return work

    def first(self) -> Record | None:
        """Return the record of the first receive."""
        try:
            record: Record = self.works[0].record
        except IndexError:
            return None
        return record

    def post_late(self) -> None:
        """Post the receives that nobody has waited for in time."""
        self.post_all()
        self.posted_late_ns = clock()

    def watch(self) -> None:
        """Have the progress thread post the receives that nobody waits for in their first moments."""
        first = self.first()
        if self._is_watched or first is None:
            return
        self._is_watched = True
        work = Work("posting receives", None)
        record = Record(first.facts, first.sequence, first.created, 0, first.code, first.instruction)
        job = Job(self._watched, work, math.inf, "posting receives", self._unwatched, record)
        self._queue.progress.submit(self._queue, job)

    def _watched(self) -> Iterator[Waitable]:
        yield _IsQuiet(self)
        self._is_watched = False
        self.watch()  # one that has been deferred right now

    def _unwatched(self, error: BaseException, error_prefix: str, record: Record) -> BaseException:
        self._is_watched = False
        return error

    def carry(self, work: Work) -> None:
        """Receive the message of `work`, and those before it, or post them all."""
        with self._lock, self._in_hand():
            while work in self.works:
                with self._first_in_hand() as first:
                    if first is None:
                        continue
                    try:
                        is_taken = self._take(first)
                    except BaseException as error:  # of `first`, raised in the wait for `work`
                        hand_over(error)
                        raise
                    if not is_taken:
                        first.queue = self
                if not is_taken:
                    if first not in self.works:
                        self.works.appendleft(first)
                    self.post_all()
        queue = work.queue  # another thread may take it out
        if queue is not None and queue is not self:
            queue.carry(work)

    def post_all(self) -> None:
        with self._lock, self._in_hand():
            self._post_each()

    @contextmanager
    def _in_hand(self) -> Iterator[None]:
        # Only the thread that has `_lock` takes it, more than once if posting fails.
        is_mine = self.taking.acquire(False)
        try:
            yield
        finally:
            if is_mine:
                self.taking.release()


# ---- Long sends


class AnnouncedWork(UnpostedWork):
    """The Work of an `isend` that the core has announced; `word` is the number of its message.

    The core makes it, and waits for a moment until the message is taken.
    """

    __slots__ = ()

    def settle(self, error: BaseException | None) -> None:
        super().settle(error)
        self._release()


class AnnouncedSends(Unposted):
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
        queue = work.queue  # another thread may take it out
        if queue is not None and queue is not self:
            queue.carry(work)

    def post_all(self) -> None:
        with self._lock:
            self._post_each()


if core.module is not None:
    core.module.configure_objects(lru_cache(dtype_of_objects), pickle_of, pickle.loads, unpickle)
    core.module.handles(
        Work,
        PlannedWork,
        DeferredWork,
        DeferredObjects,
        AnnouncedWork,
        PlannedWork,
        Work.wait,
        ObjectsWork.result,
        DeferredReceives.MOST,
        DeferredReceives.LONG_BYTES,
    )
