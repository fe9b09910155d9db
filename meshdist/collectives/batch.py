"""P2POp and batch_isend_irecv: several messages begun at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from meshdist.collectives.point_to_point import irecv, isend
from meshdist.current import GroupLike, resolve
from meshdist.devices import device_type_of
from meshdist.work import Work


class P2POp:
    """A message to send or to receive, for `batch_isend_irecv`.

    Attributes:
        op: `isend` or `irecv`.
        tensor: The array.
        peer: Global rank of the other side; None with `irecv` takes any.
        group: A ProcessGroup or a DeviceMesh; the world where None.
        tag: Matches sends with receipts.
        group_peer: The other side's rank in the group, instead of `peer`.

    Raises:
        ValueError: `op` is another function, both ranks are given, or none with `isend`.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     rank, size, taken = dist.get_rank(), dist.get_world_size(), np.zeros(1)
        ...     give = dist.P2POp(dist.isend, np.array([float(rank)]), (rank + 1) % size)
        ...     take = dist.P2POp(dist.irecv, taken, (rank - 1) % size)
        ...     for work in dist.batch_isend_irecv([give, take]):
        ...         work.wait()
        ...     return taken.item()
        >>> dist.run(main, 3)
        [2.0, 0.0, 1.0]
    """

    def __init__(
        self,
        op: Callable[..., Work],
        tensor: Any,
        peer: int | None = None,
        group: GroupLike = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ValueError(f"P2POp: op must be meshdist.isend or meshdist.irecv, got {op!r}")
        # Here and not when it is begun: by then, others of its batch would be on their way.
        if (peer is None) == (group_peer is None) and (peer is not None or op is isend):
            given = "neither" if peer is None else "both"
            raise ValueError(f"P2POp: give peer (a global rank) or group_peer (a rank in the group), got {given}")
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag
        self.group_peer = group_peer

    def __repr__(self) -> str:
        peer = f"peer={self.peer}" if self.group_peer is None else f"group_peer={self.group_peer}"
        return f"P2POp({getattr(self.op, '__name__', self.op)}, {peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begin all messages of a list; none of them waits for another.

    Args:
        p2p_op_list: Any number of P2POp, in any order.

    Returns:
        A Work for each, in the order of the list.

    Raises:
        TypeError: Not a list of P2POp, or what `isend` and `irecv` raise.
        ValueError: What `isend` and `irecv` raise.
    """
    ops = list(p2p_op_list) if isinstance(p2p_op_list, Sequence) else [p2p_op_list]
    for number, op in enumerate(ops):
        if not isinstance(op, P2POp):
            raise TypeError(f"batch_isend_irecv: p2p_op_list[{number}] must be a P2POp, got {type(op).__name__}")
    with ExitStack() as batches:
        # On a GPU, messages that are not posted together may wait for each other.
        groups = [op.group for op in ops if type(op.tensor) is not np.ndarray and device_type_of(op.tensor) != "cpu"]
        for members in {id(members): members for members in map(resolve, groups)}.values():
            if members.rank() >= 0:
                batches.enter_context(members.messages.batched("batch_isend_irecv"))
        return [op.op(op.tensor, op.peer, op.group, op.tag, op.group_peer) for op in ops]
