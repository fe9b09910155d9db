"""run: ranks as threads of this process."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar

from meshdist.backends.threads import ThreadStore
from meshdist.debug.instrumentation import WorldInstrumentation
from meshdist.debug.user_traceback import ending_at_the_call, user_frames
from meshdist.groups.world import World, world_in
from meshdist.launch.failures import came_while_handling, follows_from_peer
from meshdist.launch.rank_functions import check_arguments
from meshdist.lifecycle import enter_world
from meshdist.runtime.context import WorldSlot, use_slot
from meshdist.runtime.departure import Departure, PeerExit
from meshdist.runtime.waiting import Doorbells
from meshdist.system.deadline import Deadline, Timeout, seconds

if TYPE_CHECKING:
    from meshdist.debug.hang_watchdog import StateExchange

T = TypeVar("T")

DEFAULT_RUN_TIMEOUT_S = 300.0


@ending_at_the_call
def run(fn: Callable[..., T], world_size: int, args: Sequence[Any] = (), *, timeout: Timeout | None = None) -> list[T]:
    """Run `fn` on `world_size` ranks that are threads of this process, and return what each returned.

    Every rank has its own world with an initialized process group: `fn` makes meshes and calls collectives as in a
    script under `meshrun`. Use it for tests, notebooks and experiments; threads share one interpreter, so it is slow.

    Args:
        fn: The function that each rank runs.
        world_size: Number of ranks.
        args: Arguments of `fn`, the same for all ranks.
        timeout: How long a call may wait, in seconds or as a timedelta. 5 minutes if None.

    Returns:
        The results in rank order.

    Raises:
        TypeError: `fn` is not callable, or cannot be called with `args`, or `world_size` is not an integer.
        ValueError: `world_size` is not positive.
        Exception: The exception of the first rank whose failure does not follow from another's; if all follow from a
            rank that has returned, that of the rank that failed first. The other ranks end.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     return int(mesh["tp"].all_reduce(np.array(dist.get_rank())))
        >>> dist.run(main, 4)
        [1, 1, 5, 5]
    """
    __tracebackhide__ = True  # in notebooks: what counts is where it was called, and what the rank did
    if not callable(fn):
        raise TypeError(f"run: fn must be callable, as in run(main, 4), got {type(fn).__name__}")
    try:
        world_size = index(world_size)
    except TypeError:
        raise TypeError(f"run: world_size must be an integer, got {world_size!r}") from None
    if world_size < 1:
        raise ValueError(f"run: world_size must be at least 1, got {world_size}")
    if not isinstance(args, Iterable):
        raise TypeError(f"run: args must be a tuple, such as ({args!r},), got {type(args).__name__}")
    args = tuple(args)
    no_rank = "; run, unlike spawn, does not pass the rank: call get_rank() instead"
    check_arguments("run", fn, args, args, (0, *args), no_rank)
    store = ThreadStore()
    timeout_s = seconds(timeout, DEFAULT_RUN_TIMEOUT_S)
    ranks: list[_Rank] = []
    caller = threading.get_ident()
    ranks += [_Rank(rank, world_size, store, timeout_s, fn, args, ranks, caller) for rank in range(world_size)]
    threads = [
        threading.Thread(target=Context().run, args=(rank.run,), name=f"rank-{rank.rank}", daemon=True)
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        # Ctrl-C arrives in the main thread: end the calls of all ranks.
        try:
            if isinstance(error, KeyboardInterrupt):
                ranks[0].report_hang()
        finally:
            for rank in ranks:
                store.end(rank.rank, Departure(PeerExit.INTERRUPTED, detail=type(error).__name__))
        raise
    failed = [(rank.rank, rank.error) for rank in sorted(ranks, key=_order_of_causes) if rank.error is not None]
    if failed:
        first, cause = failed[0]
        if hasattr(cause, "add_note"):
            cause.add_note(f"raised on rank {first} of {world_size} by meshdist.run")
        raise cause.with_traceback(user_frames(cause))
    return [rank.result for rank in ranks]


def _order_of_causes(rank: _Rank) -> tuple[bool, bool, float]:
    """Sort ranks by whether their failure may have caused the others; if all follow from another, by time."""
    if rank.error is None:
        return True, True, math.inf
    follows = follows_from_peer(rank.error)
    return follows, not came_while_handling(rank.error), rank.failed_s if follows else rank.rank


@dataclass(eq=False, repr=False)
class _Rank:
    rank: int
    world_size: int
    store: ThreadStore
    timeout_s: float
    fn: Callable[..., Any]
    args: Sequence[Any]
    ranks: list[_Rank]
    caller: int  # the thread that waits for the ranks
    result: Any = None
    error: BaseException | None = None
    failed_s: float = math.inf
    world: World | None = None

    def _make_exchange(self) -> StateExchange:
        from meshdist.debug.state_exchange import ThreadStateExchange

        return ThreadStateExchange(self._worlds, self.rank, self.caller)

    def _worlds(self) -> dict[int, World]:
        return {rank.rank: rank.world for rank in self.ranks if rank.world is not None}

    def report_hang(self) -> None:
        """Show who waits for whom if ranks hang, as meshrun does after Ctrl-C."""
        from meshdist.debug.attach import long_waits  # most jobs do not hang

        for line in long_waits(*self._make_exchange().gather(0.0), self.world_size):
            print(f"run: {line}", file=sys.stderr, flush=True)

    def run(self) -> None:
        slot = WorldSlot()
        use_slot(slot)
        end = Departure(PeerExit.FINISHED)
        try:
            world = enter_world(
                *(slot, self.store, self.rank, self.world_size, "threads", Doorbells(), Deadline(self.timeout_s)),
                instrumentation=WorldInstrumentation(self._make_exchange),
            )
            self.world = world
            self.result = self.fn(*self.args)
            world.finish()
        except BaseException as error:  # handed to the caller of run
            self.error, self.failed_s = error, time.monotonic()
            if self.world is not None:
                if isinstance(error, Exception):
                    self.world.finish_after_error()
                self.world.end_with(error)
            end = Departure(PeerExit.RAISED, detail=f"{type(error).__name__}: {error}")
        self.store.end(self.rank, end)
        world_left = world_in(slot)
        if world_left is not None:
            world_left.close()
