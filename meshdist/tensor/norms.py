"""Norms of vectors and matrices, as reductions; those of singular values where no axis shards the matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from meshdist.tensor.array_reductions import reduce, reduced_dims, without_dims
from meshdist.tensor.dispatch import implements
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.operands import require, resolved

_OF_SINGULAR_VALUES = (2, -2, "nuc")


@implements(np.linalg.norm)
def norm(x: DTensor, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """Return the norm of vectors or matrices; see `numpy.linalg.norm`."""
    if np.ndim(ord):
        raise TypeError(f"np.linalg.norm: ord must be None, a number or the name of a norm, got {ord!r}")
    x = resolved(x)
    if x.dtype.kind not in "fc":
        x = _map(x, lambda block: block.astype(np.float64))
    if axis is None:
        if ord is None:
            return _euclidean(x, None, keepdims)
        axis = tuple(range(x.ndim))
    elif not isinstance(axis, tuple):
        try:
            axis = (int(axis),)
        except (TypeError, ValueError):
            raise TypeError("'axis' must be None, an integer or a tuple of integers") from None
    if len(axis) == 1:
        return _of_vectors(x, ord, axis, keepdims)
    if len(axis) == 2:
        return _of_matrices(x, ord, axis, keepdims)
    raise ValueError("Improper number of dimensions to norm.")


def _map(x: DTensor, function: Any) -> DTensor:
    return wrap(function(x.to_local()), x.layout, x.mesh)


def _euclidean(x: DTensor, axis: Any, keepdims: bool) -> DTensor:
    squares = _map(x, lambda block: (block.conj() * block).real if block.dtype.kind == "c" else block * block)
    return _map(resolved(reduce(np.add, squares, axis, None, None, keepdims)), np.sqrt)


def _of_vectors(x: DTensor, ord: Any, axis: tuple[int, ...], keepdims: bool) -> DTensor:
    if ord is None or ord == 2:
        return _euclidean(x, axis, keepdims)
    if isinstance(ord, str):
        raise ValueError(f"Invalid norm order '{ord}' for vectors")
    if ord == 0:
        return reduce(np.add, _map(x, lambda b: (b != 0).astype(b.real.dtype)), axis, None, None, keepdims)  # type: ignore[no-any-return]
    absolute = _map(x, np.abs)
    if ord == np.inf:
        return reduce(np.maximum, absolute, axis, None, None, keepdims, initial=0)  # type: ignore[no-any-return]
    if ord == -np.inf:
        return reduce(np.minimum, absolute, axis, None, None, keepdims)  # type: ignore[no-any-return]
    if ord == 1:
        return reduce(np.add, absolute, axis, None, None, keepdims)  # type: ignore[no-any-return]
    powers = _map(absolute, lambda block: (block**ord).astype(block.dtype, copy=False))
    total = resolved(reduce(np.add, powers, axis, None, None, keepdims))
    return _map(total, lambda block: block ** np.reciprocal(ord, dtype=block.dtype))


def _of_matrices(x: DTensor, ord: Any, axis: tuple[int, ...], keepdims: bool) -> DTensor:
    if len({at % x.ndim for at in axis if -x.ndim <= at < x.ndim}) == 1 and all(-x.ndim <= at < x.ndim for at in axis):
        raise ValueError("Duplicate axes given.")
    reduced_dims(x.ndim, axis)
    if ord in (None, "fro", "f"):
        return _euclidean(x, axis, keepdims)
    if ord in _OF_SINGULAR_VALUES:
        function = partial(_local_norm, ord=ord)
        why = f"with ord={ord!r}, the dimensions that it reduces must not be sharded"
        return _on_lines(why, function, x, axis, keepdims)
    if ord not in (1, -1, np.inf, -np.inf):
        raise ValueError("Invalid norm order for matrices.")
    summed = axis[0] if abs(ord) == 1 else axis[1]
    sums = reduce(np.add, _map(x, np.abs), summed, None, None, True)
    if ord > 0:
        return reduce(np.maximum, sums, axis, None, None, keepdims, initial=0)  # type: ignore[no-any-return]
    return reduce(np.minimum, sums, axis, None, None, keepdims)  # type: ignore[no-any-return]


def _local_norm(block: Any, axis: Any, keepdims: bool, ord: Any) -> Any:
    return np.linalg.norm(block, ord, axis, keepdims)


def _on_lines(why: str, function: Callable[..., Any], a: DTensor, axis: Any, keepdims: bool) -> DTensor:
    """Return what `function(block, axis=, keepdims=)` makes of dimensions that no axis shards; errors say `why`."""
    dims = reduced_dims(a.ndim, axis)
    source = a.layout.resolved().uncut(dims)
    block = require("np.linalg.norm", a, source, why)
    return wrap(
        function(block, axis=dims if a.ndim else None, keepdims=keepdims), without_dims(source, dims, keepdims), a.mesh
    )
