"""Work: a call on its way."""

from __future__ import annotations

import threading
from typing import Any

from meshdist.deadline import Timeout, seconds
from meshdist.errors import DistTimeoutError


class Work:
    """A call that was started with `async_op=True`.

    Its arrays belong to the call until it is done: do not read or write them before `wait` returns.

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

    def __init__(self, where: str, result: Any) -> None:
        self._where = where
        self._result = result
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until the call is done and return True.

        Args:
            timeout: In seconds or a timedelta. None waits as long as the call does, which has the group's timeout.

        Raises:
            DistTimeoutError: Not done in time. The call goes on; wait again.
            DistError: The call failed; every `wait` raises what it failed with.
        """
        if not self._done.wait(None if timeout is None else seconds(timeout)):
            raise DistTimeoutError(
                f"{self._where}: not done after {seconds(timeout):g} s; the call goes on, wait again"
            )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return True once the call is done, well or not."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Return True once the call is done and did not fail."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what the call failed with, None where it did not, or not yet."""
        return self._error

    def result(self) -> Any:
        """Wait, and return what the sync call returns: the output."""
        self.wait()
        return self._result

    def settle(self) -> None:
        """Block until the call is done, well or not."""
        self._done.wait()

    def finish(self, error: BaseException | None) -> None:
        """Mark the call as done; for those who carry it out."""
        self._error = error
        self._done.set()
