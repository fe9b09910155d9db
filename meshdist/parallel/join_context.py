"""uneven_inputs: ranks with different numbers of batches, as torch's Join.

In each iteration, the first joinable of every rank that still has batches says so: an all_reduce of one number for each
rank. A rank that has none left answers these calls from the end of its block, and then shadows the collectives of the
iteration, until no rank has batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshdist.collectives.all_reduce import all_reduce
from meshdist.errors import DistBackendError
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import resolve
from meshdist.parallel.model_averaging import broadcast_parameters
from meshdist.runtime.context import GroupLike
from meshdist.runtime.rank_text import call_ranks
from meshdist.runtime.work import Work


class JoinHook:
    """The actions of a rank that ran out of batches, for one Joinable; both methods do nothing unless overridden."""

    def main_hook(self) -> None:
        """Shadow the collectives of one iteration; called as long as another rank has batches."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish, once no rank has batches.

        Args:
            is_last_joiner: Whether this rank is one of those that had the most batches.
        """


class Joinable:
    """An object for `uneven_inputs`; it calls `notify_join_context` before its collectives in each iteration."""

    join: Join | None = None  # the block of `uneven_inputs` that it takes part in; None outside

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group over which its collectives run."""
        raise NotImplementedError

    def join_hook(self) -> JoinHook:
        """Return the actions of a rank that ran out of batches."""
        raise NotImplementedError

    def join_parameters(self) -> Any:
        """Return the tree of arrays that a rank without batches gets at the end, or None."""
        return None

    def notify_join_context(self) -> None:
        """Announce that this rank has a batch, if this is the first joinable of the block.

        Raises:
            DistBackendError: With `throw_on_early_termination`, if another rank has none.
        """
        if self.join is not None and self.join.joinables[0] is self:
            self.join.notify()

    def join_factor(self) -> float:
        """Return the factor for an average over all ranks: 1, or the size of the group per active rank."""
        return 1.0 if self.join is None else self.join.factor()


class Join:
    """A block of `uneven_inputs`: which ranks are active in the current iteration."""

    def __init__(
        self,
        group: ProcessGroup,
        joinables: tuple[Joinable, ...],
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
    ) -> None:
        self.group = group
        self.joinables = joinables
        self._divides_by_all = divide_by_initial_world_size
        self._throws = throw_on_early_termination
        self._prefix = group.error_prefix("uneven_inputs")
        self._active: Any = np.ones(group.size(), np.uint8)
        self._work: Work | None = None
        self._is_shadowing = False

    @property
    def last_joiner(self) -> int:
        """The global rank of a rank that had the most batches: the last of those that were active last."""
        return self.group.global_rank(int(np.flatnonzero(self._active)[-1]))

    def notify(self) -> None:
        """Say that this rank is active; returns at once, unless inactive ranks are an error."""
        if self._is_shadowing:
            return
        self._finish()
        active = np.zeros(self.group.size(), np.uint8)
        active[self.group.rank()] = 1
        self._work = all_reduce(active, group=self.group, async_op=True)
        if self._throws:
            self._finish()
            self._refuse_missing("ran out of batches, and this rank has more")

    def factor(self) -> float:
        """Return by what to multiply an average over all ranks."""
        self._finish()
        return 1.0 if self._divides_by_all else self.group.size() / int(np.count_nonzero(self._active))

    def shadow(self) -> None:
        """Shadow the iterations of the others until no rank has batches."""
        self._finish()
        self._is_shadowing = True
        hooks = [joinable.join_hook() for joinable in self.joinables]
        is_last_joiner = True
        while (active := all_reduce(np.zeros(self.group.size(), np.uint8), group=self.group)).any():
            self._active = active
            self._refuse_missing("ran out of batches, and others have more")
            for hook in hooks:
                hook.main_hook()
            is_last_joiner = False
        for hook in hooks:
            hook.post_hook(is_last_joiner)

    def _finish(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            self._active = work.result()

    def _refuse_missing(self, what: str) -> None:
        missing = np.flatnonzero(self._active == 0).tolist()
        if self._throws and missing:
            raise DistBackendError(
                f"{self._prefix}: {call_ranks(missing, self.group.ranks)} {what}; give all ranks as many, or leave out"
                " throw_on_early_termination"
            )


@contextmanager
def uneven_inputs(
    group: GroupLike,
    *joinables: Joinable,
    parameters: Any = None,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Allow ranks to have different numbers of batches inside the block; all ranks call it, around their loops.

    A rank that leaves its loop takes part in the collectives of the others, with gradients of zero, until all ranks
    have left theirs. Then it gets the parameters of a rank that had the most batches.

    Args:
        group: A ProcessGroup or a DeviceMesh; the world if None. That of the joinables.
        *joinables: The objects that call collectives in the loop, in the order in which an iteration uses them:
            GradientReducers, ShardedOptimizers, and other Joinables.
        parameters: The arrays that the loop updates: dicts, lists and tuples of them; they are written in place at the
            end of the block. If None, the arrays that were passed to the reducers, which the loop must update in place.
        divide_by_initial_world_size: Divide sums of gradients by the size of the group; otherwise by the number of
            ranks that still have batches.
        enable: False makes the block do nothing.
        throw_on_early_termination: Raise on all ranks once one has no more batches, instead of shadowing.

    Raises:
        TypeError: No Joinable is given, or an argument is not one.
        ValueError: A joinable has another group, or is already in such a block.
        DistBackendError: With `throw_on_early_termination`, on all ranks; the message names the ranks that ran out.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> from meshdist.parallel import GradientReducer, uneven_inputs
        >>> def main():
        ...     weights = {"w": np.zeros(2)}
        ...     reducer = GradientReducer(weights)
        ...     with uneven_inputs(None, reducer):
        ...         for _ in range(1 + dist.get_rank()):  # rank 0 has one batch, rank 1 has two
        ...             reducer.ready("w", np.ones(2))
        ...             reducer.wait()
        ...             weights["w"] -= reducer.gradients["w"]
        ...     return weights["w"].tolist()
        >>> dist.run(main, 2)
        [[-1.5, -1.5], [-1.5, -1.5]]
    """
    members = resolve(group)
    prefix = members.error_prefix("uneven_inputs")
    for joinable in joinables:
        if not isinstance(joinable, Joinable):
            raise TypeError(f"{prefix}: expected reducers, optimizers and other Joinables, got {joinable!r:.80}")
        if joinable.join_process_group is not members:
            other = joinable.join_process_group.label
            raise ValueError(f"{prefix}: {type(joinable).__name__} is of group {other!r}; pass that group")
        if joinable.join is not None:
            raise ValueError(f"{prefix}: {type(joinable).__name__} is in another such block already")
    if not joinables:
        raise TypeError(f"{prefix}: pass at least one reducer or optimizer, as in uneven_inputs(group, reducer)")
    if not enable:
        yield
        return
    join = Join(members, joinables, divide_by_initial_world_size, throw_on_early_termination)
    for joinable in joinables:
        joinable.join = join
    try:
        yield
        join.shadow()
        stale = [joinable.join_parameters() for joinable in joinables] if parameters is None else parameters
        broadcast_parameters(stale, members, src=join.last_joiner)
    finally:
        for joinable in joinables:
            joinable.join = None
