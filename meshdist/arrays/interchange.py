"""Arrays of other libraries as NumPy arrays over the same memory: torch tensors, DLPack, array interface, buffers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# dtypes of torch and ml_dtypes that NumPy lacks: bytes per element.
_EXTENSIONS = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
OBJECTS = "; send objects with send_object, broadcast_object_list, all_gather_object and the like"
"""The end of a message about an array that is one of objects, or none."""
_OF_TREES = (
    *("all_reduce", "reduce", "scan", "exscan", "broadcast"),
    *("all_gather", "all_gather_into_tensor", "gather"),
)
"""The collectives whose forms in `functional` take trees of arrays and numbers."""
_NUMBERS = (bool, int, float, complex, np.number, np.bool_, list, tuple)
_FAILURES = (TypeError, ValueError, RuntimeError, BufferError, AttributeError, NotImplementedError)


def shared_array(value: Any, name: str, hint: Callable[[Any, str], str] | None = None) -> Array:
    """Return an array of another library as a NumPy array over the same memory.

    Accepts, in this order: torch tensors on the CPU (those that require grad are detached, as in torch.distributed),
    `__array_interface__` and `__array_struct__`, DLPack, and the buffer protocol (`array.array`, `bytearray`,
    `memoryview`). An object with `__array__` alone may return a copy, so the result is read-only.

    Raises:
        TypeError: None of these, or the memory cannot be shared. `hint` makes the end of the message; None makes that
            of an array that is only read.
    """
    tensor_class = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor_class is not None and isinstance(value, tensor_class):
        return _of_tensor(value, name)
    if isinstance(value, type):
        raise TypeError(f"{name} must be an array, got the class {value.__name__}")
    if hasattr(value, "__cuda_array_interface__"):
        raise _on_gpu(value, name)
    if hasattr(value, "__array_interface__") or hasattr(value, "__array_struct__"):
        return _tried(np.asarray, value, name, "its array interface")
    if hasattr(value, "__dlpack__"):
        return _tried(_from_dlpack, value, name, "DLPack")
    try:
        view = memoryview(value)
    except TypeError:
        pass  # no buffer
    else:
        return _tried(np.asarray, view, name, "the buffer protocol")
    if hasattr(value, "__array__"):
        copied: Array = _tried(np.asarray, value, name, "__array__", _advice_for_blocks(value)).view()
        copied.flags.writeable = False
        return copied
    raise TypeError(f"{name} must be an array, got {type(value).__name__}{(hint or hint_of_input)(value, name)}")


def hint_of_input(value: Any, name: str, of: str = "") -> str:
    """Return what to pass instead of `value`, which is no array, as input of the function `of`."""
    if isinstance(value, dict) and of in _OF_TREES:
        return f"; functional.{of} takes dicts of arrays, and returns the result"
    if isinstance(value, dict):
        return f"; pass its arrays one by one, or{OBJECTS[1:]}"
    if isinstance(value, (str, set, frozenset)):
        return OBJECTS
    return f"; use np.array({name})" if isinstance(value, _NUMBERS) else ""


def hint_of_output(value: Any, name: str, of: str = "") -> str:
    """Return what to pass instead of `value`, which is no array, as output of the function `of`."""
    if isinstance(value, dict):
        return hint_of_input(value, name, of)
    if not isinstance(value, _NUMBERS):
        return ""
    shape = len(value) if isinstance(value, (list, tuple)) else "()"
    return f"; make an array for the result, such as buf = np.empty({shape}), and pass that"


def hint_of_both(value: Any, name: str, of: str = "") -> str:
    """Return what to pass instead of `value`, which is no array, where the function `of` replaces it by its result."""
    hint = hint_of_input(value, name, of)
    if isinstance(value, (list, tuple)) and of in _OF_TREES and any(hasattr(item, "dtype") for item in value):
        return f"; functional.{of} takes lists of arrays, and returns the result"
    if isinstance(value, _NUMBERS) and of in _OF_TREES:
        hint += f", or functional.{of}, which takes numbers and lists, and returns the result"
    return hint


def is_copied(value: Any) -> bool:
    """Return whether NumPy reads `value` by `__array__` alone, so that it cannot be written through."""
    if isinstance(value, (np.ndarray, np.generic)) or not hasattr(value, "__array__"):
        return False
    shared = ("__array_interface__", "__array_struct__", "__dlpack__")
    return not any(hasattr(value, way) for way in shared)


def _of_tensor(tensor: Any, name: str) -> Array:
    # Not by DLPack, which does not export bfloat16 to NumPy and loses the negative bit of a view.
    dtype_name = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type == "cuda":
        raise _on_gpu(tensor, name)
    if tensor.requires_grad:
        tensor = tensor.detach()  # the same memory; writes are not recorded by autograd
    if dtype_name not in _EXTENSIONS:
        return _tried(lambda tensor: tensor.numpy(), tensor, name, "tensor.numpy()")
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        raise TypeError(
            f"{name} is a tensor of {dtype_name}, which NumPy supports only with ml_dtypes: install that"
        ) from None
    torch = sys.modules["torch"]
    plain = torch.int16 if _EXTENSIONS[dtype_name] == 2 else torch.uint8
    array = _tried(lambda tensor: tensor.view(plain).numpy(), tensor, name, "tensor.numpy()")
    tensor_array: Array = array.view(getattr(ml_dtypes, dtype_name))
    return tensor_array


def _from_dlpack(value: Any) -> Array:
    try:
        return np.from_dlpack(value, copy=False)  # type: ignore[call-arg,unused-ignore]
    except TypeError:
        # NumPy before 2.1, or an exporter of version 0 of the protocol, has no such argument.
        return np.from_dlpack(value)


def _advice_for_blocks(value: Any) -> str:
    """Return what to pass instead of a DTensor, which is known by its method: this module is below its layer."""
    if not hasattr(value, "to_local"):
        return ""
    return "{name} must be an array, got {kind}; pass x.to_local(), this rank's block, or x.full(), the whole array"


def _tried(share: Any, value: Any, name: str, way: str, advice: str = "") -> Array:
    try:
        array: Array = share(value)
    except _FAILURES as error:
        if advice:
            raise TypeError(advice.format(name=name, kind=type(value).__name__)) from None
        raise TypeError(f"{name}: {type(value).__name__} does not share its memory through {way}: {error}") from error
    return array


def _on_gpu(value: Any, name: str) -> TypeError:
    return TypeError(
        f"{name} is a {type(value).__name__} in GPU memory, and this backend takes arrays in CPU memory;"
        " pass a copy there"
    )
