"""new_group, and the questions about ranks, groups and the world."""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import index
from typing import Any

from meshdist.backends.registry import backend_name
from meshdist.collectives.methods import CollectiveMethods
from meshdist.current import GroupLike, current_world, is_initialized, resolve
from meshdist.deadline import Timeout, seconds
from meshdist.non_member import NonMember
from meshdist.process_group import ProcessGroup


class GroupMember:
    """Holds the constants of torch.distributed's class of this name."""

    NON_GROUP_MEMBER = NonMember()


class _WorldGroup(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group; None before init_process_group."""
        return current_world().default_group if is_initialized() else None


class group(metaclass=_WorldGroup):
    """`group.WORLD` is the default group."""


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    *,
    sort_ranks: bool = True,
) -> CollectiveMethods:
    """Make a group of some of the ranks.

    This costs nothing and talks to nobody: ranks that are not in the group may call it, and need not.

    Args:
        ranks: Global ranks; all where None.
        timeout: How long a call may wait: seconds or a timedelta. The world's where None.
        backend: The world's where None.
        pg_options: Options of the backend; none of those here has any.
        use_local_synchronization: Of no meaning here: nothing is synchronized.
        group_desc: A name for messages.
        device_id: Of no meaning for CPU backends.
        sort_ranks: Number the members by global rank; False keeps the order of `ranks`.

    Returns:
        The ProcessGroup; `GroupMember.NON_GROUP_MEMBER` on ranks that are not in it.

    Raises:
        ValueError: `ranks` is empty, has duplicates or ranks outside the world; the backend is unknown.
    """
    world = current_world()
    members = list(range(world.size)) if ranks is None else _as_ranks(ranks)
    strangers = [rank for rank in members if not 0 <= rank < world.size]
    if strangers:
        raise ValueError(f"new_group: ranks must be 0 to {world.size - 1}, got {strangers[0]}")
    if not members or len(set(members)) != len(members):
        raise ValueError(f"new_group: ranks must be distinct, at least one, got {members}")
    if sort_ranks:
        members.sort()
    name = world.backend_name if backend is None else backend_name(backend)
    if world.rank not in members:
        return GroupMember.NON_GROUP_MEMBER
    return world.new_group(tuple(members), name, seconds(timeout, world.timeout_s), group_desc or "")


def _as_ranks(ranks: Sequence[int]) -> list[int]:
    try:
        return [index(rank) for rank in ranks]
    except TypeError:
        raise TypeError(f"new_group: ranks must be a list of integers, got {ranks!r}") from None


def _member(group: GroupLike, of: str) -> ProcessGroup:
    members = resolve(group)
    if isinstance(members, NonMember):
        raise ValueError(f"{of}: this rank is not in the group, and does not know it")
    return members


def get_rank(group: GroupLike = None) -> int:
    """Return this rank's place in `group` (the world where None), -1 where it is no member."""
    return resolve(group).rank()


def get_world_size(group: GroupLike = None) -> int:
    """Return the number of ranks of `group` (the world where None), -1 where this rank is no member."""
    members = resolve(group)
    return members.size() if members.rank() >= 0 else -1


def get_backend(group: GroupLike = None) -> str:
    """Return the name of the backend of `group` (the world where None)."""
    return _member(group, "get_backend").backend_name


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this rank's place on its host, which launchers give as LOCAL_RANK; `fallback_rank` where there is none.

    Raises:
        RuntimeError: There is none, and no fallback.
    """
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if fallback_rank is None:
        raise RuntimeError("LOCAL_RANK is not set; start the script with meshrun, or pass fallback_rank")
    return int(fallback_rank)


def get_group_rank(group: GroupLike, global_rank: int) -> int:
    """Return the place in `group` of a global rank.

    Raises:
        ValueError: It is no member.
    """
    return _member(group, "get_group_rank").root("get_group_rank", "global_rank", global_rank, None)


def get_global_rank(group: GroupLike, group_rank: int) -> int:
    """Return the global rank of a place in `group`.

    Raises:
        ValueError: There is no such place.
    """
    members = _member(group, "get_global_rank")
    return members.global_rank(members.root("get_global_rank", "rank", None, group_rank))


def get_process_group_ranks(group: GroupLike = None) -> list[int]:
    """Return the global ranks of `group` (the world where None), in group order."""
    return list(_member(group, "get_process_group_ranks").ranks)
