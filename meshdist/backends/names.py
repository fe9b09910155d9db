"""Backend: the names of the backends, as torch.distributed has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshdist.backends.device_backends import backend_name
from meshdist.backends.registry import UNDEFINED, entry_of, register_backend


class _Names(type):
    def __getattr__(cls, name: str) -> str:
        # Backends that were registered are attributes as the others are.
        try:
            entry_of(name)
        except ValueError as error:
            raise AttributeError(f"Backend.{name}: {error}") from None
        if name != name.upper():
            raise AttributeError(f"Backend has the names in upper case: Backend.{name.upper()}")
        return name.lower()


class Backend(str, metaclass=_Names):
    """The name of a backend: a string in lower case.

    `Backend("GLOO")` takes any case and is equal to "gloo"; pairs of device type and backend such as
    "cpu:gloo,cuda:nccl" are names as well. Every backend is an attribute, in upper case.

    What carries out the calls of a group is an engine: `meshdist.backends.Engine`.

    Raises:
        TypeError: It is no string.
        ValueError: No backend has this name; the message lists the known ones.

    Example:
        >>> Backend("GLOO") == Backend.GLOO == "gloo"
        True
        >>> Backend("CUDA:nccl,cpu:gloo")
        'cpu:gloo,cuda:nccl'
    """

    GLOO = "gloo"
    MPI = "mpi"
    NCCL = "nccl"
    THREADS = "threads"
    FAKE = "fake"
    UCC = "ucc"
    XCCL = "xccl"
    UNDEFINED = UNDEFINED

    __slots__ = ()

    def __new__(cls, name: str) -> Backend:
        """Return the name of a backend in its one spelling."""
        if not isinstance(name, str):
            raise TypeError(f"Backend: the name must be a string, got {name!r}")
        return super().__new__(cls, UNDEFINED if name.lower() == UNDEFINED else backend_name(name))

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., Any],
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Make a backend known under `name`, to `init_process_group`, `new_group`, `init_device_mesh` and as attribute.

        Register it on every rank, before the first group that names it. As with torch, a name that was registered
        before means the new function from then on, for groups that have not made a call yet. What `func` raises, the
        first call of a group raises, as the cause of a DistBackendError.

        Args:
            name: A word; its case does not count.
            func: Makes the engine of one group, at its first call: `func(store, rank, size, timeout)`, with the store
                of the group alone, this rank's place in it, its size, and its timeout as a timedelta. It returns a
                `meshdist.backends.Engine`.
            extended_api: `func` is called as `func(options, pg_options)` instead, with a
                `meshdist.backends.BackendOptions` and what was given to `new_group` or `init_process_group`.
            devices: The device types whose arrays it carries, "cpu" or "cuda" or both. Both where None.

        Raises:
            TypeError: `name` is no string, or `func` cannot be called with the arguments that it is to be given.
            ValueError: `name` is no word or that of a backend of meshdist, or `devices` are unknown.
        """
        register_backend(name, func, extended_api, devices)
