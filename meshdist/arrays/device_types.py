"""The device type of an array, without importing its library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshdist.arrays.host import as_array

# Device types of DLPack: kDLCUDA and kDLCUDAManaged.
_DLPACK_CUDA = (2, 13)
_NUMPY = {np.ndarray}


def device_type_of(value: Any) -> str:
    """Return "cuda" for a GPU array, otherwise "cpu"."""
    kind = type(value)
    if kind is np.ndarray:
        return "cpu"
    if kind.__module__ == "cupy" and kind.__name__ == "ndarray":
        return "cuda"
    # Look at the class: an array on the CPU may have the attribute and raise when it is read, as torch's do.
    if hasattr(kind, "__array_interface__"):
        return "cpu"
    if hasattr(kind, "__dlpack_device__"):
        return "cuda" if int(value.__dlpack_device__()[0]) in _DLPACK_CUDA else "cpu"
    return "cuda" if hasattr(value, "__cuda_array_interface__") else "cpu"


def common_device_type(buffers: tuple[Any, ...]) -> str | None:
    """Return the device type of arrays and lists of arrays; None for no arrays; raise ValueError for several types."""
    if len(buffers) == 1 and type(buffers[0]) is np.ndarray:
        return "cpu"
    if len(buffers) == 2 and buffers[0] is buffers[1] and hasattr(buffers[0], "dtype"):
        return device_type_of(buffers[0])  # one array, in place
    kinds: set[type] = set()
    for buffer in buffers:
        if isinstance(buffer, (list, tuple)):
            kinds.update(map(type, buffer))
        else:
            kinds.add(type(buffer))
    kinds.discard(type(None))
    if kinds == _NUMPY:
        return "cpu"
    arrays = [array for buffer in buffers for array in (buffer if isinstance(buffer, (list, tuple)) else [buffer])]
    found = {device_type_of(array) for array in arrays if array is not None}
    if len(found) > 1:
        raise ValueError(f"the arrays are on several device types, {', '.join(sorted(found))}; bring them to one")
    return found.pop() if found else None


def check_device_id(of: str, device_id: Any) -> None:
    """Raise TypeError or ValueError if `device_id`, a parameter of `of`, is certainly not a device."""
    if device_id is None or hasattr(device_id, "type") or hasattr(device_id, "id"):
        return
    if isinstance(device_id, str):
        kind, colon, number = device_id.partition(":")
        well = kind in ("cpu", "cuda") and (number.isdecimal() if colon else True)
    elif isinstance(device_id, int) and not isinstance(device_id, bool):
        well = device_id >= 0
    else:
        raise TypeError(f"{of}: device_id must be a device, its index or its name, got {device_id!r}")
    if not well:
        raise ValueError(f"{of}: device_id must be an index from 0, 'cpu', 'cuda' or 'cuda:<index>', got {device_id!r}")


def cuda_number(device_id: Any) -> int | None:
    """Return the number of the GPU that a `device_id` names; it may be a number, a name, or a device object."""
    if isinstance(device_id, str):
        kind, _, number = device_id.partition(":")
        return int(number) if kind == "cuda" and number else None
    if device_id is None or isinstance(device_id, int):
        return device_id
    if getattr(device_id, "type", "cuda") != "cuda":
        return None
    # torch.device has `index`, CuPy's Device `id`.
    place = getattr(device_id, "index", None)
    return place if isinstance(place, int) else getattr(device_id, "id", None)


def taken(x: Any, name: str = "x", hint: Callable[[Any, str], str] | None = None) -> Any:
    """Return `x` as a NumPy array or, in GPU memory, a CuPy array; raise TypeError for what is not an array.

    `hint` makes the end of that message; see `as_array`.
    """
    if type(x) is np.ndarray:
        return x
    if getattr(x, "requires_grad", False):
        raise TypeError(f"{name} requires grad, but the result would have no gradient; pass {name}.detach()")
    if device_type_of(x) == "cpu":
        return as_array(x, name, hint)
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
