"""Future: a value that is there later, and what is to be done with it then."""

from __future__ import annotations

from collections.abc import Callable
from threading import current_thread, main_thread
from typing import Any

from meshdist.deadline import Timeout
from meshdist.debug.log import RankLog
from meshdist.outcome import Outcome

_log = RankLog()


class Future(Outcome):
    """A value that is there later: of a Work (`Work.get_future()`), of a callback (`then`), or set by hand.

    Callbacks run at once where the value is there, else on the thread that sets it; for a Work that is the one which
    carries out the calls, so callbacks are short, and may start calls but not wait for them.

    Example:
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
            timeout: In seconds or a timedelta; None waits as long as it takes.

        Raises:
            DistTimeoutError: Not done in time; wait again.
            BaseException: What was set instead of a value.
        """
        self.await_done(timeout, "Future.wait")
        return self.value()

    def value(self) -> Any:
        """Return the value of a future that is done.

        Raises:
            RuntimeError: It is not done.
            BaseException: What was set instead of a value.
        """
        if not self._is_done:
            raise RuntimeError("Future.value: there is no value yet; wait() for it, or ask done() first")
        if self._error is not None:
            raise self._error
        return self._value

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Call `callback` with this future once it is done.

        Args:
            callback: Gets this future, which is done: `value()` returns what was set, or raises it.

        Returns:
            A new Future, of what the callback returns or raises.
        """
        after = Future()

        def run() -> None:
            try:
                value = callback(self)
            except BaseException as error:  # it belongs to whoever waits for the new future
                after.set_exception(error)
                if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                    raise  # it was meant for whoever is here
            else:
                after.set_result(value)

        self.watch(run)
        return after

    def add_done_callback(self, callback: Callable[[Future], Any]) -> None:
        """Call `callback` with this future once it is done; what it raises is logged."""

        def run() -> None:
            try:
                callback(self)
            except Exception:  # nobody waits for it
                _log.exception("a callback of a Future raised")

        self.watch(run)

    def set_result(self, result: Any) -> None:
        """Set the value.

        Raises:
            RuntimeError: It is done already.
        """
        self._refuse_second("set_result")
        self._value = result
        self.settle(None)

    def set_exception(self, result: BaseException) -> None:
        """Set an exception instead of a value: `wait` and `value` raise it.

        Raises:
            TypeError: Not an exception.
            RuntimeError: It is done already.
        """
        if not isinstance(result, BaseException):
            raise TypeError(f"Future.set_exception: result must be an exception, got {type(result).__name__}")
        self._refuse_second("set_exception")
        self.settle(result)

    def _refuse_second(self, name: str) -> None:
        if self._is_done:
            raise RuntimeError(f"Future.{name}: the future is done already; a future is set once")
