"""Where arrays are not zero, and the elements at places that a mask says; the results have blocks as they come."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from meshdist.tensor.array_reductions import reduced_dims
from meshdist.tensor.dispatch import implements
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.operands import as_operand, mesh_of, resolved


def _rows(a: DTensor, dim: int) -> DTensor:
    """Return for each element its row of dimension `dim`; it takes no memory but that of one line."""
    module, layout = array_module(a.mesh), a.layout.resolved()
    held = layout.index(coordinate_in(a.mesh))[dim]
    line = module.arange(held.start, held.stop).reshape([-1 if at == dim else 1 for at in range(a.ndim)])
    return wrap(module.broadcast_to(line, a.to_local().shape), layout, a.mesh)


@implements(np.nonzero)
def nonzero(a: DTensor) -> tuple[DTensor, ...]:
    """Return the indices of the elements that are not zero, an array for each dimension; see `numpy.nonzero`."""
    if not a.ndim:
        raise ValueError("Calling nonzero on 0d arrays is not allowed. Use np.atleast_1d(scalar).nonzero() instead.")
    mask = resolved(cast(DTensor, np.not_equal(cast(Any, a), 0)))
    return tuple(_rows(a, dim)[mask] for dim in range(a.ndim))


@implements(np.flatnonzero)
def flatnonzero(a: DTensor) -> DTensor:
    """Return the indices of the elements that are not zero in the flat array; see `numpy.flatnonzero`."""
    return nonzero(cast(DTensor, np.ravel(cast(Any, a))))[0]


@implements(np.argwhere)
def argwhere(a: DTensor) -> DTensor:
    """Return the indices of the elements that are not zero, a row for each; see `numpy.argwhere`."""
    if not a.ndim:  # as many rows as there are such elements, without a column
        return cast(DTensor, argwhere(cast(DTensor, np.atleast_1d(cast(Any, a))))[:, :0])
    return cast(DTensor, np.stack(cast(Any, nonzero(a)), axis=1))


@implements(np.extract)
def extract(condition: Any, arr: Any) -> DTensor:
    """Return the elements where a condition is true; see `numpy.extract`."""
    mesh = mesh_of("np.extract", (condition, arr))
    mask, array = (as_operand("np.extract", x, mesh) for x in (condition, arr))
    if mask.shape != array.shape:
        raise IndexError(f"np.extract: the condition must have the shape {array.shape} of the array, got {mask.shape}")
    return cast(DTensor, array[cast(Any, mask) != 0] if array.ndim else np.ravel(cast(Any, array))[np.ravel(mask) != 0])


@implements(np.compress)
def compress(condition: Any, a: DTensor, axis: int | None = None) -> DTensor:
    """Return the rows where a condition is true, which may be shorter than the dimension; see `numpy.compress`."""
    if axis is None or not a.ndim:
        a, axis = cast(DTensor, np.ravel(cast(Any, a))), axis or 0
    (dim,) = reduced_dims(a.ndim, axis)
    if np.ndim(condition) != 1:
        raise ValueError("condition must be a 1-d array")
    if isinstance(condition, DTensor):
        condition = condition.full()
    return cast(DTensor, np.take(cast(Any, a), np.flatnonzero(condition), dim))
