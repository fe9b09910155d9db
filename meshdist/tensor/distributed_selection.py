"""Selection of the elements that have given places among the sorted elements of all ranks, without moving them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from meshdist.groups.process_group import ProcessGroup

_SAMPLED = 4096  # elements of a rank's block that a sample has at most
_LEAST_NARROWED = 1 << 16
_MOST_NARROWED = 16  # places: each takes two passes over the elements


def selected(lines: Any, counts: Any, wanted: Any, group: ProcessGroup, module: Any) -> Any:
    """Return the elements that have the places `wanted` among the sorted elements of all ranks.

    Weighted medians of medians (Saukas and Song 1999, "A note on parallel selection on coarse-grained multicomputers",
    Algorithmica 24): every rank has a window of its sorted block in which the element may be. All ranks see the medians
    of all windows, choose their median weighted by the windows' sizes, and count what is less and what is equal. At
    least a quarter of the windows' elements is ruled out in each round; a rank sends a few numbers.

    Args:
        lines: This rank's block, sorted along dim 0: (rows, lines). Each line is a selection of its own.
        counts: How many rows of each line take part: (lines,).
        wanted: The places, from 0 on: (places, lines). A place that is negative is not looked for.
        group: The ranks that hold the blocks.
        module: NumPy or CuPy.

    Returns:
        The elements, (places, lines), the same on all ranks.
    """
    low, found = module.zeros_like(wanted), module.zeros(wanted.shape, lines.dtype)
    high = module.broadcast_to(counts, wanted.shape).astype(wanted.dtype)
    left = wanted.copy()  # the place among the windows of all ranks
    open_ = wanted >= 0
    every = (group.size(), *wanted.shape)
    before = None  # how many elements were in the windows: each round rules some out, except in a dry run
    while bool(open_.any()):
        high = module.where(open_, high, low)
        medians, sizes = module.empty(every, lines.dtype), module.empty(every, wanted.dtype)
        group.all_gather_into_tensor(medians, _at(lines, (low + high) // 2, module))
        group.all_gather_into_tensor(sizes, high - low)
        order = medians.argsort(axis=0)
        reached = module.take_along_axis(sizes, order, 0).cumsum(axis=0)
        in_windows = int(module.where(open_, reached[-1], 0).sum())
        if before is not None and in_windows >= before:
            break
        before = in_windows
        middle = (reached >= (reached[-1:] + 1) // 2).argmax(axis=0)
        pivots = module.take_along_axis(medians, module.take_along_axis(order, middle[None], 0), 0)[0]
        below, upto = (_bisected(lines, pivots, low, high, right, module) for right in (False, True))
        told = module.stack([below - low, upto - low])
        group.all_reduce(told)
        is_below, is_found = left < told[0], (left >= told[0]) & (left < told[1])
        found = module.where(open_ & is_found, pivots, found)
        left = module.where(is_below, left, left - told[1])
        low, high = module.where(is_below, low, upto), module.where(is_below, below, high)
        open_ = open_ & ~is_found
    return found


def _at(lines: Any, rows: Any, module: Any) -> Any:
    """Return the elements of these rows; anything where there are none."""
    if not len(lines):
        return module.zeros(rows.shape, lines.dtype)
    return module.ascontiguousarray(module.take_along_axis(lines, module.minimum(rows, len(lines) - 1), 0))


def _bisected(lines: Any, values: Any, low: Any, high: Any, right: bool, module: Any) -> Any:
    """Return for each value the first row of its line, from `low` to `high`, that is not less; `right`: is greater."""
    if lines.shape[1] == 1:
        rows = lines[:, 0].searchsorted(values[:, 0], "right" if right else "left")[:, None]
        return module.minimum(module.maximum(rows, low), high)
    while bool((low < high).any()):
        middle = (low + high) // 2
        row = _at(lines, middle, module)
        passes = ((row <= values) if right else (row < values)) & (low < high)
        low, high = module.where(passes, middle + 1, low), module.where(passes, high, module.minimum(high, middle))
    return low


def narrowed(line: Any, wanted: Any, total: int, group: ProcessGroup, module: Any) -> tuple[Any, Any]:
    """Return the elements that may have the places `wanted`, and the places among them: a sample says which may.

    As in Floyd and Rivest 1975, "Expected time bounds for selection", Communications of the ACM 18: between two
    elements of the sample, before and after each place, there are few of all. All are kept if the sample misleads.
    """
    places = np.unique(wanted[wanted >= 0])
    if total < _LEAST_NARROWED * group.size() or not 0 < len(places) <= _MOST_NARROWED or line.dtype.kind == "c":
        return line, wanted
    sample = line[:: max(1, -(-len(line) // _SAMPLED))]
    given = module.zeros(_SAMPLED, line.dtype)
    given[: len(sample)] = sample
    samples, sizes = module.empty((group.size(), _SAMPLED), line.dtype), module.empty((group.size(), 2), np.int64)
    group.all_gather_into_tensor(samples, given)
    group.all_gather_into_tensor(sizes, module.asarray([[len(sample), len(line)]], dtype=np.int64))
    sizes = sizes.get() if hasattr(sizes, "get") else sizes
    taken = module.concatenate([rows[: int(count)] for rows, count in zip(samples, sizes[:, 0], strict=True)])
    order = taken.argsort()
    stands_for = module.asarray(np.repeat(sizes[:, 1] / np.maximum(sizes[:, 0], 1), sizes[:, 0]))
    at = stands_for[order].cumsum().searchsorted(module.asarray(places, dtype=np.float64))
    margin = 4 * math.isqrt(len(taken)) + 1
    bounds = module.clip(module.stack([at - margin, at + margin]), 0, len(taken) - 1)
    low, high = taken[order[bounds]]
    keeps = module.zeros(len(line), bool)
    for first, last in zip(low, high, strict=True):
        keeps |= (line >= first) & (line <= last)
    kept = line[keeps]
    told = module.stack(
        [module.asarray([(x < first).sum() for first in low]) for x in (line, kept)]
        + [module.asarray([(line <= last).sum() for last in high])]
    )
    group.all_reduce(told)
    below, kept_below, upto = told.get() if hasattr(told, "get") else told
    if not ((below <= places) & (places < upto)).all():
        return line, wanted
    removed = (below - kept_below)[np.searchsorted(places, np.maximum(wanted, places[0]))]
    return kept, np.where(wanted < 0, -1, wanted - removed)
