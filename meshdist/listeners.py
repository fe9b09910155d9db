"""Listeners: who is told of the calls of a world's groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshdist.detour import Recorder, Watcher

if TYPE_CHECKING:
    from meshdist.process_group import ProcessGroup


class Listeners:
    """Who watches, or records, the calls of all groups of one rank, those still to be made among them.

    Args:
        groups: The groups, as they come and go.
        make_loggers: Makes those that listen while calls are logged.
    """

    def __init__(self, groups: Sequence[ProcessGroup], make_loggers: Callable[[], tuple[Watcher, ...]]) -> None:
        self._groups = groups
        self._make_loggers = make_loggers
        self._lock = threading.Lock()
        self._loggers: tuple[Watcher, ...] = ()
        self._watchers: tuple[Watcher, ...] = ()
        self._recorders: tuple[Recorder, ...] = ()

    def log_calls(self, wanted: bool) -> None:
        """Log every call of every group from now on, and compare their order and shapes; or none."""
        with self._lock:
            self._loggers = self._make_loggers() if wanted else ()
            self._show_watchers()
            for group in self._groups:
                group.compare_shapes(wanted)

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of every call."""
        with self._lock:
            self._watchers = (*self._watchers, watcher)
            self._show_watchers()

    def unwatch(self, watcher: Watcher) -> None:
        """End what `watch` began."""
        with self._lock:
            self._watchers = tuple(other for other in self._watchers if other is not watcher)
            self._show_watchers()

    def record(self, recorder: Recorder) -> None:
        """Have `recorder` stand around every call."""
        with self._lock:
            self._recorders = (*self._recorders, recorder)
            self._show_recorders()

    def unrecord(self, recorder: Recorder) -> None:
        """End what `record` began."""
        with self._lock:
            self._recorders = tuple(other for other in self._recorders if other is not recorder)
            self._show_recorders()

    def listen_to(self, group: ProcessGroup) -> None:
        """Begin with a group that was just made."""
        if self._loggers or self._watchers:
            group.detour.watch(*self._loggers, *self._watchers)
        if self._recorders:
            group.detour.record(*self._recorders)
        if self._loggers:
            group.compare_shapes(True)

    def move_to(self, other: Listeners) -> None:
        """Have those who were asked to listen here listen there."""
        for watcher in self._watchers:
            other.watch(watcher)
        for recorder in self._recorders:
            other.record(recorder)

    def _show_watchers(self) -> None:
        for group in self._groups:
            group.detour.watch(*self._loggers, *self._watchers)

    def _show_recorders(self) -> None:
        for group in self._groups:
            group.detour.record(*self._recorders)
