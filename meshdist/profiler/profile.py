"""profile: record the calls of a block, and analyse their times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from meshdist.groups.world import current_world, world_in
from meshdist.profiler.recording import Recording
from meshdist.runtime.context import current_slot

if TYPE_CHECKING:
    from meshdist.groups.world import World
    from meshdist.profiler.event import Event, Track
    from meshdist.profiler.timeline import Timeline

DEFAULT_LIMIT = 1_000_000


class Profile:
    """The recorded calls of one rank, made by `meshdist.profile`; it grows while the block runs.

    `print` shows a table; `merged` combines all ranks.
    """

    def __init__(self, world: World, limit: int) -> None:
        self._world = world
        self._recording = Recording(limit)
        self._begin_ns = perf_counter_ns()
        self._end_ns: int | None = None

    def start(self) -> None:
        """Start recording."""
        self._begin_ns = perf_counter_ns()
        self._world.hook_registry.record(self._recording)

    def stop(self) -> None:
        """Stop recording."""
        self._end_ns = perf_counter_ns()
        for world in {self._world, world_in(current_slot()) or self._world}:
            world.hook_registry.unrecord(self._recording)

    @property
    def events(self) -> list[Event]:
        """The calls so far, sorted by begin."""
        return self._track().events

    @property
    def timeline(self) -> Timeline:
        """The calls of this rank so far."""
        from meshdist.profiler.timeline import Timeline

        return Timeline([self._track()])

    def merged(self, dst: int = 0) -> Timeline | None:
        """Return the calls of all ranks, on the clock of rank 0, on one rank; all ranks of the world call it.

        All ranks must start and stop recording at the same places of the program: calls of different ranks match by
        their index on the group. Clock offsets between hosts are measured through the store, in a few milliseconds
        per host.

        Args:
            dst: The global rank that gets the result.

        Returns:
            On `dst` a Timeline that knows how long each call waited, and for which rank. Elsewhere None.

        Raises:
            DistError: A rank failed, or did not call in time.

        Example:
            >>> import numpy as np
            >>> import meshdist as dist
            >>> def main():
            ...     with dist.profile() as p:
            ...         dist.all_reduce(np.zeros(10))
            ...     return p.merged()
            >>> [None if timeline is None else len(timeline.tracks) for timeline in dist.run(main, 3)]
            [3, None, None]
        """
        from meshdist.profiler.call_matching import shifted, with_waits
        from meshdist.profiler.timeline import Timeline, clock_offset_ns
        from meshdist.store import PrefixStore

        group = current_world().default_group
        world = current_world()
        number = world.store.add(f"profile/{world.rank}", 1)  # all ranks merge equally often
        store = PrefixStore(f"profile/clocks/{number}", world.store)
        offset_ns = clock_offset_ns(store, world.rank, group.hosts())
        tracks: list[Track | None] = [None] * world.size
        group.gather_object(shifted(self._track(), offset_ns), tracks if world.rank == dst else None, dst)
        return Timeline(with_waits([track for track in tracks if track is not None])) if world.rank == dst else None

    def export_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write the calls of this rank as a trace; see `Timeline.export_chrome_trace` for all ranks.

        Args:
            path: The JSON file.

        Raises:
            OSError: The file cannot be written.
        """
        self.timeline.export_chrome_trace(path)

    def show(self, form: str = "text") -> Any:
        """Print the table of this rank, or draw its calls; see `Timeline.show`."""
        return self.timeline.show(form)

    def __repr__(self) -> str:
        return repr(self.timeline).replace("<Timeline", "<Profile", 1)

    def __str__(self) -> str:
        return str(self.timeline)

    def _repr_html_(self) -> Any:
        return self.timeline._repr_html_()

    def _track(self) -> Track:
        import socket

        from meshdist.profiler.event import Track, events_of

        now_ns = self._end_ns or perf_counter_ns()
        groups = list(self._recording.groups.values())
        events = sorted((event for group in groups for event in events_of(group, now_ns)), key=_begin)
        dropped = sum(group.num_dropped for group in groups)
        return Track(self._world.rank, socket.gethostname(), self._begin_ns, now_ns, events, dropped)


def _begin(event: Event) -> int:
    return event.begin_ns


@contextmanager
def profile(limit: int = DEFAULT_LIMIT) -> Iterator[Profile]:
    """Record every call of the block on this rank: begin, completion, waiting time and bytes.

    It records the collectives and messages of all groups, sync and async, by flat functions and methods. Recording adds
    about a microsecond per call. If CuPy is loaded, each call is also a range in NVIDIA's profilers.

    Args:
        limit: The number of calls to keep per group, from the first on; later calls are only counted.

    Yields:
        The Profile: a table to print, a list of events, a trace to export, and `merged` for all ranks.

    Raises:
        TypeError: `limit` is not an integer.
        ValueError: `limit` is negative, or `init_process_group` has not been called.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     with dist.profile() as p:
        ...         dist.all_reduce(np.zeros(1000))
        ...         dist.barrier()
        ...     return [(event.name, event.group, event.nbytes) for event in p.events]
        >>> dist.run(main, 2)[0]
        [('all_reduce', 'world', 8000), ('barrier', 'world', 0)]
    """
    from operator import index

    kept = index(limit)
    if kept < 0:
        raise ValueError(f"profile: limit must not be negative, got {limit}")
    recorded = Profile(current_world(), kept)
    recorded.start()
    try:
        yield recorded
    finally:
        recorded.stop()
