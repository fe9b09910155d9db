"""send, recv, isend and irecv: a message from one rank to another."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from meshdist.collectives.definition import GroupFunction
from meshdist.current import GroupLike, resolve
from meshdist.work import Work

if TYPE_CHECKING:
    from meshdist.process_group import ProcessGroup

P = ParamSpec("P")
R = TypeVar("R")

# As a rank in the group, what means any.
ANY_SOURCE = -1


class Receiving(GroupFunction[P, R]):
    """A function that receives from any rank where none is given."""

    absent_root = ANY_SOURCE


class NamingSender(Receiving[P, int]):
    """A function that returns the rank in the group that it received from: the flat one returns its global rank."""

    def __init__(self, function: Callable[P, int]) -> None:
        super().__init__(function)
        self._place_of_group = function.__code__.co_varnames.index("group")

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> int:
        """Call the flat function."""
        source = self.func(*args, **kwargs)
        place = self._place_of_group
        group: Any = args[place] if len(args) > place else kwargs.get("group")
        return source if group is None else resolve(group).global_rank(source)


@GroupFunction
def send(
    tensor: Any, dst: int | None = None, group: GroupLike = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send `tensor` to a rank that receives it.

    A message of at most 64 KiB is buffered, and the call returns; a larger one waits until it is received. The
    environment variable MESHDIST_EAGER_LIMIT sets another limit in bytes, up to 128 KiB; with 0 every send waits, so
    that programs which rely on buffers show it.

    Args:
        tensor: An array.
        dst: Global rank of the receiver; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world where None.
        tag: Matches this message with a `recv` of the same tag, from 0 on. Messages of one tag keep their order.
        group_dst: The receiver's rank in the group, instead of `dst`.

    Raises:
        TypeError: Not an array, or a dtype that does not travel.
        ValueError: Both or none of `dst` and `group_dst` are given, it is no member or this rank, or `tag` is negative.
        DistBackendError: The receiver failed, or its array does not fit. Of a buffered message, the next call says it.
        DistTimeoutError: It was not received within the group's timeout.
    """
    messages = resolve(group).messages
    messages.send(tensor, messages.peer("send", "dst", dst, group_dst), tag)


@NamingSender
def recv(
    tensor: Any, src: int | None = None, group: GroupLike = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Receive a message into `tensor`.

    Args:
        tensor: An array of as many elements and the dtype that was sent.
        src: Global rank of the sender; as a method, its rank in the group or along the mesh. None takes the first
            message from any rank.
        group: A ProcessGroup or a DeviceMesh; the world where None.
        tag: The tag it was sent with.
        group_src: The sender's rank in the group, instead of `src`; -1 takes any.

    Returns:
        The sender's global rank; as a method, its rank in the group or along the mesh.

    Raises:
        TypeError: Not an array, or a dtype that does not travel.
        ValueError: Both `src` and `group_src` are given, it is no member or this rank, the tag is negative, or `tensor`
            cannot be written.
        DistBackendError: The sender failed, or the message does not fit.
        DistTimeoutError: Nothing came within the group's timeout.
    """
    members = resolve(group)
    return members.messages.recv(tensor, source_of(members, "recv", src, group_src), tag)


@GroupFunction
def isend(
    tensor: Any, dst: int | None = None, group: GroupLike = None, tag: int = 0, group_dst: int | None = None
) -> Work:
    """Begin to send `tensor`; never wait for the receiver, whatever the size of the message.

    The first message to a rank sets up the way there, which takes milliseconds.

    Args:
        tensor: An array. Do not change it before the Work is done.
        dst: As in `send`.
        group: As in `send`.
        tag: As in `send`.
        group_dst: As in `send`.

    Returns:
        A Work, done when `tensor` may be changed.

    Raises:
        TypeError: As `send`.
        ValueError: As `send`. What goes wrong later is raised by the Work.
    """
    messages = resolve(group).messages
    return messages.isend(tensor, messages.peer("isend", "dst", dst, group_dst), tag)


@Receiving
def irecv(
    tensor: Any, src: int | None = None, group: GroupLike = None, tag: int = 0, group_src: int | None = None
) -> Work:
    """Begin to receive a message into `tensor`.

    Receipts of one source and tag get the messages in the order in which they were posted.

    Args:
        tensor: An array of as many elements and the dtype that is sent. Do not use it before the Work is done.
        src: As in `recv`.
        group: As in `recv`.
        tag: As in `recv`.
        group_src: As in `recv`.

    Returns:
        A Work, done when the message is there; its `source_rank()` is the global rank of the sender.

    Raises:
        TypeError: As `recv`.
        ValueError: As `recv`. What goes wrong later is raised by the Work.
    """
    members = resolve(group)
    return members.messages.irecv(tensor, source_of(members, "irecv", src, group_src), tag)


def source_of(members: ProcessGroup, of: str, src: int | None, group_src: int | None) -> int | None:
    """Return the rank of the group to receive from, None for any."""
    if group_src is None:
        return None if src is None else members.messages.peer(of, "src", src, None)
    if src is None and hasattr(group_src, "__index__") and index(group_src) == ANY_SOURCE:
        return None
    return members.messages.peer(of, "src", src, group_src)
