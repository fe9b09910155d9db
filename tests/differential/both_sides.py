"""The two sides of a comparison: the same program runs on torch.distributed and on meshdist.

A program is a function of a Side. It takes the module from `on.dist`, makes its arrays with `on.array`, and records
what comes of each step with `on.case`: the values, byte by byte, or the error. So both sides leave a dict from labels
to records, which are plain and can be compared.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import meshdist

try:
    import ml_dtypes
except ModuleNotFoundError:
    ml_dtypes = None

EXTENSION_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_SHOWN_BYTES = 1024

Outcomes = dict[str, Any]
Program = Callable[["Side"], None]


@dataclass(frozen=True)
class Seen:
    """An array as a program saw it: the bytes, or their digest where they are many."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __repr__(self) -> str:
        if len(self.data) != math.prod(self.shape) * dtype_of(self.dtype).itemsize:
            return f"{self.dtype}{list(self.shape)} with digest {self.data.hex()[:8]}"
        return f"{self.dtype} {self.values().tolist()}"

    def values(self) -> np.ndarray:
        """Return the array again; it must not have been a long one."""
        return np.frombuffer(self.data, dtype_of(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class Close:
    """An array whose last bits depend on the order of its additions, and how far two right ones may be apart."""

    seen: Seen
    bound: bytes

    def agrees(self, other: Close) -> bool:
        """Return whether the two differ by no more than the bound."""
        mine, its = self.seen, other.seen
        if (mine.dtype, mine.shape) != (its.dtype, its.shape):
            return False
        wide = np.complex128 if mine.values().dtype.kind == "c" else np.float64
        apart = np.abs(mine.values().astype(wide) - its.values().astype(wide))
        return bool((apart.reshape(-1) <= np.frombuffer(self.bound)).all())


@dataclass(frozen=True)
class Raised:
    """An exception: the names of its class and its base classes, and its message, which is not compared."""

    kinds: tuple[str, ...]
    message: str

    @property
    def kind(self) -> str:
        """The name of the class itself."""
        return self.kinds[0]

    def __repr__(self) -> str:
        return f"{self.kind}: {self.message[:200]}"


class NotHereError(AttributeError):
    """The module does not have the name; there is nothing to compare."""


class Tracked:
    """A module whose names are noted as they are asked for."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        try:
            return getattr(self._module, name)
        except AttributeError as error:
            raise NotHereError(str(error)) from None


class Side:
    """What a program runs on.

    Attributes:
        name: "meshdist" or "torch".
        dist: The module, meshdist or torch.distributed.
        rank: This rank.
        size: The number of ranks.
        outcomes: What the cases came to.
    """

    name: str

    def __init__(self, module: Any) -> None:
        self.dist = Tracked(module)
        self.outcomes: Outcomes = {}
        started = module.is_initialized()
        self.rank: int = module.get_rank() if started else 0
        self.size: int = module.get_world_size() if started else 1

    def case(self, label: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function` and record what it returns or raises; return that too, None where it raised."""
        assert label not in self.outcomes, f"two cases are called {label!r}"
        try:
            value = function(*args, **kwargs)
            self.outcomes[label] = self.seen(value)
        except Exception as error:  # the record of the case
            kinds = [cls.__name__ for cls in type(error).__mro__ if issubclass(cls, Exception)]
            self.outcomes[label] = Raised(tuple(kinds), str(error))
            return None
        return value

    def note(self, label: str, value: Any) -> None:
        """Record a value that is there already."""
        self.case(label, lambda: value)

    def seen(self, value: Any) -> Any:
        """Return the record of a value."""
        if self.is_array(value):
            data, dtype = self.bytes_of(value), self.dtype_name(value)
            if dtype == "bool":
                # Gloo adds bools as bytes, and leaves a 2 where both are true; it reads as true all the same.
                data = (np.frombuffer(data, np.uint8) != 0).tobytes()
            if len(data) > _SHOWN_BYTES:
                data = hashlib.blake2b(data, digest_size=16).digest()
            return Seen(dtype, tuple(value.shape), data)
        if isinstance(value, (list, tuple)):
            return type(value)(self.seen(item) for item in value)
        if isinstance(value, Mapping):
            return {key: self.seen(item) for key, item in value.items()}
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, Close)):
            return value
        if isinstance(value, self.dist.Work):
            return "a Work"
        return f"a {type(value).__name__}"

    def close(self, array: Any, bound: np.ndarray) -> Close:
        """Return the record of an array that is right within `bound`."""
        seen = Seen(self.dtype_name(array), tuple(array.shape), self.bytes_of(array))
        return Close(seen, np.ascontiguousarray(bound, np.float64).tobytes())

    def arrays(self, values: Sequence[np.ndarray]) -> list[Any]:
        """Return the values as arrays of this side."""
        return [self.array(value) for value in values]

    # What a side adds

    def array(self, values: np.ndarray) -> Any:
        """Return a copy of `values`, contiguous, as an array of this side."""
        raise NotImplementedError

    def is_array(self, value: Any) -> bool:
        raise NotImplementedError

    def dtype_name(self, array: Any) -> str:
        raise NotImplementedError

    def bytes_of(self, array: Any) -> bytes:
        raise NotImplementedError


class Ours(Side):
    """meshdist, with NumPy."""

    name = "meshdist"

    def __init__(self) -> None:
        super().__init__(meshdist)

    def array(self, values: np.ndarray) -> Any:
        return np.array(values, order="C")

    def is_array(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def dtype_name(self, array: Any) -> str:
        return str(array.dtype)

    def bytes_of(self, array: Any) -> bytes:
        return bytes(array.tobytes())


class Theirs(Side):
    """torch.distributed, with torch."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        super().__init__(importlib.import_module("torch.distributed"))

    def array(self, values: np.ndarray) -> Any:
        source = np.array(values, order="C")
        tensor = self.torch.empty(source.shape, dtype=getattr(self.torch, str(source.dtype)))
        ctypes.memmove(tensor.data_ptr(), source.ctypes.data, source.nbytes)
        return tensor

    def is_array(self, value: Any) -> bool:
        return isinstance(value, self.torch.Tensor)

    def dtype_name(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def bytes_of(self, array: Any) -> bytes:
        plain = array.contiguous()
        return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""


def dtype_of(name: str) -> np.dtype:
    """Return the dtype, of NumPy or of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name)) if name in EXTENSION_DTYPES else np.dtype(name)


def record(side: str, program: Program) -> tuple[Outcomes, set[str]]:
    """Run a program on this rank, on one side; return its outcomes, and the names that it asked the module for."""
    on: Side = Ours() if side == "meshdist" else Theirs()
    if threading.current_thread() is threading.main_thread():
        with warnings.catch_warnings():  # not for ranks that are threads, which share their filters
            warnings.simplefilter("ignore")
            program(on)
    else:
        program(on)
    return on.outcomes, on.dist.names
