"""HookRegistry: the observers and recorders of the calls of a world's groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from meshdist.runtime.hooks import CallObserver, CallRecorder, HookedGroup

# Called when a rank of this process has started or stopped to log and compare all calls.
level_watchers: list[Callable[[], None]] = []


class HookRegistry:
    """The observers and recorders of all groups of one rank, including future groups."""

    def __init__(self, groups: Sequence[HookedGroup], make_loggers: Callable[[], tuple[CallObserver, ...]]) -> None:
        self.groups = groups
        self._make_loggers = make_loggers
        self._lock = threading.Lock()
        self._loggers: tuple[CallObserver, ...] = ()
        self._observers: tuple[CallObserver, ...] = ()
        self._recorders: tuple[CallRecorder, ...] = ()

    def log_calls(self, wanted: bool) -> None:
        """Start or stop logging all calls of all groups, and comparing their order and shapes."""
        with self._lock:
            self._loggers = self._make_loggers() if wanted else ()
            self._install_observers()
            for group in self.groups:
                group.compare_shapes(wanted)
        for watcher in level_watchers:
            watcher()

    def watch(self, observer: CallObserver) -> None:
        with self._lock:
            self._observers = (*self._observers, observer)
            self._install_observers()

    def unwatch(self, observer: CallObserver) -> None:
        with self._lock:
            self._observers = tuple(other for other in self._observers if other is not observer)
            self._install_observers()

    def record(self, recorder: CallRecorder) -> None:
        with self._lock:
            self._recorders = (*self._recorders, recorder)
            self._install_recorders()

    def unrecord(self, recorder: CallRecorder) -> None:
        with self._lock:
            self._recorders = tuple(other for other in self._recorders if other is not recorder)
            self._install_recorders()

    def add_group(self, group: HookedGroup) -> None:
        if self._loggers or self._observers:
            group.hooks.watch(*self._loggers, *self._observers)
        if self._recorders:
            group.hooks.record(*self._recorders)
        if self._loggers:
            group.compare_shapes(True)

    def move_to(self, other: HookRegistry) -> None:
        for observer in self._observers:
            other.watch(observer)
        for recorder in self._recorders:
            other.record(recorder)

    def _install_observers(self) -> None:
        for group in self.groups:
            group.hooks.watch(*self._loggers, *self._observers)

    def _install_recorders(self) -> None:
        for group in self.groups:
            group.hooks.record(*self._recorders)
