"""Messages of objects between two ranks: lists of them, sync and async, and single objects, which are lists of one.

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
from meshdist.runtime.object_messages import ObjectMessage, pickled_list
from meshdist.runtime.work import Work

if TYPE_CHECKING:
    from meshdist.runtime.interfaces import Group

_OF_ONE = "; to send one object, pass [obj], or call send_object"


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
    _send_from_gpu(members, of, as_list(members.error_prefix(of), "object_list", object_list, hint=_OF_ONE), peer, tag)


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
    return _receive_on_gpu(members, of, objects, source, tag)


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


@GroupFunction
def send_object(
    obj: Any, dst: int | None = None, group: GroupLike = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send an object to a rank that receives it with `recv_object`.

    The message is that of `send_object_list([obj], dst)`, which may be received as a list as well. As in `send`, a
    pickle of at most 64 KiB (MESHDIST_EAGER_LIMIT) is buffered, and the call returns; with a larger one it waits until
    the object is received. `isend_object_list([obj], dst)` never waits.

    Args:
        obj: Any object that can be pickled.
        dst: Global rank of the receiver; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        tag: A non-negative integer. A receive with the same tag takes this message; messages of one tag keep their
            order.
        group_dst: The receiver's rank in the group, instead of `dst`.

    Raises:
        TypeError: `obj` cannot be pickled; nothing is sent.
        ValueError: As for `send_object_list`.
        DistBackendError: The receiver failed, or receives a list of another length.
        DistTimeoutError: The message was not received within the group's timeout.

    Example:
        >>> import meshdist as dist
        >>> def main():
        ...     if dist.get_rank() == 0:
        ...         dist.send_object({"task": 7}, 1, tag=11)
        ...     else:
        ...         return dist.recv_object(0, tag=11)
        >>> dist.run(main, 2)
        [None, {'task': 7}]
    """
    members, of = resolve(group), "send_object"
    if members.rank() < 0:
        warn_not_member(of)
        return
    peer = members.messages.peer(of, "dst", dst, group_dst)
    if members.carries("cpu"):
        message = _pickled_to_send(members, of, [obj])
        message.given, message.is_single = obj, True
        members.messages.send(message, peer, plain_number(tag), of)
    else:
        _send_from_gpu(members, of, [obj], peer, tag)


@Receiving
def recv_object(src: int | None = None, group: GroupLike = None, tag: int = 0, group_src: int | None = None) -> Any:
    """Receive an object and return it.

    It was sent with `send_object`, or as a list of one. The sender is not returned: `info = probe(tag=None)` tells it
    before, and `irecv_object_list` afterwards.

    Args:
        src: Global rank of the sender; as a method, its rank in the group or along the mesh. None takes the first
            object from any rank.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        tag: The tag it was sent with.
        group_src: The sender's rank in the group, instead of `src`; -1 takes any.

    Returns:
        The object; None in a dry run.

    Raises:
        TypeError: A rank or the tag is not an integer.
        ValueError: As for `recv_object_list`.
        DistBackendError: The sender failed, or sent an array, or a list of another length.
        DistTimeoutError: No message arrived within the group's timeout.
    """
    members, of = resolve(group), "recv_object"
    if members.rank() < 0:
        warn_not_member(of)
        return None
    source = source_of(members, of, src, group_src)
    if members.carries("cpu"):
        message = ObjectMessage.to_receive(1, is_single=True)
        members.messages.recv(message, source, plain_number(tag), of)
        return _only_object(members, of, message)
    objects = [None]
    _receive_on_gpu(members, of, objects, source, tag)
    return objects[0]


