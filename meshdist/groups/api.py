"""new_group, and the functions that return ranks, sizes and backends of groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any

from meshdist.arrays.device_types import check_device_id, cuda_number
from meshdist.backends.device_backends import Backend, by_device, pairs_of, usable_backend_name
from meshdist.backends.registry import entry_of
from meshdist.errors import NotMemberError
from meshdist.groups.non_member import NonMember
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import current_world, resolve
from meshdist.runtime.context import GroupLike, current_slot, is_initialized
from meshdist.system.deadline import Timeout, seconds
from meshdist.system.name_hints import explaining


class _WorldGroup(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group; None before init_process_group."""
        return current_world().default_group if is_initialized() else None


class GroupMember(metaclass=_WorldGroup):
    """Holds the constants of torch.distributed's class of this name: `WORLD` and `NON_GROUP_MEMBER`."""

    NON_GROUP_MEMBER = NonMember()


class group(metaclass=_WorldGroup):
    """`group.WORLD` is the default group."""


@explaining
def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup | NonMember:
    """Create a group of some of the ranks.

    This is cheap and does not communicate: ranks that are not in the group may call it, but need not. The group is
    identified by its ranks and the number of groups that the same ranks have created before. So ranks may create their
    groups in any order, as long as groups of the same ranks are created in the same order on each of them.

    Args:
        ranks: Global ranks; all if None.
        timeout: How long a call may wait: seconds or a timedelta. The world's if None.
        backend: The world's if None.
        pg_options: `ProcessGroupNCCL.Options` for the nccl backend. Passed to a backend that was registered with
            `extended_api=True`; other backends have no options.
        use_local_synchronization: Ignored: nothing is synchronized, among members or all ranks.
        group_desc: The group's name in errors and logs; may differ between ranks.
        device_id: The GPU of the group's arrays: "cuda:1", its index, or a device object. With the nccl backend the
            ranks connect at once, and not at the first call. Ignored by CPU backends.
        sort_ranks: Number the members by global rank; False keeps the order of `ranks`.

    Returns:
        The ProcessGroup, which is a context manager; `GroupMember.NON_GROUP_MEMBER` on ranks that are not in it.

    Raises:
        ValueError: `ranks` is empty, has duplicates or ranks outside the world; the backend is unknown; the timeout is
            negative; there is no such device. Raised on non-members too.
        TypeError: An argument is of the wrong type.

    Example:
        >>> import meshdist as dist
        >>> def main():
        ...     with dist.new_group([0, 2], group_desc="even") as even:
        ...         return even.rank(), even.size()
        >>> dist.run(main, 3)
        [(0, 2), (-1, -1), (1, 2)]
    """
    world = current_world()
    members = list(range(world.size)) if ranks is None else rank_list("new_group: ranks", ranks, world.size)
    if sort_ranks:
        members.sort()
    name = world.backend_name if backend is None else usable_backend_name(backend)
    timeout_s = seconds(timeout, world.timeout_s)
    if group_desc is not None and not isinstance(group_desc, str):
        raise TypeError(f"new_group: group_desc must be a string, got {group_desc!r}")
    check_device_id("new_group", device_id)
    if world.rank not in members:
        return GroupMember.NON_GROUP_MEMBER
    made = world.new_group(tuple(members), name, timeout_s, group_desc or "")
    made.pg_options, made.device_id = pg_options, device_id
    if device_id is not None:
        connect_to_device(made, "new_group")
    return made


def connect_to_device(group: ProcessGroup, of: str) -> None:
    """Connect the ranks of a group now, if it has a `device_id` and a backend that takes arrays of that GPU."""
    backend = by_device(group.backend_name).get("cuda")
    if cuda_number(group.device_id) is None or backend is None or "cuda" not in entry_of(backend).devices:
        return
    calls = group.device_calls(of)
    if calls is not None:
        calls.connect(group.error_prefix(of))


def rank_list(what: str, ranks: Iterable[int], size: int) -> list[int]:
    """Return `ranks` as integers; `what` is the function and its parameter, for messages.

    Raises:
        TypeError: They are not integers.
        ValueError: There are none, or some are duplicates or not below `size`.
    """
    try:
        listed = [index(rank) for rank in ranks]
    except TypeError:
        raise TypeError(f"{what} must be a list of integers, got {ranks!r}") from None
    for rank in listed:
        if not 0 <= rank < size:
            allowed = f" must be 0 to {size - 1}, got" if size > 1 else ": there is only rank 0; got"
            raise ValueError(f"{what}{allowed} {rank}")
    if not listed or len(set(listed)) != len(listed):
        raise ValueError(f"{what} must be a non-empty list without duplicates, got {listed}")
    return listed


def _member(group: GroupLike, of: str) -> ProcessGroup:
    members = resolve(group)
    if isinstance(members, NonMember):
        raise ValueError(
            f"{of}: this rank is not a member of the group (it got GroupMember.NON_GROUP_MEMBER), so this is not known"
            " here"
        )
    return members


def get_rank(group: GroupLike = None) -> int:
    """Return this process's rank in `group` (the world if None); -1 if it is not a member."""
    return resolve(group).rank()


def get_world_size(group: GroupLike = None) -> int:
    """Return the number of ranks of `group` (the world if None); -1 if this rank is not a member."""
    members = resolve(group)
    return members.size() if members.rank() >= 0 else -1


def get_pg_count() -> int:
    """Return the number of process groups of this rank, including the default group; 0 before `init_process_group`."""
    return current_world().num_groups() if is_initialized() else 0


def get_backend(group: GroupLike = None) -> Backend:
    """Return the backend of `group` (the world if None): a name, or pairs of device type and name."""
    return Backend(_member(group, "get_backend").backend_name)


def get_backend_config(group: GroupLike = None) -> str:
    """Return the backend of each device type of `group` (the world if None), such as "cpu:gloo,cuda:nccl"."""
    return pairs_of(_member(group, "get_backend_config").backend_name)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return the local rank on this host, from LOCAL_RANK or another launcher's variable; else `fallback_rank`.

    Raises:
        RuntimeError: No variable is set, and no fallback is given.
    """
    dry = current_slot().dry
    if dry is not None:
        return dry.local_rank()
    from meshdist.cluster.place import local_rank_here

    local_rank = local_rank_here()
    if local_rank is not None:
        return local_rank
    if fallback_rank is None:
        raise RuntimeError(
            "LOCAL_RANK is not set; start the script with a launcher such as meshrun, or pass fallback_rank"
        )
    return int(fallback_rank)


def get_group_rank(group: GroupLike, global_rank: int) -> int:
    """Return the group rank of a global rank.

    Raises:
        ValueError: It is not a member. The error is also a RuntimeError.
    """
    with _not_member():
        return _member(group, "get_group_rank").root("get_group_rank", "global_rank", global_rank, None)


def get_global_rank(group: GroupLike, group_rank: int) -> int:
    """Return the global rank of a group rank.

    Raises:
        ValueError: The group has no such rank. The error is also a RuntimeError.
    """
    with _not_member():
        members = _member(group, "get_global_rank")
        return members.global_rank(members.root("get_global_rank", "rank", None, group_rank))


@contextlib.contextmanager
def _not_member() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise NotMemberError(str(error)) from None


def get_process_group_ranks(group: GroupLike = None) -> list[int]:
    """Return the global ranks of `group` (the world if None), in group order."""
    return list(_member(group, "get_process_group_ranks").ranks)
