"""Engines: what carries out the calls of one group, one for each of its backends, made when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from meshdist.backends.base import Backend as Engine
from meshdist.backends.base import BackendOptions
from meshdist.backends.device_backends import by_device, carrier_of, pairs_of
from meshdist.backends.registry import entry_of
from meshdist.device_calls import DeviceCalls
from meshdist.devices import common_device_type
from meshdist.errors import DistBackendError


class Engines:
    """The engines of one group; arrays of different device types may need different ones.

    Args:
        backend_name: The group's backends, as `backend_name` spells them.
        make: Makes the engine of one of them.
    """

    def __init__(self, backend_name: str, make: Callable[[str], Engine]) -> None:
        self._backend_name = backend_name
        self._make = make
        self._making = threading.Lock()
        self._made: dict[str, Engine] = {}  # by backend
        self._found: dict[str | None, Engine] = {}  # by device type
        self._carried: dict[str, bool] = {}  # by device type
        self._unasked: list[Callable[[], str | None]] = []

    def engine(self, buffers: tuple[Any, ...]) -> Engine:
        """Return the engine for arrays, or lists of them; the first backend's where there are none.

        Raises:
            ValueError: No backend of the group carries arrays of their device type, or they are on several.
            DistBackendError: The backend cannot be used here, or what the group rests on is broken.
        """
        device = common_device_type(buffers)
        return self._found.get(device) or self._find(device)

    def carries(self, device: str) -> bool:
        """Return whether one of the backends carries arrays on a device type."""
        known = self._carried.get(device)
        if known is None:
            known = self._carried[device] = carrier_of(self._backend_name, device) is not None
        return known

    def engine_for(self, device: str) -> Engine | None:
        """Return the engine for arrays on a device type; None where no backend of the group carries them."""
        return self._found.get(device) or self._find(device) if self.carries(device) else None

    @property
    def any_made(self) -> bool:
        """Whether there is an engine yet."""
        return bool(self._made)

    def ask_first(self, premise: Callable[[], str | None]) -> None:
        """Before the next call, ask `premise`, which returns how something is broken that the group rests on, or None.

        If it is, that call fails on this rank and so do all after it, and ranks that wait for this one are told.
        """
        self._unasked.append(premise)
        self._found.clear()

    def close(self) -> None:
        """Close all; a group that is used again makes new ones."""
        self._found.clear()
        while self._made:
            self._made.popitem()[1].close()

    def abort(self, reason: str) -> None:
        """Tell the peers of all that this rank gives up."""
        for engine in list(self._made.values()):
            engine.abort(reason)

    def _find(self, device: str | None) -> Engine:
        backends = by_device(self._backend_name)
        backend = next(iter(backends.values())) if device is None else carrier_of(self._backend_name, device)
        if backend is None:
            raise ValueError(
                f"the array is on device type {device!r}, and the group's backends are {pairs_of(self._backend_name)};"
                f" make the group with a backend for {device!r}, as in 'cpu:gloo,cuda:nccl', or pass an array on"
                f" {' or '.join(backends)}"
            )
        with self._making:  # threads may make their first calls at once
            self._ask()
            if backend not in self._made:
                self._made[backend] = self._make(backend)
            engine = self._made[backend]
            if device == "cuda" and engine.device_calls is None:
                engine = self._stage(backend, engine)
            self._found[device] = engine
        return engine

    def _stage(self, backend: str, engine: Engine) -> Engine:
        carrier = carrier_of(self._backend_name, "cpu")
        # Of ours that is known from the names; but for dry runs, whose engines are all alike.
        if carrier not in (None, backend) and not entry_of(backend).is_ours:
            raise ValueError(
                f"backend {backend!r} takes arrays on the CPU, so those on a GPU go by way of that, where the group has"
                f" {carrier!r}; make the group with 'cpu:{backend},cuda:{backend}'"
            )
        if carrier is None:  # in a dry run, say: what carries the copies carries arrays on the CPU
            self._found["cpu"] = engine
        return _Stage(engine.options, engine.staged_calls())

    def _ask(self) -> None:
        while self._unasked:
            broken = self._unasked[0]()
            if broken is not None:
                self.abort(broken)
                raise DistBackendError(broken, peer_failed=True)
            del self._unasked[0]


class _Stage(Engine):
    """Stands for an engine where the arrays are on a GPU and the engine is for those on the CPU."""

    def __init__(self, options: BackendOptions, calls: DeviceCalls) -> None:
        super().__init__(options)
        self.device_calls = calls
