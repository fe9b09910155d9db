"""shrink_group: the surviving ranks of a group continue without the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshdist import core
from meshdist.errors import DistError
from meshdist.groups.api import rank_list
from meshdist.groups.non_member import NonMember
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import World, current_world, resolve
from meshdist.runtime.context import GroupLike, current_slot
from meshdist.system.name_hints import explaining

SHRINK_DEFAULT = 0
SHRINK_ABORT = 1


@explaining
def shrink_group(
    ranks_to_exclude: Iterable[int],
    group: GroupLike = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Replace a group by one without some of its ranks, which may be dead.

    All remaining ranks call this with the same `ranks_to_exclude`; the others do not. The group may be broken, as it is
    after a rank has died in a call. It is destroyed; the new group has its backend, timeout and description.

    If the group is that of all ranks, the new group replaces the world: `group.WORLD`, `get_rank` and `get_world_size`
    refer to it, its ranks are numbered from 0 in the old order, and all other groups are destroyed, since they use the
    old numbers. Create new meshes afterwards.

    The store must survive: the store of `meshrun` does, but not a store in an excluded rank (such as rank 0 with
    `tcp://`). In that case, the remaining ranks can end this world and call init_process_group with another address.

    Args:
        ranks_to_exclude: Ranks in the group; at least one, not all of them, and not this one.
        group: The group to shrink; that of all ranks if None.
        shrink_flags: `SHRINK_DEFAULT` waits for async calls; `SHRINK_ABORT` makes them fail.
        pg_options: Passed to the backend of the new group; those of the old one if None.

    Returns:
        The new group.

    Raises:
        ValueError: `ranks_to_exclude` is empty, has all ranks, duplicates or ranks outside the group, or differs from
            that of another rank; the flags are unknown; this rank is not in the group; the group has been destroyed.
        TypeError: The ranks are not integers.
        DistError: This rank is excluded, or the store is gone. Nothing has changed.

    Example:
        >>> import meshdist as dist
        >>> def main():
        ...     if dist.get_rank() == 1:
        ...         return "excluded"
        ...     dist.shrink_group([1])
        ...     return dist.get_rank(), dist.get_world_size()
        >>> dist.run(main, 3)
        [(0, 2), 'excluded', (1, 2)]
    """
    world, old = current_world(), resolve(group)
    if isinstance(old, NonMember):
        raise ValueError("shrink_group: this rank is not in the group; only the remaining ranks call it")
    error_prefix = old.error_prefix("shrink_group")
    world.check_holds(old)
    if not isinstance(shrink_flags, int) or shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(
            f"{error_prefix}: shrink_flags must be SHRINK_DEFAULT ({SHRINK_DEFAULT}) or SHRINK_ABORT ({SHRINK_ABORT}),"
            f" got {shrink_flags!r}"
        )
    excluded = _checked(error_prefix, old, ranks_to_exclude)
    _agree(error_prefix, world, old, excluded)
    options = old.pg_options if pg_options is None else pg_options
    keep = tuple(rank for place, rank in enumerate(old.ranks) if place not in excluded)
    if shrink_flags == SHRINK_ABORT:
        _abort(world, old, f"rank {world.rank} called shrink_group, which excludes ranks {excluded} of the group")
    new = _shrunk_world(world, keep) if old is world.default_group else _shrunk(world, old, keep)
    new.pg_options, new.device_id = options, old.device_id
    return new


def _checked(error_prefix: str, old: ProcessGroup, ranks_to_exclude: Iterable[int]) -> list[int]:
    excluded = sorted(rank_list(f"{error_prefix}: ranks_to_exclude", ranks_to_exclude, old.size()))
    if len(excluded) == old.size():
        raise ValueError(
            f"{error_prefix}: ranks_to_exclude must leave a rank in the group, got all {old.size()}: {excluded}"
        )
    if old.rank() in excluded:
        raise DistError(
            f"{error_prefix}: this rank is one of those to exclude, {excluded}; only the remaining ranks call it"
        )
    return excluded


def _agree(error_prefix: str, world: World, old: ProcessGroup, excluded: list[int]) -> None:
    # Ranks with different exclusions would make different groups, and wait for each other without end.
    mine = ",".join(map(str, excluded))
    try:
        first = world.store.compare_set(f"shrinking/{old.name}", "", f"{mine} {world.rank}").decode()
    except DistError as error:
        raise type(error)(
            f"{error_prefix}: the store does not answer; it is gone if an excluded rank hosted it (as rank 0 does"
            " without meshrun or spawn). To continue, call destroy_process_group() and then init_process_group() on the"
            f" {old.size() - len(excluded)} remaining ranks, with new rank numbers and another address; or start the"
            f" job with meshrun, whose store outlives its ranks: {error}"
        ) from error
    theirs, rank = first.split()
    if theirs != mine:
        raise ValueError(
            f"{error_prefix}: ranks_to_exclude must be the same on all remaining ranks: global rank {rank} has excluded"
            f" [{theirs}], this rank [{mine}]; call shrink_group with [{theirs}] here too, then shrink the resulting"
            " group again"
        )


def _abort(world: World, old: ProcessGroup, reason: str) -> None:
    if old is world.default_group:
        world.abort(reason)
    else:
        old.abort(reason)


def _shrunk(world: World, old: ProcessGroup, keep: tuple[int, ...]) -> ProcessGroup:
    desc = "" if old.label == old.name else old.label
    world.drop(old, "was shrunk; use what shrink_group returned")
    return world.new_group(keep, old.backend_name, old.timeout_s, desc)


def _shrunk_world(world: World, keep: tuple[int, ...]) -> ProcessGroup:
    new = current_slot().world = world.shrunk(keep)
    core.world_changed()
    return new.default_group
