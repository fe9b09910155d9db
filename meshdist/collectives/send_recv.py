"""Messages between two ranks: send, recv, isend, irecv, and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from meshdist.arrays.device_types import device_type_of
from meshdist.arrays.host import AnyArray, describe_value
from meshdist.arrays.plain_numbers import plain_number
from meshdist.collectives.dataflow import RECV, SEND
from meshdist.collectives.definition import GroupFunction
from meshdist.runtime.context import GroupLike, resolve
from meshdist.runtime.work import Work
from meshdist.system.name_hints import named_as, never_began

if TYPE_CHECKING:
    from meshdist.runtime.interfaces import Group


P = ParamSpec("P")
R = TypeVar("R")

# As `group_src`: any rank.
ANY_SOURCE = -1


class Receiving(GroupFunction[P, R]):
    """A function that receives from any rank by default."""

    absent_root = ANY_SOURCE


class NamingSender(Receiving[P, R]):
    """A function whose code returns the sender's rank in the group; the flat function returns its global rank."""

    @classmethod
    def flat(cls, function: Callable[..., Any]) -> Callable[..., Any]:
        place, in_world = function.__code__.co_varnames.index("group"), cls.in_world

        @wraps(function)
        def flat(*args: Any, **kwargs: Any) -> Any:
            try:
                found = function(*args, **kwargs)
            except TypeError as error:
                if never_began(error):
                    wrong_arguments = error.with_traceback(None)
                    raise wrong_arguments
                raise
            group = args[place] if len(args) > place else kwargs.get("group")
            return found if group is None else in_world(found, resolve(group))

        return named_as(function, flat)

    @staticmethod
    def in_world(found: Any, group: Group) -> Any:
        """Return what the code has returned, with the sender's global rank."""
        return group.global_rank(found)


for _kind in (GroupFunction, Receiving, NamingSender):
    _kind.__name__ = "function"  # what help() calls them


