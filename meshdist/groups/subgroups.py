"""Make several groups at once, as parts of the world or of a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from meshdist.groups.api import GroupMember, new_group, rank_list
from meshdist.groups.non_member import NonMember
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import current_world, resolve
from meshdist.runtime.context import GroupLike
from meshdist.system.deadline import Timeout
from meshdist.system.name_hints import explaining
from meshdist.system.plurals import counted


@explaining
def new_subgroups(
    group_size: int | None = None,
    group: GroupLike = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | NonMember, list[ProcessGroup | NonMember]]:
    """Divide a group into subgroups of equal size, or into one subgroup for each host.

    This does not communicate, like `new_group`.

    Args:
        group_size: Ranks in each subgroup, consecutive in the group; it must divide the size of `group`. None creates a
            subgroup of the ranks of each host, of any size.
        group: The group to divide; the world if None.
        timeout: How long calls on a group may wait, as for `new_group`.
        backend: The world's if None.
        pg_options: Passed to the backend of each subgroup.
        group_desc: The name of each subgroup in errors and logs.

    Returns:
        This rank's subgroup, and the list of all subgroups, with `GroupMember.NON_GROUP_MEMBER` in place of the others.
        On a rank outside `group`, NON_GROUP_MEMBER and an empty list.

    Raises:
        ValueError: `group_size` is not positive, larger than the group, or does not divide it; see `new_group`.
        TypeError: `group_size` is not an integer; see `new_group`.

    Example:
        >>> import meshdist as dist
        >>> def main():
        ...     mine, subgroups = dist.new_subgroups(2)
        ...     return mine.ranks, len(subgroups)
        >>> dist.run(main, 4)
        [((0, 1), 2), ((0, 1), 2), ((2, 3), 2), ((2, 3), 2)]
    """
    world, parent = current_world(), resolve(group)
    if isinstance(parent, NonMember):
        return parent, []
    world.check_holds(parent)
    if group_size is None:
        by_host: dict[str, list[int]] = {}
        for rank, host in zip(parent.ranks, world.hosts(parent.ranks), strict=True):
            by_host.setdefault(host, []).append(rank)
        parts = list(by_host.values())
    else:
        size = _part_size(parent, group_size)
        parts = [list(parent.ranks[first : first + size]) for first in range(0, parent.size(), size)]
    return new_subgroups_by_enumeration(parts, timeout, backend, pg_options, group_desc)


def _part_size(parent: ProcessGroup, group_size: int) -> int:
    error_prefix, size = parent.error_prefix("new_subgroups"), parent.size()
    try:
        part = index(group_size)
    except TypeError:
        raise TypeError(f"{error_prefix}: group_size must be an integer, got {group_size!r}") from None
    if not 1 <= part <= size:
        raise ValueError(f"{error_prefix}: group_size must be 1 to {size}, the ranks of the group, got {part}")
    if size % part:
        raise ValueError(
            f"{error_prefix}: group_size must divide the {counted(size, 'rank')} of the group, got {part}, and"
            f" {size % part} {'is' if size % part == 1 else 'are'} left; new_subgroups_by_enumeration"
            " creates subgroups of unequal sizes"
        )
    return part


@explaining
def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | NonMember, list[ProcessGroup | NonMember]]:
    """Create a group for each of several disjoint lists of ranks.

    This does not communicate, like `new_group`; ranks that are in no list need not call it.

    Args:
        ranks_per_subgroup_list: The global ranks of each group. A rank may be in none of them.
        timeout: How long calls on a group may wait, as for `new_group`.
        backend: The world's if None.
        pg_options: Passed to the backend of each group.
        group_desc: The name of each group in errors and logs.

    Returns:
        This rank's group, and the list of all groups, with `GroupMember.NON_GROUP_MEMBER` in place of groups that this
        rank does not belong to; calls on that object do nothing (None would mean the world).

    Raises:
        ValueError: There are no lists, one is empty, or has a rank twice or outside the world; no group is created.
        TypeError: They are not lists of integers.

    Example:
        >>> import meshdist as dist
        >>> def main():
        ...     mine, subgroups = dist.new_subgroups_by_enumeration([[0, 2], [1]])
        ...     return mine.ranks
        >>> dist.run(main, 4)
        [(0, 2), (1,), (0, 2), ()]
    """
    world = current_world()
    name = "ranks_per_subgroup_list"
    lists = _disjoint_lists(f"new_subgroups_by_enumeration: {name}", ranks_per_subgroup_list, world.size)
    made = [
        new_group(ranks, timeout, backend, pg_options, use_local_synchronization=True, group_desc=group_desc)
        for ranks in lists
    ]
    mine = next((group for group in made if group.rank() >= 0), GroupMember.NON_GROUP_MEMBER)
    return mine, made


@explaining
def split_group(
    parent_pg: GroupLike = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | NonMember:
    """Split a group into several groups, and return this rank's.

    This does not communicate, like `new_group`. The ranks of a new group keep their order in the parent.

    Args:
        parent_pg: The group to split; the world if None. It remains valid.
        split_ranks: For each part, ranks in the parent (not global ones). A rank may be in none of them.
        timeout: How long a call may wait: seconds or a timedelta. The parent's if None.
        pg_options: Passed to the backend; the parent's if None.
        group_desc: The name of each group in errors and logs.
        backend: The parent's if None.

    Returns:
        The group of this rank's part; `GroupMember.NON_GROUP_MEMBER` if it is in no part, or not in the parent.

    Raises:
        ValueError: There are no parts, one is empty, or has a rank twice or outside the parent; the parent has been
            destroyed.
        TypeError: They are not lists of integers.

    Example:
        >>> import meshdist as dist
        >>> def main():
        ...     odd = dist.new_group([1, 3, 5])
        ...     return dist.split_group(odd, [[0, 2], [1]]).ranks
        >>> dist.run(main, 6)
        [(), (1, 5), (), (3,), (), (1, 5)]
    """
    world, parent = current_world(), resolve(parent_pg)
    if isinstance(parent, NonMember):
        return parent
    world.check_holds(parent)
    if split_ranks is None:
        raise ValueError(
            f"{parent.error_prefix('split_group')}: pass split_ranks, a list of lists of ranks in the group"
        )
    lists = _disjoint_lists(f"{parent.error_prefix('split_group')}: split_ranks", split_ranks, parent.size())
    mine = next((ranks for ranks in lists if parent.rank() in ranks), [])
    # Ranks of no part call new_group as non-members of the first part, so that they raise the same errors.
    return new_group(
        [parent.ranks[rank] for rank in sorted(mine or lists[0])],
        parent.timeout_s if timeout is None else timeout,
        parent.backend_name if backend is None else backend,
        parent.pg_options if pg_options is None else pg_options,
        use_local_synchronization=True,
        group_desc=group_desc,
        device_id=parent.device_id,
        sort_ranks=False,
    )


def _disjoint_lists(what: str, lists: Iterable[Iterable[int]], size: int) -> list[list[int]]:
    # Check all lists before making any group, so that the ranks have made the same groups after an error.
    try:
        given = list(lists)
    except TypeError:
        raise TypeError(f"{what} must be a list of lists of integers, got {lists!r}") from None
    if not given:
        raise ValueError(f"{what} must have at least one list, got {given}")
    checked = [rank_list(f"{what}[{place}]", ranks, size) for place, ranks in enumerate(given)]
    found: dict[int, int] = {}
    for place, ranks in enumerate(checked):
        for rank in ranks:
            if rank in found:
                raise ValueError(f"{what}: rank {rank} is in lists {found[rank]} and {place}; it can be in one")
            found[rank] = place
    return checked
