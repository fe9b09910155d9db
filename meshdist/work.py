"""Work: a call on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshdist.deadline import Timeout, seconds
from meshdist.outcome import Outcome

if TYPE_CHECKING:
    from meshdist.future import Future
    from meshdist.progress import JobQueue


class Work(Outcome):
    """A call that was started with `async_op=True`, or by `isend` or `irecv`.

    Its arrays belong to the call until it is done: do not read or write them before `wait` returns. A Work that nobody
    keeps is carried out all the same.

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

    __slots__ = ("_where", "queue")

    def __init__(self, where: str, result: Any) -> None:
        super().__init__()
        self._where = where
        self.queue: JobQueue | None = None  # that the progress thread carries it out of
        self._value = result

    def __repr__(self) -> str:
        state = "on its way" if not self._is_done else "done" if self._error is None else f"failed: {self._error}"
        return f"<{type(self).__name__} of {self._where}: {state}>"

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until the call is done and return True.

        Args:
            timeout: In seconds or a timedelta. None waits as long as the call does, which has the group's timeout.

        Raises:
            DistTimeoutError: Not done in time; says who is missing. The call goes on and the group is not broken: wait
                again.
            DistError: The call failed; every `wait` raises what it failed with. Or a callback waits for a call that
                comes after it.
        """
        if not self._is_done:
            if timeout is None or self.queue is None:
                self.await_done(timeout, self._where)
            else:
                from meshdist.limited_wait import wait_for

                wait_for(self, self._where, self.queue, seconds(timeout))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return True once the call is done, well or not."""
        return self._is_done

    def is_success(self) -> bool:
        """Return True once the call is done and did not fail."""
        return self._is_done and self._error is None

    def exception(self) -> BaseException | None:
        """Return what the call failed with, None where it did not, or not yet."""
        return self._error

    def result(self) -> Any:
        """Wait, and return what the sync call returns: the output."""
        self.wait()
        return self._value

    def source_rank(self) -> int:
        """Wait, and return the global rank of the sender: of an `irecv`, which may have taken any.

        Raises:
            ValueError: The call is no `irecv`.
        """
        raise ValueError(f"{self._where}: only the Work of an irecv has a source rank")

    def get_future(self) -> Future:
        """Return a Future of the call; its value is the list of the arrays that the call writes."""
        from meshdist.future import Future

        future = Future()
        self.watch(lambda: self._tell(future))
        return future

    def _tell(self, future: Future) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        elif isinstance(self._value, (list, tuple)):
            future.set_result(list(self._value))
        else:
            future.set_result([] if self._value is None else [self._value])


class ReceiptWork(Work):
    """The Work of an `irecv`."""

    __slots__ = ("source",)

    def __init__(self, where: str, result: Any) -> None:
        super().__init__(where, result)
        self.source = -1

    def source_rank(self) -> int:
        """Wait, and return the global rank of the sender."""
        self.wait()
        return self.source
