"""CuPy's arrays under differentiation: their box and their vector space, and what NumPy computes on the host alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.core import primitive_jvps, primitive_vjps
from autograd.extend import Box, VSpace, primitive
from autograd.numpy import numpy_wrapper
from autograd.numpy.numpy_boxes import ArrayBox

from meshdist.arrays.device import cupy_module
from meshdist.arrays.device_types import new_empty

# What CuPy adds at repeated places; it computes other dtypes in one of these.
_ADDABLE = frozenset(map(np.dtype, ("int32", "int64", "uint32", "uint64", "float16", "float32", "float64")))


class DeviceArrayBox(ArrayBox):  # type: ignore[misc]
    """A CuPy array under differentiation, for the functions of `autograd.numpy`."""

    __slots__ = ()
    __array_priority__ = 1000.0  # above CuPy's arrays, whose operators then leave it to this box


class DeviceArrayVSpace(VSpace):  # type: ignore[misc]
    """The vector space of CuPy's arrays of one shape and dtype."""

    def __init__(self, value: Any) -> None:
        self.shape: tuple[int, ...] = value.shape
        self.dtype = value.dtype
        self.iscomplex = value.dtype.kind == "c"
        self._cupy = cupy_module()

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape) * (2 if self.iscomplex else 1)

    def zeros(self) -> Any:
        return self._cupy.zeros(self.shape, self.dtype)

    def ones(self) -> Any:
        return self._cupy.full(self.shape, 1 + 1j if self.iscomplex else 1, self.dtype)

    def standard_basis(self) -> Iterator[Any]:
        for place in np.ndindex(*self.shape):
            for one in (1, 1j) if self.iscomplex else (1,):
                vector = self.zeros()
                vector[place] = one
                yield vector

    def randn(self) -> Any:
        drawn = np.random.standard_normal((2, *self.shape))
        return self._cupy.asarray((drawn[0] + 1j * drawn[1] if self.iscomplex else drawn[0]).astype(self.dtype))

    def _inner_prod(self, x: Any, y: Any) -> Any:
        return anp.real(anp.sum(anp.conj(x) * y))

    def _covector(self, x: Any) -> Any:
        return anp.conj(x) if self.iscomplex else x


def register(x: Any) -> None:
    """Let autograd differentiate by `x`, if that is a CuPy array."""
    kind = type(x)
    if kind is not np.ndarray and is_device_array(x) and kind not in Box.type_mappings:
        DeviceArrayBox.register(kind)
        DeviceArrayVSpace.register(kind)


def is_device_array(x: Any) -> bool:
    """Return whether `x` is an array of CuPy, or a box of one."""
    return isinstance(x, DeviceArrayBox) or type(x).__module__.partition(".")[0] == "cupy"


def as_any_array(x: Any) -> Any:
    """Return an array of CuPy as it is, and anything else as a NumPy array."""
    return x if is_device_array(x) else np.asarray(x)


def new_zeros(shape: tuple[int, ...], like: Any) -> Any:
    """Return an array of zeros of the dtype of `like` and in its memory; CuPy's zeros_like takes no shape of ()."""
    made = new_empty(shape, like)
    made.fill(0)
    return made


@primitive
def _concatenated(axis: int, *arrays: Any) -> Any:
    return np.concatenate(arrays, axis)


# autograd's views its result as NumPy's array, which takes the type for a dtype in CuPy.
for _rules in (primitive_vjps, primitive_jvps):
    _rules[_concatenated] = _rules[numpy_wrapper.concatenate_args]
numpy_wrapper.concatenate_args = anp.concatenate_args = _concatenated


def contiguous(x: Any) -> Any:
    """Return an array, or a number as one, that lies in one piece in the order of C."""
    x = as_any_array(x)
    return x if x.flags.c_contiguous else x.copy(order="C")


def beside(x: Any, other: Any) -> Any:
    """Return the array `x` where `other` is: in GPU memory, if that is there."""
    return cupy_module().asarray(x) if is_device_array(other) else x


def added_at(shape: tuple[int, ...], places: Any, values: Any) -> Any:
    """Return an array of zeros to which `values` are added at `places`, an index that may name an element twice."""
    made = new_zeros(shape, values)
    if not is_device_array(values):
        np.add.at(made, places, values)
    elif values.dtype in _ADDABLE:
        cupy_module().add.at(made, _on_device(places), values)
    elif values.dtype.kind == "c":
        made = added_at(shape, places, values.real.copy()) + 1j * added_at(shape, places, values.imag.copy())
        made = made.astype(values.dtype, copy=False)
    else:
        wider = values.astype(np.float32 if values.dtype.kind not in "biu" else np.int64)
        made = added_at(shape, places, wider).astype(values.dtype)
    return made


def _on_device(places: Any) -> Any:
    if isinstance(places, tuple):
        return tuple(map(_on_device, places))
    return cupy_module().asarray(places) if isinstance(places, (np.ndarray, list)) else places
