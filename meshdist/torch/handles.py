"""The handles of calls that torch gets: its Work over that of meshdist."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work as TorchWork

from meshdist.errors import DistError
from meshdist.runtime.work import Work, in_progress_thread


class DoneWork(TorchWork):  # type: ignore[misc]
    """The handle of a call that is over when the backend returns.

    torch waits for that of a sync call and drops it, so one object serves all of a group.
    """

    def __init__(self, outputs: list[Any] | None = None) -> None:
        super().__init__()
        self._outputs = outputs or []

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Any]:
        return self._outputs

    def synchronize(self) -> None:
        return

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class AsyncWork(TorchWork):  # type: ignore[misc]
    """The handle of an async call.

    Args:
        work: That of meshdist. Calls of one group end in order: for several calls it is the last.
        outputs: The tensors that the call writes.
        group_rank: Returns the rank in the group of a global rank.
    """

    def __init__(self, work: Work, outputs: list[Any], group_rank: Callable[[int], int] | None = None) -> None:
        super().__init__()
        work.forgotten = None  # torch itself drops some
        self._work = work
        self._outputs = outputs
        self._group_rank = group_rank
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        # torch passes 0 for "no timeout of its own".
        return self._work.wait(timeout or None)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> list[Any]:
        self._work.wait()
        return self._outputs

    def synchronize(self) -> None:
        self._work.wait()

    def source_rank(self) -> int:
        """Wait and return the rank in the group of the sender, for a message received from any rank."""
        source = self._work.source_rank()
        return source if self._group_rank is None else self._group_rank(source)

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return the torch Future of the outputs, the same each time.

        Raises:
            DistError: A callback asks for it. The wait of a torch Future, which is C++, would block the thread that has
                to carry out the call.
        """
        if self._future is None:
            if in_progress_thread() and not self._work.is_completed():
                raise DistError(
                    f"{self._work!r}: the callback of a Future asks for the Future of another call, and waiting for it"
                    " would never end; make the call where the first Future is waited for"
                )
            done: Any = torch.futures.Future()
            # An exception that `set_exception` of Python sets is a value to C++, such as DDP's reducer. What a callback
            # raises is an error to both.
            self._future = done.then(self._outcome)
            self._work.add_callback(lambda: done.set_result(None))
            self._work.hasten()
        return self._future

    def _outcome(self, _: Any) -> list[Any]:
        error = self._work.exception()
        if error is not None:
            raise error
        return self._outputs
