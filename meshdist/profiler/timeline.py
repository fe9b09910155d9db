"""Timeline: the recorded calls of one rank or of all, as a table, a trace and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

from meshdist.profiler.event import Event, Track
from meshdist.profiler.summary import Slowest, Total, rows, sentences, slowest_rank, totals
from meshdist.profiler.tables import html_table, side, text_table


class Timeline:
    """The calls of all ranks on one clock; `print` it, or view its trace in Perfetto.

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
        """The share of time for which calls blocked the ranks, on average: 0 to 1 with one thread per rank."""
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

    def plot(self, ax: Any = None) -> Any:
        """Draw a bar for each call of each rank over time with matplotlib, hatched while it waited.

        Args:
            ax: The matplotlib Axes to draw in. None: those of a new figure.

        Returns:
            The Axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from meshdist.profiler.timeline_plot import plot_timeline

        return plot_timeline(self.tracks, ax)

    def show(self) -> None:
        """Print the table and a summary; in colour if rich is installed (extra `rich`)."""
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            print(self)
            return
        head, *others = rows(self.tracks, self.totals())
        table = Table()
        for column, name in enumerate(head):
            table.add_column(
                name, justify="left" if side(column) == "left" else "right", style="" if column else "bold"
            )
        for row in others:
            table.add_row(*row)
        console = Console()
        console.print(table)
        console.print("\n".join(sentences(self.tracks, self.slowest())), highlight=False)

    def __str__(self) -> str:
        return "\n".join([text_table(rows(self.tracks, self.totals())), *sentences(self.tracks, self.slowest())])

    def _repr_html_(self) -> str:
        from html import escape

        lines = "<br>".join(map(escape, sentences(self.tracks, self.slowest())))
        return f"{html_table(rows(self.tracks, self.totals()))}<p>{lines}</p>"
