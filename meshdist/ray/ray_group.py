"""A group of ray.util.collective whose calls are those of a world of meshdist.

An actor may be in several groups, of different actors. So each group is a world of its own, which is not the one that
`meshdist.init_process_group` makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import ray
from ray.util import collective
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import Backend as RayBackend
from ray.util.collective.types import ReduceOp as RayReduceOp

from meshdist.arrays.reduce_op import Op, ReduceOp
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import world_in
from meshdist.ray.meeting import DEFAULT_JOIN_TIMEOUT_S, Meeting
from meshdist.runtime.context import WorldSlot, current_slot, use_slot
from meshdist.system.deadline import DEFAULT_TIMEOUT_S, Deadline, Timeout, seconds
from meshdist.system.platform import why_no_processes

NAME = "MESHDIST"


class RayGroup(BaseGroup):  # type: ignore[misc]
    """A group of Ray over a world of meshdist; Ray makes it, and passes each array in a list of one.

    Attributes:
        timeout_s: How long the calls of new groups wait for the other ranks, in seconds.
        join_timeout_s: How long a new group waits for its ranks to come, in seconds.
        slot: The place of the world.

    Raises:
        DistError: The ranks did not meet.
    """

    timeout_s = DEFAULT_TIMEOUT_S
    join_timeout_s = DEFAULT_JOIN_TIMEOUT_S
    _names: ClassVar[dict[str, None]] = {}  # of the groups of this process

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self.slot = WorldSlot()
        advice = (
            "all actors of the group call init_collective_group with the same group_name and world_size, in Ray's"
            f" namespace {ray.get_runtime_context().namespace!r}"
        )
        call = f"init_collective_group of {group_name!r}"
        meeting = Meeting(group_name, rank, world_size, Deadline(self.join_timeout_s), call, advice)
        self._group = meeting.enter_world(self.slot, self.timeout_s).default_group
        self._group.relabel(group_name)
        self._names[group_name] = None

    @property
    def group(self) -> ProcessGroup:
        """The group of meshdist."""
        return self._group

    @classmethod
    def backend(cls) -> str:
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        return why_no_processes() is None

    def destroy_group(self) -> None:
        """Leave the world; calls of other ranks that wait for this one raise."""
        self._names.pop(self.group_name, None)
        world = world_in(self.slot)
        if world is not None:
            self.slot.empty()
            world.close()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        self._group.all_reduce(self._only("all_reduce", tensor), _op(allreduce_options))

    def reduce(self, tensor: list[Any], reduce_options: Any = None) -> None:
        self._group.reduce(self._only("reduce", tensor), _root(reduce_options), _op(reduce_options))

    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        self._group.broadcast(self._only("broadcast", tensor), _root(broadcast_options))

    def allgather(self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None) -> None:
        outputs, block = self._only("all_gather", tensor_list), self._only("all_gather", tensor)
        self._group.all_gather(outputs, block)

    def reducescatter(self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = None) -> None:
        output, blocks = self._only("reduce_scatter", tensor), self._only("reduce_scatter", tensor_list)
        self._group.reduce_scatter(output, blocks, _op(reducescatter_options))

    def barrier(self, barrier_options: Any = None) -> None:
        self._group.barrier()

    def send(self, tensor: list[Any], send_options: Any) -> None:
        self._check_whole("send", send_options)
        self._group.send(self._only("send", tensor), send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        self._check_whole("recv", recv_options)
        self._group.recv(self._only("recv", tensor), recv_options.src_rank)

    def _only(self, of: str, tensors: list[Any]) -> Any:
        if len(tensors) != 1:
            raise ValueError(
                f"{self._group.error_prefix(of)}: expected one array for each rank, got {len(tensors)}; backend {NAME}"
                " has a rank for each GPU, so make an actor for each"
            )
        return tensors[0]

    def _check_whole(self, of: str, options: Any) -> None:
        if getattr(options, "n_elements", 0):
            raise ValueError(
                f"{self._group.error_prefix(of)}: n_elements is not supported; pass the part, such as tensor[:"
                f"{options.n_elements}]"
            )


def _op(options: Any) -> Op:
    # Ray's reductions have the names of ours. Others are ours, or are refused by the call.
    op = RayReduceOp.SUM if options is None else options.reduceOp
    return ReduceOp[op.name] if isinstance(op, RayReduceOp) else op


def _root(options: Any) -> int:
    return 0 if options is None else int(options.root_rank)


def end_all() -> None:
    """Leave all groups of this process."""
    for name in list(RayGroup._names):
        collective.destroy_collective_group(name)


# ---- What users call


def register(timeout: Timeout | None = None, join_timeout: Timeout | None = None) -> None:
    """Make `MESHDIST` a backend of ray.util.collective in this process, or change its timeouts.

    `import meshdist.ray` calls it, as soon as `ray.util.collective` is imported. With arguments, call it before the
    groups are made that they are for.

    Args:
        timeout: How long a call waits for the other ranks: a timedelta or seconds. 30 minutes by default.
        join_timeout: How long a new group waits for its ranks to come. Three minutes by default, as Ray's NCCL.

    Raises:
        TypeError: A timeout has a different type.
        ValueError: A timeout is negative.
    """
    timeouts = seconds(timeout, RayGroup.timeout_s), seconds(join_timeout, RayGroup.join_timeout_s)
    RayGroup.timeout_s, RayGroup.join_timeout_s = timeouts
    if not hasattr(RayBackend, NAME):
        collective.register_collective_backend(NAME, RayGroup)


def get_group(group_name: str = "default") -> ProcessGroup:
    """Return the group of meshdist that carries out the calls of a group of Ray.

    Its methods are all collectives of meshdist, also those that Ray lacks (`gather`, `scatter`, `all_to_all`, `scan`,
    objects, `async_op=True`), and take and return what they do in meshdist. Its ranks are those of Ray's group.

    Args:
        group_name: The group, of this actor and of backend MESHDIST. If Ray's `create_collective_group` declared it, it
            is made now, with the other ranks.

    Raises:
        RuntimeError: There is no such group in this actor.
        ValueError: The group has another backend.

    Example:
        ::

            group = meshdist.ray.get_group("data")
            received = [np.empty_like(block) for block in blocks]
            group.all_to_all(received, blocks)
    """
    return _ray_group(group_name).group


@contextmanager
def use_world(group_name: str = "default") -> Iterator[None]:
    """Let the functions of meshdist in a `with` block run over the world of a group of Ray.

    Calls without `group`, `new_group` and `init_device_mesh` in the block are on its ranks. Meshes and groups that are
    made in it work after it, too, as long as the group exists. It holds for the thread that enters it.

    Args:
        group_name: The name of the group, as for `get_group`.

    Raises:
        RuntimeError: There is no such group in this actor.
        ValueError: The group has another backend.

    Example:
        ::

            with meshdist.ray.use_world("data"):
                mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            mesh["tp"].all_reduce(x)
    """
    outer = current_slot()
    use_slot(_ray_group(group_name).slot)
    try:
        yield
    finally:
        use_slot(outer)


def _ray_group(group_name: str) -> RayGroup:
    found = collective.get_group_handle(group_name)
    if not isinstance(found, RayGroup):
        raise ValueError(
            f"group {group_name!r} of Ray has backend {found.backend()}, not {NAME}; make it with backend={NAME!r}"
        )
    return found


register()
