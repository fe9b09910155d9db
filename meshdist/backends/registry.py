"""The backends by name: one table, to which `register_backend` adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshdist.current import current_slot
from meshdist.systems import why_no_processes

if TYPE_CHECKING:
    from meshdist.backends.base import Backend as Engine
    from meshdist.backends.base import BackendOptions

DEVICE_TYPES = ("cpu", "cuda")
UNDEFINED = "undefined"

# What makes the engine of one group.
Maker = Callable[["BackendOptions"], "Engine"]


@dataclass(frozen=True)
class Entry:
    """What is known of a backend before its first use.

    Attributes:
        devices: The device types whose arrays it carries.
        make: Makes the engine of a group.
        missing: Says why it cannot be used here; None where it can.
        is_ours: It comes with the package, so its name is taken.
        stages: The device types whose arrays it carries by way of the CPU, where the group has no other backend for
            them.
        is_engine: There is one; not for the names that only say what torch has and this package has not.
    """

    devices: tuple[str, ...]
    make: Maker
    missing: Callable[[], str | None]
    is_ours: bool = True
    stages: tuple[str, ...] = ()
    is_engine: bool = True


def entry_of(name: str) -> Entry:
    """Return the entry of a backend.

    Raises:
        ValueError: No backend has this name; the message lists the known ones.
    """
    entry = _ENTRIES.get(name.lower())
    if entry is None:
        raise ValueError(f"unknown backend {name!r}; known are {', '.join(known_names())}")
    return entry


def known_names() -> list[str]:
    """Return the names of all backends that there are, those too that cannot be used here."""
    return sorted(name for name, entry in _ENTRIES.items() if entry.is_engine)


def make_engine(name: str, options: BackendOptions) -> Engine:
    """Return a new engine of the backend `name`, for one group.

    Args:
        name: A known name, in any case.
        options: What the group is.

    Raises:
        ValueError: No backend has this name.
        DistBackendError: It cannot be used here; says why.
        TypeError: The function that was registered returned something else.
    """
    entry = entry_of(name)
    check_usable(name)
    return entry.make(options)


def check_usable(name: str) -> None:
    """Raise DistBackendError, with the reason, where the backend `name` cannot be used here."""
    from meshdist.errors import DistBackendError

    reason = entry_of(name).missing()
    if reason is not None and current_slot().dry is None:  # a dry run carries nothing, so it needs nothing
        registered = [other for other in known_names() if not _ENTRIES[other].is_ours]
        others = f"; registered are {', '.join(registered)}" if registered else ""
        instead = "" if name.lower() == "gloo" else "; for arrays on the CPU use 'gloo'"
        raise DistBackendError(f"backend {name.lower()!r} is not available: {reason}{instead}{others}")


def register_backend(
    name: str, func: Callable[..., Engine], extended_api: bool = False, devices: str | Sequence[str] | None = None
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
    except ValueError:  # written in C, and does not tell
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
    def make(options: BackendOptions) -> Engine:
        from meshdist.backends.base import Backend as Engine
        from meshdist.errors import DistBackendError

        try:
            engine = call(options)
        except Exception as error:  # whatever code of others raises
            raise DistBackendError(
                f"backend {name!r}: the registered function {_name_of(func)} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(engine, Engine):
            raise TypeError(
                f"backend {name!r}: the registered function must return a meshdist.backends.Engine, got"
                f" {type(engine).__name__}"
            )
        engine.attach(options)
        return engine

    return make


def _built_in(module: str, cls: str) -> Maker:
    """Return what imports the engine when a group of that backend makes its first call."""

    def make(options: BackendOptions) -> Engine:
        engine: Engine = getattr(import_module(module), cls)(options)
        return engine

    return make


def _always() -> str | None:
    return None


def _only_dry() -> str | None:
    return None if current_slot().dry is not None else "it is for dry runs: `with meshdist.dry_run(world_size, rank):`"


def _without_engine(reason: str, *devices: str) -> Entry:
    """Return the entry of a backend of torch's that this package does not have."""

    def make(options: BackendOptions) -> Engine:
        raise AssertionError("what is not available is never made")

    return Entry(devices, make, lambda: reason, is_engine=False)


def no_nccl() -> str | None:
    """Return what NCCL lacks here: CuPy, a GPU, or its library; None where all are there."""
    from meshdist.backends.nccl.environment import no_nccl

    return no_nccl()


def no_mpi() -> str | None:
    """Return what MPI lacks here; None where mpi4py is installed and finds an MPI library."""
    from meshdist.backends.mpi.environment import no_mpi

    return no_mpi()


_GLOO = "meshdist.backends.gloo.backend"
_THREADS = "meshdist.backends.threads"
_FAKE = "meshdist.backends.fake"
_MPI = "meshdist.backends.mpi.backend"
_NCCL = "meshdist.backends.nccl.backend"

# What users add here holds for the whole process, as a function's name does: a table of its own, no part of a World.
_ENTRIES: dict[str, Entry] = {
    "gloo": Entry(("cpu",), _built_in(_GLOO, "GlooBackend"), why_no_processes, stages=("cuda",)),
    "threads": Entry(("cpu",), _built_in(_THREADS, "ThreadsBackend"), _always, stages=("cuda",)),
    "fake": Entry(("cpu", "cuda"), _built_in(_FAKE, "FakeBackend"), _only_dry),
    "mpi": Entry(("cpu",), _built_in(_MPI, "MpiBackend"), no_mpi, stages=("cuda",)),
    "nccl": Entry(("cuda",), _built_in(_NCCL, "NcclBackend"), no_nccl),
    "ucc": _without_engine("meshdist has no UCC engine", "cpu", "cuda"),
    "xccl": _without_engine("meshdist has no engine for Intel GPUs"),
}
