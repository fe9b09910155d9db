"""barrier: no rank leaves before all have entered."""

from __future__ import annotations

from typing import Any

from meshdist.call import Call
from meshdist.collectives.algorithms.pairwise import dissemination_barrier
from meshdist.collectives.checks import check_nothing
from meshdist.collectives.definition import collective
from meshdist.current import GroupLike, resolve


def agreed(call: Call) -> tuple[Any, ...]:
    """All ranks are in a barrier: nothing more to agree on."""
    return ()


@collective(check=check_nothing, agreed=agreed, default=dissemination_barrier)
def barrier(group: GroupLike = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
    """Wait until all ranks of the group have come here.

    Args:
        group: A ProcessGroup or a DeviceMesh; the world where None.
        async_op: Return a `Work` at once.
        device_ids: Of no meaning for CPU backends.

    Returns:
        None; with `async_op` the Work.

    Raises:
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: A rank did not come within the group's timeout.
    """
    return resolve(group).submit(barrier, None, None, None, None, async_op)
