"""profile: record the calls of a block, and see afterwards where the time went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from meshdist.current import current_slot, current_world
from meshdist.profiler.recording import Recording

if TYPE_CHECKING:
    from meshdist.profiler.event import Event, Track
    from meshdist.profiler.timeline import Timeline
    from meshdist.world import World

DEFAULT_LIMIT = 1_000_000


class Profile:
    """The recorded calls of one rank; `meshdist.profile` makes it, and while its block runs it grows.

    `print` it for a table; `merged` brings all ranks together.
    """

    def __init__(self, world: World, limit: int) -> None:
        self._world = world
        self._recording = Recording(limit)
        self._begin_ns = perf_counter_ns()
        self._end_ns: int | None = None

    def start(self) -> None:
        """Begin to record."""
        self._begin_ns = perf_counter_ns()
        self._world.listeners.record(self._recording)

    def stop(self) -> None:
        """End to record."""
        self._end_ns = perf_counter_ns()
        for world in {self._world, current_slot().world or self._world}:
            world.listeners.unrecord(self._recording)

    @property
    def events(self) -> list[Event]:
        """The calls so far, by when they began."""
        return self._track().events

    @property
    def timeline(self) -> Timeline:
        """The calls so far of this rank alone."""
        from meshdist.profiler.timeline import Timeline

        return Timeline([self._track()])

    def merged(self, dst: int = 0) -> Timeline | None:
        """Return the calls of all ranks, by the clock of rank 0, on one rank; all ranks of the world call it.

        The ranks must have begun and ended their blocks at the same places of the program: a call belongs to those of
        other ranks that are as many calls of the group away from the begin. How far the clocks of hosts are apart is
        found out through the store, in some milliseconds a host.

        Args:
            dst: The global rank that gets it.

        Returns:
            On `dst` the Timeline, which knows how long each call waited, and for which rank. Elsewhere None.

        Raises:
            DistError: A rank failed, or did not come.

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
        from meshdist.profiler.clocks import clock_offset_ns
        from meshdist.profiler.matching import shifted, with_waits
        from meshdist.profiler.timeline import Timeline
        from meshdist.store import PrefixStore

        group = current_world().default_group
        world = current_world()
        number = world.store.add(f"profile/{world.rank}", 1)  # all ranks merge as often
        store = PrefixStore(f"profile/clocks/{number}", world.store)
        offset_ns = clock_offset_ns(store, world.rank, group.hosts())
        tracks: list[Track | None] = [None] * world.size
        group.gather_object(shifted(self._track(), offset_ns), tracks if world.rank == dst else None, dst)
        return Timeline(with_waits([track for track in tracks if track is not None])) if world.rank == dst else None

    def export_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write the calls of this rank as a trace; see `Timeline.export_chrome_trace` for that of all ranks.

        Args:
            path: The JSON file.

        Raises:
            OSError: It cannot be written.
        """
        self.timeline.export_chrome_trace(path)

    def show(self) -> None:
        """Print the table of this rank; in colour where the package rich is installed."""
        self.timeline.show()

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
    """Record every call of the block on this rank: when it began, when it was done, how long it waited, its bytes.

    Recorded are the collectives and messages of all groups, sync and async, by flat functions and methods. A call costs
    about a microsecond more for it. Where CuPy is loaded, each call is a range in NVIDIA's profilers as well.

    Args:
        limit: How many calls of each group are kept, from the first on; of the rest is known how many they were.

    Yields:
        What is recorded: a table to print, a list of events, a trace to write, and `merged`, all ranks together.

    Raises:
        TypeError: `limit` is no integer.
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
