"""coalescing_manager: the calls made inside it become one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.all_reduce_coalesced import all_reduce_coalesced
from meshdist.collectives.definition import Collective
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_tensor
from meshdist.collectives.tensor_coalesced import all_gather_into_tensor_coalesced, reduce_scatter_tensor_coalesced
from meshdist.current import GroupLike, resolve
from meshdist.deadline import Timeout
from meshdist.reduce_op import Op

_COALESCED: tuple[tuple[Collective[..., Any], Collective[..., Any]], ...] = (
    (all_reduce, all_reduce_coalesced),
    (all_gather_into_tensor, all_gather_into_tensor_coalesced),
    (reduce_scatter_tensor, reduce_scatter_tensor_coalesced),
)


class CoalescedCalls:
    """The calls made inside a `coalescing_manager`, and what became of them.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     x, y = np.ones(2), np.ones(3)
        ...     with dist.coalescing_manager(async_ops=True) as calls:
        ...         dist.all_reduce(x)
        ...         dist.all_reduce(y)
        ...     calls.wait()
        ...     return x.tolist() + y.tolist()
        >>> dist.run(main, 2)
        [[2.0, 2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0, 2.0]]
    """

    def __init__(self) -> None:
        self._kind: tuple[Collective[..., Any], Op | None] | None = None
        self._pairs: list[tuple[Any, Any]] = []
        self._works: list[Any] = []

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until all calls are done and return True; see `Work.wait`."""
        return all(work.wait(timeout) for work in self._works)

    def add(
        self,
        collective: Collective[..., Any],
        send: Any,
        recv: Any,
        op: Op | None = None,
        root: int | None = None,
        async_op: bool = False,
        *rest: Any,
        **others: Any,
    ) -> Any:
        """Take a call that would have been submitted to the group."""
        known = [single for single, _ in _COALESCED]
        if collective not in known:
            names = ", ".join(single.name for single in known)
            raise ValueError(f"coalescing_manager takes calls of {names}; {collective.name} is none of them")
        kind = collective, op
        if self._kind is None:
            self._kind = kind
        if self._kind != kind:
            first = f"{self._kind[0].name} with op {self._kind[1]}"
            raise ValueError(
                f"coalescing_manager takes calls of one kind: the first was {first}, now came {collective.name} with"
                f" op {op}; use one manager for each kind"
            )
        self._pairs.append((send, recv))
        return self if async_op else recv

    def submit(self, group: Any, async_ops: bool) -> None:
        """Make the calls: one for each dtype, in the order in which the dtypes came."""
        if self._kind is None:
            return
        collective, op = self._kind
        coalesced = dict(_COALESCED)[collective]
        by_dtype: dict[str, list[tuple[Any, Any]]] = {}
        for pair in self._pairs:
            by_dtype.setdefault(str(getattr(pair[0], "dtype", None)), []).append(pair)
        for pairs in by_dtype.values():
            sends, recvs = [send for send, _ in pairs], [recv for _, recv in pairs]
            sent = recvs if collective is all_reduce else sends
            work = group.submit(coalesced, sent, recvs, op, None, async_ops)
            if async_ops:
                self._works.append(work)


@contextmanager
def coalescing_manager(
    group: GroupLike = None, device: Any = None, async_ops: bool = False
) -> Iterator[CoalescedCalls]:
    """Make the calls inside the block one call at its end, which costs as much as one.

    Inside are calls on `group` of `all_reduce` or `reduce_scatter_tensor`, with one op, or of `all_gather_into_tensor`.
    Their outputs are written when the block ends; with `async_ops`, when `wait` of what the block gives returns. After
    an exception inside nothing is called.

    Args:
        group: A ProcessGroup or a DeviceMesh; the world where None.
        device: Of no meaning for CPU backends.
        async_ops: Do not wait at the end of the block.

    Yields:
        The calls, to be waited for.

    Raises:
        ValueError: Calls of different kinds, or a manager inside one of the same group.
    """
    members, calls = resolve(group), CoalescedCalls()
    if members.rank() < 0:
        yield calls
        return
    with members.detour.redirect(calls.add):
        yield calls
    calls.submit(members, async_ops)
