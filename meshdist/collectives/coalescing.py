"""coalescing_manager: combine the calls of a block into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshdist.arrays.reduce_op import Op
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.coalesced import (
    all_gather_into_tensor_coalesced,
    all_reduce_coalesced,
    reduce_scatter_tensor_coalesced,
)
from meshdist.collectives.definition import Collective
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_tensor
from meshdist.errors import DistError
from meshdist.runtime.context import GroupLike, resolve
from meshdist.runtime.work import Work
from meshdist.system.deadline import Timeout

_COALESCED: tuple[tuple[Collective[..., Any], Collective[..., Any]], ...] = (
    (all_reduce, all_reduce_coalesced),
    (all_gather_into_tensor, all_gather_into_tensor_coalesced),
    (reduce_scatter_tensor, reduce_scatter_tensor_coalesced),
)


class CoalescedCalls:
    """The calls inside a `coalescing_manager`, and their works.

    Attributes:
        works: A Work for each message and, after the block with `async_ops`, one for the collectives of each dtype.

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
        self._has_ended = False
        self.works: list[Work] = []

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until all calls are done and return True; see `Work.wait`.

        Raises:
            DistError: The block has not ended, or ended with an exception, so the collectives are not begun.
        """
        if not self._has_ended:
            raise DistError(
                "coalescing_manager: the calls inside the block begin only when it ends without an exception; wait"
                " after the block"
            )
        for work in self.works:
            work.wait(timeout)
        return True

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
        """Collect a call instead of submitting it to the group."""
        known = [single for single, _ in _COALESCED]
        if collective not in known:
            names = ", ".join(single.name for single in known)
            raise ValueError(f"coalescing_manager takes only calls of {names}; got {collective.name}")
        kind = collective, op
        if self._kind is None:
            self._kind = kind
        if self._kind != kind:
            first = f"{self._kind[0].name} with op {self._kind[1]}"
            raise ValueError(
                f"coalescing_manager takes calls of one kind: the first was {first}, and this one is {collective.name}"
                f" with op {op}; use one manager for each kind"
            )
        self._pairs.append((send, recv))
        return self if async_op else recv

    def take_message(self, name: str, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of `begin`, the function `name` of a group's messages."""

        def collect(*args: Any) -> Work:
            work: Work = begin(*args)
            self.works.append(work)
            return work

        def refuse(tensor: Any, peer: int | None, tag: int, of: str = name, **how: Any) -> None:
            raise ValueError(
                f"coalescing_manager takes messages of isend and irecv; {of} would wait inside the block: call"
                f" i{of}, or {of} outside"
            )

        return collect if name in ("isend", "irecv") else refuse

    def end(self, group: Any, async_ops: bool) -> None:
        """Submit the calls; without `async_ops`, wait for them and for the messages."""
        self._submit(group, async_ops)
        self._has_ended = True
        if not async_ops:
            self.wait()

    def _submit(self, group: Any, async_ops: bool) -> None:
        # One call per dtype, in order of first use.
        if self._kind is None:
            return
        collective, op = self._kind
        coalesced = dict(_COALESCED)[collective]
        by_dtype: dict[str, list[tuple[Any, Any]]] = {}
        for pair in self._pairs:
            by_dtype.setdefault(_dtype_name(pair[0]), []).append(pair)
        for pairs in by_dtype.values():
            sends, recvs = [send for send, _ in pairs], [recv for _, recv in pairs]
            sent = recvs if collective is all_reduce else sends
            work = group.submit(coalesced, sent, recvs, op, None, async_ops)
            if async_ops:
                self.works.append(work)


def _dtype_name(array: Any) -> str:
    # Without the byte order, which may differ between ranks: all ranks must build the same calls.
    dtype = getattr(array, "dtype", None)
    return str(dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype)


@contextmanager
def coalescing_manager(
    group: GroupLike = None, device: Any = None, async_ops: bool = False
) -> Iterator[CoalescedCalls]:
    """Combine the calls inside the block into one call at its end.

    The block may call, on `group`, `all_reduce` or `reduce_scatter_tensor` with one op, or `all_gather_into_tensor`.
    Outputs are written when the block ends; with `async_ops`, when `wait` of the yielded object returns. After an
    exception in the block, no collective is called.

    The block may also call `isend` and `irecv`: messages start at once, and are waited for with the rest.

    Args:
        group: A ProcessGroup or a DeviceMesh; the world if None.
        device: Ignored by CPU backends.
        async_ops: Do not wait at the end of the block.

    Yields:
        The calls, to be waited for.

    Raises:
        ValueError: The calls are of different kinds or of another function, or managers of one group are nested.
        DistError: A call failed; with `async_ops`, `wait` raises it.
    """
    members, calls = resolve(group), CoalescedCalls()
    if members.rank() < 0:
        yield calls
        calls.end(members, async_ops)
        return
    with members.messages.batched("coalescing_manager"), members.hooks.redirect(calls.add, calls.take_message):
        yield calls
    calls.end(members, async_ops)