@GroupFunction
def send(
    tensor: AnyArray, dst: int | None = None, group: GroupLike = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send `tensor` to a rank that receives it.

    A message of at most 64 KiB to another rank is buffered, and the call returns at once. With a larger message, the
    call waits until the receiver has received it.

    The environment variable `MESHDIST_EAGER_LIMIT` sets this limit in bytes. The highest limit is 262,144 (256 KiB);
    the gloo backend buffers messages of up to 130,944 bytes (just below 128 KiB) at most. With the limit 0 every send
    waits for its receiver, which reveals programs that rely on buffering.

    Args:
        tensor: An array.
        dst: Global rank of the receiver; as a method, its rank in the group or along the mesh.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        tag: A non-negative integer. A `recv` with the same tag takes this message; messages of one tag keep their
            order.
        group_dst: The receiver's rank in the group, instead of `dst`.

    Raises:
        TypeError: `tensor` is not an array, or its dtype is not supported.
        ValueError: Both or neither of `dst` and `group_dst` are given, the receiver is not a member of the group, or
            `tag` is negative; or the receiver is this rank, which has posted no receive for the message, and would
            wait for itself.
        DistBackendError: The receiver failed, or its array does not fit. After a buffered send, the next call raises.
        DistTimeoutError: The message was not received within the group's timeout.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     x = np.zeros(3)
        ...     if dist.get_rank() == 0:
        ...         dist.send(np.arange(3.0), dst=1)
        ...     else:
        ...         dist.recv(x, src=0)
        ...     return x.tolist()
        >>> dist.run(main, 2)
        [[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]]
    """
    messages = resolve(group).messages
    messages.send(tensor, messages.peer("send", "dst", dst, group_dst), plain_number(tag))


@NamingSender
def recv(
    tensor: AnyArray, src: int | None = None, group: GroupLike = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Receive a message into `tensor`.

    Args:
        tensor: An array with the number of elements and the dtype that were sent.
        src: Global rank of the sender; as a method, its rank in the group or along the mesh. None takes the first
            message from any rank.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        tag: The tag it was sent with.
        group_src: The sender's rank in the group, instead of `src`; -1 takes any.

    Returns:
        The sender's global rank; as a method, its rank in the group or along the mesh.

    Raises:
        TypeError: `tensor` is not an array, or its dtype is not supported.
        ValueError: Both `src` and `group_src` are given, the sender is not a member of the group, `tag` is negative, or
            `tensor` is read-only; or the sender is this rank, which has sent itself no message and would wait for
            itself.
        DistBackendError: The sender failed, or the message does not fit.
        DistTimeoutError: No message arrived within the group's timeout.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     if dist.get_rank() != 0:
        ...         return dist.send(np.array([10 * dist.get_rank()]), dst=0)
        ...     x, senders = np.zeros(1, int), []
        ...     for _ in range(2):
        ...         senders.append(dist.recv(x))  # from the rank whose message arrives first
        ...     return sorted(senders)
        >>> dist.run(main, 3)[0]
        [1, 2]
    """
    members = resolve(group)
    return members.messages.recv(tensor, source_of(members, "recv", src, group_src), plain_number(tag))


@GroupFunction
def isend(
    tensor: AnyArray, dst: int | None = None, group: GroupLike = None, tag: int = 0, group_dst: int | None = None
) -> Work:
    """Begin to send `tensor`; never wait for the receiver, whatever the size of the message.

    A message to this rank itself is buffered. The first message to a rank sets up a connection, which takes
    milliseconds.

    Args:
        tensor: An array. Do not change it before the Work is done.
        dst: As in `send`.
        group: As in `send`.
        tag: As in `send`.
        group_dst: As in `send`.

    Returns:
        A Work, done when `tensor` may be changed.

    Raises:
        TypeError: As for `send`.
        ValueError: As for `send`, except that this rank may send to itself. The Work raises later errors.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     other, x = 1 - dist.get_rank(), np.zeros(1)
        ...     sent = dist.isend(np.array([float(dist.get_rank())]), dst=other)
        ...     dist.recv(x, src=other)  # the ranks exchange arrays; with `send`, large ones would deadlock
        ...     sent.wait()
        ...     return x.item()
        >>> dist.run(main, 2)
        [1.0, 0.0]
    """
    messages = resolve(group).messages
    return messages.isend(tensor, messages.peer("isend", "dst", dst, group_dst), plain_number(tag))


@Receiving
def irecv(
    tensor: AnyArray, src: int | None = None, group: GroupLike = None, tag: int = 0, group_src: int | None = None
) -> Work:
    """Begin to receive a message into `tensor`.

    Receives with one source and tag match messages in the order in which they were posted.

    Args:
        tensor: An array with the number of elements and the dtype that are sent. Do not use it before the Work is
            done.
        src: As in `recv`.
        group: As in `recv`.
        tag: As in `recv`.
        group_src: As in `recv`.

    Returns:
        A Work, done when the message has arrived; its `source_rank()` is the global rank of the sender.

    Raises:
        TypeError: As for `recv`.
        ValueError: As for `recv`. The Work raises later errors.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     other, x = 1 - dist.get_rank(), np.zeros(1)
        ...     received = dist.irecv(x, src=other)  # posted first, so that the message arrives during the computation
        ...     dist.send(np.array([float(dist.get_rank())]), dst=other)
        ...     y = sum(range(1000))
        ...     received.wait()
        ...     return x.item() + y
        >>> dist.run(main, 2)
        [499501.0, 499500.0]
    """
    members = resolve(group)
    return members.messages.irecv(tensor, source_of(members, "irecv", src, group_src), plain_number(tag))


def source_of(members: Group, of: str, src: int | None, group_src: int | None) -> int | None:
    if group_src is None:
        return None if src is None else members.messages.peer(of, "src", src, None)
    if src is None and hasattr(group_src, "__index__") and index(group_src) == ANY_SOURCE:
        return None
    return members.messages.peer(of, "src", src, group_src)


send.dataflow = isend.dataflow = SEND
recv.dataflow = irecv.dataflow = RECV


class P2POp:
    """A message to send or to receive, for `batch_isend_irecv`.

    Attributes:
        op: `isend` or `irecv`.
        tensor: The array.
        peer: Global rank of the other side; None with `irecv` takes any.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        tag: Matches sends with receives.
        group_peer: The other side's rank in the group, instead of `peer`.

    Raises:
        ValueError: `op` is neither `isend` nor `irecv`, both `peer` and `group_peer` are given, or neither is given for
            `isend`.

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
        tensor: AnyArray,
        peer: int | None = None,
        group: GroupLike = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            name = getattr(op, "__name__", "")
            hint = f"; did you mean meshdist.i{name}?" if name in ("send", "recv") else ""
            if tensor is isend or tensor is irecv:
                hint = "; did you swap op and tensor?"
            raise ValueError(f"P2POp: op must be meshdist.isend or meshdist.irecv, got {describe_value(op)}{hint}")
        # Checked here: later, other messages of the batch would already be posted.
        if (peer is None) == (group_peer is None) and (peer is not None or op is isend):
            given = "" if peer is None else ", not both"
            raise ValueError(f"P2POp: pass peer (a global rank) or group_peer (a rank in the group){given}")
        for name, given_peer in (("peer", peer), ("group_peer", group_peer)):
            if given_peer is not None and not isinstance(given_peer, Integral):
                from meshdist.system.name_hints import hint_at_swap  # only needed here

                hint = hint_at_swap(name, given_peer)
                raise TypeError(f"P2POp: {name} must be an integer, got {describe_value(given_peer)}{hint}")
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
    """Start all messages of a list together.

    Args:
        p2p_op_list: Any number of P2POp, in any order.

    Returns:
        A Work for each, in the order of the list.

    Raises:
        TypeError: `p2p_op_list` is not a list or tuple of P2POp; otherwise as for `isend` and `irecv`.
        ValueError: As for `isend` and `irecv`.
    """
    if not isinstance(p2p_op_list, Sequence):
        hint = "; write batch_isend_irecv([op])" if isinstance(p2p_op_list, P2POp) else ""
        raise TypeError(
            f"batch_isend_irecv: p2p_op_list must be a list of P2POp, got {type(p2p_op_list).__name__}{hint}"
        )
    ops = list(p2p_op_list)
    for number, op in enumerate(ops):
        if not isinstance(op, P2POp):
            raise TypeError(
                f"batch_isend_irecv: p2p_op_list[{number}] must be a P2POp, got {type(op).__name__};"
                " write meshdist.P2POp(meshdist.isend, x, peer)"
            )
    with ExitStack() as batches:
        # On a GPU, messages that are not posted together may deadlock.
        groups = [op.group for op in ops if type(op.tensor) is not np.ndarray and device_type_of(op.tensor) != "cpu"]
        for members in {id(members): members for members in map(resolve, groups)}.values():
            if members.rank() >= 0:
                batches.enter_context(members.messages.batched("batch_isend_irecv"))
        return [op.op(op.tensor, op.peer, op.group, op.tag, op.group_peer) for op in ops]


@NamingSender
def sendrecv(
    send: AnyArray,
    recv: AnyArray,
    dst: int | None = None,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
    group_src: int | None = None,
    *,
    recv_tag: int | None = None,
) -> int:
    """Send `send` to one rank, and receive a message from the same or a different rank into `recv`.

    Both messages are transferred at the same time, so ranks that exchange arrays of any size, in pairs or around a
    ring, never deadlock. The other sides may call `sendrecv`, `send` and `recv`, or `isend` and `irecv`; with the
    `nccl` backend, only `sendrecv` or `batch_isend_irecv`.

    Args:
        send: The array to send.
        recv: The array to receive into, with the number of elements and the dtype that are sent. It may
            differ from `send` in shape and dtype, and must not share memory with it.
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
        TypeError: `send` or `recv` is not an array, or its dtype is not supported.
        ValueError: Both or neither of `dst` and `group_dst` are given, or both of `src` and `group_src`; the receiver
            or the sender is not a member of the group; a tag is negative; `recv` is read-only, or shares memory with
            `send`. Nothing is sent.
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
    tags = plain_number(tag), plain_number(tag if recv_tag is None else recv_tag)
    return members.messages.sendrecv(send, recv, to, by, tags)
