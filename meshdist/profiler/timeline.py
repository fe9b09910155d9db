"""Timeline: the recorded calls of one rank or of all on one clock, as a table, a trace and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from time import perf_counter_ns
from typing import Any

from meshdist.profiler.event import Event, Track
from meshdist.profiler.summary import Slowest, Total, fitting, rows, sentences, slowest_rank, totals
from meshdist.profiler.tables import html_table, side, text_table, text_width
from meshdist.store import Store
from meshdist.system.terminal import fold, terminal_width

# The quickest of these exchanges counts.
_EXCHANGES = 8


class Timeline:
    """The calls of all ranks on one clock; `print` it, or view its trace in Perfetto.

    A terminal that is too narrow for the table gets several, such as one of times and one of bytes.

    Attributes:
        tracks: One per rank, in rank order.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     with dist.profile() as p:
        ...         mesh["tp"].all_reduce(np.zeros(1000))
        ...     return p.merged()
        >>> timeline = dist.run(main, 4)[0]
        >>> [(event.name, event.group, event.nbytes) for event in timeline.tracks[3].events]
        [('all_reduce', 'tp', 8000)]
        >>> timeline.totals()["tp"]["all_reduce"].calls
        4
    """

    def __init__(self, tracks: Sequence[Track]) -> None:
        self.tracks = list(tracks)

    def __iter__(self) -> Iterator[Event]:
        """Yield the calls of all ranks, rank by rank."""
        return (event for track in self.tracks for event in track.events)

    @property
    def seconds(self) -> float:
        """The time of recording, from the first rank's begin to the last rank's end."""
        return (max(track.end_ns for track in self.tracks) - min(track.begin_ns for track in self.tracks)) / 1e9

    @property
    def communication_share(self) -> float:
        """The share of time for which calls blocked the ranks, on average; 0 to 1 with one thread per rank."""
        return sum(track.share for track in self.tracks) / len(self.tracks)

    def totals(self) -> dict[str, dict[str, Total]]:
        """Return the totals by label of the group and name of the call, the longest first."""
        return totals(self.tracks)

    def slowest(self) -> Slowest | None:
        """Return the rank that the others waited for most; None if no rank waited, or for a single rank."""
        return slowest_rank(self.tracks)

    def chrome_trace(self) -> dict[str, Any]:
        """Return the trace that `export_chrome_trace` writes."""
        from meshdist.profiler.chrome_trace import chrome_trace

        return chrome_trace(self.tracks)

    def export_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write a trace for https://ui.perfetto.dev and chrome://tracing.

        Args:
            path: The JSON file.

        Raises:
            OSError: The file cannot be written.
        """
        import json

        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.chrome_trace(), file)

    def plot(self, ax: Any = None, *, arrows: int = 40) -> Any:
        """Draw a bar for each call of each rank over time with matplotlib, hatched while it waited.

        Calls of one name and group have one colour. Async calls are below the sync calls, with an outline.
        If the first calls of groups, which set them up, would take more than half of the width, the picture
        begins after them.

        Args:
            ax: The matplotlib Axes to draw in. None: those of a new figure.
            arrows: The number of messages, those that took longest, that get an arrow from sender to receiver.

        Returns:
            The Axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from meshdist.profiler.timeline_plot import plot_timeline

        return plot_timeline(self.tracks, ax, arrows)

    def show(self, form: str = "text") -> Any:
        """Print the table and a summary, as `print` does; in colour if rich is installed (extra `rich`).

        Args:
            form: "text", or "plot", which draws the calls over time instead, and returns the Axes; see `plot`.

        Raises:
            ValueError: `form` is neither.
            ImportError: matplotlib is not installed.
        """
        if form == "plot":
            return self.plot()
        if form != "text":
            raise ValueError(f"Timeline.show: form must be 'text' or 'plot', got {form!r}")
        self._print()
        return None

    def _print(self) -> None:
        try:
            from rich.console import Console
        except ImportError:
            console = None
        else:
            console = Console()
        if console is None or not (console.is_terminal or console.is_jupyter):  # a file has room for wide tables
            print(self)
            return
        console.width = width = max(console.width, _NARROWEST)
        tables = fitting(rows(self.tracks, self.totals()), width, _rich_width)
        for table in tables:
            console.print(_rich_table(table, framed=len(tables) == 1))
            if len(tables) > 1:
                console.print()
        console.print(fold("\n".join(sentences(self.tracks, self.slowest())), width), highlight=False)

    def __repr__(self) -> str:
        num_calls, num_ranks = sum(len(track.events) for track in self.tracks), len(self.tracks)
        calls, ranks = f"call{'s' * (num_calls != 1)}", f"rank{'s' * (num_ranks != 1)}"
        return (
            f"<Timeline: {num_calls} {calls} of {num_ranks} {ranks} in {self.seconds:.3g} s,"
            f" {self.communication_share:.0%} of it in calls; print it for the table>"
        )

    def __str__(self) -> str:
        width = terminal_width()
        tables = fitting(rows(self.tracks, self.totals()), width, text_width)
        parts = [*map(text_table, tables), fold("\n".join(sentences(self.tracks, self.slowest())), width)]
        return ("\n" if len(tables) == 1 else "\n\n").join(parts)

    def _repr_html_(self) -> str:
        from html import escape

        lines = "<br>".join(map(escape, sentences(self.tracks, self.slowest())))
        return f"{html_table(rows(self.tracks, self.totals()))}<p>{lines}</p>"


# Terminals narrower than this wrap the lines.
_NARROWEST = 80
# Of each column of rich: a line, and a space on either side of the text.
_FRAME = 3


def _rich_width(table: Sequence[Sequence[str]]) -> int:
    return 1 + sum(max(map(len, column)) + _FRAME for column in zip(*table, strict=True))


def _rich_table(table: Sequence[Sequence[str]], framed: bool) -> Any:
    from rich.table import Table

    head, *others = table
    made = Table() if framed else Table(box=None, pad_edge=False)
    for column, cells in enumerate(zip(*table, strict=True)):
        justify: Any = side(column)
        # Names may be folded, numbers keep their width.
        width = max(map(len, cells)) if justify == "right" else None
        made.add_column(head[column], justify=justify, style="" if column else "bold", min_width=width, overflow="fold")
    for row in others:
        made.add_row(*row)
    return made


def clock_offset_ns(store: Store, rank: int, hosts: Sequence[str], clock: Callable[[], int] = perf_counter_ns) -> int:
    """Return the offset from this rank's clock to that of rank 0, in nanoseconds; all ranks call it together.

    The processes of a host share a clock, so the first rank of each host asks rank 0 for its time, and the other ranks
    of the host use its result. The asking rank assumes that rank 0 read its clock half way between question and answer;
    the quickest of several exchanges is off by at most half its duration (Cristian, "Probabilistic clock
    synchronization", 1989). `hosts` has a key of the host of each rank; the store is used for this exchange only.
    """
    leaders = [first for first in (hosts.index(host) for host in dict.fromkeys(hosts)) if first != 0]
    leader = hosts.index(hosts[rank])
    if rank == 0:
        for asking in leaders:
            _answer(store, asking, clock)
        return 0
    if leader == 0:
        return 0
    if leader == rank:
        offset = _ask(store, rank, clock)
        store.set(f"offset/{rank}", str(offset))
        return offset
    return int(store.get(f"offset/{leader}"))


def _answer(store: Store, asking: int, clock: Callable[[], int]) -> None:
    for number in range(_EXCHANGES):
        store.get(f"asked/{asking}/{number}")
        store.set(f"answered/{asking}/{number}", str(clock()))


def _ask(store: Store, rank: int, clock: Callable[[], int]) -> int:
    found: list[tuple[int, int]] = []
    for number in range(_EXCHANGES):
        began = clock()
        store.set(f"asked/{rank}/{number}", "")
        answer = int(store.get(f"answered/{rank}/{number}"))
        ended = clock()
        found.append((ended - began, answer - (began + ended) // 2))
    return min(found)[1]
