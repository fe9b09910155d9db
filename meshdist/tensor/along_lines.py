"""Functions along one dimension that is whole on every rank: any of the user's, and the cross product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dispatch import implements
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.index_keys import along, normalized
from meshdist.tensor.operands import as_operand, mesh_of, require


@implements(np.apply_along_axis)
def apply_along_axis(func1d: Callable[..., Any], axis: int, arr: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """Call a function on every line along a dimension, which must not be cut; see `numpy.apply_along_axis`.

    The results have the dimensions that the function returns in place of this one; the others stay cut as they are.
    """
    if not isinstance(arr, DTensor):
        raise TypeError("np.apply_along_axis: the array must be a DTensor where a further argument is one")
    dim = normalized(axis, arr.ndim)
    if 0 in (*arr.shape[:dim], *arr.shape[dim + 1 :]):
        raise ValueError("Cannot apply_along_axis when any iteration dimensions are 0")
    layout = arr.layout.resolved().uncut((dim,))
    block = require("np.apply_along_axis", arr, layout, "the function needs whole lines")
    # A rank without lines calls the function once, for the shape and the dtype of what it returns.
    lines = block
    if 0 in (*block.shape[:dim], *block.shape[dim + 1 :]):
        lines = array_module(arr.mesh).ones([arr.shape[dim] if at == dim else 1 for at in range(arr.ndim)], arr.dtype)
    made = array_module(arr.mesh).apply_along_axis(func1d, dim, lines, *args, **kwargs)
    inner = made.shape[dim : made.ndim - (arr.ndim - dim - 1)]
    shape = (*arr.shape[:dim], *inner, *arr.shape[dim + 1 :])
    cuts = (*layout.cuts[:dim], *[None] * len(inner), *layout.cuts[dim + 1 :])
    result = ArrayLayout.of_cuts(shape, layout.mesh_shape, cuts, {})
    return wrap(made[tuple(map(slice, result.local_shape(coordinate_in(arr.mesh))))], result, arr.mesh)


@implements(np.cross)
def cross(a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> DTensor:
    """Return the cross products of vectors with three components, which are not cut; see `numpy.cross`."""
    if axis is not None:
        axisa = axisb = axisc = axis
    mesh = mesh_of("np.cross", (a, b))
    a, b = as_operand("np.cross", a, mesh), as_operand("np.cross", b, mesh)
    first, second = normalized(axisa, a.ndim), normalized(axisb, b.ndim)
    if a.shape[first] != 3 or b.shape[second] != 3:
        raise ValueError(
            f"np.cross: vectors of DTensors must have 3 components, got {a.shape[first]} and {b.shape[second]}"
        )
    x, y = ([array[along(dim, at)] for at in range(3)] for array, dim in ((a, first), (b, second)))
    parts = [x[i] * y[j] - x[j] * y[i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return np.stack(parts, axisc)  # type: ignore[return-value]