@Receiving
def sendrecv_object(
    obj: Any,
    dst: int | None = None,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
    group_src: int | None = None,
    *,
    recv_tag: int | None = None,
) -> Any:
    """Send an object to one rank, and receive one from the same or a different rank.

    Ranks that exchange objects of any size, in pairs or around a ring, never deadlock. The other sides may call
    `sendrecv_object`, `send_object` and `recv_object`, or the functions of lists.

    Args:
        obj: Any object that can be pickled.
        dst: Global rank of the receiver of `obj`; as a method, its rank in the group or along the mesh. It may be this
            rank.
        src: Global rank of the sender; as a method, its rank in the group or along the mesh. None takes the first
            object from any rank.
        group: A ProcessGroup or a DeviceMesh; the world if None. It needs a backend for arrays on the CPU.
        tag: The tag of both messages.
        group_dst: The receiver's rank in the group, instead of `dst`.
        group_src: The sender's rank in the group, instead of `src`; -1 takes any.
        recv_tag: The tag of the received message, if it differs from `tag`.

    Returns:
        The object that is received; None in a dry run.

    Raises:
        TypeError: `obj` cannot be pickled; nothing is sent.
        ValueError: Both or neither of `dst` and `group_dst` are given, or both of `src` and `group_src`; the receiver
            or the sender is not a member of the group; a tag is negative; or the group has no backend for arrays on
            the CPU.
        DistBackendError: The other side failed, or the message is an array, or a list of another length.
        DistTimeoutError: A message was not received, or did not arrive, within the group's timeout.

    Example:
        >>> import meshdist as dist
        >>> def main():
        ...     rank, size = dist.get_rank(), dist.get_world_size()
        ...     return dist.sendrecv_object({"from": rank}, dst=(rank + 1) % size, src=(rank - 1) % size)
        >>> dist.run(main, 3)
        [{'from': 2}, {'from': 0}, {'from': 1}]
    """
    members, of = resolve(group), "sendrecv_object"
    if members.rank() < 0:
        warn_not_member(of)
        return None
    peer, source = members.messages.peer(of, "dst", dst, group_dst), source_of(members, of, src, group_src)
    _check_cpu(members, of)
    message = ObjectMessage.to_receive(1)
    work = members.messages.isend(_pickled_to_send(members, of, [obj]), peer, plain_number(tag), of)
    members.messages.recv(message, source, plain_number(tag if recv_tag is None else recv_tag), of)
    work.wait()
    return _only_object(members, of, message)


def _only_object(members: Group, of: str, message: ObjectMessage) -> Any:
    objects = message.objects(members.error_prefix(of))
    return None if objects is None else objects[0]  # None in a dry run


def _to_send(members: Group, of: str, object_list: list[Any]) -> ObjectMessage:
    objects = as_list(members.error_prefix(of), "object_list", object_list, hint=_OF_ONE)
    message = _pickled_to_send(members, of, objects)
    message.given = objects
    return message


def _pickled_to_send(members: Group, of: str, objects: list[Any]) -> ObjectMessage:
    """Return the message of a list; without `given`, since the list may not be an argument of the user's call."""
    try:
        return ObjectMessage.of_pickle(pickled_list(objects), len(objects))
    except Exception as error:  # the objects' own code may raise anything
        failed = error
    pickled(members.error_prefix(of), objects)  # raises for the one that cannot be pickled
    raise failed


def _check_cpu(members: Group, of: str) -> None:
    if not members.carries("cpu"):
        raise ValueError(
            f"{members.error_prefix(of)}: async messages of objects need a backend for arrays on the CPU, which this"
            ' group does not have; call send_object_list and recv_object_list, or create it with "cpu:gloo,cuda:nccl"'
        )


def _send_from_gpu(members: Group, of: str, objects: list[Any], peer: int, tag: int) -> None:
    pickles = pickled(members.error_prefix(of), objects)
    members.messages.send(on_gpu(members, sizes_of(pickles)), peer, tag, of, is_size_exchange=True)
    members.messages.send(on_gpu(members, np.concatenate([*empty_blocks(1), *pickles])), peer, tag, of)


def _receive_on_gpu(members: Group, of: str, objects: list[Any], source: int | None, tag: int) -> int:
    """Receive as many objects as `objects` has, into it; return the sender."""
    sizes = np.zeros(len(objects), np.int64)
    sender = _receive_from_gpu(members, of, sizes, source, tag, is_size_exchange=True)
    data = np.empty(int(sizes.sum()), np.uint8)
    _receive_from_gpu(members, of, data, sender, tag)
    if objects:
        objects[:] = unpickled(members.error_prefix(of), cut(data, sizes))
    return sender


def _receive_from_gpu(
    members: Group, of: str, array: Array, src: int | None, tag: int, *, is_size_exchange: bool = False
) -> int:
    taken = on_gpu(members, array)
    source = members.messages.recv(taken, src, tag, of, is_size_exchange=is_size_exchange)
    bring_back(taken, array)
    return source
