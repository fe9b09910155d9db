"""Draws what ranks hold before and after a call, for collectives.ipynb."""

import numpy as np
from matplotlib import pyplot
from matplotlib.patches import Rectangle

import meshdist as dist

RANKS = 4
COLOURS = ["#77aadd", "#ee8866", "#eedd88", "#44bb99"]


def numbers():
    """Return the array that the calling rank begins with."""
    return 10 ** dist.get_rank() * (1 + np.arange(RANKS))


def draw(ax, held, title):
    """Draw the arrays of the ranks, a row for each, in the colours of the ranks that the numbers come from."""
    for row, values in enumerate(held):
        ax.text(-0.6, row, f"rank {row}", ha="right", va="center", color="#444444")
        for column, value in enumerate(values):
            origins = [rank for rank in range(RANKS) if value // 10**rank % 10]
            for number, rank in enumerate(origins):
                left, width = column - 0.45 + 0.9 * number / len(origins), 0.9 / len(origins)
                ax.add_patch(Rectangle((left, row - 0.42), width, 0.84, color=COLOURS[rank], linewidth=0))
            ax.text(column, row, str(value), ha="center", va="center", fontsize=8)
    width = max(map(len, held))
    ax.set(xlim=(-1.9, max(width, RANKS) - 0.4), ylim=(len(held) - 0.4, -0.6), aspect="equal")
    ax.set_title(title, fontsize="medium")
    ax.axis("off")


def show(name, program):
    """Run `program`, which returns the arrays before and after a call, on four ranks; draw both, return the last."""
    results = dist.run(program, RANKS)
    before, after = ([np.ravel(held).tolist() for held in part] for part in zip(*results, strict=True))
    width = max(RANKS, *map(len, after))
    widths = [RANKS + 1.5, width + 1.5]
    figure = pyplot.figure(figsize=(0.6 * sum(widths), 2.3), layout="constrained")
    axes = figure.subplots(1, 2, width_ratios=widths)
    draw(axes[0], before, "before")
    draw(axes[1], after, f"after {name}")
    pyplot.show()
    return after
