"""Arrays as users have them: each kind with the bytes around it, and a way to see what became of it."""

from __future__ import annotations

import array
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided


class Kept:
    """A user's array, and what of it must not change.

    Attributes:
        value: What is passed to a call.
    """

    def __init__(self, value: Any, view: np.ndarray, memory: np.ndarray) -> None:
        self.value = value
        self._view = view
        self._memory = memory.view(np.uint8).reshape(-1)
        self._before = self._memory.copy()
        # By addresses: NumPy need not write all bytes of an element (those of a long double that say nothing).
        self._outside = np.ones(self._memory.shape, bool)
        first = view.__array_interface__["data"][0] - self._memory.__array_interface__["data"][0]
        as_strided(self._outside[first:], (*view.shape, view.itemsize), (*view.strides, 1))[...] = False

    def check(self, wanted: np.ndarray, what: str) -> None:
        """Compare the content, and all bytes around it."""
        if self._view.size != wanted.size or not (self._view.reshape(wanted.shape) == wanted).all():
            raise AssertionError(f"{what}: got\n{self._view}\nexpected\n{wanted}")
        if (self._memory != self._before)[self._outside].any():
            raise AssertionError(f"{what}: bytes outside the array were written")


def _guarded(content: np.ndarray, dtype: Any = None) -> tuple[np.ndarray, np.ndarray]:
    # A plain array in the middle of other bytes, and these.
    dtype = content.dtype if dtype is None else dtype
    memory = np.full(content.nbytes + 64, 0x55, np.uint8)
    view = memory[32 : 32 + content.nbytes].view(dtype).reshape(content.shape)
    view[...] = content
    return view, memory


def plain(content: np.ndarray) -> Kept:
    view, memory = _guarded(content)
    return Kept(view, view, memory)


def big_endian(content: np.ndarray) -> Kept:
    view, memory = _guarded(content, content.dtype.newbyteorder(">"))
    return Kept(view, view, memory)


def big_endian_strided(content: np.ndarray) -> Kept:
    wide, memory = _guarded(np.repeat(content, 2, axis=-1), content.dtype.newbyteorder(">"))
    return Kept(wide[..., ::2], wide[..., ::2], memory)


def fortran(content: np.ndarray) -> Kept:
    view, memory = _guarded(np.ascontiguousarray(content.T))
    return Kept(view.T, view.T, memory)


def backwards(content: np.ndarray) -> Kept:
    view, memory = _guarded(content)
    view[...] = content[::-1]
    return Kept(view[::-1], view[::-1], memory)


def unaligned(content: np.ndarray) -> Kept:
    memory = np.full(content.nbytes + 65, 0x55, np.uint8)
    view = memory[33 : 33 + content.nbytes].view(content.dtype).reshape(content.shape)
    view[...] = content
    return Kept(view, view, memory)


def matrix(content: np.ndarray) -> Kept:
    view, memory = _guarded(content.reshape(len(content), -1))
    return Kept(view.view(np.matrix), view, memory)


def recarray(content: np.ndarray) -> Kept:
    view, memory = _guarded(content)
    return Kept(view.view(np.recarray), view, memory)


def memmap(content: np.ndarray) -> Kept:
    with tempfile.TemporaryFile() as file:
        file.write(b"U" * (content.nbytes + 64))
        file.flush()
        memory = np.memmap(file, np.uint8, "r+")
    view = memory[32 : 32 + content.nbytes].view(content.dtype).reshape(content.shape)
    view[...] = content
    return Kept(view, np.asarray(view), np.asarray(memory))


class WithInterface:
    """Offers `__array_interface__` alone."""

    def __init__(self, source: np.ndarray) -> None:
        self.__array_interface__ = source.__array_interface__
        self.source = source


class WithDlpack:
    """Offers DLPack alone."""

    def __init__(self, source: np.ndarray) -> None:
        self.source = source

    def __dlpack__(self, **how: Any) -> Any:
        return self.source.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.source.__dlpack_device__()


