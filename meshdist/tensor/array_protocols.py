"""The protocols by which NumPy's functions take a DTensor, and its conversions to Python's numbers and lists."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import numpy as np

from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.system.name_hints import missing_attribute
from meshdist.tensor.agreement import Origin, inherited, origin_of
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dispatch import (
    INTEGERS,
    NUMBERS,
    deferring,
    implementation_of,
    implementation_of_ufunc,
    name_of,
)
from meshdist.tensor.dispatch import method as array_method
from meshdist.tensor.known_calls import called, known_ufuncs
from meshdist.tensor.placements import PlacementError

T = TypeVar("T")

# Methods by which arrays of other libraries become NumPy arrays.
_NAMES = re.compile(r"^(np\.[\w.]+: )+")
_ARRAY_OF = ("compute", "detach", "get", "numpy")
_GRADIENTS = "`meshdist.autograd.grad(function)` returns a function of gradients; see docs/autograd.md"
_COLLECTIVES = "write `x.redistribute(placements)`, which calls the collective, or `x.full()` for the whole array"
# Attributes of torch's tensors and others, and what to write instead.
_OF_OTHER_ARRAYS = {
    **dict.fromkeys(("all_gather", "all_reduce", "gather", "reduce_scatter"), _COLLECTIVES),
    **dict.fromkeys(("backward", "grad", "requires_grad", "requires_grad_"), _GRADIENTS),
    "clone": "write `x.copy()`",
    "contiguous": "it is not needed: leave it out",
    "dim": "write `x.ndim`",
    "double": "write `x.astype('float64')`",
    "expand": "write `np.broadcast_to(x, shape)`",
    "float": "write `x.astype('float32')`",
    "half": "write `x.astype('float16')`",
    "long": "write `x.astype('int64')`",
    "numel": "write `x.size`",
    "permute": "write `x.transpose(1, 0)`, with the dimensions in their new order",
    "t": "write `x.T`",
    "to": "write `x.astype(dtype)` for another dtype, `x.cpu()` or `x.cuda()` for another device, and"
    " `x.redistribute(placements)` for other placements",
    "unsqueeze": "write `np.expand_dims(x, axis)`",
}


class Absent:
    """An attribute of NumPy arrays that a DTensor does not have; the error says what to use.

    A `__getattr__` of the class would slow every attribute of its arrays down.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: Any = None) -> NoReturn:
        raise AttributeError(
            f"{self._name} is not available for DTensors; use x.full() for the whole array, or x.to_local() for the"
            " block"
        )


