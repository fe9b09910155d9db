"""Sets of values: union, intersection and differences, by the sample sort of `unique`, without a gather."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout, Cut, is_whole
from meshdist.tensor.dispatch import implements, refuse
from meshdist.tensor.distinct_values import isin, unique
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.operands import as_operand, local_of, mesh_of, require, resolved
from meshdist.tensor.shaping import ravel


@implements(np.union1d)
def union1d(ar1: Any, ar2: Any) -> DTensor:
    """Return the distinct values of two arrays, sorted; see `numpy.union1d`."""
    arrays = [_flat(array) for array in _operands("np.union1d", ar1, ar2)]
    return cast(DTensor, unique(_pooled("np.union1d", arrays)))


@implements(np.intersect1d)
def intersect1d(ar1: Any, ar2: Any, assume_unique: bool = False, return_indices: bool = False) -> DTensor:
    """Return the values that two arrays have in common, sorted; see `numpy.intersect1d`."""
    if return_indices:
        refuse("np.intersect1d(return_indices=)")
    values, counts = _counted("np.intersect1d", ar1, ar2, assume_unique)
    return cast(DTensor, values[counts > 1])


@implements(np.setxor1d)
def setxor1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> DTensor:
    """Return the values that one of two arrays has, and not the other, sorted; see `numpy.setxor1d`."""
    values, counts = _counted("np.setxor1d", ar1, ar2, assume_unique)
    return cast(DTensor, values[counts == 1])


@implements(np.setdiff1d)
def setdiff1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> DTensor:
    """Return the values of the first array that the second one lacks; see `numpy.setdiff1d`.

    With `assume_unique`, they are in the order of the first array, and the second one has to fit it as in `isin`.
    """
    first, second = _operands("np.setdiff1d", ar1, ar2)
    if assume_unique:
        first = _flat(first)
        return cast(DTensor, first[isin(first, second, invert=True)])
    dtype = first.dtype
    first, second = unique(first), unique(second)
    if second.dtype.kind in "fc":
        second = second[second == second]  # NaN is not equal to itself
    # What the second array has, counts twice or three times.
    pool = _pooled("np.setdiff1d", [first, second, second])
    values, counts = unique(pool, return_counts=True, equal_nan=False)
    left = values[counts == 1]
    return wrap(left.to_local().astype(dtype, copy=False), left.layout, left.mesh)


def _operands(name: str, *arrays: Any) -> list[DTensor]:
    mesh = mesh_of(name, arrays)
    return [resolved(as_operand(name, array, mesh)) for array in arrays]


def _flat(array: DTensor) -> DTensor:
    """Return the elements in one dimension, in any order where they are sharded."""
    if array.ndim == 1:
        return array
    if is_whole(array.layout, None):
        return ravel(array)
    return cast(DTensor, unique(array))


def _counted(name: str, ar1: Any, ar2: Any, assume_unique: bool) -> tuple[DTensor, DTensor]:
    """Return the values of both arrays, sorted, and how many of the arrays have each."""
    arrays = _operands(name, ar1, ar2)
    sets = [_flat(array) if assume_unique else cast(DTensor, unique(array)) for array in arrays]
    values, counts = unique(_pooled(name, sets), return_counts=True, equal_nan=False)
    return values, counts


def _pooled(name: str, arrays: list[DTensor]) -> DTensor:
    """Return the elements of vectors as one, each on the rank that has it: in an order that differs from NumPy's.

    Those that are not sharded are, as the first that is.
    """
    mesh = arrays[0].mesh
    module = array_module(mesh)
    cut = next((array.layout.cuts[0] for array in arrays if array.layout.cuts[0] is not None), None)
    if cut is None:
        block = module.concatenate([array.to_local() for array in arrays])
        return wrap(block, ArrayLayout.of_cuts(block.shape, mesh.shape, (None,), {}), mesh)
    blocks, sizes = [], np.zeros(len(cut.sizes), np.int64)
    for number, array in enumerate(arrays):
        own = array.layout.cuts[0]
        if own is not None and own.axes == cut.axes:
            blocks.append(array.to_local())
        else:
            rows, parts = array.shape[0], len(cut.sizes)
            own = Cut(cut.axes, tuple((rows * (at + 1)) // parts - rows * at // parts for at in range(parts)))
            target = array.layout.with_cuts((own,))
            if array.layout.cuts[0] is None:
                blocks.append(local_of(array, target, mesh))
            else:
                first = arrays[0].layout.describe(mesh.mesh_dim_names)
                why = f"the arrays must be sharded along the same axes, and ar1 is {first}"
                blocks.append(require(name, array, target, why, f"ar{min(number, 1) + 1}"))
        sizes += own.sizes
    layout = ArrayLayout.of_cuts((int(sizes.sum()),), mesh.shape, (Cut(cut.axes, tuple(map(int, sizes))),), {})
    block = module.concatenate(blocks)
    assert block.shape == layout.local_shape(coordinate_in(mesh)), "the blocks are those of the cut"
    return wrap(block, layout, mesh)
