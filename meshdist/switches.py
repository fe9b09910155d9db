"""Switches: the environment variables that are 0 or 1."""

from __future__ import annotations

import os

SINGLE_COPY = "MESHDIST_SINGLE_COPY"
DISABLE_SHM = "MESHDIST_DISABLE_SHM"
INSECURE = "MESHDIST_INSECURE"
MPI_CUDA = "MESHDIST_MPI_CUDA"

_VALUES = {"0": False, "1": True, "": None}


def switch(variable: str) -> bool | None:
    """Return what a switch says; None where it is not set, or empty.

    Raises:
        ValueError: It is neither 0 nor 1.

    Example:
        >>> os.environ["MESHDIST_SINGLE_COPY"] = "0"
        >>> switch("MESHDIST_SINGLE_COPY"), switch("MESHDIST_DISABLE_SHM")
        (False, None)
        >>> del os.environ["MESHDIST_SINGLE_COPY"]
    """
    value = os.environ.get(variable, "")
    if value not in _VALUES:
        raise ValueError(f"the environment variable {variable} must be 0 or 1, got {value!r}")
    return _VALUES[value]


def check_switches() -> None:
    """Raise ValueError if one has a value that it cannot have."""
    for variable in (SINGLE_COPY, DISABLE_SHM, INSECURE, MPI_CUDA):
        switch(variable)
