"""The environment variables that are 0 or 1."""

from __future__ import annotations

import os

SINGLE_COPY = "MESHDIST_SINGLE_COPY"
DISABLE_SHM = "MESHDIST_DISABLE_SHM"
INSECURE = "MESHDIST_INSECURE"
MPI_CUDA = "MESHDIST_MPI_CUDA"

_VALUES = {"0": False, "1": True, "": None}


def switch(variable: str) -> bool | None:
    """Return whether a flag is set to 1; None if it is unset or empty."""
    value = os.environ.get(variable, "")
    if value not in _VALUES:
        raise ValueError(f"the environment variable {variable} must be 0 or 1, got {value!r}")
    return _VALUES[value]


def check_switches() -> None:
    for variable in (SINGLE_COPY, DISABLE_SHM, INSECURE, MPI_CUDA):
        switch(variable)


def to_int(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{what} must be a whole number, got {text!r}") from None
