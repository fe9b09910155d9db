"""Reduce arrays in rank order: the result is equal to the last bit on every rank and by every route."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import ReduceOp


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

    There are two sources at least, of the shape of `total`, in rank order; each but the first is read before the next
    is taken. Only the first may be `total`, unless partial results go into `scratch`. `num_ranks` counts the ranks
    behind the result, for a mean, if they are not as many as the sources.
    """
    combine, room = op.ufunc, total if scratch is None else scratch
    so_far: Any = None
    for number, source in enumerate(sources, 1):
        target = total if number == num_sources else room
        so_far = source if so_far is None else run(combine, so_far, source, out=target)
    if op is ReduceOp.AVG:
        run(op.finish, total, num_ranks or num_sources)
