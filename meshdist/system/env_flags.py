"""The environment variables that are one of a few words, and those that show a launcher of MPI."""

from __future__ import annotations

import os

SINGLE_COPY = "MESHDIST_SINGLE_COPY"
SPREADING = "MESHDIST_SPREADING"
DISABLE_SHM = "MESHDIST_DISABLE_SHM"
INSECURE = "MESHDIST_INSECURE"
MPI_CUDA = "MESHDIST_MPI_CUDA"

TUNING = "MESHDIST_TUNING"
TUNING_MODES = ("off", "cached", "on", "force")
"""Plans take the default; what was measured before; measure what was not; measure everything again."""

ENCRYPTION = "MESHDIST_ENCRYPTION"
_ENCRYPTION_MODES = ("off", "on", "all")

MPI_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
"""Variables that the launchers of MPI set for a rank."""

_VALUES = {"0": False, "1": True, "": None}


def has_mpi_launcher() -> bool:
    """Return whether a launcher of MPI has started this process."""
    return any(name in os.environ for name in MPI_LAUNCHED)


def switch(variable: str) -> bool | None:
    """Return whether a flag is set to 1; None if it is unset or empty."""
    value = os.environ.get(variable, "")
    if value not in _VALUES:
        raise ValueError(f"the environment variable {variable} must be 0 or 1, got {value!r}")
    return _VALUES[value]


def tuning_mode() -> int:
    """Return the number of the mode in `TUNING_MODES` that is asked for; "on" by default."""
    return TUNING_MODES.index(_one_of(TUNING, TUNING_MODES))


def encryption_mode() -> str:
    """Return which connections are encrypted: "off", none; "on", those to other hosts; "all"."""
    return _one_of(ENCRYPTION, _ENCRYPTION_MODES)


def _one_of(variable: str, values: tuple[str, ...]) -> str:
    value = os.environ.get(variable) or "on"
    if value not in values:
        from meshdist.system.option_parser import did_you_mean  # which an error alone needs

        known, hint = ", ".join(values), did_you_mean(value, values)
        raise ValueError(f"the environment variable {variable} must be one of {known}, got {value!r}{hint}")
    return value


def check_switches() -> None:
    tuning_mode()
    encryption_mode()
    for variable in (SINGLE_COPY, SPREADING, DISABLE_SHM, INSECURE, MPI_CUDA):
        switch(variable)


def to_int(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{what} must be a whole number, got {text!r}") from None
