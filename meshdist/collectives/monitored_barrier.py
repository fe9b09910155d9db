"""monitored_barrier: a barrier that says who did not come."""

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


@collective(check=check_nothing, agreed=agreed, default=dissemination_barrier, native="barrier")
def monitored_barrier(group: GroupLike = None, timeout: Timeout | None = None, wait_all_ranks: bool = False) -> None:
    """Wait until all ranks of the group have come here; at the timeout, raise an error that names those who did not.

    Args:
        group: A ProcessGroup or a DeviceMesh; the world where None.
        timeout: How long to wait: seconds or a timedelta. The group's timeout where None.
        wait_all_ranks: Of no meaning here: the error names all ranks that did not come, in either case.

    Raises:
        DistBackendError: A rank failed, or the ranks' calls disagree.
        DistTimeoutError: Some ranks did not come in time; says which.
    """
    members = resolve(group)
    timeout_s = None if timeout is None else members.named(members.where("monitored_barrier"), seconds, timeout)
    members.submit(monitored_barrier, None, None, timeout_s=timeout_s)
