"""Faults of arrays: strange ones, which are to be written right, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from faults_compared.fault import Fault
from faults_compared.library import Library
from faults_compared.witness import Witness


def _sums(lib: Library, witness: Witness, x: Any, right: Any) -> None:
    witness.fault()
    witness.attempt(lambda: lib.all_reduce(x), lambda: bool(np.array_equal(x, right)))


def strided(lib: Library, witness: Witness) -> None:
    """Every second element of an array."""
    base = np.arange(8.0)
    witness.fault()
    right = np.where(np.arange(8) % 2 == 0, base * lib.size, base)
    witness.attempt(lambda: lib.all_reduce(base[::2]), lambda: bool(np.array_equal(base, right)))


def read_only(lib: Library, witness: Witness) -> None:
    """Memory that must not be written, as NumPy says."""
    x = np.ones(4)
    x.flags.writeable = False
    witness.fault()
    witness.attempt(lambda: lib.all_reduce(x), lambda: False)


def repeated(lib: Library, witness: Witness) -> None:
    """One element that stands for many."""
    x = np.broadcast_to(np.ones(1), (4,))
    witness.fault()
    witness.attempt(lambda: lib.all_reduce(x), lambda: False)


def scalar(lib: Library, witness: Witness) -> None:
    """An array of no dimensions."""
    _sums(lib, witness, np.array(1.0), lib.size)


def empty(lib: Library, witness: Witness) -> None:
    """An array of no elements."""
    _sums(lib, witness, np.ones(0), np.ones(0))


def fortran(lib: Library, witness: Witness) -> None:
    """An array whose columns are contiguous, added to one whose rows are."""
    x = np.arange(6.0).reshape(2, 3)
    _sums(lib, witness, np.asfortranarray(x) if lib.rank == 0 else x.copy(), x * lib.size)


def uint16(lib: Library, witness: Witness) -> None:
    """A dtype that is not everywhere."""
    _sums(lib, witness, np.ones(4, np.uint16), np.full(4, lib.size))


def big_endian(lib: Library, witness: Witness) -> None:
    """Bytes in the other order."""
    _sums(lib, witness, np.ones(4, ">f4"), np.full(4, lib.size))


def objects(lib: Library, witness: Witness) -> None:
    """References, which mean nothing in another process."""
    x = np.array([1, 2], object)
    witness.fault()
    witness.attempt(lambda: lib.all_reduce(x), lambda: False)


def nan_first(lib: Library, witness: Witness) -> None:
    """Not a number, on rank 0."""
    _nan(lib, witness, 0)


def nan_last(lib: Library, witness: Witness) -> None:
    """Not a number, on rank 1."""
    _nan(lib, witness, 1)


def _nan(lib: Library, witness: Witness, where: int) -> None:
    x = np.array([np.nan if lib.rank == where else 1.0])
    witness.fault()
    witness.attempt(lambda: lib.all_reduce(x, "max"), lambda: bool(np.isnan(x[0])))


ARRAYS = (
    Fault("all_reduce of every second element, in place", strided, has_answer=True),
    Fault("a read-only array as output", read_only),
    Fault("an array of `broadcast_to` as output", repeated),
    Fault("a 0-d array", scalar, has_answer=True),
    Fault("an empty array", empty, has_answer=True),
    Fault("Fortran order on one rank, C order on the other", fortran, has_answer=True),
    Fault("uint16", uint16, has_answer=True),
    Fault("big-endian floats", big_endian, has_answer=True),
    Fault("objects", objects),
    Fault("MAX with NaN on rank 0 (NumPy: NaN)", nan_first, has_answer=True),
    Fault("MAX with NaN on rank 1 (NumPy: NaN)", nan_last, has_answer=True),
)
