"""Which backends can be used here."""

from __future__ import annotations

from meshdist.backends.device_backends import backend_name, by_device
from meshdist.backends.registry import entry_of


def is_available() -> bool:
    """Return True: where meshdist can be imported, it can be used."""
    return True


def is_backend_available(backend: str) -> bool:
    """Return whether a backend can be used here; False where it is unknown.

    Args:
        backend: A name in any case, or pairs of device type and name, of which all must be available.

    Raises:
        TypeError: It is no string.
    """
    if not isinstance(backend, str):
        raise TypeError(f"is_backend_available: backend must be a string, got {backend!r}")
    try:
        spelled = backend_name(backend)
    except ValueError:
        return False
    return all(entry_of(name).missing() is None for name in by_device(spelled).values() or [spelled])


def is_gloo_available() -> bool:
    """Return whether backend `gloo` can be used here: on Linux and macOS always, as it needs nothing but NumPy."""
    return is_backend_available("gloo")


def is_mpi_available() -> bool:
    """Return whether backend `mpi` can be used here."""
    return is_backend_available("mpi")


def is_nccl_available() -> bool:
    """Return whether backend `nccl` can be used here: with CuPy, and a GPU that this process sees."""
    return is_backend_available("nccl")


def is_ucc_available() -> bool:
    """Return False: meshdist has no UCC engine."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return False: meshdist has no engine for Intel GPUs."""
    return is_backend_available("xccl")
