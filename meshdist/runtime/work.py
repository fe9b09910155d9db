"""Work and Future: handles of results that are available later."""

from __future__ import annotations

import logging
import math
import threading
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from time import perf_counter_ns
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

from meshdist import core
from meshdist.errors import DistError, DistTimeoutError
from meshdist.runtime.handover import hand_over, keep
from meshdist.system.deadline import Timeout, seconds
from meshdist.system.name_hints import NamesExplained, missing_attribute

_log = logging.getLogger("meshdist")

_SLICE_S = 0.05


class ProgressThread(threading.Thread):
    """A thread that carries out calls; it must not wait for one, since no other thread would complete it."""


def in_progress_thread() -> bool:
    """Return whether the current thread is one."""
    return isinstance(threading.current_thread(), ProgressThread)


class Carried(threading.local):
    """The async call that this thread carries out.

    Attributes:
        place: The code object and the instruction of the user's call; None where a thread carries out none, or makes a
            sync call.
    """

    place: tuple[CodeType, int] | None = None


carried = Carried()


class Observer(Protocol):
    """Observes the waits for a Completion."""

    def blocked(self, nanoseconds: int) -> None: ...
    def done(self) -> None: ...


class _Handles(NamesExplained):
    """The type of handles: `dir` and `help` show what Work and Future define, also of what is derived from them.

    What Completion and the core define is for this package.
    """

    def __dir__(cls) -> list[str]:
        public: type = next((base for base in cls.__mro__ if Completion in base.__bases__), cls)
        return sorted({*dir(object), *vars(public)})


