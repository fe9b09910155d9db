"""Which backend carries the arrays of which device type: "gloo", "cpu:gloo,cuda:nccl", or what None means.

Everywhere in the package the backends of a group are one string, in the form that `backend_name` makes: a plain name
where one backend carries all that it can, else pairs in the order of the device types. So two strings are equal where
the backends are.
"""

from __future__ import annotations

from meshdist.backends.registry import DEVICE_TYPES, UNDEFINED, check_usable, entry_of, known_names

_DEFAULTS = {"cpu": "gloo", "cuda": "nccl"}
_FORM = "write a name, such as 'gloo', or pairs of device type and name, such as 'cpu:gloo,cuda:nccl'"


def backend_name(name: str | None) -> str:
    """Return the one spelling of what `name` means, which may be in any case; the default for None.

    Args:
        name: A backend, or pairs of device type and backend. None, or "undefined", is gloo for arrays on the CPU and,
            where it can be used here, NCCL for those on a GPU.

    Raises:
        TypeError: It is no string.
        ValueError: A backend or a device type is unknown, a device type comes twice, a backend does not carry arrays of
            its device type, or the string has another form.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"backend must be a name, one of {', '.join(known_names())}, got {name!r}")
    if name is None or name.lower() == UNDEFINED:
        return _canonical({device: each for device, each in _DEFAULTS.items() if entry_of(each).missing() is None})
    return _canonical(_pairs(name)) if ":" in name else _plain(name)


def by_device(name: str) -> dict[str, str]:
    """Return device type to backend, for a `name` that `backend_name` returned."""
    return _pairs(name) if ":" in name else dict.fromkeys(entry_of(name).devices, name)


def carrier_of(name: str, device: str) -> str | None:
    """Return which of the backends carries arrays of a device type; None where there is none.

    Arrays in the memory of a GPU are carried by a backend for them; else by one for the CPU that stages them, by way of
    the CPU. What stages them carries those of the CPU as well.

    Args:
        name: What `backend_name` returned.
        device: The device type.
    """
    backends = by_device(name)
    able = (other for other in backends.values() if device in (*entry_of(other).devices, *entry_of(other).stages))
    return backends.get(device) or next(able, None)


def pairs_of(name: str) -> str:
    """Return the backends as pairs, such as "cpu:gloo", for a `name` that `backend_name` returned."""
    return ",".join(f"{device}:{backend}" for device, backend in by_device(name).items())


def usable_backend_name(name: str | None) -> str:
    """Return `backend_name(name)`, of which something can be used here.

    Of several backends one is enough: the others are made, and missed, when an array of their device type comes.

    Raises:
        DistBackendError: None of the backends can be used here; says why.
    """
    spelled = backend_name(name)
    backends = list(by_device(spelled).values()) or [spelled]
    if all(entry_of(backend).missing() is not None for backend in backends):
        check_usable(backends[0])
    return spelled


def get_default_backend_for_device(device: object) -> str:
    """Return the backend that carries the arrays of a device where the user names none, available or not.

    Args:
        device: A device type, with or without an index ("cuda:0"), or an object whose `type` is one, as torch.device.

    Raises:
        TypeError: It is neither.
        ValueError: The device type is unknown; the message lists the known ones.
    """
    text = getattr(device, "type", device)
    if not isinstance(text, str):
        raise TypeError(f"device must be a device type, one of {', '.join(DEVICE_TYPES)}, got {device!r}")
    kind, colon, index = text.partition(":")
    if kind not in _DEFAULTS or (colon and not index.isdecimal()):
        raise ValueError(f"unknown device {text!r}; known are {', '.join(DEVICE_TYPES)}, each with or without an index")
    return _DEFAULTS[kind]


def _plain(name: str) -> str:
    try:
        entry_of(name)
    except ValueError as error:
        raise ValueError(f"{error}; {_FORM}") from None
    return name.lower()


def _pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.lower().split(","):
        device, colon, backend = (word.strip() for word in part.partition(":"))
        if not colon or not device or not backend or ":" in backend:
            raise ValueError(f"backend {text!r}: {part!r} is no pair of device type and name; {_FORM}")
        if device not in DEVICE_TYPES:
            raise ValueError(
                f"backend {text!r}: unknown device type {device!r}; known are {', '.join(DEVICE_TYPES)}; {_FORM}"
            )
        if device in pairs:
            raise ValueError(f"backend {text!r}: device type {device!r} comes twice; {_FORM}")
        if device not in _carried_by(_plain(backend)):
            able = ", ".join(other for other in known_names() if device in _carried_by(other))
            raise ValueError(f"backend {text!r}: {backend} does not carry arrays on {device!r}; those that do: {able}")
        pairs[device] = backend
    _check_stage(text, pairs)
    return {device: pairs[device] for device in DEVICE_TYPES if device in pairs}


def _carried_by(backend: str) -> tuple[str, ...]:
    entry = entry_of(backend)
    return (*entry.devices, *entry.stages)


def _check_stage(text: str, pairs: dict[str, str]) -> None:
    # What is staged goes the way of the arrays on the CPU, by the same engine.
    for device, backend in pairs.items():
        if device in entry_of(backend).stages and pairs.get("cpu", backend) != backend:
            raise ValueError(
                f"backend {text!r}: {backend} carries arrays on {device!r} by way of the CPU, so it must be that of the"
                f" arrays there as well; write 'cpu:{backend},{device}:{backend}'"
            )


def _canonical(pairs: dict[str, str]) -> str:
    names = set(pairs.values())
    if len(names) == 1 and set(pairs) == set(entry_of(*names).devices):
        return names.pop()
    return ",".join(f"{device}:{backend}" for device, backend in pairs.items())
