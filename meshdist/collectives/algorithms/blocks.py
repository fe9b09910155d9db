"""Helpers of the algorithms: buffers as one block per rank, the exchange of two messages, reductions in rank order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays.host import Array, split_rows
from meshdist.arrays.reduce_op import ReduceOp
from meshdist.runtime.call import Buffers
from meshdist.runtime.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.runtime.call import Transport

# Users' tags are not negative, so the messages of a collective never meet theirs.
COLLECTIVE_TAG = -1


def flat(buffers: Buffers) -> Array:
    assert isinstance(buffers, np.ndarray)
    return buffers.reshape(-1)


def blocks_of(buffers: Buffers, size: int) -> list[Array]:
    """Return the flat block of each rank, from a list of arrays or from one array of equal blocks."""
    if isinstance(buffers, list):
        return [array if array.ndim == 1 else array.reshape(-1) for array in buffers]
    assert buffers is not None
    return split_rows(buffers, size)


def shares_of(array: Array, size: int) -> list[Array]:
    """Cut a flat array into `size` nearly equal views, in order; the first ones get the remainder."""
    short, longer = divmod(array.size, size)
    ends = [short * (k + 1) + min(k + 1, longer) for k in range(size)]
    return [array[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def exchange(transport: Transport, give: Array, dst: int, take: Array, src: int) -> Iterator[Waitable]:
    sent = transport.send(give, dst, COLLECTIVE_TAG)
    yield transport.recv(take, src, COLLECTIVE_TAG)
    yield sent


def joined(arrays: list[Array]) -> Array:
    """Return the elements of all arrays as one flat array."""
    whole: Array = np.concatenate([array.reshape(-1) for array in arrays])
    return whole


def fill(arrays: list[Array], whole: Array) -> None:
    """Copy the parts of a flat array to the arrays: the reverse of `joined`."""
    begin = 0
    for array in arrays:
        part = whole[begin : begin + array.size]
        array[...] = part if array.ndim == 1 else part.reshape(array.shape)
        begin += array.size


def reduce_in_rank_order(
    run: Callable[..., Any],
    op: ReduceOp,
    sources: Iterable[Array],
    num_sources: int,
    total: Array,
    num_ranks: int | None = None,
    scratch: Array | None = None,
) -> None:
    """Put the reduction of `sources` into `total`, by NumPy functions that `run` calls; see `quiet_runner`.

    The sources are of the shape of `total`, in rank order, at least one; each but the first is read before the next is
    taken. Only the first may be `total`, unless partial results go into `scratch`. `num_ranks` counts the ranks
    behind the result, for a mean, if they are not as many as the sources.
    """
    combine, room = op.ufunc, total if scratch is None else scratch
    so_far: Any = None
    for number, source in enumerate(sources, 1):
        target = total if number == num_sources else room
        so_far = source if so_far is None else run(combine, so_far, source, out=target)
    if num_sources == 1:
        total[...] = so_far
    if op is ReduceOp.AVG:
        run(op.finish, total, num_ranks or num_sources)
