"""Arrays in the memory of a GPU: any that shares its memory with CuPy, as CuPy's own.

CuPy is looked for where it is loaded already. Only who has an array on a GPU, and no CuPy, loads it here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from meshdist.arrays import check_apart, check_dtype
from meshdist.errors import DistBackendError
from meshdist.overlap import repeats_elements

_FAILURES = (TypeError, ValueError, RuntimeError, BufferError, AttributeError, NotImplementedError)


def cupy_module() -> Any:
    """Return the module `cupy`.

    Raises:
        DistBackendError: It is not installed, or cannot be imported; says what to install.
    """
    module = sys.modules.get("cupy")
    if module is None:
        try:
            module = import_module("cupy")
        except ImportError as error:
            raise DistBackendError(
                f"arrays in the memory of a GPU need CuPy: `pip install 'meshdist[cuda]'` ({error})"
            ) from None
    return module


def as_device_array(value: Any, name: str, *, written: bool = False) -> Any:
    """Return `value` as a CuPy array over the same memory.

    Taken are CuPy's arrays, what has `__cuda_array_interface__` (Numba's arrays, torch's tensors), and DLPack.

    Args:
        value: The user's array.
        name: The argument's name, for the error.
        written: The call writes it.

    Raises:
        TypeError: It does not share its memory, or its dtype does not travel.
        ValueError: It is read-only, or repeats elements in memory, and the call writes it.
    """
    cupy = cupy_module()
    array = value if isinstance(value, cupy.ndarray) else _shared(cupy, value, name, written)
    check_dtype(array, name)
    if written and not array.flags.c_contiguous and repeats_elements(array):
        raise ValueError(
            f"{name} repeats elements in memory (broadcast_to?), and this call writes it; pass {name}.copy()"
        )
    return array


def as_device_buffers(value: Any, name: str, is_list: bool, *, written: bool = False) -> Any:
    """Return an argument as the CuPy array, or the list of such, that it is; None stays.

    Args:
        value: The argument.
        name: Its name, for the error.
        is_list: Whether it is to be a list of arrays.
        written: The call writes it.

    Raises:
        TypeError: A list for one array, no list for several, or what `as_device_array` raises.
        ValueError: What `as_device_array` raises; or two arrays that are written share memory.
    """
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        if is_list:
            raise TypeError(f"{name} must be a list of arrays, got {type(value).__name__}")
        return as_device_array(value, name, written=written)
    if not is_list:
        raise TypeError(f"{name} must be one array, got a {type(value).__name__} of {len(value)} elements")
    arrays = [as_device_array(item, f"{name}[{k}]", written=written) for k, item in enumerate(value)]
    if written and not _lie_apart(arrays):
        check_apart([outline(array) for array in arrays], name)
    return arrays


def outline(array: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a NumPy array that lies where a CuPy array does, to be asked whether it overlaps others.

    Its elements are in the memory of the GPU: they must never be read.
    """
    return np.asarray(_Outline(array))


def outlines(buffers: Any) -> Any:
    """Return the outline of an array, or of each of a list."""
    if isinstance(buffers, list):
        return [outline(array) for array in buffers]
    return None if buffers is None else outline(buffers)


def plain(array: Any) -> Any:
    """Return the array itself where its elements lie side by side, else a copy that is so, by the current stream.

    It has the shape of the array, which `cupy.ascontiguousarray` may change for one without dims.
    """
    return array if array.flags.c_contiguous else array.copy()


def device_of(arrays: Sequence[Any]) -> int | None:
    """Return the number of the GPU that the arrays are on; None where there are none.

    Raises:
        ValueError: They are on several.
    """
    found = {int(array.device.id) for array in arrays}
    if len(found) > 1:
        raise ValueError(
            f"the arrays are on several GPUs, {', '.join(map(str, sorted(found)))}; a rank has one: bring them there"
        )
    return found.pop() if found else None


def on_current_stream(device: int, use: Callable[[Any], object]) -> None:
    """Call `use` with the current stream of a GPU, while that is the current device.

    CuPy has one object for the default streams of all GPUs, and CUDA takes it as that of the current one.

    Args:
        device: The number of the GPU.
        use: What is to be done with the stream.
    """
    cuda = cupy_module().cuda
    if cuda.runtime.getDevice() == device:
        use(cuda.get_current_stream())
        return
    with cuda.Device(device):
        use(cuda.get_current_stream())


def _lie_apart(arrays: list[Any]) -> bool:
    """Return True where no two arrays can share memory; a look that costs little."""
    if not all(array.flags.c_contiguous for array in arrays):
        return False
    spans = sorted((array.data.ptr, array.data.ptr + array.nbytes) for array in arrays if array.nbytes)
    return all(end <= begin for (_, end), (begin, _) in pairwise(spans))


class _Outline:
    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": f"|V{array.dtype.itemsize}",
            "strides": array.strides,
            "data": (int(array.data.ptr), False),
        }


def _shared(cupy: Any, value: Any, name: str, written: bool) -> Any:
    ways = (("__cuda_array_interface__", cupy.asarray), ("__dlpack__", cupy.from_dlpack))
    failure: BaseException | None = None
    for attribute, take in ways:
        # In the class: reading it from the array may raise, where another way leads on.
        if not hasattr(type(value), attribute):
            continue
        try:
            if written and attribute == "__cuda_array_interface__" and value.__cuda_array_interface__["data"][1]:
                raise ReadOnlyError(f"{name} is read-only, and this call writes it; pass a copy")
            return take(value)
        except ReadOnlyError:
            raise
        except _FAILURES as error:
            failure = failure or error
    raise TypeError(f"{name}: {type(value).__name__} does not share its memory with CuPy: {failure}") from failure


class ReadOnlyError(ValueError):
    """Report an array that a call writes and that is read-only."""
