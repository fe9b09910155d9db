"""New arrays for results: of the library and on the device of an argument."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshdist.arrays.device_types import device_type_of
from meshdist.arrays.host import as_array


def taken(x: Any, name: str = "x") -> Any:
    """Return `x` as a NumPy array or, in GPU memory, a CuPy array; raise TypeError for what is not an array."""
    if type(x) is np.ndarray:
        return x
    if getattr(x, "requires_grad", False):
        raise TypeError(f"{name} requires grad, and what is returned would have none: pass {name}.detach()")
    if device_type_of(x) == "cpu":
        return as_array(x, name)
    from meshdist.arrays.device import as_device_array

    return as_device_array(x, name)


def new_empty(shape: tuple[int, ...], like: Any) -> Any:
    """Return a new array with the dtype and on the device of `like`, which `taken` made."""
    if type(like) is np.ndarray:
        return np.empty(shape, like.dtype)
    from meshdist.arrays.device import cupy_module

    cupy = cupy_module()
    with cupy.cuda.Device(like.device.id):
        return cupy.empty(shape, like.dtype)
