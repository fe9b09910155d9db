"""Library: the few calls that the faults are made of, in terms of one library each. Arrays are NumPy's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Library(ABC):
    """One rank, or one group of a rank.

    Attributes:
        rank: Its number.
        size: How many there are.
    """

    rank: int
    size: int

    @abstractmethod
    def join(self, rank: int, size: int, timeout_s: float, url: str) -> None:
        """Meet the others at an address of torch's form."""

    @abstractmethod
    def leave(self) -> None:
        """End what `join` has begun."""

    @abstractmethod
    def peek(self, host: str, port: int) -> None:
        """As a stranger to the job: read what is in its store."""

    @abstractmethod
    def group(self) -> Library:
        """Return another group of all ranks."""

    @abstractmethod
    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Reduce in place: "sum", "max" or "min"."""

    @abstractmethod
    def begin(self, array: Array) -> Callable[[], Any]:
        """Begin a sum; return what waits for it."""

    @abstractmethod
    def broadcast(self, array: Array, root: int) -> None:
        """Send to all from one."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all."""

    @abstractmethod
    def send(self, array: Array, dst: int) -> None:
        """Send to one."""

    @abstractmethod
    def recv(self, array: Array, src: int) -> None:
        """Receive from one."""


def ones(count: int, dtype: str = "float32") -> Array:
    """Return what most faults are about."""
    return np.ones(count, dtype)
