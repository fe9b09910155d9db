"""The backends of one group; each is made when a call first needs it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from meshdist.arrays.device_types import common_device_type
from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.base import Backend
from meshdist.backends.device_backends import by_device, carrier_of, pairs_of
from meshdist.backends.registry import entry_of
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.device_calls import DeviceCalls
from meshdist.runtime.flight_recorder import tag_text
from meshdist.runtime.rank_text import numbers_differ
from meshdist.system.plurals import counted

_MOST_NAMED = 8


class GroupBackends:
    """The backends of one group, by the device type of the arrays that they take; `make` makes that of one name."""

    def __init__(self, backend_name: str, make: Callable[[str], Backend]) -> None:
        self._backend_name = backend_name
        self._make = make
        self._making = threading.Lock()
        self._made: dict[str, Backend] = {}  # by name
        self._found: dict[str | None, Backend] = {}  # by device type
        self._carried: dict[str, bool] = {}  # by device type
        self._preconditions: list[Callable[[], str | None]] = []  # not checked yet

    def for_buffers(self, buffers: tuple[Any, ...]) -> Backend:
        """Return the backend for arrays, or lists of them; the first backend if there are none."""
        device = common_device_type(buffers)
        return self._found.get(device) or self._find(device)

    def carries(self, device: str) -> bool:
        known = self._carried.get(device)
        if known is None:
            known = self._carried[device] = carrier_of(self._backend_name, device) is not None
        return known

    def for_device(self, device: str) -> Backend | None:
        return self._found.get(device) or self._find(device) if self.carries(device) else None

    @property
    def any_made(self) -> bool:
        return bool(self._made)

    def has_left(self, rank: int) -> bool:
        """Return whether a rank of the group has left it, as far as the store tells."""
        return any(backend.departure_of(rank) is not None for backend in list(self._made.values()))

    def check_precondition(self, precondition: Callable[[], str | None]) -> None:
        """Call `precondition` before the next call; it returns what is broken, or None.

        If something is broken, that call and all later ones fail on this rank, and on the peers that wait for it.
        """
        self._preconditions.append(precondition)
        self._found.clear()

    def left_over(self, ranks: Sequence[int]) -> str:
        """Return which messages have arrived and were not received, in words; `ranks` are those of the group."""
        found = (message for backend in list(self._made.values()) for message in backend.left_over())
        by_kind = Counter((source, tag) for source, tag in found if tag >= 0)  # others are of collectives
        if not by_kind:
            return ""
        num, kind = by_kind.total(), "global rank" if numbers_differ(ranks) else "rank"
        which = [
            f"{count} from {kind} {ranks[source]}{tag_text(' with tag ', tag)}"
            for (source, tag), count in sorted(by_kind.items())
        ]
        named = ", ".join(which[:_MOST_NAMED]) + (", ..." if len(which) > _MOST_NAMED else "")
        were = "was" if num == 1 else "were"
        return f"{counted(num, 'message')} that had arrived {were} never received: {named}"

    def disagreement(self) -> str:
        """Return which calls of the ranks disagree, in words, as far as no call has raised that so far; else ""."""
        return next(filter(None, (backend.disagreement() for backend in list(self._made.values()))), "")

    def begin_close(self) -> None:
        for backend in list(self._made.values()):
            backend.begin_close()

    def close(self) -> None:
        """Close all backends; a group that is used again makes new ones."""
        self._found.clear()
        while self._made:
            self._made.popitem()[1].close()

    def give_up(self, error: DistError) -> None:
        for backend in list(self._made.values()):
            backend.give_up(error)

    def _find(self, device: str | None) -> Backend:
        names = by_device(self._backend_name)
        name = next(iter(names.values())) if device is None else carrier_of(self._backend_name, device)
        if name is None:
            raise ValueError(
                f"the array is on device type {device!r}, and the group's backends are {pairs_of(self._backend_name)};"
                f" create the group with a backend for {device!r}, as in 'cpu:gloo,cuda:nccl', or pass an array on"
                f" {' or '.join(names)}"
            )
        with self._making:  # several threads may make their first calls at once
            self._check_preconditions()
            if name not in self._made:
                self._made[name] = self._make(name)
            backend = self._made[name]
            if device == "cuda" and backend.device_calls is None:
                backend = self._stage(name, backend)
            self._found[device] = backend
        return backend

    def _stage(self, name: str, backend: Backend) -> Backend:
        carrier = carrier_of(self._backend_name, "cpu")
        # Only a registered backend can lack support for GPUs unnoticed: those of this package declare it by name.
        if carrier not in (None, name) and not entry_of(name).is_ours:
            raise ValueError(
                f"backend {name!r} supports CPU arrays only, so GPU arrays are staged through the CPU, for which this"
                f" group uses {carrier!r}; create the group with 'cpu:{name},cuda:{name}'"
            )
        if carrier is None:  # the copies on the CPU need a backend too
            self._found["cpu"] = backend
        return _HostStaged(backend.options, backend.staged_calls())

    def _check_preconditions(self) -> None:
        while self._preconditions:
            broken = self._preconditions[0]()
            if broken is not None:
                error = DistBackendError(broken, peer_failed=True)
                self.give_up(error)
                raise error
            del self._preconditions[0]


class _HostStaged(Backend):
    """Carries out calls on a GPU's arrays by copying them to a backend for the CPU."""

    def __init__(self, options: BackendOptions, calls: DeviceCalls) -> None:
        super().__init__(options)
        self.device_calls = calls