class ArrayProtocols:
    """`__array_ufunc__`, `__array_function__` and `__array__`, and what makes Python's values of an array."""

    __slots__ = ()

    _local: Any
    _layout: ArrayLayout
    _mesh: DeviceMesh
    _origin: Origin

    __array_priority__ = 1000

    @classmethod
    def _wrapped(cls, local: Any, layout: ArrayLayout, mesh: DeviceMesh, origin: Origin = None) -> Any:
        """Return the array of this rank's block `local`, whose shape must be that of the layout's block.

        Of a pending reduction, `origin` is what it was computed from.
        """
        array: Any = _new(cls)
        array._local = np.asarray(local) if isinstance(local, np.generic) else local  # ufuncs of 0-d arrays: scalars
        array._layout = layout
        array._mesh = mesh
        array._origin = origin
        return array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs:
            kind, mesh = type(self), self._mesh
            layouts, blocks = [], []
            for x in inputs:
                of = type(x)
                if of is kind and x._mesh is mesh:
                    layouts.append(x._layout)
                    blocks.append(x._local)
                elif of in NUMBERS:
                    layouts.append(None)
                    blocks.append(x)
                else:
                    break
            else:
                result = known_ufuncs.get((ufunc, *layouts))
                if result is not None and (ufunc is not _power or not _is_refused_power(*blocks)):
                    made = self._wrapped(ufunc(*blocks), result, mesh)
                    if result.pending:
                        made._origin = origin_of(*layouts)
                    return made
        if deferring and any(type(x) in deferring for x in inputs):
            return NotImplemented
        implementation = implementation_of_ufunc(ufunc, method)
        if implementation is None:
            return array_method("ufunc_on_whole_arrays")(ufunc, method, inputs, kwargs)
        made = implementation(ufunc, *inputs, **kwargs)
        if type(made) is type(self) and not made._layout.pending:
            return made
        return inherited(made, type(self), inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not deferring.isdisjoint(types):
            return NotImplemented
        implementation = implementation_of(func)
        if implementation is None:
            return array_method("on_whole_arrays")(func, args, kwargs)
        try:
            return called(func, implementation, args, kwargs, self)
        except PlacementError as error:
            # In place of the names of functions which this one calls.
            why = _NAMES.sub("", str(error))
            error.args = (f"{name_of(func)}: {why}",)
            raise

    if not TYPE_CHECKING:  # for a type checker, it would make every attribute one of an array

        def __getattr__(self, name: str) -> Any:
            if hasattr(np.ndarray, name) and not name.startswith("_"):
                advice = (
                    "is not available for DTensors; use x.full() for the whole array, or x.to_local() for the block"
                )
                raise AttributeError(f"{name} {advice}", name=name, obj=self)
            if name in _ARRAY_OF:
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}; use x.full() for the whole array, or"
                    " x.to_local() for the block",
                    name=name,
                )
            if name in _OF_OTHER_ARRAYS:
                what = f"{type(self).__name__} has no attribute {name!r}"
                raise AttributeError(f"{what}: {_OF_OTHER_ARRAYS[name]}", name=name)
            raise missing_attribute(self, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._whole("np.asarray")
        return np.array(self._local, dtype=dtype, copy=True) if copy or dtype else np.asarray(self._local)

    def _whole(self, what: str) -> Any:
        """Return this rank's array, which must be the whole one."""
        if not self._layout.is_replicated:
            described = self._layout.describe(self._mesh.mesh_dim_names)
            raise PlacementError(
                f"{what}: the array is {described}, so no rank has all of it; write x.full() for the whole array,"
                " x.full(root=0) for one rank, or x.to_local() for this rank's block"
            )
        return self._local

    def tolist(self) -> Any:
        """Return the array as nested lists; every axis must replicate."""
        return self._whole("tolist").tolist()

    def item(self, *args: Any) -> Any:
        """Return the only element as a Python number, on every rank; a pending reduction is computed."""
        return cast(Any, self).full().item(*args) if args else self._converted(lambda array: array.item())

    def __bool__(self) -> bool:
        return self._converted(bool)

    def __float__(self) -> float:
        return self._converted(float)

    def __int__(self) -> int:
        return self._converted(int)

    def __complex__(self) -> complex:
        return self._converted(complex)

    def __index__(self) -> int:
        return self._converted(operator.index)

    def _converted(self, convert: Callable[[Any], T]) -> T:
        """Return what `convert` makes of the whole array; of several elements, NumPy refuses that: nothing is sent."""
        whole = cast(Any, self)
        if whole.size > 1:
            convert(np.broadcast_to(np.zeros((), whole.dtype), whole.shape))
        return convert(whole.full())

    def __format__(self, spec: str) -> str:
        return format(self._number("format"), spec) if spec else str(self)

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self._number("round"), ndigits)

    def _number(self, what: str) -> Any:
        """Return the only element, where this sends nothing: what is printed is often printed by one rank alone."""
        if self._layout.shape or not self._layout.is_replicated:
            raise TypeError(
                f"{what}: the array is {self._layout.describe(self._mesh.mesh_dim_names)}, and no number on this rank;"
                f" write value = float(x) on all ranks, and {what} that"
            )
        return self._local.item()


_new, _power = object.__new__, np.power


def _is_refused_power(block: Any, exponent: Any) -> bool:
    """Return whether NumPy refuses this exponent for elements of integers: it raises where a block has some."""
    return type(exponent) is int and exponent < 0 and block.dtype.kind in INTEGERS
