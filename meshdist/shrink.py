"""shrink_group: the ranks of a group that are left go on without the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshdist.current import GroupLike, current_slot, current_world, resolve
from meshdist.errors import DistError
from meshdist.groups import rank_list
from meshdist.non_member import NonMember
from meshdist.process_group import ProcessGroup
from meshdist.world import World

SHRINK_DEFAULT = 0
SHRINK_ABORT = 1


def shrink_group(
    ranks_to_exclude: Iterable[int],
    group: GroupLike = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Replace a group by one without some of its ranks, which may be dead.

    The ranks that stay all call this, with the same `ranks_to_exclude`; the others do not. The group may be broken, as
    it is when a rank has died in a call. It is destroyed, and the new one has its backend, timeout and description.

    Where the group is that of all ranks, the new one is the world from then on: `group.WORLD` is it, its ranks are
    numbered anew, from 0 in the old order, `get_rank` and `get_world_size` say so, and all other groups are destroyed,
    as they speak of the old numbers. Meshes are to be made anew.

    The store must live on: that of `meshrun` does, one that an excluded rank held (as rank 0 does with `tcp://`) does
    not. Then the ranks that stay can still end this world and meet anew at another address.

    Args:
        ranks_to_exclude: Ranks in the group; at least one, not all of them, and not this one.
        group: The group to shrink; that of all ranks where None.
        shrink_flags: `SHRINK_DEFAULT` lets async calls end; `SHRINK_ABORT` has them fail.
        pg_options: Handed to the backend of the new group; those of the old one where None.

    Returns:
        The new group.

    Raises:
        ValueError: The ranks are none, all, given twice or no ranks of the group, or others than another rank excluded
            from it; the flags are unknown; this rank is not in the group; the group has been destroyed.
        TypeError: The ranks are no integers.
        DistError: This rank is one of those excluded, or the store is gone. Nothing has changed.

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
        raise ValueError("shrink_group: this rank is not in the group; only the ranks that stay call it")
    where = old.where("shrink_group")
    world.check_holds(old)
    if not isinstance(shrink_flags, int) or shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(
            f"{where}: shrink_flags must be SHRINK_DEFAULT ({SHRINK_DEFAULT}) or SHRINK_ABORT ({SHRINK_ABORT}),"
            f" got {shrink_flags!r}"
        )
    excluded = _checked(where, old, ranks_to_exclude)
    _agree(where, world, old, excluded)
    options = old.pg_options if pg_options is None else pg_options
    keep = tuple(rank for place, rank in enumerate(old.ranks) if place not in excluded)
    if shrink_flags == SHRINK_ABORT:
        _abort(world, old, f"rank {world.rank} called shrink_group, which excludes ranks {excluded} of the group")
    new = _shrunk_world(world, keep) if old is world.default_group else _shrunk(world, old, keep)
    new.pg_options, new.device_id = options, old.device_id
    return new


def _checked(where: str, old: ProcessGroup, ranks_to_exclude: Iterable[int]) -> list[int]:
    excluded = sorted(rank_list(f"{where}: ranks_to_exclude", ranks_to_exclude, old.size()))
    if len(excluded) == old.size():
        raise ValueError(f"{where}: ranks_to_exclude must leave a rank in the group, got all {old.size()}: {excluded}")
    if old.rank() in excluded:
        raise DistError(f"{where}: this rank is one of those to exclude, {excluded}; only the ranks that stay call it")
    return excluded


def _agree(where: str, world: World, old: ProcessGroup, excluded: list[int]) -> None:
    # Ranks that left out different ones would wait for each other in groups that never meet.
    mine = ",".join(map(str, excluded))
    try:
        first = world.store.compare_set(f"shrinking/{old.name}", "", f"{mine} {world.rank}").decode()
    except DistError as error:
        raise type(error)(
            f"{where}: the store in which the ranks met does not answer; it went with an excluded rank if that held it,"
            f" as rank 0 does without meshrun. To go on, destroy_process_group() and init_process_group() the"
            f" {old.size() - len(excluded)} ranks that stay, numbered anew, at another address; or start with meshrun,"
            f" whose store outlives its ranks: {error}"
        ) from error
    theirs, rank = first.split()
    if theirs != mine:
        raise ValueError(
            f"{where}: ranks_to_exclude must be the same on all ranks that stay: global rank {rank} has excluded"
            f" [{theirs}], this rank [{mine}]; do as it did first, then shrink the group that comes of it"
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
    return new.default_group
