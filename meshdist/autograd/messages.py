"""Messages on plain arrays as differentiable functions: permute, send and recv, whose gradients go the way back."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive
from autograd.tracer import getval

from meshdist.arrays.device_types import new_empty
from meshdist.arrays.host import AnyArray
from meshdist.autograd.collective_primitives import Collective, Wanted, array_of, with_vjp
from meshdist.autograd.device_arrays import as_any_array, contiguous, new_zeros
from meshdist.autograd.tape import communicating, current_tape, is_on
from meshdist.collectives.send_recv import recv as _recv_into
from meshdist.collectives.send_recv import send as _send_from
from meshdist.collectives.send_recv import sendrecv as _sendrecv
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import resolve
from meshdist.runtime.context import GroupLike


def _permuted(x: Any, members: ProcessGroup, to: int | None, by: int | None) -> Any:
    block = contiguous(x)
    if to is not None and by is not None:
        taken = np.empty_like(block)
        _sendrecv(block, taken, group=members, group_dst=to, group_src=by)
        return taken
    if to is not None:
        _send_from(block, group=members, group_dst=to)
        return np.zeros_like(block)
    taken = np.zeros_like(block)
    if by is not None:
        _recv_into(taken, group=members, group_src=by)
    return taken


def _pull_permute(g: Any, x: Any, y: Any, members: ProcessGroup, to: int | None, by: int | None) -> Any:
    return _PERMUTE(g, members, by, to)


_PERMUTE = Collective("permute", _permuted, _pull_permute)


@with_vjp
def permute(x: AnyArray, perm: int | Sequence[tuple[int, int]], group: GroupLike = None) -> AnyArray:
    """Send `x` to one rank and return the array received from another, or zeros if no rank sends to this one.

    The gradient of `x` is received from the rank that has it (Varying to Varying), by messages in the opposite
    direction.

    Args:
        x: An array, of one shape and dtype on all ranks.
        perm: Pairs (source, destination) of ranks in the group, the same on all ranks; each at most once a source and
            once a destination. Or an integer: each rank sends to the rank at this distance, around the ring.
        group: A ProcessGroup or a DeviceMesh; the world if None.

    Raises:
        TypeError: `x` is not an array, or `perm` has other values than integers.
        ValueError: A rank is outside the group, or is a source or a destination twice.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import grad, permute
        >>> def program():
        ...     own = 1.0 + meshdist.get_rank()
        ...     return float(permute(own, 1)), float(grad(lambda x: own * permute(x, [(0, 1)]))(own))
        >>> meshdist.run(program, 3)
        [(3.0, 2.0), (1.0, 0.0), (2.0, 0.0)]
    """
    members = resolve(group)
    size, rank = members.size(), members.rank()
    if isinstance(perm, (list, tuple)):
        to, by = _partners(members, perm)
    else:
        shift = _rank_number(members, perm)
        to, by = (rank + shift) % size, (rank - shift) % size
    x = x if x is Wanted else array_of("permute", members, x)
    return _PERMUTE(x, members, to, by)


def _partners(members: ProcessGroup, perm: Sequence[tuple[int, int]]) -> tuple[int | None, int | None]:
    """Return the rank that this one sends to, and the one that sends to it."""
    prefix = members.error_prefix("permute")
    if any(not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in perm):
        raise TypeError(f"{prefix}: perm must be pairs (source, destination), or an integer, got {perm!r}")
    pairs = [(_rank_number(members, source), _rank_number(members, to)) for source, to in perm]
    for number, what in enumerate(("source", "destination")):
        ranks = [pair[number] for pair in pairs]
        wrong = [rank for rank in ranks if not 0 <= rank < members.size()]
        if wrong:
            highest = members.size() - 1
            allowed = f"ranks must be 0 to {highest}, got" if highest else "there is only rank 0; got"
            raise ValueError(f"{prefix}: {allowed} {wrong[0]} in {perm!r}")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"{prefix}: each rank can be a {what} once, got {perm!r}")
    mine = members.rank()
    return dict(pairs).get(mine), {to: source for source, to in pairs}.get(mine)


def _rank_number(members: ProcessGroup, value: Any) -> int:
    try:
        return index(value)
    except TypeError:
        raise TypeError(
            f"{members.error_prefix('permute')}: perm must be pairs of ranks, or an integer, got {value!r}"
        ) from None


def _has_gradient(x: Any) -> bool:
    return bool(anp.result_type(x).kind in "fc")  # the same where it is sent and where it is received


def _sent(x: Any, members: ProcessGroup, to: int, tag: int) -> Any:
    block = contiguous(x)
    _send_from(block, group=members, group_dst=to, tag=tag)
    return new_zeros((), block)


def _pull_send(g: Any, x: Any, y: Any, members: ProcessGroup, to: int, tag: int) -> Any:
    del g, y  # the receiver has the gradient
    return _RECV(None, members, to, tag, np.shape(getval(x)), _kind_of(x))


def _kind_of(x: Any) -> Any:
    """Return an array without elements, of the dtype of `x` and in its memory."""
    return np.empty_like(as_any_array(getval(x)), shape=0)


_SEND = Collective("send", _sent, _pull_send, "x")


def _received(anchor: Any, members: ProcessGroup, by: int, tag: int, shape: Any, kind: Any) -> Any:
    del anchor
    taken = new_empty(shape, kind)
    _recv_into(taken, group=members, group_src=by, tag=tag)
    return taken


def _pull_recv(g: Any, anchor: Any, y: Any, members: ProcessGroup, by: int, tag: int, *array: Any) -> Any:
    _SEND(anp.array(g, dtype=array[1].dtype), members, by, tag)
    return np.zeros_like(getval(anchor))


_RECV = Collective("recv", _received, _pull_recv)


def _sent_undifferentiated(anchor: Any, x: Any, members: ProcessGroup, to: int, tag: int) -> Any:
    del anchor
    return _sent(x, members, to, tag)


def _discard(g: Any, anchor: Any, y: Any, x: Any, members: ProcessGroup, to: int, tag: int) -> Any:
    _pull_send(None, x, None, members, to, tag)
    return np.zeros_like(getval(anchor))


# Of what is not differentiated here, but may be so where it is received.
_SEND_ALONG = primitive(_sent_undifferentiated)
_SEND_ALONG.__name__ = "send"
communicating.add(_SEND_ALONG)
defvjp(_SEND_ALONG, lambda y, anchor, *bound: lambda g: _discard(g, anchor, y, *bound))


@with_vjp
def send(
    x: AnyArray, dst: int | None = None, group: GroupLike = None, tag: int = 0, group_dst: int | None = None
) -> AnyArray:
    """Send `x` to a rank that calls `recv`; the backward pass receives its gradient from there.

    Either both ranks or neither must be differentiated by `grad` or `value_and_grad` of this module: these run the
    backward passes of messages even if the loss of a rank does not depend on them. First derivatives only.

    Args:
        x: An array or a number.
        dst: Global rank of the receiver.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        tag: Matches this message with a `recv` of the same tag.
        group_dst: The receiver's rank in the group, instead of `dst`.

    Returns:
        Zero, of the dtype of `x`: with the package autograd's own `grad`, add it to the loss.

    Raises:
        TypeError: `x` is not an array or a number.
        ValueError: No receiver is given, or both `dst` and `group_dst`, or the receiver is not a member.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import grad, recv, send
        >>> def program():
        ...     if meshdist.get_rank() == 0:
        ...         return float(grad(lambda x: send(x * x, dst=1))(3.0))
        ...     return float(grad(lambda w: w * recv(0.0, src=0))(2.0))
        >>> meshdist.run(program, 2)
        [12.0, 9.0]
    """
    members = resolve(group)
    to = members.messages.peer("send", "dst", dst, group_dst)
    if x is Wanted:
        return _SEND(x, members, to, tag)
    x, tape = array_of("send", members, x), current_tape()
    if tape is None or not _has_gradient(x) or is_on(tape, x):
        return _SEND(x, members, to, tag)
    return _SEND_ALONG(tape.anchor, x, members, to, tag)


def recv(
    x: AnyArray, src: int | None = None, group: GroupLike = None, tag: int = 0, group_src: int | None = None
) -> AnyArray:
    """Return the array that a rank sends to this one with `send`; the backward pass sends its gradient there.

    Args:
        x: An array or a number of the shape and dtype that are sent. It has a gradient of zeros.
        src: Global rank of the sender.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        tag: The tag it was sent with.
        group_src: The sender's rank in the group, instead of `src`.

    Raises:
        TypeError: `x` is not an array or a number.
        ValueError: No sender is given, or both `src` and `group_src`, or the sender is not a member.
    """
    members = resolve(group)
    by = members.root("recv", "src", src, group_src)
    x, tape = array_of("recv", members, x), current_tape()
    anchor = x if tape is None or not _has_gradient(x) or is_on(tape, x) else tape.anchor
    return _RECV(anchor, members, by, tag, np.shape(getval(x)), _kind_of(x))
