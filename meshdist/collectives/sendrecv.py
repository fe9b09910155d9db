"""sendrecv: send one message and receive another, without an order to think of."""

from __future__ import annotations

from typing import Any

from meshdist.collectives.send_recv import NamingSender, source_of
from meshdist.runtime.context import GroupLike, resolve


@NamingSender
def sendrecv(
    send: Any,
    recv: Any,
    dst: int | None = None,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
    group_src: int | None = None,
    *,
    recv_tag: int | None = None,
) -> int:
    """Send `send` to one rank, and receive a message from the same or another one into `recv`.

    Both messages are under way at once, so ranks that exchange arrays of any size, in pairs or around a ring, never
    deadlock. The other sides may call `sendrecv`, `send` and `recv`, or `isend` and `irecv`; on backend nccl, only
    `sendrecv` or `batch_isend_irecv`. Accounts and profiles show an `isend` and an `irecv`.

    Args:
        send: The array to send.
        recv: The array to receive into, with the number of elements and the dtype that are sent. It may have another
            shape and dtype than `send`, and must not share memory with it.
        dst: Global rank of the receiver of `send`; as a method, its rank in the group or along the mesh. It may be this
            rank.
        src: Global rank of the sender of `recv`; as a method, its rank in the group or along the mesh. None takes the
            first message from any rank.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        tag: The tag of both messages.
        group_dst: The receiver's rank in the group, instead of `dst`.
        group_src: The sender's rank in the group, instead of `src`; -1 takes any.
        recv_tag: The tag of the received message, if it differs from `tag`.

    Returns:
        The sender's global rank; as a method, its rank in the group or along the mesh.

    Raises:
        TypeError: Not arrays, or unsupported dtypes.
        ValueError: Both or none of `dst` and `group_dst` are given, or both of `src` and `group_src`; one is no member;
            a tag is negative; `recv` cannot be written, or shares memory with `send`. Nothing is sent.
        DistBackendError: The other side failed, or a message does not fit.
        DistTimeoutError: A message was not received, or did not arrive, within the group's timeout.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     rank, size, taken = dist.get_rank(), dist.get_world_size(), np.zeros(1)
        ...     dist.sendrecv(np.array([float(rank)]), taken, dst=(rank + 1) % size, src=(rank - 1) % size)
        ...     return taken.item()
        >>> dist.run(main, 3)
        [2.0, 0.0, 1.0]
    """
    members, of = resolve(group), "sendrecv"
    to, by = members.messages.peer(of, "dst", dst, group_dst), source_of(members, of, src, group_src)
    return members.messages.sendrecv(send, recv, to, by, (tag, tag if recv_tag is None else recv_tag))
