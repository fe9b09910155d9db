"""numpy.fft on DTensors: local along unsharded dimensions, by transposed pencils along sharded ones.

A Fourier transform along a sharded dimension shards another dimension instead by an all_to_all, transforms whole rows,
and redistributes back: the result has the placements of the array, with equal chunks where a dimension changes its
length. The second move is saved by `y = np.fft.fft(x.redistribute(...), axis=...)` with placements that leave the axis
whole: the result stays where it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout, is_cut, pencil
from meshdist.tensor.dispatch import implements
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.index_keys import normalized
from meshdist.tensor.joining import roll
from meshdist.tensor.moves import move
from meshdist.tensor.operands import require
from meshdist.tensor.placements import Shard

_NORMS = (None, "backward", "ortho", "forward")


class Step(NamedTuple):
    """A transform of one dimension.

    Attributes:
        transform: The function of `numpy.fft`, for one dimension.
        n: Its argument: the rows of the signal.
        dim: The dimension.
        before: The layout in which the array must be.
        after: The layout of the result.
    """

    transform: Callable[..., Any]
    n: int
    dim: int
    before: ArrayLayout
    after: ArrayLayout


class Plan(NamedTuple):
    """The steps, and the layout of the result."""

    steps: tuple[Step, ...]
    result: ArrayLayout


@lru_cache(maxsize=1_000)
def plan_of(layout: ArrayLayout, transforms: tuple[tuple[Any, int, int, int], ...]) -> Plan | None:
    """Return how to take `transforms`, each (function, n, dim, rows of the result), in any order but the marked ones.

    None: a dimension has to be whole, and no other dimension can be sharded instead.
    """
    result = now = layout
    steps = []
    for at, (function, n, dim, rows) in enumerate(transforms):
        before: ArrayLayout | None = now
        if is_cut(now, dim):
            before = pencil(now, dim, frozenset(later for _, _, later, _ in transforms[at + 1 :]))
        if before is None:
            return None
        now = resized(before, dim, rows)
        result = resized(result, dim, rows)
        steps.append(Step(function, n, dim, before, now))
    return Plan(tuple(steps), result)


def _transformed(name: str, a: Any, transforms: Sequence[tuple[Any, int, int, int]], norm: Any) -> DTensor:
    if norm not in _NORMS:
        raise ValueError(f'Invalid norm value {norm}; should be "backward", "ortho" or "forward".')
    for _, n, _, _ in transforms:
        if n < 1:
            raise ValueError(f"Invalid number of FFT data points ({n}) specified.")
    if a.dtype.kind == "c" and any(function is np.fft.rfft for function, *_ in transforms):
        raise TypeError(f"{name}: the array must be real, got dtype {a.dtype}")
    local, layout = a.to_local(), a.layout
    is_linear = a.dtype.kind in "fc" and set(layout.pending.values()) <= {"sum", "avg"}
    if layout.pending and not is_linear:
        resolved = layout.resolved()
        local, layout = a._moved(resolved), resolved
    origin = a._origin if layout.pending else None
    plan = plan_of(layout, tuple(transforms))
    if plan is None:  # one dimension, and it is cut
        whole = layout.with_cuts([None] * layout.ndim)
        why = f"dimension {transforms[0][2]} must not be sharded, since the array has no other dimension to shard"
        local = require(name, wrap(local, layout, a.mesh, origin), whole, why)
        plan = plan_of(whole, tuple(transforms))
        assert plan is not None
        layout = whole
    for step in plan.steps:
        if step.before is not layout:
            local = move(local, layout, step.before, a.mesh, origin)
        local, layout = step.transform(local, step.n, step.dim, norm), step.after
    return wrap(move(local, layout, plan.result, a.mesh, origin), plan.result, a.mesh, origin)


def _rows(function: Any, n: int) -> int:
    return n // 2 + 1 if function is np.fft.rfft else n


def _along_one(function: Any) -> None:
    name = f"np.fft.{function.__name__}"

    def transform(a: DTensor, n: int | None = None, axis: int = -1, norm: str | None = None) -> DTensor:
        dim = normalized(axis, a.ndim)
        if n is None:
            n = 2 * (a.shape[dim] - 1) if function is np.fft.irfft else a.shape[dim]
        n = operator.index(n)
        return _transformed(name, a, [(function, n, dim, _rows(function, n))], norm)

    implements(function)(transform)


def _along_several(function: Any, one: Any, special: Any, default_axes: Any) -> None:
    """Register a transform of several dimensions: of the last one by `special`, of the others by `one`."""
    name = f"np.fft.{function.__name__}"
    is_inverse_real = special is np.fft.irfft

    def transform(a: DTensor, s: Any = None, axes: Any = default_axes, norm: str | None = None) -> DTensor:
        if axes is None:
            axes = tuple(range(-(a.ndim if s is None else len(s)), 0))
        dims = [normalized(axis, a.ndim) for axis in axes]
        if s is not None and len(s) != len(dims):
            raise ValueError("Shape and axes have different lengths.")
        lengths = [a.shape[dim] for dim in dims] if s is None else list(s)
        if is_inverse_real and dims and s is None:
            lengths[-1] = 2 * (a.shape[dims[-1]] - 1)
        lengths = [
            a.shape[dim] if n is None or n == -1 else operator.index(n) for n, dim in zip(lengths, dims, strict=True)
        ]
        if not dims:
            if special is not one:
                raise IndexError(f"{name}: at least 1 axis must be transformed")
            return wrap(a.to_local().copy(), a.layout, a.mesh)
        chain = [(one, n, dim, n) for n, dim in zip(lengths, dims, strict=True)]
        last = (special, lengths[-1], dims[-1], _rows(special, lengths[-1]))
        # What is whole goes first: its dimension can be cut instead of the next one.
        rest = sorted(chain[:-1], key=lambda step: is_cut(a.layout, step[2]))
        if special is one:
            ordered = sorted([*rest, last], key=lambda step: is_cut(a.layout, step[2]))
        else:
            ordered = [*rest, last] if is_inverse_real else [last, *rest]
        return _transformed(name, a, ordered, norm)

    implements(function)(transform)


for _one in (np.fft.fft, np.fft.ifft, np.fft.rfft, np.fft.irfft):
    _along_one(_one)
# Transforms of several dimensions: that of all dimensions but the last, that of the last, and the default axes.
_SEVERAL: tuple[tuple[Any, Any, Any, Any], ...] = (
    (np.fft.fftn, np.fft.fft, np.fft.fft, None),
    (np.fft.ifftn, np.fft.ifft, np.fft.ifft, None),
    (np.fft.fft2, np.fft.fft, np.fft.fft, (-2, -1)),
    (np.fft.ifft2, np.fft.ifft, np.fft.ifft, (-2, -1)),
    (np.fft.rfftn, np.fft.fft, np.fft.rfft, None),
    (np.fft.rfft2, np.fft.fft, np.fft.rfft, (-2, -1)),
    (np.fft.irfftn, np.fft.ifft, np.fft.irfft, None),
    (np.fft.irfft2, np.fft.ifft, np.fft.irfft, (-2, -1)),
)
for _several in _SEVERAL:
    _along_several(*_several)


def _shift(function: Any) -> None:
    def shift(x: DTensor, axes: Any = None) -> DTensor:
        if axes is None and x.ndim == 0:
            function(np.zeros(()))  # raises, as NumPy
        dims = range(x.ndim) if axes is None else [axes] if np.ndim(axes) == 0 else axes
        dims = tuple(normalized(dim, x.ndim) for dim in dims)
        halves = [x.shape[dim] // 2 for dim in dims]
        return roll(x, halves if function is np.fft.fftshift else [-rows for rows in halves], dims)

    implements(function)(shift)


_shift(np.fft.fftshift)
_shift(np.fft.ifftshift)


@lru_cache(maxsize=10_000)
def resized(layout: ArrayLayout, dim: int, rows: int) -> ArrayLayout:
    """Return the layout with a different number of rows of `dim`, which the same axes cut into blocks of chunks."""
    if rows == layout.shape[dim]:
        return layout
    shape = (*layout.shape[:dim], rows, *layout.shape[dim + 1 :])
    placements = [Shard(dim) if isinstance(p, Shard) and p.dim == dim else p for p in layout.placements]
    return ArrayLayout.of(shape, layout.mesh_shape, placements)
