"""NumPy's functions for the arrays of the stand-in for CuPy: those that CuPy has, and with what it takes.

They are computed at once, when the device has done all that it was asked to do: so these calls say nothing of the order
of streams, and much of what may be passed to CuPy. It takes no NumPy arrays beside its own, and returns arrays without
dimensions where NumPy returns numbers.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
from standin_gpu import MACHINE

# Functions of NumPy that CuPy 14 has not, among those that arrays over a mesh have.
ABSENT = {
    "asmatrix", "block", "bmat", "einsum_path", "frompyfunc", "geomspace", "histogram_bin_edges", "insert", "isnat",
    "matvec", "nanpercentile", "nanquantile", "polyder", "polydiv", "polyint", "spacing", "unstack", "vecdot", "vecmat",
    "linalg.diagonal", "linalg.matrix_norm", "linalg.multi_dot", "linalg.outer", "linalg.svdvals", "linalg.tensordot",
    "linalg.trace", "linalg.vecdot", "linalg.vector_norm",
}  # fmt: skip
# Arguments of NumPy's functions that CuPy's have not.
_UNKNOWN = {
    "clip": {"min", "max"},
    "max": {"initial", "where"},
    "min": {"initial", "where"},
    "sum": {"initial", "where"},
}
# Functions that copy NumPy's arrays to the device.
_QUANTILES = ("percentile", "quantile")
_ORDERED = (*_QUANTILES, "median", "nanmedian")
_METHODS = ("linear", "lower", "higher", "midpoint", "nearest")  # of quantiles
METHODS = {
    "all", "any", "argmax", "argmin", "argsort", "clip", "conj", "conjugate", "cumprod", "cumsum", "diagonal", "dot",
    "fill", "flatten", "max", "mean", "min", "nonzero", "prod", "ravel", "repeat", "round", "searchsorted", "sort",
    "squeeze", "std", "sum", "swapaxes", "take", "trace", "var",
}  # fmt: skip


def computed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], array_type: type) -> Any:
    """Return what CuPy's function of this name does, where it has one; `array_type` is that of the stand-in."""
    name = ".".join([*(getattr(function, "__module__", None) or "").split(".")[1:2], function.__name__])
    if name in ABSENT or (name.startswith("linalg._") and name[8:] in ABSENT):
        raise TypeError(f"no implementation found for 'numpy.{name}'")
    if unknown := _UNKNOWN.get(function.__name__, set()) & kwargs.keys():
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {min(unknown)!r}")
    if function.__name__.endswith("_like") and kwargs.get("shape") == ():
        del kwargs["shape"]  # CuPy takes that for no shape
    if function.__name__ in _QUANTILES and kwargs.get("method", "linear") not in _METHODS:
        raise ValueError(f"{kwargs['method']!r} method is not yet supported. Please use any other method.")
    if function.__name__ in _ORDERED and not np.size(args[0]):
        raise ValueError("kth(=-1) out of bounds 0")
    given: list[Any] = []
    taken = array_type if function.__name__ not in _QUANTILES else (array_type, np.ndarray)
    on_host = [_on_host(value, taken, given) for value in (args, kwargs)]
    for device in {array.device.id for array in given} or {MACHINE.device()}:
        MACHINE.current(device).synchronize()
    return _on_device(function(*on_host[0], **on_host[1]), given, array_type)


def _on_host(value: Any, array_type: Any, given: list[Any]) -> Any:
    if isinstance(value, array_type):
        if isinstance(value, np.ndarray):
            return value
        given.append(value)
        return value._host
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if type(value) in (list, tuple):
        return type(value)(_on_host(part, array_type, given) for part in value)
    if isinstance(value, dict):
        return {key: _on_host(part, array_type, given) for key, part in value.items()}
    return value


def _on_device(value: Any, given: list[Any], array_type: type) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        for array in given:
            if value is array._host:
                return array
            if isinstance(value, np.ndarray) and value.size and np.shares_memory(value, array._host):
                return array.seen_as(value)
        made = array_type(value.shape, value.dtype)
        made._host[...] = value
        return made
    if isinstance(value, tuple):
        parts = [_on_device(part, given, array_type) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return [_on_device(part, given, array_type) for part in value] if isinstance(value, list) else value


class Functions(types.ModuleType):
    """A module with the functions of one of NumPy's modules, where the stand-in has no function of its own."""

    def __init__(self, name: str, of: Any, array_type: type) -> None:
        super().__init__(name)
        self._of, self._array_type = of, array_type

    def __getattr__(self, name: str) -> Any:
        path = name if self._of is np else f"{self._of.__name__.removeprefix('numpy.')}.{name}"
        if name.startswith("_") or path in ABSENT or not hasattr(self._of, name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = getattr(self._of, name)
        if isinstance(found, types.ModuleType):
            return Functions(f"{self.__name__}.{name}", found, self._array_type)
        if not callable(found) or isinstance(found, type):
            return found
        return lambda *args, **kwargs: computed(found, args, kwargs, self._array_type)