class Completion(core.Handle, metaclass=_Handles):
    """Completes once, with a value or an error.

    It has no lock, to be cheap: a waiting thread appends a callback and then checks `_is_done`; the completing thread
    sets `_is_done` and then runs the callbacks. So at least one of the two sees the other.
    """

    __slots__ = ()

    def __init__(self) -> None:
        self._is_done = False
        self._was_awaited = False  # `wait` has returned, or raised the error of the call
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []
        self.forgotten: list[Any] | None = None

    def __dir__(self) -> list[str]:
        return dir(type(self))

    def complete(self, error: BaseException | None) -> None:
        self.settle(error)
        self.run_callbacks()

    def settle(self, error: BaseException | None) -> None:
        """Complete it, but for the callbacks."""
        if error is not None:
            keep(error)
        self._error = error
        self._is_done = True

    def run_callbacks(self) -> None:
        while self._callbacks:
            self._run_next()

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` once this is done; at once if it is done already."""
        self._callbacks.append(callback)
        while self._is_done and self._callbacks:
            self._run_next()

    def remove_callback(self, callback: Callable[[], object]) -> None:
        """Undo `add_callback`, unless the callback has run, or is about to."""
        with suppress(ValueError):
            self._callbacks.remove(callback)

    @property
    def has_callbacks(self) -> bool:
        """Whether something happens once it is done."""
        return bool(self._callbacks)

    def await_done(self, timeout: Timeout | None, what: str) -> None:
        """Block until this is done or has failed; raise DistTimeoutError at the timeout."""
        limit_s = math.inf if timeout is None else seconds(timeout)
        if not self.done_within(limit_s, what):
            raise DistTimeoutError(f"{what}: {not_yet(limit_s)}")

    def done_within(self, limit_s: float, what: str) -> bool:
        """Block until this is done or has failed, at most for `limit_s`; return whether it is."""
        if self._is_done:
            return True
        if in_progress_thread():
            raise DistError(
                f"{what}: this callback runs on the progress thread, which must execute the call, so waiting here would"
                " deadlock; chain another callback with then()"
            )
        lock = allocate_lock()
        lock.acquire()
        self.add_callback(lock.release)
        began_ns = perf_counter_ns()
        # Sleep in slices: a signal that arrives just before the sleep, or in another thread, does not end it.
        is_done = lock.acquire(True, min(limit_s, _SLICE_S))
        while not is_done and (left_s := limit_s - (perf_counter_ns() - began_ns) * 1e-9) > 0:
            is_done = lock.acquire(True, min(left_s, _SLICE_S)) or self._is_done
        if hasattr(self, "_observer"):
            self._observer.blocked(perf_counter_ns() - began_ns)
        return is_done

    def hasten(self) -> None:
        """Have the progress thread carry out the call now: no thread waits for it, but a callback does."""
        queue = self.queue  # another thread may take it out
        if not self._is_done and queue is not None:
            queue.hasten()

    def observe(self, observer: Observer) -> None:
        """Notify `observer` of every blocking wait from now on, and of the completion."""
        self._observer = observer
        self.add_callback(observer.done)

    def _run_next(self) -> None:
        try:
            callback = self._callbacks.pop(0)
        except IndexError:  # another thread was faster
            return
        callback()


def not_yet(limit_s: float, what_for: str = "") -> str:
    """Return the message of a timeout after which the wait can be repeated."""
    return f"not done after {limit_s:g} s{what_for}; the call continues; call wait() again"


class Future(Completion):
    """A value that becomes available later: of a Work (`Work.get_future()`), of a callback (`then`), or set by hand.

    A callback runs immediately if the value is available, else on the thread that sets it. For a Work, this is the
    progress thread, so callbacks should be short; they may start calls, but must not wait for them.

    Example:
        >>> from meshdist import Future
        >>> future = Future()
        >>> doubled = future.then(lambda done: 2 * done.value())
        >>> future.set_result(21)
        >>> doubled.wait()
        42
    """

    __slots__ = ()

    def __repr__(self) -> str:
        state = "not done" if not self._is_done else repr(self._value) if self._error is None else repr(self._error)
        return f"<Future: {state}>"

    def done(self) -> bool:
        """Return True once there is a value or an exception."""
        return self._is_done

    def wait(self, timeout: Timeout | None = None) -> Any:
        """Block until it is done and return the value.

        Args:
            timeout: In seconds or a timedelta; None waits without limit.

        Raises:
            DistTimeoutError: The value was not there in time; wait again.
            BaseException: The exception that was set instead of a value.
        """
        self.await_done(timeout, "Future.wait")
        return self.value()

    def value(self) -> Any:
        """Return the value of a future that is done.

        Raises:
            RuntimeError: It is not done.
            BaseException: The exception that was set instead of a value.
        """
        if not self._is_done:
            raise RuntimeError("Future.value: there is no value yet; call wait(), or check done() first")
        if self._error is not None:
            raise self._error
        return self._value

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Call `callback` with this future once it is done.

        Args:
            callback: Called with this future, which is done: `value()` returns or raises its result.

        Returns:
            A new Future with the result, or the exception, of the callback.
        """
        after = Future()

        def run() -> None:
            try:
                value = callback(self)
            except BaseException as error:  # raised where the user waits for the new future
                after.set_exception(error)
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise  # Ctrl-C must also interrupt the main thread
            else:
                after.set_result(value)

        self.add_callback(run)
        return after

    def add_done_callback(self, callback: Callable[[Future], Any]) -> None:
        """Call `callback` with this future once it is done; an exception that it raises is logged."""

        def run() -> None:
            try:
                callback(self)
            except Exception:  # no caller waits for it
                _log.exception("a callback of a Future raised")

        self.add_callback(run)

    def set_result(self, result: Any) -> None:
        """Set the value.

        Raises:
            RuntimeError: It is already done.
        """
        self._refuse_second("set_result")
        self._value = result
        self.complete(None)

    def set_exception(self, result: BaseException) -> None:
        """Set an exception instead of a value: `wait` and `value` raise it.

        Raises:
            TypeError: `result` is not an exception.
            RuntimeError: It is already done.
        """
        if not isinstance(result, BaseException):
            raise TypeError(f"Future.set_exception: result must be an exception, got {type(result).__name__}")
        self._refuse_second("set_exception")
        self.complete(result)
        hand_over(result)  # to the owner of the future

    def _refuse_second(self, name: str) -> None:
        if self._is_done:
            raise RuntimeError(f"Future.{name}: the future is done already; it can be set only once")


class WorkQueue(Protocol):
    """The queue of calls that has a Work."""

    def carry(self, work: Work) -> None:
        """Carry out calls on this thread until `work` is done, but only for a moment."""

    def wait_for(self, work: Work, error_prefix: str, limit_s: float) -> None:
        """Block until `work` is done or has failed; raise DistTimeoutError after `limit_s`."""

    def await_done(self, work: Work, error_prefix: str) -> None:
        """Block until `work` is done or has failed."""

    def awaiting(self, works: Sequence[Work], *, is_limited: bool = False) -> AbstractContextManager[None]:
        """Let observers know that this thread does nothing else until one of `works` is done or has failed.

        A wait that `is_limited` may end earlier; it is known to reports alone.
        """

    def cause_of_delay(self, work: Work) -> str:
        """Return what `work` waits for, to go on a message; empty if that is unknown."""
        ...

    def hasten(self) -> None:
        """Have the progress thread carry out calls now, and not after it has left them to waiting threads."""


class Work(Completion):
    """The handle of a call that was started with `async_op=True`, or by `isend`, `irecv` and similar calls.

    Do not read or write the arrays of the call before `wait` returns. The call is executed even if its Work is dropped.
    If the program has never waited for the Work, or asked it whether the call is done, the rank logs a warning when the
    group is destroyed.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     x = np.ones(3)
        ...     work = dist.all_reduce(x, async_op=True)
        ...     work.wait()
        ...     return x.tolist()
        >>> dist.run(main, 2)
        [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """

    __slots__ = ()

    def __init__(self, error_prefix: str, result: Any) -> None:
        super().__init__()
        self._error_prefix = error_prefix
        self.queue: WorkQueue | None = None  # the queue of the call, until it is done
        self._value = result

    if not TYPE_CHECKING:  # for type checkers, a name that is not there is an error

        def __getattr__(self, name: str) -> object:
            if name.startswith("_"):  # every async call asks for one
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name)
            raise missing_attribute(self, name, Work)

    def __repr__(self) -> str:
        state = "in progress" if not self._is_done else "done" if self._error is None else f"failed: {self._error}"
        return f"<{type(self).__name__} of {self._error_prefix}: {state}>"

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until the call is complete and return True.

        Args:
            timeout: In seconds or a timedelta. None waits until the call ends; the call has the timeout of its group.

        Raises:
            DistTimeoutError: The call did not end in time; the message names the missing ranks. The call continues and
                the group is not broken: call `wait` again.
            DistError: The call failed; every `wait` raises its error. Or a callback waits for a later call.
        """
        self.forgotten = None
        queue = self.queue  # another thread may take it out
        if not self._is_done and queue is not None:
            began_ns = perf_counter_ns()
            queue.carry(self)
            if hasattr(self, "_observer"):
                self._observer.blocked(perf_counter_ns() - began_ns)
        if not self._is_done:
            queue = self.queue
            if queue is None:
                self.await_done(timeout, self._error_prefix)
            elif timeout is None:
                queue.await_done(self, self._error_prefix)
            else:
                with queue.awaiting([self], is_limited=True):
                    queue.wait_for(self, self._error_prefix, seconds(timeout))
        self._was_awaited = True
        if self._error is not None:
            hand_over(self._error)
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return True once the call is done or has failed."""
        self.forgotten = None
        return self._is_done

    def is_success(self) -> bool:
        """Return True once the call is done and did not fail."""
        return self.exception() is None and self._is_done

    def exception(self) -> BaseException | None:
        """Return the error of the call; None if it did not fail, or is not done."""
        self.forgotten = None
        if self._error is not None:
            hand_over(self._error)
        return self._error

    def result(self) -> Any:
        """Wait and return the output, as the sync call does; for an `irecv_object_list`, the list that was sent."""
        self.wait()
        return self._value

    def source_rank(self) -> int:
        """Wait and return the global rank of the sender, for an `irecv` or `irecv_object_list`.

        Raises:
            ValueError: The call is neither.
        """
        raise ValueError(f"{self._error_prefix}: only the Work of an irecv has a source rank")

    def get_future(self) -> Future:
        """Return a Future of the call; its value is the list of the arrays, or the objects, that the call writes."""
        future = Future()
        self.forgotten = None
        self.add_callback(lambda: self._complete_future(future))
        self.hasten()
        return future

    def _expect_wait(self, record: Any, forgotten: list[Any] | None) -> None:
        """Have the group know, by `forgotten` of its Calls, that the user has not asked this anything yet."""
        self.record, self.forgotten = record, forgotten

    def _stand_for(self, other: Work) -> None:
        """Be what the user has of a call, in the place of `other`."""
        if other.forgotten is not None:
            self._expect_wait(other.record, other.forgotten)
            other.forgotten = None

    def _complete_future(self, future: Future) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        elif isinstance(self._value, (list, tuple)):
            future.set_result(list(self._value))
        else:
            future.set_result([] if self._value is None else [self._value])


def done_work(error_prefix: str, result: Any) -> Work:
    """Return the handle of a call that is done already."""
    work = Work(error_prefix, result)
    work._is_done = True
    return work


class ReceiptWork(Work):
    """The Work of an `irecv`."""

    __slots__ = ()

    def __init__(self, error_prefix: str, result: Any) -> None:
        super().__init__(error_prefix, result)
        self.source = -1

    def source_rank(self) -> int:
        self.wait()
        return self.source


class PlannedWork(Work):
    """The Work of a call that the core has begun, which is also its entry in the queue of calls.

    A thread that waits for it carries out the calls before it, and then this one, in the core. For what takes longer,
    and for the progress thread, `job` returns the Job that goes on with it in Python.
    """

    __slots__ = ()

    if core.module is not None:
        wait = core.Handle._wait

    @property
    def work(self) -> PlannedWork:
        """This work: a Job has one."""
        return self

    def call(self) -> tuple[Any, Any, Any]:
        """Return the plan, what is sent and what is received; raise IndexError if the call is done."""
        plan, sent = self.kind, self.sent
        if plan is None:
            raise IndexError(f"{self._error_prefix}: the call is done")
        return plan, sent, self._value

    def settle(self, error: BaseException | None) -> None:
        super().settle(error)
        self._release()
