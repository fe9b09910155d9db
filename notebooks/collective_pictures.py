"""Draws what ranks hold before and after a call, for collectives.ipynb."""

import numpy as np
from matplotlib import pyplot
from matplotlib.patches import Rectangle

import meshdist as dist
from meshdist.system.drawing_style import PLAIN, fill

RANKS = 4
COLOURS = [fill(rank, None) for rank in range(RANKS)]  # those of the ranks in drawings of meshes and arrays


def numbers():
    """Return the array that the calling rank begins with."""
    return 10 ** dist.get_rank() * (1 + np.arange(RANKS))


def draw(ax, held, title):
    """Draw the arrays of the ranks, a row for each, in the colours of the ranks that the numbers come from.

    A number that comes from several ranks has a band of their colours below it.
    """
    for row, values in enumerate(held):
        ax.text(-0.6, row, f"rank {row}", ha="right", va="center", color="#444444")
        for column, value in enumerate(values):
            origins = [rank for rank in range(RANKS) if value // 10**rank % 10]
            is_sum = len(origins) > 1
            colour = PLAIN if is_sum else COLOURS[origins[0]]
            ax.add_patch(Rectangle((column - 0.45, row - 0.42), 0.9, 0.84, color=colour, linewidth=0))
            for number, rank in enumerate(origins if is_sum else []):
                left, part = column - 0.45 + 0.9 * number / len(origins), 0.9 / len(origins)
                ax.add_patch(Rectangle((left, row + 0.22), part, 0.2, color=COLOURS[rank], linewidth=0))
            ax.text(column, row - 0.1 * is_sum, str(value), ha="center", va="center", fontsize=8)
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
