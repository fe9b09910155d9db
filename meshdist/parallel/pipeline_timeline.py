"""PipelineTimeline: when each rank of a pipeline computed what, simulated or measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdist.parallel.pipeline_drawing import as_html, as_plot, as_text, draw
from meshdist.parallel.pipeline_simulation import Span


class PipelineTimeline:
    """The computations of all ranks of a pipeline over time; `print` it or draw it.

    Attributes:
        name: What was run.
        rows: The computations of each rank, as `Span` of action, begin and end, from the earliest begin of all on.
        peak_activations: How many activations each rank keeps at most, each from its forward to the end of its whole
            backward.

    Example:
        >>> from meshdist.parallel import one_f_one_b
        >>> timeline = one_f_one_b(num_ranks=3, num_microbatches=4).simulate()
        >>> timeline.makespan, round(timeline.bubble, 3), timeline.peak_activations
        (18.0, 0.333, [3, 2, 1])
    """

    def __init__(self, name: str, rows: Sequence[Sequence[Span]], peak_activations: Sequence[int]) -> None:
        first = min((span.begin for row in rows for span in row), default=0.0)
        self.name = name
        self.rows = [[Span(span.action, span.begin - first, span.end - first) for span in row] for row in rows]
        self.peak_activations = list(peak_activations)

    @property
    def makespan(self) -> float:
        """The time from the first begin to the last end."""
        return max((span.end for row in self.rows for span in row), default=0.0)

    @property
    def bubbles(self) -> list[float]:
        """The share of the makespan in which each rank does not compute, 0 to 1."""
        whole = self.makespan
        return [1 - sum(span.end - span.begin for span in row) / whole if whole else 0.0 for row in self.rows]

    @property
    def bubble(self) -> float:
        """The share of time in which ranks do not compute, on average."""
        return sum(self.bubbles) / len(self.rows)

    def show(self, form: str | None = None, ax: Any = None, width: int | None = None) -> Any:
        """Draw a bar for each computation of each rank.

        Args:
            form: `"text"`, `"html"` or `"plot"` (also `"matplotlib"`). None prints text, and displays HTML in a
                notebook.
            ax: The matplotlib Axes to plot in. None: those of a new figure.
            width: Letters in a line of text. None: those of the terminal; without one, the actions are listed.

        Returns:
            The HTML with `"html"`, the Axes with `"plot"`, else None.

        Raises:
            ValueError: Another form, or `ax` without `"plot"`.
            ImportError: matplotlib is not installed.
        """
        return draw(self, form, ax, width)

    def to_text(self, width: int | None = None) -> str:
        """Return the drawing as text; see `show`."""
        return as_text(self, width)

    def plot(self, ax: Any = None) -> Any:
        """Draw with matplotlib; see `show`."""
        return as_plot(self, ax)

    def __str__(self) -> str:
        return as_text(self, None)

    def __repr__(self) -> str:
        return f"<PipelineTimeline {self.name}: makespan {self.makespan:g}, bubble {self.bubble:.1%}>"

    def _repr_html_(self) -> str:
        return as_html(self)
