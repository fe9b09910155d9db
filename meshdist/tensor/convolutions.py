"""Convolution and correlation of a vector that may be sharded with a filter that every rank has."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.differences import shortened, with_rows_around
from meshdist.tensor.dispatch import implements
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.joining import pad
from meshdist.tensor.operands import as_operand, mesh_of, require, resolved

_MODES = ("valid", "same", "full")


@implements(np.convolve)
def convolve(a: Any, v: Any, mode: str = "full") -> DTensor:
    """Return the convolution of two vectors, of which the shorter one is whole on every rank; see `numpy.convolve`.

    The ranks exchange the rows at the edges of their blocks.
    """
    a, v = _vectors("np.convolve", a, v)
    _check(a, v)
    if len(v) > len(a):
        a, v = v, a
    return _slid("np.convolve", a, v, _mode(mode), np.convolve)


@implements(np.correlate)
def correlate(a: Any, v: Any, mode: str = "valid") -> DTensor:
    """Return the correlation of two vectors, of which the shorter one is whole on every rank; see `numpy.correlate`."""
    a, v = _vectors("np.correlate", a, v)
    _check(a, v)
    if len(v) > len(a):  # the same sums, the other way round
        reversed_ = _slid("np.correlate", v, a, _mode(mode), np.correlate)
        return np.conjugate(reversed_)[::-1]  # type: ignore[return-value]
    return _slid("np.correlate", a, v, _mode(mode), np.correlate)


def _vectors(name: str, a: Any, v: Any) -> tuple[DTensor, DTensor]:
    mesh = mesh_of(name, (a, v))
    first, second = (resolved(as_operand(name, x, mesh)) for x in (a, v))
    for vector in (first, second):
        if vector.ndim > 1:
            raise ValueError("object too deep for desired array")
    return tuple(np.atleast_1d(x) for x in (first, second))  # type: ignore[return-value]


def _check(a: DTensor, v: DTensor) -> None:
    for name, vector in (("a", a), ("v", v)):
        if not vector.size:
            raise ValueError(f"{name} cannot be empty")


def _mode(mode: Any) -> str:
    np.convolve([1], [1], mode)  # NumPy says what it does not take
    return _MODES[mode] if isinstance(mode, int) else mode


def _slid(name: str, a: DTensor, v: DTensor, mode: str, function: Any) -> DTensor:
    """Return the sums of products of a filter with the rows under it, as NumPy does of the whole vector.

    No row is multiplied by a zero beyond the ends of the vector: an infinity in the filter would become NaN.
    """
    whole = ArrayLayout.of_cuts(v.shape, v.mesh.shape, (None,), {})
    taps = require(name, v, whole, "every rank needs the whole of the shorter vector", "v")
    more = len(taps) - 1
    around = more if mode == "full" else 0
    offset = {"full": 0, "same": more // 2, "valid": more}[mode]  # of the results among all sums
    if around:
        a = pad(a, (around, around))  # which has the cut of the results
    before, after = (more - more // 2, more // 2) if mode == "same" else (0, more)
    layout = a.layout if mode == "same" else shortened(a.layout, 0, more)
    (held,), (wanted,) = (each.index(coordinate_in(a.mesh)) for each in (a.layout, layout))
    rows = wanted.stop - wanted.start
    block = with_rows_around(name, a, 0, before, after)
    if not rows:
        dtype = function(np.ones(1, a.dtype), np.ones(1, v.dtype)).dtype
        return wrap(array_module(a.mesh).empty((0,), dtype), layout, a.mesh)
    begin = max(0, held.start - before)
    first, last = max(begin, around), min(begin + len(block), len(a) - around)
    sums = function(block[first - begin : last - begin], taps, "full")
    at = wanted.start + offset - (first - around)
    return wrap(sums[at : at + rows], layout, a.mesh)
