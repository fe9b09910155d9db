"""PipelineTimeline: when each rank of a pipeline computed what, simulated or measured, and its drawings."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Protocol

from meshdist.mesh.show import FORMS, in_notebook
from meshdist.parallel.pipeline_actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, WORDS, Action
from meshdist.parallel.pipeline_simulation import Span
from meshdist.system.drawing_style import fill, legend_beside
from meshdist.system.terminal import fold, terminal_width


class PipelineTimeline:
    """The computations of all ranks of a pipeline over time; `print` it or draw it.

    Attributes:
        name: What was run.
        rows: The computations of each rank, as `Span` of action, begin and end, from the earliest begin of all on.
        peak_activations: How many activations each rank keeps at most, each from its forward pass to the end of its
            whole backward pass.
        unit: The unit of time, "s" if it was measured; empty for that of the costs.

    Example:
        >>> from meshdist.parallel import one_f_one_b
        >>> timeline = one_f_one_b(num_ranks=3, num_microbatches=4).simulate()
        >>> timeline.makespan, round(timeline.bubble, 3), timeline.peak_activations
        (18.0, 0.333, [3, 2, 1])
    """

    def __init__(
        self, name: str, rows: Sequence[Sequence[Span]], peak_activations: Sequence[int], unit: str = ""
    ) -> None:
        first = min((span.begin for row in rows for span in row), default=0.0)
        self.name = name
        self.rows = [[Span(span.action, span.begin - first, span.end - first) for span in row] for row in rows]
        self.peak_activations = list(peak_activations)
        self.unit = unit

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
            ValueError: `form` is unknown, or `ax` is given without `"plot"`.
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


# The same colour for a kind in all drawings: blue, orange, yellow, green.
_NUMBER = {FORWARD: 0, BACKWARD: 1, BACKWARD_INPUT: 2, BACKWARD_WEIGHT: 4}
# Later stages of a rank are drawn paler.
_PALE = (1.0, 0.6, 0.4, 0.25)
_PALER = "paler: later stages of a rank"
_IDLE, _REST = ".", "-"
# Narrower drawings list the actions.
_NARROWEST = 24


class Drawn(Protocol):
    """What is drawn: a `PipelineTimeline`."""

    name: str
    rows: list[list[Span]]
    peak_activations: list[int]
    unit: str

    @property
    def makespan(self) -> float: ...
    @property
    def bubbles(self) -> list[float]: ...
    @property
    def bubble(self) -> float: ...


def draw(timeline: Drawn, form: str | None, ax: Any, width: int | None) -> Any:
    if form == "matplotlib":
        form = "plot"
    if form is not None and form not in FORMS:
        raise ValueError(f"show: form must be one of {', '.join(map(repr, FORMS))} or None, got {form!r}")
    if ax is not None and form != "plot":
        raise ValueError("show: ax needs form='plot'; pass both")
    if form == "plot":
        return as_plot(timeline, ax)
    if form == "html":
        return as_html(timeline)
    if form is None and in_notebook():
        from IPython.display import HTML, display

        display(HTML(as_html(timeline)))
    else:
        print(as_text(timeline, width) + "\n", end="")  # in one piece, as other ranks may be threads
    return None


def summary(timeline: Drawn) -> str:
    """Return the numbers of the pipeline in one sentence."""
    makespan = f"{timeline.makespan:.4g} {timeline.unit}".rstrip()
    return f"{timeline.name}: makespan {makespan}, bubble {timeline.bubble:.1%}"


def _facts(timeline: Drawn, rank: int) -> str:
    """Return what is said of a rank beside its row."""
    kept = timeline.peak_activations[rank]
    return f"bubble {timeline.bubbles[rank]:.0%}, {kept} activation{'s' * (kept != 1)}"


def label(action: Action, first: int) -> str:
    """Return what is written into a bar: the micro-batch, and the stage where the rank has several."""
    return f"{action.kind}{action.microbatch}" if first < 0 else str(action)


def _has_several_stages(timeline: Drawn) -> bool:
    return any(_only_stage(row) >= 0 for row in timeline.rows)


def _only_stage(row: Sequence[Span]) -> int:
    """Return -1 for a rank of one stage, whose number need not be written, else its first stage."""
    stages = {span.action.stage for span in row}
    return min(stages) if len(stages) > 1 else -1


# ---- As text


def as_text(timeline: Drawn, width: int | None) -> str:
    """Return a line for each rank: its actions to scale where `width` letters suffice, else one after the other."""
    columns = terminal_width() if width is None else width
    margin = len(f"rank {len(timeline.rows) - 1} ")
    lines = [summary(timeline)]
    scaled = _scaled_rows(timeline, columns - margin) if columns >= _NARROWEST else None
    for rank, row in enumerate(timeline.rows):
        name = f"rank {rank} ".ljust(margin)
        line = (name + (scaled[rank] if scaled is not None else _listed(row))).rstrip()
        lines.append(fold(line, columns, hanging=margin))
    lines += [f"rank {rank}: {_facts(timeline, rank)}" for rank in range(len(timeline.rows))]
    return "\n".join(lines)


def _scaled_rows(timeline: Drawn, width: int) -> list[str] | None:
    """Return the rows to scale, or None if a label is wider than its bar."""
    spans = [span for row in timeline.rows for span in row if span.end > span.begin]
    if not spans:
        return None
    # The narrowest drawing in which each label fits, with a space after it.
    scale = max(
        (len(_written(span, row)) + 1) / (span.end - span.begin)
        for row in timeline.rows
        for span in row
        if span.end > span.begin
    )
    if scale * timeline.makespan > width:
        return None
    return [_scaled(row, scale, round(timeline.makespan * scale)) for row in timeline.rows]


def _written(span: Span, row: Sequence[Span]) -> str:
    return label(span.action, _only_stage(row))


def _scaled(row: Sequence[Span], scale: float, width: int) -> str:
    letters = [_IDLE] * width
    for span in row:
        begin, end = round(span.begin * scale), round(span.end * scale)
        text = _written(span, row)
        letters[begin:end] = (text.ljust(end - begin - 1, _REST) + " ")[: end - begin]
    return "".join(letters)


def _listed(row: Sequence[Span]) -> str:
    words: list[str] = []
    ended = 0.0
    for span in row:
        if span.begin - ended > 1e-9 * max(1.0, abs(ended)):
            words.append(_IDLE)
        words.append(str(span.action))
        ended = span.end
    return " ".join(words)


# ---- As HTML

_ROW = "position:relative;height:22px;background:#f2f2f2;margin:2px 0"
_BAR = (
    "position:absolute;top:0;height:22px;line-height:22px;overflow:hidden;text-align:center;color:#000;font-size:11px"
)


def as_html(timeline: Drawn) -> str:
    """Return the bars as HTML; a tooltip names each action and its time."""
    whole = timeline.makespan or 1.0
    table = []
    for rank, row in enumerate(timeline.rows):
        first = _only_stage(row)
        bars = "".join(_bar(span, row, first, whole) for span in row)
        table.append(
            f'<tr><td style="padding:0 8px;white-space:nowrap">rank {rank}</td><td style="width:100%;padding:0">'
            f'<div style="{_ROW}">{bars}</div></td>'
            f'<td style="padding:0 8px;white-space:nowrap;color:#666">{_facts(timeline, rank)}</td></tr>'
        )
    swatches = "".join(
        f'<span style="background:{fill(_NUMBER[kind], None)};color:#000;padding:1px 8px;margin-right:6px">'
        f"{kind} {WORDS[kind]}</span>"
        for kind in kinds_of(timeline)
    )
    return (
        f'<div><div><b>{escape(summary(timeline))}</b></div><table style="width:100%;border-collapse:collapse">'
        f"{''.join(table)}</table><div>{swatches}{_PALER if _has_several_stages(timeline) else ''}</div></div>"
    )


def _bar(span: Span, row: Sequence[Span], first: int, whole: float) -> str:
    begin, end = 100 * span.begin / whole, 100 * span.end / whole
    title = f"{span.action}: {WORDS[span.action.kind]}, {span.begin:.4g} to {span.end:.4g}"
    style = f"{_BAR};left:{begin:.3f}%;width:calc({end - begin:.3f}% - 1px);background:{colour(span.action, row)}"
    # Behind the zero-width space, a label that is wider than its bar goes to a second line, which is hidden.
    return f'<span style="{style}" title="{title}">&#8203;{label(span.action, first)}</span>'


def kinds_of(timeline: Drawn) -> list[str]:
    found = {span.action.kind for row in timeline.rows for span in row}
    return [kind for kind in _NUMBER if kind in found]


def colour(action: Action, row: Sequence[Span]) -> str:
    """Return the colour of a kind, mixed with white for the later stages of a rank."""
    stages = sorted({span.action.stage for span in row})
    share = _PALE[min(stages.index(action.stage), len(_PALE) - 1)]
    plain = fill(_NUMBER[action.kind], None)
    parts = [int(plain[start : start + 2], 16) for start in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - share * (255 - part)):02x}" for part in parts)


# ---- With matplotlib

# Inches: the height of a row, the space around the rows.
_HEIGHT, _AROUND = 0.38, 1.1
# Points: the size of the labels of bars, and the space beside them.
_LABEL_PT, _AROUND_LABEL_PT = 7, 2.5


def as_plot(timeline: Drawn, ax: Any = None) -> Any:
    try:
        from matplotlib import pyplot
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("a pipeline is plotted with matplotlib; pip install matplotlib") from error
    if ax is None:
        ax = pyplot.subplots(figsize=(9.0, _AROUND + _HEIGHT * len(timeline.rows)), layout="constrained")[1]
    whole = timeline.makespan or 1.0
    for rank, row in enumerate(timeline.rows):
        spans = [(span.begin, span.end - span.begin) for span in row]
        colours = [colour(span.action, row) for span in row]
        ax.broken_barh(spans, (rank - 0.45, 0.9), facecolors=colours, edgecolor="white", linewidth=0.8)
    ax.set_yticks(range(len(timeline.rows)), [f"rank {rank}" for rank in range(len(timeline.rows))])
    ax.set_ylim(len(timeline.rows) - 0.4, -0.6)  # rank 0 above
    ax.set_xlim(0, whole)
    ax.set_xlabel(f"time ({timeline.unit or 'in cost units'})")
    ax.set_title(summary(timeline), fontsize="small")
    handles = [
        Patch(facecolor=fill(_NUMBER[kind], None), label=f"{kind}: {WORDS[kind]}") for kind in kinds_of(timeline)
    ]
    handles += [Patch(facecolor="none", label=line) for line in _notes(timeline)]
    legend_beside(ax, handles)
    _write_labels(ax, timeline)
    return ax


def _notes(timeline: Drawn) -> list[str]:
    """Return what the numbers in the bars and their shades mean."""
    return ["number: micro-batch", *([_PALER] if _has_several_stages(timeline) else [])]


def _write_labels(ax: Any, timeline: Drawn) -> None:
    """Write its micro-batch into each bar that is wide enough."""
    from matplotlib.textpath import TextPath

    ax.figure.canvas.figure.draw_without_rendering()  # the layout decides the width of the bars
    points = ax.get_window_extent().width * 72.0 / ax.figure.dpi / (timeline.makespan or 1.0)
    widths: dict[str, float] = {}
    for rank, row in enumerate(timeline.rows):
        for span in row:
            text, middle = str(span.action.microbatch), (span.begin + span.end) / 2
            if text not in widths:
                widths[text] = TextPath((0, 0), text, size=_LABEL_PT).get_extents().width + _AROUND_LABEL_PT
            if widths[text] <= points * (span.end - span.begin):
                how = {"ha": "center", "va": "center", "fontsize": _LABEL_PT, "color": "black", "clip_on": True}
                ax.text(middle, rank, text, **how)