def with_interface(content: np.ndarray) -> Kept:
    view, memory = _guarded(content)
    return Kept(WithInterface(view), view, memory)


def with_dlpack(content: np.ndarray) -> Kept:
    view, memory = _guarded(content)
    return Kept(WithDlpack(view), view, memory)


def with_strided_dlpack(content: np.ndarray) -> Kept:
    wide, memory = _guarded(np.repeat(content, 2, axis=-1))
    return Kept(WithDlpack(wide[..., ::2]), wide[..., ::2], memory)


def memory_view(content: np.ndarray) -> Kept:
    view, memory = _guarded(content)
    return Kept(memoryview(view), view, memory)


def stdlib_array(content: np.ndarray) -> Kept:
    value = array.array(content.dtype.char, content.reshape(-1).tolist())
    view = np.asarray(value)
    return Kept(value, view, view)


def byte_array(content: np.ndarray) -> Kept:
    value = bytearray(content.tobytes())
    view = np.asarray(value)
    return Kept(value, view, view)


def tensor(content: np.ndarray) -> Kept:
    import torch

    view, memory = _guarded(content)
    return Kept(torch.from_numpy(view), view, memory)


def strided_tensor(content: np.ndarray) -> Kept:
    import torch

    wide, memory = _guarded(np.repeat(content, 2, axis=-1))
    return Kept(torch.from_numpy(wide)[..., ::2], wide[..., ::2], memory)


def extension_tensor(content: np.ndarray) -> Kept:
    import torch

    view, memory = _guarded(content)
    plain_dtype = np.int16 if content.itemsize == 2 else np.uint8
    return Kept(torch.from_numpy(view.view(plain_dtype)).view(getattr(torch, content.dtype.name)), view, memory)


# Kind -> how it is made, the dtype, and a small and a large shape.
KINDS: dict[str, tuple[Callable[[np.ndarray], Kept], str, tuple[tuple[int, ...], ...]]] = {
    "plain": (plain, "float32", ((), (0,), (5,), (0, 3), (40_000,))),
    "bool": (plain, "bool", ((5,), (100_000,))),
    "longdouble": (plain, "longdouble", ((5,), (9_000,))),
    "clongdouble": (plain, "clongdouble", ((3,),)),
    "int4": (plain, "int4", ((5,), (40_000,))),
    "uint2": (plain, "uint2", ((5,),)),
    "float8_e5m2": (plain, "float8_e5m2", ((5,), (40_000,))),
    "big-endian": (big_endian, "float64", ((), (0,), (3, 5), (20_000,))),
    "big-endian, of integers": (big_endian, "int16", ((7,), (40_000,))),
    "big-endian and strided": (big_endian_strided, "int32", ((3, 5), (20_000,))),
    "Fortran": (fortran, "int64", ((3, 5), (200, 101))),
    "backwards": (backwards, "float32", ((5,), (40_000,))),
    "unaligned": (unaligned, "float64", ((5,), (20_000,))),
    "matrix": (matrix, "float64", ((3, 5), (100, 200))),
    "recarray": (recarray, "int32", ((5,),)),
    "memmap": (memmap, "float32", ((5,), (40_000,))),
    "__array_interface__": (with_interface, "float32", ((), (5,), (40_000,))),
    "DLPack": (with_dlpack, "float32", ((), (5,), (40_000,))),
    "DLPack, strided": (with_strided_dlpack, "int32", ((5,), (40_000,))),
    "memoryview": (memory_view, "float64", ((3, 5), (20_000,))),
    "array.array": (stdlib_array, "float32", ((5,), (40_000,))),
    "bytearray": (byte_array, "uint8", ((5,), (100_000,))),
    "tensor": (tensor, "float32", ((), (0,), (3, 5), (40_000,))),
    "tensor, strided": (strided_tensor, "int64", ((3, 5), (20_000,))),
    "tensor of bfloat16": (extension_tensor, "bfloat16", ((), (5,), (40_000,))),
    "tensor of float8": (extension_tensor, "float8_e5m2", ((5,), (40_000,))),
}
