"""barrier and monitored_barrier: no rank leaves before all ranks have entered."""

from __future__ import annotations

from meshdist.arrays.host import OutputOrWork
from meshdist.collectives.algorithms.pairwise import dissemination_barrier
from meshdist.collectives.checks import check_nothing
from meshdist.collectives.dataflow import BARRIER
from meshdist.collectives.definition import collective
from meshdist.runtime.context import GroupLike, resolve
from meshdist.system.deadline import Timeout, seconds


@collective(check=check_nothing, agreed=lambda call: (), default=dissemination_barrier, dataflow=BARRIER)
def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: Timeout | None = None,
) -> OutputOrWork:
    """Wait until all ranks of the group have called.

    Args:
        group: A ProcessGroup or a DeviceMesh; the world if None.
        async_op: Return a `Work` at once.
        device_ids: Ignored by CPU backends.
        timeout: Seconds or a timedelta. None: the group's timeout.

    Returns:
        None; with `async_op` the Work.

    Raises:
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: Some ranks did not call in time; the message names them.
    """
    members = resolve(group)
    timeout_s = None if timeout is None else members.named(members.error_prefix("barrier"), seconds, timeout)
    return members.submit(barrier, None, None, None, None, async_op, None, timeout_s)


@collective(
    check=check_nothing, agreed=lambda call: (), default=dissemination_barrier, dataflow=BARRIER, native="barrier"
)
def monitored_barrier(group: GroupLike = None, timeout: Timeout | None = None, wait_all_ranks: bool = False) -> None:
    """Wait until all ranks of the group have called; on timeout, raise an error that names the missing ranks.

    The ranks synchronize through the store, which takes longer than `barrier`. The group can be used after a timeout:
    either the call has had no effect on any rank, or all ranks have called. If another rank makes a different call
    instead, backends gloo and threads raise an error at once, or after a second if it is the group's first call; other
    backends at the timeout.

    Args:
        group: A ProcessGroup or a DeviceMesh; the world if None.
        timeout: Seconds or a timedelta. None: the group's timeout.
        wait_all_ranks: Ignored: the error always names all missing ranks.

    Raises:
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: Some ranks did not call in time.
    """
    members = resolve(group)
    timeout_s = None if timeout is None else members.named(members.error_prefix("monitored_barrier"), seconds, timeout)
    members.submit(monitored_barrier, None, None, timeout_s=timeout_s)


monitored_barrier.meets = True
