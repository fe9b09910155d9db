"""GPU arrays: CuPy's own, and any that share memory with CuPy.

CuPy is used if it is already loaded; it is imported only for a GPU array of a different library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from meshdist.arrays.host import check_apart, check_dtype
from meshdist.arrays.overlap import repeats_elements
from meshdist.errors import DistBackendError
from meshdist.system.plurals import counted

_FAILURES = (TypeError, ValueError, RuntimeError, BufferError, AttributeError, NotImplementedError)


def cupy_module() -> Any:
    """Return the module `cupy`; raise DistBackendError if it cannot be imported."""
    try:
        import cupy  # waits if another thread has begun to import it
    except ImportError as error:
        raise DistBackendError(
            f"arrays in the memory of a GPU need CuPy: `pip install cupy-cuda12x` ({error})"
        ) from None
    return cupy


def as_device_array(value: Any, name: str, *, written: bool = False) -> Any:
    """Return `value` as a CuPy array over the same memory.

    Accepts CuPy arrays, `__cuda_array_interface__` (Numba arrays, torch tensors), and DLPack.

    Raises:
        TypeError: The memory cannot be shared, or the dtype is not supported.
        ValueError: The call writes it, and it is read-only or repeats elements in memory.
    """
    cupy = cupy_module()
    array = value if isinstance(value, cupy.ndarray) else _shared(cupy, value, name, written)
    check_dtype(array, name)
    if written and not array.flags.c_contiguous and repeats_elements(array):
        raise ValueError(
            f"{name} repeats elements in memory (broadcast_to?), and this call writes to it; pass {name}.copy()"
        )
    return array


def as_device_buffers(value: Any, name: str, is_list: bool, *, written: bool = False) -> Any:
    """Return an argument as a CuPy array or, if `is_list`, a list of them; None stays None.

    Raises:
        TypeError: `value` is a list instead of one array, or an array instead of a list; or `as_device_array` raises
            it.
        ValueError: `as_device_array` raises it, or two arrays that are written share memory.
    """
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        if is_list:
            raise TypeError(f"{name} must be a list of arrays, got {type(value).__name__}")
        return as_device_array(value, name, written=written)
    if not is_list:
        raise TypeError(f"{name} must be one array, got a {type(value).__name__} of {counted(len(value), 'element')}")
    arrays = [as_device_array(item, f"{name}[{k}]", written=written) for k, item in enumerate(value)]
    if written and not _lie_apart(arrays):
        check_apart([outline(array) for array in arrays], name)
    return arrays


def outline(array: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a NumPy array at the addresses of a CuPy array, for overlap checks only: never read its elements."""
    return np.asarray(_Outline(array))


def outlines(buffers: Any) -> Any:
    """Return the outline of an array, or of each of a list."""
    if isinstance(buffers, list):
        return [outline(array) for array in buffers]
    return None if buffers is None else outline(buffers)


def plain(array: Any) -> Any:
    """Return the array if it is contiguous, else a contiguous copy made on the current stream.

    Unlike `cupy.ascontiguousarray`, it keeps the shape of an array without dims.
    """
    return array if array.flags.c_contiguous else array.copy()


def device_of(arrays: Sequence[Any]) -> int | None:
    """Return the number of the GPU that holds the arrays; None for no arrays; raise ValueError for several GPUs."""
    found = {int(array.device.id) for array in arrays}
    if len(found) > 1:
        raise ValueError(
            f"the arrays are on several GPUs, {', '.join(map(str, sorted(found)))}; a rank has one: copy them to it"
        )
    return found.pop() if found else None


def on_current_stream(device: int, use: Callable[[Any], object]) -> None:
    """Call `use` with the current stream of a GPU, while that GPU is the current device.

    CuPy has one object for the default streams of all GPUs; CUDA takes it as that of the current device.
    """
    cuda = cupy_module().cuda
    if cuda.runtime.getDevice() == device:
        use(cuda.get_current_stream())
        return
    with cuda.Device(device):
        use(cuda.get_current_stream())


def _lie_apart(arrays: list[Any]) -> bool:
    """Return True if no two arrays can share memory, by a cheap test."""
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
    if getattr(value, "requires_grad", False):
        value = value.detach()  # torch's: the same memory; writes are not recorded by autograd
    for attribute, take in ways:
        # Look at the class: reading the attribute of the array may raise, although the other protocol works.
        if not hasattr(type(value), attribute):
            continue
        try:
            if written and attribute == "__cuda_array_interface__" and value.__cuda_array_interface__["data"][1]:
                raise ReadOnlyError(f"{name} is read-only, and this call writes to it; pass a copy")
            return _with_dtype_of(take(value), value)
        except ReadOnlyError:
            raise
        except _FAILURES as error:
            failure = failure or error
    raise TypeError(f"{name}: {type(value).__name__} does not share its memory with CuPy: {failure}") from failure


def _with_dtype_of(array: Any, value: Any) -> Any:
    """Return an array over the memory of `value` with its dtype, which the protocols of sharing may not have."""
    if array.dtype.kind != "V" or array.dtype.isbuiltin == 2:
        return array
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        return array
    dtype = getattr(ml_dtypes, str(getattr(value, "dtype", "")).rpartition(".")[2], None)
    return array if dtype is None else array.view(np.dtype(dtype))


class ReadOnlyError(ValueError):
    """Report an array that a call writes and that is read-only."""
