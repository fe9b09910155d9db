"""The registry of backends, to which `register_backend` adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from meshdist.runtime.context import current_slot
from meshdist.system.platform import why_no_processes

if TYPE_CHECKING:
    from meshdist.backends.backend_options import BackendOptions
    from meshdist.backends.base import Backend

DEVICE_TYPES = ("cpu", "cuda")
UNDEFINED = "undefined"

# Creates the backend of one group.
Maker = Callable[["BackendOptions"], "Backend"]


class Entry(NamedTuple):
    """A backend before its first use."""

    devices: tuple[str, ...]  # the device types whose arrays it carries
    make: Maker  # creates the backend of a group
    missing: Callable[[], str | None]  # returns why it is not usable here, or None
    is_ours: bool = True  # it is part of the package, so its name is reserved
    # The device types it carries through the CPU, if the group has no other backend for them.
    stages: tuple[str, ...] = ()
    exists: bool = True  # it exists; False for names that torch has and this package has not


def entry_of(name: str) -> Entry:
    """Return the entry of a backend; raise ValueError, with the known names, if there is none."""
    entry = _ENTRIES.get(name.lower())
    if entry is None:
        from meshdist._spelling import spelt  # which an error alone needs

        meant = spelt(name, known_names())
        hint = "" if meant is None else f"; did you mean {meant!r}?"
        if name.lower() == "tcp":
            hint = "; use 'gloo' instead of torch's former backend 'tcp'"
        raise ValueError(f"unknown backend {name!r}; choose from {', '.join(known_names())}{hint}")
    return entry


def known_names() -> list[str]:
    """Return the names of all backends, whether or not they are usable here."""
    return sorted(name for name, entry in _ENTRIES.items() if entry.exists)


def make_engine(name: str, options: BackendOptions) -> Backend:
    """Create a backend of type `name`, for one group.

    Args:
        name: A known name, in any case.
        options: The group.

    Raises:
        ValueError: There is no such backend.
        DistBackendError: It is not usable here; the message says why.
        TypeError: A registered function returned a different type.
    """
    entry = entry_of(name)
    check_usable(name)
    return entry.make(options)


def check_usable(name: str) -> None:
    """Raise DistBackendError, with the reason, if the backend `name` is not usable here."""
    from meshdist.errors import DistBackendError

    reason = entry_of(name).missing()
    if reason is not None and current_slot().dry is None:  # a dry run needs no backend
        registered = [other for other in known_names() if not _ENTRIES[other].is_ours]
        others = f"; registered are {', '.join(registered)}" if registered else ""
        instead = "" if name.lower() == "gloo" else "; for arrays on the CPU use 'gloo'"
        raise DistBackendError(f"the {name.lower()!r} backend is not available: {reason}{instead}{others}")


def register_backend(
    name: str, func: Callable[..., Backend], extended_api: bool = False, devices: str | Sequence[str] | None = None
) -> None:
    """Add a backend to the table; see `Backend.register_backend`."""
    if not isinstance(name, str):
        raise TypeError(f"register_backend: name must be a string, got {name!r}")
    if not callable(func):
        raise TypeError(f"register_backend({name!r}): func must be callable, got {func!r}")
    key = name.lower()
    if not key.isidentifier() or key == UNDEFINED:
        raise ValueError(
            f"register_backend: name must be a word of letters, digits and underscores and not {UNDEFINED!r},"
            f" got {name!r}"
        )
    if key in _ENTRIES and _ENTRIES[key].is_ours:
        raise ValueError(f"register_backend: {key!r} is a backend of meshdist; choose another name")
    carried = DEVICE_TYPES if devices is None else (devices,) if isinstance(devices, str) else tuple(devices)
    strangers = [device for device in carried if device not in DEVICE_TYPES]
    if strangers or not carried:
        raise ValueError(
            f"register_backend({name!r}): devices must be some of {', '.join(DEVICE_TYPES)}, got {devices!r}"
        )
    _check_form(name, func, extended_api)
    call = _extended(func) if extended_api else _classic(func)
    _ENTRIES[key] = Entry(carried, _checked(key, func, call), lambda: None, is_ours=False)


_FORMS = {False: ("store", "rank", "size", "timeout"), True: ("options", "pg_options")}


def _check_form(name: str, func: Callable[..., Any], extended_api: bool) -> None:
    from inspect import signature

    try:
        form = signature(func)
    except ValueError:  # written in C, without a signature
        return
    try:
        form.bind(*_FORMS[extended_api])
    except TypeError as error:
        takes = {key: f"func({', '.join(names)})" for key, names in _FORMS.items()}
        raise TypeError(
            f"register_backend({name!r}): {_name_of(func)} takes {form}, and with extended_api={extended_api} it is"
            f" called as {takes[extended_api]}: {error}; with extended_api={not extended_api} it would be"
            f" {takes[not extended_api]}"
        ) from None


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__qualname__", type(func).__name__)


def _classic(func: Callable[..., Any]) -> Maker:
    def make(options: BackendOptions) -> Any:
        return func(options.store, options.rank, len(options.ranks), timedelta(seconds=options.timeout_s))

    return make


def _extended(func: Callable[..., Any]) -> Maker:
    return lambda options: func(options, options.pg_options)


def _checked(name: str, func: Callable[..., Any], call: Maker) -> Maker:
    def make(options: BackendOptions) -> Backend:
        from meshdist.backends.base import Backend
        from meshdist.errors import DistBackendError

        try:
            backend = call(options)
        except Exception as error:
            raise DistBackendError(
                f"backend {name!r}: the registered function {_name_of(func)} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(backend, Backend):
            raise TypeError(
                f"backend {name!r}: the registered function must return a meshdist.backends.Engine, got"
                f" {type(backend).__name__}"
            )
        backend.attach(options)
        return backend

    return make


def _built_in(module: str, cls: str) -> Maker:
    """Return a function that imports the backend at its first use."""

    def make(options: BackendOptions) -> Backend:
        backend: Backend = getattr(import_module(module), cls)(options)
        return backend

    return make


def _always() -> str | None:
    return None


def _only_dry() -> str | None:
    return None if current_slot().dry is not None else "it is for dry runs: `with meshdist.dry_run(world_size, rank):`"


def _missing_backend(reason: str, *devices: str) -> Entry:
    """Return the entry of a backend of torch that this package lacks."""

    def make(options: BackendOptions) -> Backend:
        raise AssertionError("unavailable backends are never created")

    return Entry(devices, make, lambda: reason, exists=False)


def no_nccl() -> str | None:
    """Return what is missing for NCCL here (CuPy, a GPU, or the library), or None."""
    from meshdist.backends.nccl.library import no_nccl

    return no_nccl()


def no_mpi() -> str | None:
    """Return what is missing for MPI here (mpi4py or an MPI library), or None."""
    from meshdist.backends.mpi.environment import no_mpi

    return no_mpi()


_GLOO = "meshdist.backends.gloo.backend"
_THREADS = "meshdist.backends.threads"
_FAKE = "meshdist.backends.fake"
_MPI = "meshdist.backends.mpi.backend"
_NCCL = "meshdist.backends.nccl.backend"

# Registered backends apply to the whole process: module state, not part of a World.
_ENTRIES: dict[str, Entry] = {
    "gloo": Entry(("cpu",), _built_in(_GLOO, "GlooBackend"), why_no_processes, stages=("cuda",)),
    "threads": Entry(("cpu",), _built_in(_THREADS, "ThreadsBackend"), _always, stages=("cuda",)),
    "fake": Entry(("cpu", "cuda"), _built_in(_FAKE, "FakeBackend"), _only_dry),
    "mpi": Entry(("cpu",), _built_in(_MPI, "MpiBackend"), no_mpi, stages=("cuda",)),
    "nccl": Entry(("cuda",), _built_in(_NCCL, "NcclBackend"), no_nccl),
    "ucc": _missing_backend("meshdist has no UCC backend", "cpu", "cuda"),
    "xccl": _missing_backend("meshdist has no backend for Intel GPUs"),
}
