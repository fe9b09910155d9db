"""What a reader sees of matplotlib's figures: their texts, and whether all can be read."""

import itertools

import pytest


def axes_of_figures():
    """Yield Axes of several figures, as users make them; None for those of a new one. `figure` is closed after use."""
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    makers = (
        lambda: [None],
        lambda: pyplot.subplots(1, 2)[1],
        lambda: pyplot.subplots(2, 2)[1].flat,
        lambda: pyplot.subplots(2, 2, layout="constrained")[1].flat,
        lambda: [pyplot.figure(figsize=(3, 2)).add_axes((0, 0, 1, 1))],
        lambda: [part.subplots() for part in pyplot.figure().subfigures(1, 2)],
    )
    for make in makers:
        yield list(make())
        pyplot.close("all")


def texts_of(figure):
    """Return the texts of a figure but the labels of ticks, each with its bounding box in pixels."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    unseen = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            unseen |= set(axis.findobj(Text) if not ax.axison else axis.get_ticklabels())
    texts = [text for text in figure.findobj(Text) if text not in unseen and text.get_visible() and text.get_text()]
    return [(text, text.get_window_extent()) for text in texts]


def unreadable(figure):
    """Return the texts that leave a figure, and pairs of texts that overlap by more than a pixel."""
    texts, frame = texts_of(figure), figure.bbox
    left_out = [
        text.get_text()
        for text, box in texts
        if min(box.x0 - frame.x0, frame.x1 - box.x1, box.y0 - frame.y0, frame.y1 - box.y1) < 0
    ]
    overlapping = [
        (text.get_text(), other.get_text())
        for (text, box), (other, other_box) in itertools.combinations(texts, 2)
        if min(box.x1, other_box.x1) - max(box.x0, other_box.x0) > 1
        and min(box.y1, other_box.y1) - max(box.y0, other_box.y0) > 1
    ]
    return left_out + overlapping
