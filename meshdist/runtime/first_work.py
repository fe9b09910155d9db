"""wait_any: waits for the first of several works that ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from meshdist import core
from meshdist.errors import DistTimeoutError
from meshdist.runtime.work import Work
from meshdist.system.deadline import Timeout, seconds

# How many calls the message of a timeout names.
_MOST_NAMED = 8


class _FirstOf(Work):
    """Stands for the first of several works that is done, in a list that may have None in the places of others."""

    __slots__ = ("works",)

    def __init__(self, works: list[Work | None]) -> None:
        super().__init__("wait_any", None)
        self.works = [None if work is None or work._was_awaited else work for work in works]

    def is_completed(self) -> bool:
        return self.place() is not None

    def place(self) -> int | None:
        """Return where it is in the list; None if no work is done yet."""
        places = (place for place, work in enumerate(self.works) if work is not None and work.is_completed())
        return next(places, None)

    def notice(self) -> None:
        """Be complete, as one of the works is done."""
        if not self._is_done:
            self.complete(None)


def wait_any(works: Sequence[Work | None], timeout: Timeout | None = None) -> int:
    """Block until one of several calls is complete or has failed, and return its index.

    The list is not changed. Entries that are None are skipped, and so are calls whose `wait` has returned or raised
    their error; MPI's Waitany replaces the handles of those.

    Args:
        works: The handles of the calls, of any groups.
        timeout: In seconds or a timedelta. None waits until a call ends; each call has the timeout of its group.

    Returns:
        The index of a call that has ended: its `wait()`, which must still be called, returns or raises its error at
        once. If several calls have ended, the first of them.

    Raises:
        TypeError: `works` is not a sequence of Works.
        ValueError: There is no Work in it, or all have been waited for.
        DistTimeoutError: No call has ended in time. All continue; call `wait_any` again.
        DistError: It was called in a callback of a Work, where waiting would deadlock.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     rank, size = dist.get_rank(), dist.get_world_size()
        ...     if rank:
        ...         dist.send(np.array([10 * rank]), 0)
        ...         return None
        ...     rooms = {src: np.zeros(1, int) for src in range(1, size)}
        ...     works, total = [dist.irecv(room, src) for src, room in rooms.items()], 0
        ...     while works:
        ...         work = works.pop(dist.wait_any(works))
        ...         work.wait()
        ...         total += rooms[work.source_rank()].item()
        ...     return total
        >>> dist.run(main, 3)
        [30, None, None]
    """
    if not isinstance(works, Sequence) or isinstance(works, str):
        hint = "; write [work]" if isinstance(works, Work) else ""
        raise TypeError(f"wait_any: works must be a sequence of Works; got {works!r}{hint}")
    handles: list[Any] = works if type(works) is list else list(works)
    # A receive that is deferred need not be posted if its message comes soon.
    soon: int = -1 if core.module is None else core.module.poll_any(handles)
    if soon >= 0:
        return soon
    for number, work in enumerate(handles):
        if work is not None and not isinstance(work, Work):
            raise TypeError(f"wait_any: works must be a sequence of Works; works[{number}] is {work!r}")
    first = _FirstOf(handles)
    present = [work for work in first.works if work is not None]
    if not present:
        why = ": all have been waited for" if any(work is not None for work in handles) else ""
        raise ValueError(f"wait_any: works has no Work to wait for{why}")
    for work in present:
        work.forgotten = None
    queue = None if first.is_completed() else next((work.queue for work in present if work.queue is not None), None)
    if queue is not None:
        queue.carry(first)
    if not first.is_completed():
        with ExitStack() as stack:
            if queue is not None:
                stack.enter_context(queue.awaiting(present, is_limited=timeout is not None))
            for work in present:
                work.add_callback(first.notice)
                stack.callback(work.remove_callback, first.notice)
                work.hasten()
            limit_s = math.inf if timeout is None else seconds(timeout)
            if not first.done_within(limit_s, "wait_any"):
                raise DistTimeoutError(_none_of(present, limit_s))
    place = first.place()
    assert place is not None
    return place


def _none_of(works: Sequence[Work], limit_s: float) -> str:
    calls = [work._error_prefix for work in works]
    queues = [(work, work.queue) for work in works[:_MOST_NAMED]]  # another thread may take it out
    causes = ["" if queue is None else queue.cause_of_delay(work) for work, queue in queues]
    if len(works) == 1:
        return f"wait_any: {calls[0]} has not ended after {limit_s:g} s{causes[0]}; call wait_any() again"
    lines = [f"wait_any: none of {len(works)} calls has ended after {limit_s:g} s; call wait_any() again"]
    lines += [f"  {call}{cause}" for call, cause in zip(calls, causes, strict=False)]
    if len(works) > _MOST_NAMED:
        lines.append(f"  and {len(works) - _MOST_NAMED} more")
    return "\n".join(lines)
