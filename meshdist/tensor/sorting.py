"""sort, argsort, unique and searchsorted: local along what is not cut, by sample sort along what is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np

from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.all_to_all_single import all_to_all_single
from meshdist.groups.process_group import ProcessGroup
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor.array_layout import ArrayLayout, Cut, is_cut, pencil
from meshdist.tensor.dispatch import implements, refuse
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


@lru_cache(maxsize=16)  # arrays of ranks * ranks entries
def _samples(sizes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Return for the samples of all blocks the block, the position in it, and the rows that it stands for.

    Each block of a group of p gives as many as p samples, at regular distances.
    """
    parts = len(sizes)
    counts = np.minimum(sizes, parts)
    blocks = np.repeat(np.arange(parts), counts)
    numbers = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows, of = np.asarray(sizes)[blocks], counts[blocks]
    return blocks, numbers * rows // np.maximum(of, 1), rows / np.maximum(of, 1)


def sample_sort(
    values: Any, sizes: tuple[int, ...], group: ProcessGroup, mesh: DeviceMesh, with_places: bool
) -> Sorted:
    """Return this rank's block of the sorted array; stable, and in blocks of the same `sizes`.

    Parallel sorting by regular sampling (Shi and Schaeffer 1992, Journal of Parallel and Distributed Computing 14):
    every rank sorts its block, all see regular samples of all blocks and choose the same pivots among them, and each
    rank gets what lies between two pivots. Pivots are told from equal values by block and position, so that many equal
    values spread over the ranks too. Then the rows in excess go to the ranks that have too few.
    """
    module, rank, parts = array_module(mesh), group.rank(), len(sizes)
    starts = np.array([0, *accumulate(sizes)])
    order = values.argsort(kind="stable") if with_places else None
    values = np.sort(values) if order is None else values[order]
    places = None if order is None else order + starts[rank]
    if not starts[-1]:
        return Sorted(values, places)

    blocks, positions, weights = _samples(sizes)
    mine = values[module.asarray(positions[blocks == rank])]
    given = module.zeros(parts, values.dtype)
    given[: len(mine)] = mine
    taken = _gathered(given, group).reshape(parts, parts)
    samples = taken[np.arange(parts) < np.minimum(sizes, parts)[:, None]]
    by_value = samples.argsort(kind="stable")  # equal ones by block and position, since they come in that order
    reached = np.cumsum(weights[by_value])
    # A block begins before the first sample up to which there are as many rows as before the block.
    chosen = by_value[np.minimum(np.searchsorted(reached, starts[1:-1], "left"), len(by_value) - 1)]

    pivots = module.asarray(samples[chosen])
    left, right = (_host(values.searchsorted(pivots, side)) for side in ("left", "right"))
    ends = np.where(rank < blocks[chosen], right, np.where(rank > blocks[chosen], left, positions[chosen]))
    to = np.diff([0, *ends, len(values)]).astype(np.int64)
    come = module.empty(parts, np.int64)
    all_to_all_single(come, module.asarray(to), group=group)
    values, places = (_sent(rows, _host(come), to, group) for rows in (values, places))
    order = values.argsort(kind="stable")  # of runs that are sorted already
    values, places = values[order], None if places is None else places[order]

    now = np.array([0, *np.cumsum(_gathered(module.asarray([len(values)]), group))])
    if (now == starts).all():
        return Sorted(values, places)
    to, come = _overlaps(now[rank : rank + 2], starts), _overlaps(starts[rank : rank + 2], now)
    return Sorted(*(_sent(rows, come, to, group) for rows in (values, places)))


def _gathered(rows: Any, group: ProcessGroup) -> Any:
    """Return the rows of all ranks, as many of each, as an array of NumPy."""
    taken = type(rows)((group.size() * len(rows), *rows.shape[1:]), rows.dtype)
    all_gather_into_tensor(taken, rows, group)
    return _host(taken)


def _overlaps(held: Any, starts: Any) -> Any:
    """Return how many of the rows `held` lie in each of the blocks that begin at `starts`."""
    return np.maximum(np.minimum(held[1], starts[1:]) - np.maximum(held[0], starts[:-1]), 0)


def _sent(rows: Any, come: Any, to: Any, group: ProcessGroup) -> Any:
    """Return what the ranks send to this one, one after the other."""
    if rows is None:
        return None
    taken = type(rows)((int(come.sum()), *rows.shape[1:]), rows.dtype)
    all_to_all_single(taken, rows, come.tolist(), to.tolist(), group)
    return taken


def _host(array: Any) -> Any:
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
    made = _local_sorted(name, a, axis, {"kind": "stable" if name == "argsort" else kind})
    if made is not None:
        return made
    cut, layout = a.layout.cuts[0], a.layout.resolved()
    assert cut is not None
    local = local_of(a, layout, a.mesh)
    found = sample_sort(local, cut.sizes, group_of(a.mesh, cut.axes), a.mesh, name == "argsort")
    return wrap(found.places if name == "argsort" else found.values, layout, a.mesh)


@implements(np.sort)
def sort(a: DTensor, axis: Any = -1, kind: Any = None, order: Any = None, *, stable: bool | None = None) -> DTensor:
    """Sort along a dimension; what is cut keeps its blocks' sizes."""
    return _sorted("sort", a, axis, kind, order, stable)


