"""The methods that a DTensor has as NumPy arrays have them; each calls NumPy's function of its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from meshdist.system.name_hints import explain
from meshdist.tensor.dispatch import method


class ArrayMethods:
    """Methods of `numpy.ndarray`, by the functions of NumPy."""

    __slots__ = ()

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(cast(Any, self), *args, **kwargs)
        except TypeError as error:
            explain(function, error)
            raise

    # ---- A sequence of rows

    def __len__(self) -> int:
        if not cast(Any, self).shape:
            raise TypeError("len() of a DTensor without dimensions")
        return int(cast(Any, self).shape[0])

    def __iter__(self) -> Any:
        return (cast(Any, self)[row] for row in range(len(self)))

    def __contains__(self, value: Any) -> bool:
        return bool(np.any(cast(Any, self) == value))

    # ---- Shape

    @property
    def T(self) -> Any:
        """The array with its dimensions reversed."""
        return self._call(np.transpose)

    @property
    def mT(self) -> Any:
        """The array with its last two dimensions exchanged."""
        return self._call(np.swapaxes, -1, -2)

    def transpose(self, *axes: Any) -> Any:
        """Return the array with its dimensions permuted; see `numpy.ndarray.transpose`."""
        return self._call(np.transpose, axes[0] if len(axes) == 1 else axes or None)

    def swapaxes(self, axis1: int, axis2: int) -> Any:
        """Return the array with two dimensions exchanged."""
        return self._call(np.swapaxes, axis1, axis2)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        """Return the array in a different shape, if no element has to change ranks; see `numpy.ndarray.reshape`."""
        return self._call(np.reshape, shape[0] if len(shape) == 1 else shape, **kwargs)

    def ravel(self, order: Any = "C") -> Any:
        """Return the array with one dimension, if no element has to change ranks."""
        return self._call(np.ravel, order)

    def flatten(self, order: Any = "C") -> Any:
        """Return a copy with one dimension, if no element has to change ranks."""
        return self._call(np.ravel, order).copy()

    def squeeze(self, axis: Any = None) -> Any:
        """Return the array without dimensions of one row."""
        return self._call(np.squeeze, axis)

    # ---- Elements

    def copy(self) -> Any:
        """Return a copy with the same placements."""
        return self._call(np.copy)

    def astype(self, dtype: Any, **kwargs: Any) -> Any:
        """Return a copy of a different dtype; see `numpy.ndarray.astype`."""
        return method("astype")(self, dtype, **kwargs)

    def view(self, type: Any, *shape: int) -> Any:
        """Return the array itself: `view(numpy.ndarray)`, by which libraries drop subclasses.

        Raises:
            TypeError: A dtype; or a shape, as in torch.
        """
        if type is np.ndarray:
            return self
        given = ", ".join(map(repr, (type, *shape)))
        if isinstance(type, (int, tuple)):
            raise TypeError(f"view: to change the shape, write x.reshape({given})")
        raise TypeError(
            f"view: arrays over a mesh have no views of another dtype; write x.astype({given}) to convert the numbers,"
            f" or x.to_local().view({given}) to reinterpret this rank's block"
        )

    @property
    def real(self) -> Any:
        """The real parts."""
        return self._call(np.real)

    @property
    def imag(self) -> Any:
        """The imaginary parts."""
        return self._call(np.imag)

    def conj(self) -> Any:
        """Return the complex conjugates; of real numbers, the array itself."""
        return self._call(np.conjugate) if cast(Any, self).dtype.kind == "c" else self

    conjugate = conj

    def clip(self, min: Any = None, max: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the values limited to an interval."""
        return self._call(np.clip, min, max, *args, **kwargs)

    def round(self, decimals: int = 0, out: Any = None) -> Any:
        """Return the values rounded."""
        return self._call(np.round, decimals) if out is None else self._call(np.round, decimals, out=out)

    def fill(self, value: Any) -> None:
        """Set all elements to one value."""
        method("fill")(self, value)

    def take(self, indices: Any, axis: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the elements at indices along a dimension; see `numpy.take`."""
        return self._call(np.take, indices, axis, *args, **kwargs)

    def compress(self, condition: Any, axis: int | None = None) -> Any:
        """Return the rows where a condition is true; see `numpy.compress`."""
        return np.compress(condition, cast(Any, self), axis)

    def nonzero(self) -> Any:
        """Return the indices of the elements that are not zero, an array for each dimension."""
        return self._call(np.nonzero)

    def searchsorted(self, v: Any, side: Any = "left", sorter: Any = None) -> Any:
        """Return where values belong in the array, which is sorted; see `numpy.searchsorted`."""
        return self._call(np.searchsorted, v, side, sorter)

    def sort(self, axis: int = -1, *args: Any, **kwargs: Any) -> None:
        """Sort in place along a dimension."""
        cast(Any, self)[...] = self._call(np.sort, axis, *args, **kwargs)

    def argsort(self, axis: int | None = -1, *args: Any, **kwargs: Any) -> Any:
        """Return the indices that sort along a dimension."""
        return self._call(np.argsort, axis, *args, **kwargs)

    def repeat(self, repeats: Any, axis: int | None = None) -> Any:
        """Return the array with each row repeated; see `numpy.repeat`."""
        return self._call(np.repeat, repeats, axis)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
        """Return the diagonals of two dimensions; see `numpy.diagonal`."""
        return self._call(np.diagonal, offset, axis1, axis2)

    # ---- Reductions

    def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None) -> Any:
        """Return the sums of the diagonals of two dimensions; see `numpy.trace`."""
        return self._call(np.trace, offset, axis1, axis2, dtype, out)

    def sum(self, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the sum over dimensions; see `numpy.sum`."""
        return self._call(np.sum, axis, *args, **kwargs)

    def prod(self, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the product over dimensions."""
        return self._call(np.prod, axis, *args, **kwargs)

    def mean(self, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the mean over dimensions."""
        return self._call(np.mean, axis, *args, **kwargs)

    def var(self, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the variance over dimensions."""
        return self._call(np.var, axis, *args, **kwargs)

    def std(self, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the standard deviation over dimensions."""
        return self._call(np.std, axis, *args, **kwargs)

    def max(self, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the maximum over dimensions."""
        return self._call(np.max, axis, *args, **kwargs)

    def min(self, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the minimum over dimensions."""
        return self._call(np.min, axis, *args, **kwargs)

    def argmax(self, axis: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the index of the maximum along a dimension."""
        return self._call(np.argmax, axis, *args, **kwargs)

    def argmin(self, axis: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the index of the minimum along a dimension."""
        return self._call(np.argmin, axis, *args, **kwargs)

    def any(self, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return whether any element is true, over dimensions."""
        return self._call(np.any, axis, *args, **kwargs)

    def all(self, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return whether all elements are true, over dimensions."""
        return self._call(np.all, axis, *args, **kwargs)

    def cumsum(self, axis: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the running sums along a dimension."""
        return self._call(np.cumsum, axis, *args, **kwargs)

    def cumprod(self, axis: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the running products along a dimension."""
        return self._call(np.cumprod, axis, *args, **kwargs)

    def dot(self, other: Any) -> Any:
        """Return the dot product; see `numpy.dot`."""
        return self._call(np.dot, other)

    # ---- Blocks

    def halo(self, width: int | Sequence[int], periodic: bool | Sequence[bool] = False) -> Any:
        """Return this rank's block with rows of its neighbours around it; see `meshdist.tensor.halo`."""
        return method("halo")(self, width, periodic)

    def cpu(self) -> Any:
        """Return the array with blocks that are NumPy arrays, on the same ranks; itself if they already are."""
        return method("on_device")(self, "cpu")

    def cuda(self) -> Any:
        """Return the array with blocks that are CuPy arrays, on the same ranks; itself if they already are.

        Raises:
            DistBackendError: CuPy is not installed.
        """
        return method("on_device")(self, "cuda")
