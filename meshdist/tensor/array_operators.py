"""The operators that a DTensor has as NumPy arrays have them; each calls its ufunc."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from meshdist.tensor.agreement import origin_of
from meshdist.tensor.dispatch import INTEGERS, NUMBERS
from meshdist.tensor.known_calls import known_ufuncs


def _binary(ufunc: np.ufunc, unknown: Callable[[Any, Any], Any] | None = None) -> Callable[[Any, Any], Any]:
    unknown = unknown or ufunc

    # The result of operands that lie right is known from the first time; the rest is for the implementation.
    def operator(self: Any, other: Any) -> Any:
        kind = type(other)
        if kind is type(self) and other._mesh is self._mesh:
            layout = known_ufuncs.get((ufunc, self._layout, other._layout))
            if layout is not None:
                return self._wrapped(ufunc(self._local, other._local), layout, self._mesh)
        elif kind in NUMBERS:
            layout = known_ufuncs.get((ufunc, self._layout, None))
            if layout is not None:
                return self._wrapped(ufunc(self._local, other), layout, self._mesh)
        return unknown(self, other)

    return operator


def is_incomparable(other: Any) -> bool:
    """Return whether an operand is None, or text, or dates: what equals no number, and what no ufunc compares."""
    if isinstance(other, (str, bytes, list, tuple)):
        other = np.asarray(other)
    return other is None or (isinstance(other, (np.ndarray, np.generic)) and other.dtype.kind in "USM")


def _equal(self: Any, other: Any) -> Any:
    return np.logical_and(self, np.zeros(np.shape(other), bool)) if is_incomparable(other) else np.equal(self, other)


def _not_equal(self: Any, other: Any) -> Any:
    return np.logical_or(self, np.ones(np.shape(other), bool)) if is_incomparable(other) else np.not_equal(self, other)


def _matmul(self: Any, other: Any) -> Any:
    if type(other) is type(self) and other._mesh is self._mesh:
        layout = known_ufuncs.get((np.matmul, self._layout, other._layout))
        if layout is not None:
            # Of arrays that are sharded along what is summed over, the product is a pending sum.
            origin = origin_of(self._layout, other._layout) if layout.pending else None
            return self._wrapped(np.matmul(self._local, other._local), layout, self._mesh, origin)
    return np.matmul(self, other)


def _reflected(ufunc: np.ufunc) -> Callable[[Any, Any], Any]:
    return lambda self, other: ufunc(other, self)


def _in_place(ufunc: np.ufunc) -> Callable[[Any, Any], Any]:
    def operator(self: Any, other: Any) -> Any:
        layout, kind = self._layout, type(other)
        if kind in NUMBERS:
            if known_ufuncs.get((ufunc, layout, None)) is layout:
                ufunc(self._local, other, out=self._local)
                return self
        elif (
            kind is type(self)
            and other._mesh is self._mesh
            and known_ufuncs.get((ufunc, layout, other._layout)) is layout
        ):
            ufunc(self._local, other._local, out=self._local)
            return self
        ufunc(self, other, out=(self,))
        return self

    return operator


_plain_power = _binary(np.power)
# What NumPy's operator computes for these exponents: the last two of inexact numbers alone.
_POWERS = {2: np.square, 0.5: np.sqrt, -1: np.reciprocal}


def _power(self: Any, other: Any) -> Any:
    if type(other) in (int, float):
        ufunc = _POWERS.get(other)
        if ufunc is not None and (self.dtype.kind in "fc" or (ufunc is np.square and type(other) is int)):
            return ufunc(self)
        layout = known_ufuncs.get((np.power, self._layout, None))
        if layout is None or (other < 0 and self._local.dtype.kind in INTEGERS):
            return np.power(self, other)
        return self._wrapped(np.power(self._local, other), layout, self._mesh)
    return _plain_power(self, other)


_plain_power_in_place = _in_place(np.power)


def _power_in_place(self: Any, other: Any) -> Any:
    if type(other) is not int:
        return _plain_power_in_place(self, other)
    layout, local = self._layout, self._local
    if known_ufuncs.get((np.power, layout, None)) is layout and (other >= 0 or local.dtype.kind not in INTEGERS):
        np.power(local, other, out=local)
    else:
        np.power(self, other, out=(self,))
    return self


def _unary(ufunc: np.ufunc) -> Callable[[Any], Any]:
    return lambda self: ufunc(self)


class ArrayOperators:
    """Operators of `numpy.ndarray`, by ufuncs; in place too."""

    __slots__ = ()

    __hash__ = None  # type: ignore[assignment]

    __add__, __radd__, __iadd__ = _binary(np.add), _reflected(np.add), _in_place(np.add)
    __sub__, __rsub__, __isub__ = _binary(np.subtract), _reflected(np.subtract), _in_place(np.subtract)
    __mul__, __rmul__, __imul__ = _binary(np.multiply), _reflected(np.multiply), _in_place(np.multiply)
    __truediv__, __rtruediv__ = _binary(np.true_divide), _reflected(np.true_divide)
    __itruediv__ = _in_place(np.true_divide)
    __floordiv__, __rfloordiv__ = _binary(np.floor_divide), _reflected(np.floor_divide)
    __ifloordiv__ = _in_place(np.floor_divide)
    __mod__, __rmod__, __imod__ = _binary(np.remainder), _reflected(np.remainder), _in_place(np.remainder)
    __pow__, __rpow__, __ipow__ = _power, _reflected(np.power), _power_in_place
    __matmul__, __rmatmul__ = _matmul, _reflected(np.matmul)
    __imatmul__ = _in_place(np.matmul)
    __and__, __rand__, __iand__ = _binary(np.bitwise_and), _reflected(np.bitwise_and), _in_place(np.bitwise_and)
    __or__, __ror__, __ior__ = _binary(np.bitwise_or), _reflected(np.bitwise_or), _in_place(np.bitwise_or)
    __xor__, __rxor__, __ixor__ = _binary(np.bitwise_xor), _reflected(np.bitwise_xor), _in_place(np.bitwise_xor)
    __lshift__, __rlshift__, __ilshift__ = _binary(np.left_shift), _reflected(np.left_shift), _in_place(np.left_shift)
    __rshift__, __rrshift__ = _binary(np.right_shift), _reflected(np.right_shift)
    __irshift__ = _in_place(np.right_shift)
    __lt__, __le__ = _binary(np.less), _binary(np.less_equal)
    __gt__, __ge__ = _binary(np.greater), _binary(np.greater_equal)
    __eq__, __ne__ = _binary(np.equal, _equal), _binary(np.not_equal, _not_equal)
    __neg__, __pos__, __abs__ = _unary(np.negative), _unary(np.positive), _unary(np.absolute)
    __invert__ = _unary(np.invert)

    def __divmod__(self, other: Any) -> Any:
        return np.divmod(cast(Any, self), other)

    def __rdivmod__(self, other: Any) -> Any:
        return np.divmod(other, cast(Any, self))
