"""send and recv: a message from one rank to another."""

from __future__ import annotations

from typing import Any

from meshdist.collectives.definition import GroupFunction
from meshdist.current import GroupLike, resolve


@GroupFunction
def send(
    tensor: Any, dst: int | None = None, group: GroupLike = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send `tensor` to a rank that receives it.

    A message of at most 64 KiB is buffered, and the call returns; a larger one waits until it is received.

    Args:
        tensor: An array.
        dst: Global rank of the receiver; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world where None.
        tag: Matches this message with a `recv` of the same tag, from 0 on. Messages of one tag keep their order.
        group_dst: The receiver's rank in the group, instead of `dst`.

    Raises:
        TypeError: Not an array, or a dtype that does not travel.
        ValueError: Both or none of `dst` and `group_dst` are given, it is no member or this rank, or `tag` is negative.
        DistBackendError: The receiver failed, or its array does not fit.
        DistTimeoutError: It was not received within the group's timeout.
    """
    members = resolve(group)
    members.send_to(tensor, members.peer("send", "dst", dst, group_dst), tag)


@GroupFunction
def recv(
    tensor: Any, src: int | None = None, group: GroupLike = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Receive a message into `tensor`.

    Args:
        tensor: An array of as many elements and the dtype that was sent.
        src: Global rank of the sender; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world where None.
        tag: The tag it was sent with.
        group_src: The sender's rank in the group, instead of `src`.

    Returns:
        The sender's global rank; as a method, its rank in the group.

    Raises:
        TypeError: Not an array, or a dtype that does not travel.
        ValueError: Both or none of `src` and `group_src` are given, it is no member or this rank, the tag is negative,
            or `tensor` cannot be written.
        DistBackendError: The sender failed, or the message does not fit.
        DistTimeoutError: Nothing came within the group's timeout.
    """
    members = resolve(group)
    source = members.peer("recv", "src", src, group_src)
    members.recv_from(tensor, source, tag)
    return source if group_src is not None else members.global_rank(source)
