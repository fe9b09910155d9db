"""sort, argsort and searchsorted: local along what is not sharded, by sample sort along what is."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np

from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.all_to_all_single import all_to_all_single
from meshdist.groups.process_group import ProcessGroup
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor.agreement import origin_of, words_of
from meshdist.tensor.array_layout import ArrayLayout, is_cut, pencil
from meshdist.tensor.dispatch import implements
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.index_keys import normalized
from meshdist.tensor.moves import group_of, move
from meshdist.tensor.operands import aligned, local_of

# ---- Sample sort


class Sorted(NamedTuple):
    """A rank's block of a sorted array: its values, and where in the whole array each was, if asked for."""

    values: Any
    places: Any


# All ranks see the samples of all blocks: more of each would take memory that grows with the square of the ranks.
MOST_SAMPLES = 512
_GOLDEN = (5**0.5 - 1) / 2


@lru_cache(maxsize=16)  # arrays of ranks * samples entries
def samples_of_blocks(sizes: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
    """Return for the samples of all blocks the block, the position in it, and the rows that it stands for.

    And how many samples each block gives: as many as there are blocks, at regular distances. Of more than 512 blocks,
    each gives 512, and they begin elsewhere in each block: those of equal blocks lie between each other.
    """
    parts = len(sizes)
    counts = np.minimum(sizes, min(parts, MOST_SAMPLES))
    blocks = np.repeat(np.arange(parts), counts)
    numbers = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows, of = np.asarray(sizes)[blocks], np.maximum(counts[blocks], 1)
    if parts <= MOST_SAMPLES:
        positions = numbers * rows // of
    else:
        positions = ((numbers + blocks * _GOLDEN % 1) * rows / of).astype(np.int64)
    return blocks, np.minimum(positions, rows - 1), rows / of, counts


def sample_sort(
    values: Any, sizes: tuple[int, ...], group: ProcessGroup, mesh: DeviceMesh, with_places: bool, words: str
) -> Sorted:
    """Return this rank's block of the sorted array; stable, and in blocks of the same `sizes`.

    Parallel sorting by regular sampling (Shi and Schaeffer 1992, Journal of Parallel and Distributed Computing 14):
    every rank sorts its block, all see regular samples of all blocks and choose the same pivots among them, and each
    rank gets what lies between two pivots. Pivots are told from equal values by block and position, so that many equal
    values spread over the ranks too. Then the rows in excess go to the ranks that have too few.

    The ranks compare `words`, which tell the operation and the layout of its array.
    """
    module, rank, parts = array_module(mesh), group.rank(), len(sizes)
    starts = np.array([0, *accumulate(sizes)])
    order = values.argsort(kind="stable") if with_places else None
    values = np.sort(values) if order is None else values[order]
    places = None if order is None else order + starts[rank]
    if not starts[-1]:
        return Sorted(values, places)

    blocks, positions, weights, counts = samples_of_blocks(sizes)
    mine = values[module.asarray(positions[blocks == rank])]
    most = int(counts.max())
    given = module.zeros(most, values.dtype)
    given[: len(mine)] = mine
    with group.hooks.comparing(words):
        taken = gathered_rows(given, group).reshape(parts, most)
    samples = taken[np.arange(most) < counts[:, None]]
    by_value = samples.argsort(kind="stable")  # equal ones by block and position, since they come in that order
    reached = np.cumsum(weights[by_value])
    # A block begins before the first sample up to which there are as many rows as before the block.
    chosen = by_value[np.minimum(np.searchsorted(reached, starts[1:-1], "left"), len(by_value) - 1)]

    pivots = module.asarray(samples[chosen])
    left, right = (on_host(values.searchsorted(pivots, side)) for side in ("left", "right"))
    ends = np.where(rank < blocks[chosen], right, np.where(rank > blocks[chosen], left, positions[chosen]))
    to = np.diff([0, *ends, len(values)]).astype(np.int64)
    come = module.empty(parts, np.int64)
    all_to_all_single(come, module.asarray(to), group=group)
    values, places = (sent_rows(rows, on_host(come), to, group) for rows in (values, places))
    order = values.argsort(kind="stable")  # of runs that are sorted already
    values, places = values[order], None if places is None else places[order]

    now = np.array([0, *np.cumsum(gathered_rows(module.asarray([len(values)]), group))])
    if (now == starts).all():
        return Sorted(values, places)
    if now[-1] != starts[-1]:  # a dry run, whose peers have sent nothing of their own
        return Sorted(*(None if x is None else module.resize(x, sizes[rank]) for x in (values, places)))
    to, come = _overlaps(now[rank : rank + 2], starts), _overlaps(starts[rank : rank + 2], now)
    return Sorted(*(sent_rows(rows, come, to, group) for rows in (values, places)))


def gathered_rows(rows: Any, group: ProcessGroup) -> Any:
    """Return the rows of all ranks, as many of each, as an array of NumPy."""
    taken = type(rows)((group.size() * len(rows), *rows.shape[1:]), rows.dtype)
    all_gather_into_tensor(taken, rows, group)
    return on_host(taken)


def _overlaps(held: Any, starts: Any) -> Any:
    """Return how many of the rows `held` lie in each of the blocks that begin at `starts`."""
    return np.maximum(np.minimum(held[1], starts[1:]) - np.maximum(held[0], starts[:-1]), 0)


def sent_rows(rows: Any, come: Any, to: Any, group: ProcessGroup) -> Any:
    """Return what the ranks send to this one, one after the other."""
    if rows is None:
        return None
    taken = type(rows)((int(come.sum()), *rows.shape[1:]), rows.dtype)
    all_to_all_single(taken, rows, come.tolist(), to.tolist(), group)
    return taken


def on_host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


# ---- NumPy's functions


def _local_sorted(name: str, a: DTensor, axis: Any, options: dict[str, Any]) -> DTensor | None:
    """Sort along a dimension that is whole on each rank, or by a pencil; None: that takes a sample sort."""
    function = getattr(np, name)
    dim = normalized(axis, a.ndim)
    layout = a.layout.resolved()
    before = layout
    if is_cut(layout, dim):
        found = pencil(layout, dim)
        if found is None:
            return None
        before = found
    result = function(local_of(a, before, a.mesh), axis=dim, **options)
    return wrap(result if before is layout else move(result, before, layout, a.mesh), layout, a.mesh)


def _sorted(name: str, a: DTensor, axis: Any, kind: Any, order: Any, stable: bool | None) -> DTensor:
    if order is not None:
        raise ValueError("Cannot specify order when the array has no fields.")
    if kind is not None and stable is not None:
        raise ValueError("`kind` and keyword parameters can't be provided at the same time. Use only one of them.")
    np.sort(np.empty(0), kind=kind)  # an unknown kind is NumPy's error
    if axis is None:
        a, axis = a if a.ndim == 1 else cast(DTensor, np.ravel(cast(Any, a))), 0
    if a.ndim == 0 and name == "argsort":  # which NumPy takes as an array of one row
        a = cast(DTensor, np.ravel(cast(Any, a)))
    made = _local_sorted(name, a, axis, {"kind": "stable" if name == "argsort" else kind})
    if made is not None:
        return made
    cut, layout = a.layout.cuts[0], a.layout.resolved()
    assert cut is not None
    local = local_of(a, layout, a.mesh)
    words = words_of(f"np.{name}", layout)
    found = sample_sort(local, cut.sizes, group_of(a.mesh, cut.axes), a.mesh, name == "argsort", words)
    return wrap(found.places if name == "argsort" else found.values, layout, a.mesh)


@implements(np.sort)
def sort(a: DTensor, axis: Any = -1, kind: Any = None, order: Any = None, *, stable: bool | None = None) -> DTensor:
    """Sort along a dimension; what is sharded keeps its blocks' sizes."""
    return _sorted("sort", a, axis, kind, order, stable)


@implements(np.argsort)
def argsort(a: DTensor, axis: Any = -1, kind: Any = None, order: Any = None, *, stable: bool | None = None) -> DTensor:
    """Return the indices that sort along a dimension: those of a stable sort, whatever `kind` says."""
    return _sorted("argsort", a, axis, kind, order, stable)


@implements(np.searchsorted)
def searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> DTensor:
    """Search in the blocks: where the sorted array is sharded, the result is a pending sum of each block's counts."""
    if np.ndim(a) != 1:
        raise ValueError("np.searchsorted: a must have one dimension")
    if side not in ("left", "right"):
        raise ValueError(f"search side must be 'left' or 'right' (got {side!r})")
    if sorter is not None:
        try:
            a = np.take(a, sorter)
        except IndexError:
            raise ValueError("Sorter index out of range.") from None
    a, v = (x if isinstance(x, DTensor) else np.asarray(x) for x in (a, v))
    labels = tuple(range(np.ndim(v)))
    (block, wanted), alignment, mesh = aligned("np.searchsorted", (a, v), (("sorted",), labels), what=("a", "v"))
    cut = alignment.cuts.get("sorted")
    pending = {} if cut is None else dict.fromkeys(cut.axes, "sum")
    layout = ArrayLayout.of_cuts(np.shape(v), mesh.shape, alignment.cuts_of(labels), pending)
    origin = None if cut is None else origin_of(*alignment.targets)
    return wrap(block.searchsorted(wanted, side), layout, mesh, origin)
