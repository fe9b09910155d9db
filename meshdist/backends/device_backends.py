"""The names of backends: which exist, which carry arrays of which device type, and which are usable here.

The backends of a group are one string, in the canonical form of `backend_name`: a plain name if one backend carries all
device types that it can, otherwise pairs in the order of the device types: "gloo", or "cpu:gloo,cuda:nccl". So equal
backends are equal strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshdist.backends.registry import DEVICE_TYPES, UNDEFINED, check_usable, entry_of, known_names, register_backend
from meshdist.system.name_hints import missing_attribute

_DEFAULTS = {"cpu": "gloo", "cuda": "nccl"}
_FORM = "write a name, such as 'gloo', or pairs of device type and name, such as 'cpu:gloo,cuda:nccl'"


def backend_name(name: str | None) -> str:
    """Return the canonical form of a backend's name in any case, or the default for None.

    Args:
        name: A backend, or pairs of device type and backend. None, or "undefined", is gloo for CPU arrays and, if
            usable here, NCCL for GPU arrays.

    Raises:
        TypeError: It is not a string.
        ValueError: A backend or a device type is unknown, a device type is repeated, a backend does not support arrays
            of its device type, or the string has a different form.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"backend must be a name, one of {', '.join(known_names())}, got {name!r}")
    if name is None or name.lower() == UNDEFINED:
        return _canonical({device: each for device, each in _DEFAULTS.items() if entry_of(each).missing() is None})
    return _canonical(_pairs(name)) if ":" in name else _plain(name)


def by_device(name: str) -> dict[str, str]:
    """Return device type -> backend for a canonical name."""
    return _pairs(name) if ":" in name else dict.fromkeys(entry_of(name).devices, name)


def carrier_of(name: str, device: str) -> str | None:
    """Return the backend of a canonical name that carries arrays of a device type; None if none does.

    GPU arrays are carried by a GPU backend; otherwise by a CPU backend that stages them through the CPU, and carries
    the CPU arrays as well.
    """
    backends = by_device(name)
    able = (other for other in backends.values() if device in (*entry_of(other).devices, *entry_of(other).stages))
    return backends.get(device) or next(able, None)


def pairs_of(name: str) -> str:
    """Return the backends of a canonical name as pairs, such as "cpu:gloo"."""
    return ",".join(f"{device}:{backend}" for device, backend in by_device(name).items())


def usable_backend_name(name: str | None) -> str:
    """Return `backend_name(name)`; raise DistBackendError if none of its backends is usable here.

    One usable backend is enough: the others are created when an array of their device type comes.
    """
    spelled = backend_name(name)
    backends = list(by_device(spelled).values()) or [spelled]
    if all(entry_of(backend).missing() is not None for backend in backends):
        check_usable(backends[0])
    return spelled


def get_default_backend_for_device(device: object) -> str:
    """Return the default backend for arrays of a device, whether or not it is usable here.

    Args:
        device: A device type, with or without an index ("cuda:0"), or an object whose `type` is one, as torch.device.

    Raises:
        TypeError: `device` is neither a string nor such an object.
        ValueError: The device type is unknown; the message lists the known ones.
    """
    text = getattr(device, "type", device)
    if not isinstance(text, str):
        raise TypeError(f"device must be a device type, one of {', '.join(DEVICE_TYPES)}, got {device!r}")
    kind, colon, index = text.partition(":")
    if kind not in _DEFAULTS or (colon and not index.isdecimal()):
        raise ValueError(
            f"unknown device {text!r}; choose from {', '.join(DEVICE_TYPES)}, each with or without an index"
        )
    return _DEFAULTS[kind]


def _plain(name: str) -> str:
    try:
        entry_of(name)
    except ValueError as error:
        words = str(error)
        raise ValueError(words if words.endswith("?") else f"{words}; {_FORM}") from None
    return name.lower()


def _pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.lower().split(","):
        device, colon, backend = (word.strip() for word in part.partition(":"))
        if not colon or not device or not backend or ":" in backend:
            raise ValueError(f"backend {text!r}: {part!r} is not a pair of device type and name; {_FORM}")
        if device not in DEVICE_TYPES:
            raise ValueError(
                f"backend {text!r}: unknown device type {device!r}; choose from {', '.join(DEVICE_TYPES)}; {_FORM}"
            )
        if device in pairs:
            raise ValueError(f"backend {text!r}: device type {device!r} is given twice; {_FORM}")
        if device not in _carried_by(_plain(backend)):
            able = ", ".join(other for other in known_names() if device in _carried_by(other))
            raise ValueError(
                f"backend {text!r}: {backend} does not support {device!r} arrays; backends that do: {able}"
            )
        pairs[device] = backend
    _check_stage(text, pairs)
    return {device: pairs[device] for device in DEVICE_TYPES if device in pairs}