@implements(np.argsort)
def argsort(a: DTensor, axis: Any = -1, kind: Any = None, order: Any = None, *, stable: bool | None = None) -> DTensor:
    """Return the indices that sort along a dimension: those of a stable sort, whatever `kind` says."""
    return _sorted("argsort", a, axis, kind, order, stable)


@implements(np.unique)
def unique(
    ar: DTensor,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
    sorted: bool = True,
) -> Any:
    """Return the distinct values, sorted; of an array that is cut, in as many blocks, of sizes as they come."""
    layout, mesh = ar.layout.resolved(), ar.mesh
    local = local_of(ar, layout, mesh)
    if not any(is_cut(layout, dim) for dim in range(layout.ndim)):
        options: dict[str, Any] = {
            "return_index": return_index,
            "return_inverse": return_inverse,
            "return_counts": return_counts,
        }
        found = cast(Any, np.unique)(local, axis=axis, equal_nan=equal_nan, **options)
        blocks = found if isinstance(found, tuple) else (found,)
        wrapped = [
            wrap(block, ArrayLayout.of_cuts(block.shape, mesh.shape, (None,) * block.ndim, {}), mesh)
            for block in blocks
        ]
        return tuple(wrapped) if isinstance(found, tuple) else wrapped[0]
    if axis is not None and ar.ndim == 1:
        normalized(axis, 1)
        axis = None
    if return_inverse or axis is not None or (return_index and ar.ndim != 1):
        refuse(
            f"np.unique({'return_inverse' if return_inverse else 'axis' if axis is not None else 'return_index'}=)"
            f" of cut arrays"
        )
    axes, sizes = _all_cuts(layout)
    group = group_of(mesh, axes)
    values, places = sample_sort(local.reshape(-1), sizes, group, mesh, return_index)
    starts = np.array([0, *accumulate(sizes)])
    keeps = _is_first(values, sizes, group, equal_nan)
    first = np.flatnonzero(_host(keeps)) + starts[group.rank()]
    told = _gathered(array_module(mesh).asarray([[len(first), first[0] if len(first) else starts[-1]]]), group)
    result = ArrayLayout.of_cuts((int(told[:, 0].sum()),), mesh.shape, (Cut(axes, tuple(map(int, told[:, 0]))),), {})
    results = [values[keeps]]
    if return_index:
        results.append(places[keeps])
    if return_counts:
        end = told[group.rank() + 1 :, 1].min(initial=starts[-1])
        results.append(array_module(mesh).asarray(np.diff([*first, end]).astype(np.intp)[: len(first)]))
    wrapped = [wrap(block, result, mesh) for block in results]
    return tuple(wrapped) if len(wrapped) > 1 else wrapped[0]


@lru_cache(maxsize=1_000)
def _all_cuts(layout: ArrayLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes that cut any dimension, and the elements of the blocks by coordinates along them."""
    axes = tuple(sorted(axis for dim in range(layout.ndim) for axis in layout.axes_of(dim)))
    sizes = []
    for at in np.ndindex(*(layout.mesh_shape[axis] for axis in axes)):
        coordinate = [0] * len(layout.mesh_shape)
        for axis, place in zip(axes, at, strict=True):
            coordinate[axis] = place
        sizes.append(int(np.prod(layout.local_shape(coordinate), dtype=np.int64)))
    return axes, tuple(sizes)


def _is_first(values: Any, sizes: Sequence[int], group: ProcessGroup, equal_nan: bool) -> Any:
    """Return for each sorted value of this rank whether the one before it, here or on the ranks before, is another."""
    rank = group.rank()
    last = type(values)((1,), values.dtype)
    last[:] = values[-1:] if len(values) else 0
    lasts = _gathered(last, group)
    before = [at for at in range(rank) if sizes[at]][-1:]
    if not len(values):
        return values.astype(bool)
    keeps = values == values
    keeps[1:] = values[1:] != values[:-1]
    keeps[0] = not before or bool(values[0] != lasts[before[0]])
    if equal_nan and values.dtype.kind in "fc":
        nan = np.isnan(values)
        keeps[1:] &= ~(nan[1:] & nan[:-1])
        keeps[0] &= not before or not (bool(nan[0]) and bool(np.isnan(lasts[before[0]])))
    return keeps


@implements(np.searchsorted)
def searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> DTensor:
    """Search in the blocks: where the sorted array is cut, the result is a pending sum of what each block counts."""
    if np.ndim(a) != 1:
        raise ValueError("np.searchsorted: a must have one dimension")
    if side not in ("left", "right"):
        raise ValueError(f"search side must be 'left' or 'right' (got {side!r})")
    if sorter is not None:
        a = np.take(a, sorter)
    a, v = (x if isinstance(x, DTensor) else np.asarray(x) for x in (a, v))
    labels = tuple(range(np.ndim(v)))
    (block, wanted), alignment, mesh = aligned("np.searchsorted", (a, v), (("sorted",), labels))
    cut = alignment.cuts.get("sorted")
    pending = {} if cut is None else dict.fromkeys(cut.axes, "sum")
    layout = ArrayLayout.of_cuts(np.shape(v), mesh.shape, alignment.cuts_of(labels), pending)
    return wrap(block.searchsorted(wanted, side), layout, mesh)
