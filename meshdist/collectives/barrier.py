"""barrier: no rank leaves before all have entered."""

from __future__ import annotations

from typing import Any

from meshdist.call import Call
from meshdist.collectives.algorithms.pairwise import dissemination_barrier
from meshdist.collectives.checks import check_nothing
from meshdist.collectives.definition import collective
from meshdist.current import GroupLike, resolve
from meshdist.deadline import Timeout, seconds


def agreed(call: Call) -> tuple[Any, ...]:
    """All ranks are in a barrier: nothing more to agree on."""
    return ()


@collective(check=check_nothing, agreed=agreed, default=dissemination_barrier)
def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Wait until all ranks of the group have come here.

    Args:
        group: A ProcessGroup or a DeviceMesh; the world where None.
        async_op: Return a `Work` at once.
        device_ids: Of no meaning for CPU backends.
        timeout: How long to wait: seconds or a timedelta. The group's timeout where None.

    Returns:
        None; with `async_op` the Work.

    Raises:
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: Some ranks did not come in time; says which.
    """
    members = resolve(group)
    timeout_s = None if timeout is None else members.named(members.where("barrier"), seconds, timeout)
    return members.submit(barrier, None, None, None, None, async_op, None, timeout_s)