def _carried_by(backend: str) -> tuple[str, ...]:
    entry = entry_of(backend)
    return (*entry.devices, *entry.stages)


def _check_stage(text: str, pairs: dict[str, str]) -> None:
    # Staged calls are calls on CPU arrays, by the same backend.
    for device, backend in pairs.items():
        if device in entry_of(backend).stages and pairs.get("cpu", backend) != backend:
            raise ValueError(
                f"backend {text!r}: {backend} stages {device!r} arrays through the CPU, so it must also be the backend"
                f" for cpu; write 'cpu:{backend},{device}:{backend}'"
            )


def _canonical(pairs: dict[str, str]) -> str:
    names = set(pairs.values())
    if len(names) == 1 and set(pairs) == set(entry_of(*names).devices):
        return names.pop()
    return ",".join(f"{device}:{backend}" for device, backend in pairs.items())


FOR_THREADS = "threads"
"""The one backend whose ranks are threads of one process."""


def check_rank_kind(backend: str, *, ranks_are_threads: bool) -> str | None:
    """Return why ranks that are threads of `meshdist.run`, or processes, cannot use a backend; None if they can."""
    names = set(by_device(backend).values())
    if FOR_THREADS in names and not ranks_are_threads:
        return f"the {FOR_THREADS!r} backend is for ranks that are threads of meshdist.run; for processes use 'gloo'"
    return None


def is_available() -> bool:
    """Return True: if meshdist can be imported, it can be used."""
    return True


def is_backend_available(backend: str) -> bool:
    """Return whether a backend is usable here; False if it is unknown.

    Args:
        backend: A name in any case, or pairs of device type and name, all of which must be usable.

    Raises:
        TypeError: It is not a string.
    """
    if not isinstance(backend, str):
        raise TypeError(f"is_backend_available: backend must be a string, got {backend!r}")
    try:
        spelled = backend_name(backend)
    except ValueError:
        return False
    return all(entry_of(name).missing() is None for name in by_device(spelled).values() or [spelled])


def is_gloo_available() -> bool:
    """Return whether the `gloo` backend can be used here: on Linux and macOS always, as it needs nothing but NumPy."""
    return is_backend_available("gloo")


def is_mpi_available() -> bool:
    """Return whether the `mpi` backend can be used here."""
    return is_backend_available("mpi")


def is_nccl_available() -> bool:
    """Return whether the `nccl` backend can be used here: with CuPy, and a GPU that this process sees."""
    return is_backend_available("nccl")


def is_ucc_available() -> bool:
    """Return False: meshdist has no UCC backend."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return False: meshdist has no backend for Intel GPUs."""
    return is_backend_available("xccl")


class _Names(type):
    def __getattr__(cls, name: str) -> str:
        # Registered backends are attributes too.
        try:
            entry_of(name)
        except ValueError as error:
            raise missing_attribute(cls, name, known=(), otherwise=f": {error}") from None
        if name != name.upper():
            raise AttributeError(f"Backend has the names in upper case: Backend.{name.upper()}")
        return name.lower()


class Backend(str, metaclass=_Names):
    """The name of a backend: a string in lower case.

    `Backend("GLOO")` takes any case and is equal to "gloo"; pairs of device type and backend such as
    "cpu:gloo,cuda:nccl" are names as well. Every backend is an attribute, in upper case.

    The class of a backend, which carries out the calls of a group, is `meshdist.backends.Engine`.

    Raises:
        TypeError: It is not a string.
        ValueError: No backend has this name; the message lists the known ones.

    Example:
        >>> from meshdist import Backend
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
        """Return the canonical name of a backend."""
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
        """Register a backend under `name`, for new groups and meshes and as an attribute.

        Register it on every rank, before the first group that names it. As in torch, registering a name again replaces
        the function for groups that have not made a call yet. An exception of `func` is raised by the first call of a
        group, as the cause of a DistBackendError.

        Args:
            name: A word, case-insensitive.
            func: Creates the backend of one group at its first call: `func(store, rank, size, timeout)`, with the
                group's store, this rank in the group, its size, and its timeout as a timedelta. It returns a
                `meshdist.backends.Engine`.
            extended_api: Call `func(options, pg_options)` instead, with a `meshdist.backends.BackendOptions` and the
                argument of `new_group` or `init_process_group`.
            devices: The device types that it carries, "cpu" or "cuda" or both. Both if None.

        Raises:
            TypeError: `name` is not a string, or `func` cannot be called with these arguments.
            ValueError: `name` is not a word or is a backend of meshdist, or `devices` are unknown.
        """
        register_backend(name, func, extended_api, devices)
