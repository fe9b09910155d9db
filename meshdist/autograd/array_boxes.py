"""DTensors under differentiation: their box, and their vector space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import autograd.numpy as anp
import numpy as np
from autograd.builtins import DictBox, SequenceBox
from autograd.core import primitive_vjps
from autograd.extend import VSpace, primitive
from autograd.numpy import numpy_wrapper
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import isbox

from meshdist.autograd.array_moves import full, redistribute, to_local
from meshdist.autograd.device_arrays import is_device_array
from meshdist.tensor.array_creation import zeros
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dispatch import deferring
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.random_numbers import random


class DTensorBox(ArrayBox):  # type: ignore[misc]
    """A DTensor under differentiation. NumPy's functions take it, and so do those of `autograd.numpy`."""

    __slots__ = ()
    __array_priority__ = 1100.0

    shape = property(lambda self: self._value.shape)
    ndim = property(lambda self: self._value.ndim)
    size = property(lambda self: self._value.size)
    dtype = property(lambda self: self._value.dtype)
    mesh = property(lambda self: self._value.mesh)
    device_mesh = property(lambda self: self._value.mesh)
    placements = property(lambda self: self._value.placements)
    layout = property(lambda self: self._value.layout)
    index = property(lambda self: self._value.index)
    mT = property(lambda self: anp.swapaxes(self, -1, -2))
    real = property(lambda self: anp.real(self))
    imag = property(lambda self: anp.imag(self))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        space: Any = anp
        for name in func.__module__.split(".")[1:]:
            space = getattr(space, name, None)
        differentiable = _select if func is np.select else getattr(space, func.__name__, None)
        # A primitive takes boxes as positional arguments alone, and not inside of lists.
        is_primitive = getattr(differentiable, "_is_autograd_primitive", False)
        if differentiable is None or (is_primitive and not any(map(isbox, args))):
            name = f"{func.__module__}.{func.__name__}"
            raise TypeError(f"{name} has no gradient for these arguments; use meshdist.autograd.local_map")
        return differentiable(*args, **kwargs)

    def redistribute(self, placements: Any = None) -> Any:
        """Return the array with other placements; see `DTensor.redistribute`."""
        return redistribute(self, placements)

    def full(self, root: int | None = None, *, grad: str = "identity") -> Any:
        """Return the whole array; see `meshdist.autograd.full`."""
        if root is not None:
            raise TypeError("full: with root= it has no gradient; write full()")
        return full(self, grad=grad)

    full_tensor = full

    def to_local(self, *, grad: str = "identity") -> Any:
        """Return this rank's block; see `meshdist.autograd.to_local`."""
        return to_local(self, grad=grad)

    def dot(self, other: Any) -> Any:
        """Return the dot product; see `numpy.dot`."""
        return anp.dot(self, other)

    def conj(self) -> Any:
        """Return the complex conjugates."""
        return anp.conj(self)

    def copy(self) -> Any:
        """Return a copy, placed alike."""
        return self * 1

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __pos__(self) -> Any:
        return self

    def __hash__(self) -> int:
        return id(self)

    def __float__(self) -> float:
        raise _no_number("float(x)")

    def __int__(self) -> int:
        raise _no_number("int(x)")

    def __complex__(self) -> complex:
        raise _no_number("complex(x)")

    def item(self) -> Any:
        """Raise TypeError: a number of Python has no gradient."""
        raise _no_number("x.item()")


def _no_number(call: str) -> TypeError:
    return TypeError(
        f"{call}: x is differentiated here, and a number of Python has no gradient; return and use the array itself,"
        f" without {call.replace('x', '')}: an array without dimensions may be the result"
    )


def _select(condlist: Sequence[Any], choicelist: Sequence[Any], default: Any = 0) -> Any:
    """Return `numpy.select`, by `where`."""
    result = default
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        result = anp.where(condition, choice, result)
    return result


class DTensorVSpace(VSpace):  # type: ignore[misc]
    """The vector space of the arrays of one shape and dtype on one mesh; it makes them with one layout."""

    def __init__(self, value: DTensor) -> None:
        self.layout: ArrayLayout = value.layout.resolved()
        self.mesh = value.mesh
        self.dtype = value.dtype
        self.iscomplex = value.dtype.kind == "c"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def ndim(self) -> int:
        return self.layout.ndim

    @property
    def size(self) -> int:
        return int(np.prod(self.layout.shape)) * (2 if self.iscomplex else 1)

    def _filled(self, value: Any) -> DTensor:
        block = array_module(self.mesh).full(self.layout.local_shape(coordinate_in(self.mesh)), value, self.dtype)
        return wrap(block, self.layout, self.mesh)

    def zeros(self) -> DTensor:
        return self._filled(0)

    def ones(self) -> DTensor:
        return self._filled(1 + 1j if self.iscomplex else 1)

    def standard_basis(self) -> Iterator[DTensor]:
        for place in np.ndindex(*self.shape):
            for one in (1, 1j) if self.iscomplex else (1,):
                vector = zeros(self.shape, dtype=self.dtype, mesh=self.mesh, placements=self.layout.placements)
                vector[place] = one
                yield vector

    def randn(self) -> DTensor:
        numbers = random(0)
        placed: dict[str, Any] = {"mesh": self.mesh, "placements": self.layout.placements}
        drawn: Any = numbers.standard_normal(self.shape, **placed)
        if self.iscomplex:
            drawn = drawn + 1j * numbers.standard_normal(self.shape, **placed)
        made: DTensor = drawn.astype(self.dtype)
        return made

    def _add(self, x: Any, y: Any) -> Any:
        return x + y

    def _mut_add(self, x: Any, y: Any) -> Any:
        if isinstance(x, DTensor) and isinstance(y, DTensor) and x.layout is y.layout and x.dtype == y.dtype:
            x += y
            return x
        return x + y

    def _scalar_mul(self, x: Any, a: Any) -> Any:
        return x * a

    def _inner_prod(self, x: Any, y: Any) -> Any:
        return anp.real(anp.sum(anp.conj(x) * y))

    def _covector(self, x: Any) -> Any:
        return anp.conj(x) if self.iscomplex else x


@primitive
def _array(args: tuple[Any, ...], kwargs: dict[str, Any], x: Any) -> Any:
    """Return `numpy.array(x, *args, **kwargs)`, and a DTensor or CuPy's array as it is: `stack` and others call it."""
    if not isinstance(x, DTensor) and not is_device_array(x):
        return np.array(x, *args, **kwargs)
    if kwargs.get("dtype") is not None:
        x = x.astype(kwargs["dtype"], copy=False)
    added = max(0, kwargs.get("ndmin", 0) - x.ndim)
    return np.expand_dims(cast(Any, x), tuple(range(added)))


primitive_vjps[_array] = primitive_vjps[numpy_wrapper._array_from_scalar_or_array]
numpy_wrapper._array_from_scalar_or_array = _array
DTensorBox.register(DTensor)
DTensorVSpace.register(DTensor)
deferring.update((DTensorBox, ArrayBox, SequenceBox, DictBox))
