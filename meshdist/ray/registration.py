"""What users call: the registration in Ray, and the groups of meshdist behind those of Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.util import collective
from ray.util.collective.types import Backend as RayBackend

from meshdist.groups.process_group import ProcessGroup
from meshdist.ray.ray_group import NAME, RayGroup
from meshdist.runtime.context import current_slot, use_slot
from meshdist.system.deadline import Timeout, seconds


def register(timeout: Timeout | None = None, join_timeout: Timeout | None = None) -> None:
    """Make `MESHDIST` a backend of ray.util.collective in this process, or change its timeouts.

    `import meshdist.ray` calls it. With arguments, call it before the groups are made that they are for.

    Args:
        timeout: How long a call waits for the other ranks: a timedelta or seconds. 30 minutes by default.
        join_timeout: How long a new group waits for its ranks to come. Three minutes by default, as Ray's NCCL.

    Raises:
        TypeError: A timeout has another type.
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
        group_name: As for `get_group`.

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
