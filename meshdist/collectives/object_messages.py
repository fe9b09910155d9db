"""Messages of objects between two ranks: send_object_list, recv_object_list, and their async forms.

A list is one message, whose header tells how many objects it has; see `runtime.object_messages`. If the group's only
backend is for GPUs, the sizes of the pickles are sent first, as in the collectives of objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays.host import Array
from meshdist.arrays.plain_numbers import plain_number
from meshdist.collectives.definition import GroupFunction
from meshdist.collectives.objects import as_list, bring_back, cut, empty_blocks, on_gpu, pickled, sizes_of, unpickled
from meshdist.collectives.send_recv import NamingSender, Receiving, source_of
from meshdist.runtime.call_site import warn_not_member
from meshdist.runtime.context import GroupLike, resolve
from meshdist.runtime.object_messages import ObjectMessage
from meshdist.runtime.work import Work

if TYPE_CHECKING:
    from meshdist.runtime.interfaces import Group

_OF_ONE = "; to send one object, pass [obj]"


@GroupFunction
def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: GroupLike = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    *,
    tag: int = 0,
) -> None:
    """Send the objects of a list to a rank that receives them with `recv_object_list` or `irecv_object_list`.

    As in `send`, a pickle of at most 64 KiB (`MESHDIST_EAGER_LIMIT`) is buffered, and the call returns at once. With a
    larger one, the call waits until the receiver has received the list.

    Args:
        object_list: A list of objects that can be pickled.
        dst: Global rank of the receiver; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        device: Ignored: objects travel as arrays on the CPU.
        group_dst: The receiver's rank in the group, instead of `dst`.
        use_batch: Ignored: a list is one message.
        tag: A non-negative integer. A receive with the same tag takes this message; messages of one tag keep their
            order.

    Raises:
        TypeError: `object_list` is not a list, or an object cannot be pickled; nothing is sent.
        ValueError: Both or neither of `dst` and `group_dst` are given, the receiver is not a member of the group, or
            `tag` is negative; or the receiver is this rank, which has posted no receive for the message, and would
            wait for itself.
        DistBackendError: The receiver failed, or its list is of a different length.
        DistTimeoutError: The message was not received within the group's timeout.
    """
    members, of = resolve(group), "send_object_list"
    if members.rank() < 0:
        warn_not_member(of)
        return
    peer = members.messages.peer(of, "dst", dst, group_dst)
    if members.carries("cpu"):
        members.messages.send(_to_send(members, of, object_list), peer, plain_number(tag), of)
        return
    error_prefix = members.error_prefix(of)
    pickles = pickled(error_prefix, as_list(error_prefix, "object_list", object_list, hint=_OF_ONE))
    members.messages.send(on_gpu(members, sizes_of(pickles)), peer, tag, of, is_size_exchange=True)
    members.messages.send(on_gpu(members, np.concatenate([*empty_blocks(1), *pickles])), peer, tag, of)


@NamingSender
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    tag: int = 0,
) -> int:
    """Receive objects into a list, replacing all its elements.

    Args:
        object_list: A list of the same length as the sent one, or an empty list, which receives any number of objects.
            If the group's backend is for GPUs alone, the length must be known.
        src: Global rank of the sender; as a method, its rank in the group or along the mesh. None takes the first list
            from any rank.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        device: Ignored: objects travel as arrays on the CPU.
        group_src: The sender's rank in the group, instead of `src`; -1 takes any.
        use_batch: Ignored.
        tag: The tag it was sent with.

    Returns:
        The sender's global rank; as a method, its rank in the group or along the mesh.

    Raises:
        TypeError: `object_list` is not a list.
        ValueError: Both `src` and `group_src` are given, the sender is not a member, or `tag` is negative; or the
            sender is this rank, which has sent itself no message and would wait for itself.
        DistBackendError: The sender failed, its list is of a different length, or it sent an array.
        DistTimeoutError: No message arrived within the group's timeout.
    """
    members, of = resolve(group), "recv_object_list"
    if members.rank() < 0:
        warn_not_member(of)
        return -1
    source = source_of(members, of, src, group_src)
    objects = as_list(members.error_prefix(of), "object_list", object_list)
    if members.carries("cpu"):
        message = ObjectMessage.to_receive(len(objects) or None, objects)
        source = members.messages.recv(message, source, plain_number(tag), of)
        received = message.objects(members.error_prefix(of))
        objects[:] = [None] * len(objects) if received is None else received  # None in a dry run
        return source
    sizes = np.zeros(len(objects), np.int64)
    source = _receive_from_gpu(members, sizes, source, tag, is_size_exchange=True)
    data = np.empty(int(sizes.sum()), np.uint8)
    _receive_from_gpu(members, data, source, tag)
    if objects:
        objects[:] = unpickled(members.error_prefix(of), cut(data, sizes))
    return source


@GroupFunction
def isend_object_list(
    object_list: list[Any], dst: int | None = None, group: GroupLike = None, tag: int = 0, group_dst: int | None = None
) -> Work:
    """Begin to send the objects of a list; never wait for the receiver, however large they are.

    The objects are pickled before the call returns, so they may be changed at once.

    Args:
        object_list: A list of objects that can be pickled.
        dst: As in `send_object_list`.
        group: As in `send_object_list`.
        tag: As in `send_object_list`.
        group_dst: As in `send_object_list`.

    Returns:
        A Work, done when the message has been received or buffered.

    Raises:
        TypeError: `object_list` is not a list, or an object cannot be pickled; nothing is sent.
        ValueError: As for `send_object_list`, except that this rank may send to itself; or the group has no backend for
            arrays on the CPU. The Work raises later errors.

    Example:
        >>> import meshdist as dist
        >>> def main():
        ...     other = 1 - dist.get_rank()
        ...     given = dist.isend_object_list([{"from": dist.get_rank()}], other, tag=11)
        ...     taken = dist.irecv_object_list(other, tag=11)
        ...     given.wait()
        ...     return taken.result()
        >>> dist.run(main, 2)
        [[{'from': 1}], [{'from': 0}]]
    """
    members, of = resolve(group), "isend_object_list"
    if members.rank() < 0:
        warn_not_member(of)
        return None  # type: ignore[return-value]
    peer = members.messages.peer(of, "dst", dst, group_dst)
    _check_cpu(members, of)
    return members.messages.isend(_to_send(members, of, object_list), peer, plain_number(tag), of)


@Receiving
def irecv_object_list(
    src: int | None = None, group: GroupLike = None, tag: int = 0, group_src: int | None = None
) -> Work:
    """Begin to receive a list of objects, of any length.

    To wait for it at once, as mpi4py's `comm.recv` does, write `irecv_object_list(src).result()`.

    Args:
        src: Global rank of the sender; as a method, its rank in the group or along the mesh. None takes the first list
            from any rank.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        tag: The tag it was sent with.
        group_src: The sender's rank in the group, instead of `src`; -1 takes any.

    Returns:
        A Work, done when the list has arrived. Its `result()` waits, and returns the list, which is `[None]` in a dry
        run; it raises what unpickling raises. Its `source_rank()` is the global rank of the sender.

    Raises:
        TypeError: A rank or the tag is not an integer.
        ValueError: Both `src` and `group_src` are given, the sender is not a member, `tag` is negative, or the group
            has no backend for arrays on the CPU. The Work raises later errors.
    """
    members, of = resolve(group), "irecv_object_list"
    if members.rank() < 0:
        warn_not_member(of)
        return None  # type: ignore[return-value]
    if isinstance(src, list) or isinstance(group_src, list):
        raise TypeError(
            f"{members.error_prefix(of)}: src must be a rank, got a list; the objects are the result of the Work:"
            " write objects = irecv_object_list(src).result()"
        )
    source = source_of(members, of, src, group_src)
    _check_cpu(members, of)
    return members.messages.irecv(ObjectMessage.to_receive(None), source, plain_number(tag), of)


def _to_send(members: Group, of: str, object_list: list[Any]) -> ObjectMessage:
    error_prefix = members.error_prefix(of)
    objects = as_list(error_prefix, "object_list", object_list, hint=_OF_ONE)
    try:
        return ObjectMessage.to_send(objects)
    except Exception as error:  # the objects' own code may raise anything
        failed = error
    pickled(error_prefix, objects)  # raises for the one that cannot be pickled
    raise failed


def _check_cpu(members: Group, of: str) -> None:
    if not members.carries("cpu"):
        raise ValueError(
            f"{members.error_prefix(of)}: async messages of objects need a backend for arrays on the CPU, which this"
            ' group does not have; call send_object_list and recv_object_list, or create it with "cpu:gloo,cuda:nccl"'
        )


def _receive_from_gpu(
    members: Group, array: Array, src: int | None, tag: int, *, is_size_exchange: bool = False
) -> int:
    taken = on_gpu(members, array)
    source = members.messages.recv(taken, src, tag, "recv_object_list", is_size_exchange=is_size_exchange)
    bring_back(taken, array)
    return source
