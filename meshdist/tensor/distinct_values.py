"""Distinct values and membership: unique by sample sort, isin on the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import numpy as np

from meshdist.collectives.all_to_all_single import all_to_all_single
from meshdist.groups.process_group import ProcessGroup
from meshdist.tensor.agreement import origin_of, words_of
from meshdist.tensor.array_layout import ArrayLayout, Cut, is_cut
from meshdist.tensor.dispatch import implements
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.index_keys import normalized
from meshdist.tensor.moves import group_of
from meshdist.tensor.operands import aligned, local_of, require
from meshdist.tensor.sorting import gathered_rows, on_host, sample_sort, sent_rows


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
    """Return the distinct values, sorted; of an array that is sharded, in as many blocks, of sizes as they come.

    The inverse is placed as the array is. Of NaN that count as different (`equal_nan=False`) it is any order, as
    NumPy's.
    """
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
    if axis is not None or (return_index and ar.ndim != 1):
        whole = layout.with_cuts((None,) * layout.ndim)
        why = f"unique({'axis' if axis is not None else 'return_index'}=) compares what is on one rank"
        every = wrap(require("np.unique", ar, whole, why), whole, mesh)
        return unique(every, return_index, return_inverse, return_counts, axis, equal_nan=equal_nan)
    axes, sizes = _all_cuts(layout)
    group = group_of(mesh, axes)
    words = words_of("np.unique", layout)
    values, places = sample_sort(local.reshape(-1), sizes, group, mesh, return_index or return_inverse, words)
    starts = np.array([0, *accumulate(sizes)])
    keeps = _is_first(values, sizes, group, equal_nan)
    first = np.flatnonzero(on_host(keeps)) + starts[group.rank()]
    told = gathered_rows(array_module(mesh).asarray([[len(first), first[0] if len(first) else starts[-1]]]), group)
    result = ArrayLayout.of_cuts((int(told[:, 0].sum()),), mesh.shape, (Cut(axes, tuple(map(int, told[:, 0]))),), {})
    results = [values[keeps]]
    if return_index:
        results.append(places[keeps])
    inverse = None
    if return_inverse:
        numbers = np.cumsum(on_host(keeps)) + int(told[: group.rank(), 0].sum()) - 1
        inverse = _by_place(array_module(mesh).asarray(numbers), places, sizes, group, array_module(mesh)).reshape(
            local.shape
        )
    if return_counts:
        end = told[group.rank() + 1 :, 1].min(initial=starts[-1])
        results.append(array_module(mesh).asarray(np.diff([*first, end]).astype(np.intp)[: len(first)]))
    wrapped = [wrap(block, result, mesh) for block in results]
    if inverse is not None:
        flat = cast(Any, np.unique)(np.zeros((1,) * ar.ndim), return_inverse=True)[1].ndim != ar.ndim  # before NumPy 2
        of_all = wrap(inverse, layout, mesh)
        wrapped.insert(1 + return_index, cast(DTensor, np.ravel(cast(Any, of_all))) if flat else of_all)
    return tuple(wrapped) if len(wrapped) > 1 else wrapped[0]


def _by_place(values: Any, places: Any, sizes: tuple[int, ...], group: ProcessGroup, module: Any) -> Any:
    """Return the values that belong to this rank's places, of `values` at any places of the whole: an all_to_all."""
    starts = np.array([0, *accumulate(sizes)])
    order = places.argsort()
    held = on_host(places[order])
    to = np.diff(np.searchsorted(held, starts)).astype(np.int64)
    come = type(values)((len(sizes),), np.int64)
    all_to_all_single(come, module.asarray(to), group=group)
    rows = [sent_rows(given[order], on_host(come), to, group) for given in (values, places)]
    made = type(values)((sizes[group.rank()],), values.dtype)
    made[rows[1] - starts[group.rank()]] = rows[0]
    return made


@lru_cache(maxsize=1_000)
def _all_cuts(layout: ArrayLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes that shard any dimension, and the elements of the blocks by coordinates along them."""
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
    lasts = gathered_rows(last, group)
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


if hasattr(np, "unique_values"):
    _results: Any = [
        type(np.unique_counts(np.zeros(1))),
        type(np.unique_inverse(np.zeros(1))),
        type(np.unique_all(np.zeros(1))),
    ]

    @implements(np.unique_values)
    def unique_values(x: DTensor) -> DTensor:
        """Return the distinct values; see `numpy.unique_values`."""
        return cast(DTensor, unique(x, equal_nan=False))

    @implements(np.unique_counts)
    def unique_counts(x: DTensor) -> Any:
        """Return the distinct values and their counts; see `numpy.unique_counts`."""
        return _results[0](*unique(x, return_counts=True, equal_nan=False))

    @implements(np.unique_inverse)
    def unique_inverse(x: DTensor) -> Any:
        """Return the distinct values and which of them each element is; see `numpy.unique_inverse`."""
        return _results[1](*unique(x, return_inverse=True, equal_nan=False))

    @implements(np.unique_all)
    def unique_all(x: DTensor) -> Any:
        """Return the distinct values, their first places, which each element is, and counts; see `numpy.unique_all`."""
        return _results[2](*unique(x, return_index=True, return_inverse=True, return_counts=True, equal_nan=False))


@implements(np.isin)
def isin(
    element: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False, *, kind: Any = None
) -> DTensor:
    """Return which elements are among others; see `numpy.isin`.

    Where the others are sharded, each rank compares with its block of them: the result is a pending maximum.
    """
    del assume_unique
    element, tested = (x if hasattr(x, "ndim") else np.asarray(x) for x in (element, test_elements))
    labels = tuple(range(element.ndim)), tuple(("tested", dim) for dim in range(tested.ndim))
    (block, others), alignment, mesh = aligned("np.isin", (element, tested), labels, what=("element", "test_elements"))
    axes = [axis for label in labels[1] if label in alignment.cuts for axis in alignment.cuts[label].axes]
    pending = dict.fromkeys(axes, "min" if invert else "max")
    layout = ArrayLayout.of_cuts(element.shape, mesh.shape, alignment.cuts_of(labels[0]), pending)
    module = array_module(mesh)
    block, others = module.asarray(block), module.asarray(others)
    origin = origin_of(*alignment.targets) if pending else None
    return wrap(module.isin(block, others, invert=invert, **({"kind": kind} if kind else {})), layout, mesh, origin)
