"""On which type of device an array lives, found without importing what made it."""

from __future__ import annotations

from typing import Any

import numpy as np

# Of DLPack: kDLCUDA, and memory that CUDA manages for both sides.
_DLPACK_CUDA = (2, 13)
_NUMPY = {np.ndarray}


def device_type_of(value: Any) -> str:
    """Return "cuda" for an array in the memory of a GPU, "cpu" for whatever else.

    Example:
        >>> device_type_of(np.zeros(3))
        'cpu'
    """
    kind = type(value)
    if kind is np.ndarray:
        return "cpu"
    # Looked for in the class: an array on the CPU may have the attribute and raise when it is read, as torch's do.
    if hasattr(kind, "__array_interface__"):
        return "cpu"
    if hasattr(kind, "__dlpack_device__"):
        return "cuda" if int(value.__dlpack_device__()[0]) in _DLPACK_CUDA else "cpu"
    return "cuda" if hasattr(value, "__cuda_array_interface__") else "cpu"


def common_device_type(buffers: tuple[Any, ...]) -> str | None:
    """Return the device type of arrays and of lists of arrays; None where there are none.

    Raises:
        ValueError: They are on several.
    """
    if len(buffers) == 1 and type(buffers[0]) is np.ndarray:
        return "cpu"
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
