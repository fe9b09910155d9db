"""Draws the pictures of the pages in docs/howto: `python docs/draw_howto.py`."""

import heapq
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
from draw_arrays import draw_blocks, legend
from matplotlib import pyplot
from matplotlib.patches import Rectangle

import meshdist as dist
from meshdist.system.drawing_style import PLAIN, fill
from meshdist.tensor import DTensor, Partial, Shard

ROOT = Path(__file__).parents[1]
IMAGES = Path(__file__).parent / "images"
PALE = "#666666"
_TRIANGLE = 0.14  # the width of a triangle in the picture of the workers, in units of the tasks


def cell(ax: Any, column: float, row: float, rank: int | None, text: object = "", width: float = 1.0) -> None:
    """Draw a cell in the colour of a rank; None: white."""
    colour = "white" if rank is None else fill(rank, None)
    ax.add_patch(
        Rectangle((column, row), width, 1, facecolor=colour, edgecolor="white" if rank is not None else "#cccccc")
    )
    ax.text(column + width / 2, row + 0.5, str(text), ha="center", va="center", fontsize="small")


def frame(ax: Any, width: float, height: float, title: str = "") -> None:
    """Show the area of `width` x `height` cells, without axes."""
    ax.set(xlim=(-0.1, width + 0.1), ylim=(height + 0.1, -0.1))
    ax.set_aspect("equal")
    ax.set_axis_off()
    ax.set_title(title, fontsize="small")


def saved(figure: Any, name: str) -> None:
    """Write a picture."""
    figure.savefig(IMAGES / f"howto-{name}.svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def training_step() -> None:
    """Draw the arrays of a step, each with its placement, and what is computed and sent between them."""
    x, w1, w2 = ((8, 4), {"dp": Shard(0)}), ((4, 6), {"tp": Shard(1)}), ((6, 2), {"tp": Shard(0)})
    hidden = (8, 6), {"dp": Shard(0), "tp": Shard(1)}
    product, output = ((8, 2), {"dp": Shard(0), "tp": Partial()}), ((8, 2), {"dp": Shard(0)})
    layers = (
        {"x": x, "w1": w1, "x @ w1": hidden, "hidden": hidden},
        {"hidden": hidden, "w2": w2, "hidden @ w2": product, "output": output},
    )
    figure = pyplot.figure(figsize=(8.4, 4.9), layout="constrained")
    # Between the arrays: how the next one comes about.
    places = figure.subplots(2, 7, width_ratios=(1, 0.2, 1, 0.2, 1, 0.55, 1))
    with dist.dry_run(world_size=4, rank=0):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for row, arrays in zip(places[:, ::2], layers, strict=True):
            for ax, (name, (shape, placements)) in zip(row, arrays.items(), strict=True):
                _array(ax, mesh, name, shape, placements)
    nothing_sent = {"color": PALE, "fontsize": "small"}
    for ax in places[:, 1::2].flat:
        ax.set_axis_off()
    for row in places:
        for ax, sign in zip(row[1:4:2], "@=", strict=True):
            ax.text(0.5, 0.5, sign, ha="center", va="center", fontsize="x-large")
    _arrow(places[0, 5], "relu", nothing_sent)
    _arrow(places[1, 5], "all_reduce\nalong tp", SENT)
    legend(figure)
    saved(figure, "training-step")


def _array(ax: Any, mesh: Any, name: str, shape: tuple[int, ...], placements: dict[str, Any]) -> None:
    """Draw an array of a step with its name, its placement and, below weights, what becomes of the gradient."""
    cut = [getattr(placement, "dim", None) for placement in placements.values()]
    block = [extent // (1 + (dim in cut)) for dim, extent in enumerate(shape)]
    draw_blocks(DTensor.from_local(np.zeros(block), mesh, placements, shape=shape), ax)
    axes = ",\n".join(f"{_placed(placement)} along {axis}" for axis, placement in placements.items())
    ax.set_title(name, fontsize="medium", fontweight="bold", pad=32)  # above two lines of placements
    middle = ax.title.get_position()[0]
    below = {"transform": ax.transAxes, "ha": "center"}
    # From the title down, so that the arrays of a row agree in where each line is.
    above_blocks = {"xy": (middle, 1.0), "xytext": (0, 28), "textcoords": "offset points"}
    ax.annotate(axes, xycoords="axes fraction", ha="center", va="top", fontsize="small", **above_blocks)
    if name in ("w1", "w2"):
        told = "gradient: all_reduce\nalong dp (average of\n0 and 2, of 1 and 3)"
        ax.text(middle, -0.02, told, va="top", **below, **SENT)


# What is sent, in words.
SENT = {"color": "#1b5a96", "fontsize": "small", "fontweight": "bold"}


def _placed(placement: Shard | Partial) -> str:
    return "terms of a sum" if isinstance(placement, Partial) else ("rows", "columns")[placement.dim]


def _arrow(ax: Any, text: str, how: dict[str, str]) -> None:
    """Draw an arrow from the array on the left to that on the right, with a text above."""
    style = {"arrowstyle": "-|>", "color": how["color"], "linewidth": 2.0, "mutation_scale": 14}
    ax.annotate("", (1.0, 0.5), (0.0, 0.5), arrowprops=style)
    ax.text(0.5, 0.56, text, ha="center", va="bottom", **how)


def halo_exchange() -> None:
    """Draw the four blocks before and after an exchange."""

    def program() -> tuple[Any, Any]:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x"))
        block = np.pad(np.full((3, 3), mesh.get_rank()), 1, constant_values=-1)
        return block.copy(), mesh.halo_exchange(block)

    figure, places = pyplot.subplots(1, 2, figsize=(8, 4), layout="constrained")
    for ax, title, held in zip(places, ("before", "after"), zip(*dist.run(program, 4), strict=True), strict=True):
        for rank, block in enumerate(held):
            top, left = 5.6 * (rank // 2), 5.6 * (rank % 2)
            for (row, column), of in np.ndenumerate(block):
                cell(ax, left + column, top + row, None if of < 0 else int(of), "" if of < 0 else int(of))
            ax.add_patch(Rectangle((left, top), 5, 5, fill=False, edgecolor="#999999", linewidth=0.8))
            ax.add_patch(Rectangle((left + 1, top + 1), 3, 3, fill=False, edgecolor="black", linewidth=1.5))
        frame(ax, 10.6, 10.6, title)
    saved(figure, "halo-exchange")


def read_shards() -> None:
    """Draw which rank reads which row of a file in two epochs."""
    batches = example("read_shards").batches
    rows, size = np.arange(26), 3

    def program() -> list[list[int]]:
        dp = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        return [np.concatenate(list(batches(rows, epoch, size, dp))).tolist() for epoch in range(2)]

    figure, ax = pyplot.subplots(figsize=(9, 1.6), layout="constrained")
    for rank, epochs in enumerate(dist.run(program, 4)):
        for epoch, taken in enumerate(epochs):
            for row in taken:
                cell(ax, row, 1.3 * epoch, rank, rank)
    for epoch in range(2):
        ax.text(-0.4, 1.3 * epoch + 0.5, f"epoch {epoch}", ha="right", va="center", fontsize="small", color=PALE)
        for row in rows:
            ax.add_patch(Rectangle((row, 1.3 * epoch), 1, 1, fill=False, edgecolor="#999999", linewidth=0.5))
    frame(ax, len(rows), 2.3, "the rows of a file, and the rank that reads each; white: left out")
    saved(figure, "read-shards")


def average_gradients() -> None:
    """Draw the gradients of four ranks in the first step of the program, before and after the call."""
    program = example("average_gradients")
    all_reduce = program.functional.all_reduce
    steps: dict[int, list[list[Any]]] = {rank: [] for rank in range(4)}

    def recorded(grads: dict[str, Any], op: str) -> Any:
        average = all_reduce(grads, op=op)
        steps[dist.get_rank()].append([np.concatenate(list(tree.values())) for tree in (grads, average)])
        return average

    program.functional = SimpleNamespace(all_reduce=recorded)
    dist.run(program.main, 4)
    width, gap = 1.5, 0.15
    figure, places = pyplot.subplots(1, 2, figsize=(9, 2.9), layout="constrained")
    for number, (ax, title) in enumerate(zip(places, ("gradients of the first step", "their average"), strict=True)):
        for rank in range(4):
            top = 1.2 * rank
            ax.text(-0.3, top + 0.5, f"rank {rank}", ha="right", va="center", fontsize="small", color=PALE)
            for column, grad in enumerate(steps[rank][0][number]):
                left = column * (width + gap) + (0.4 if column == 3 else 0.0)
                if number == 0:
                    cell(ax, left, top, rank, f"{grad:.2f}", width)
                else:
                    average_cell(ax, left, top, f"{grad:.2f}", width)
        ax.text(1.5 * width + gap, -0.3, "weight", ha="center", fontsize="small", color=PALE)
        ax.text(3.5 * width + 3 * gap + 0.4, -0.3, "bias", ha="center", fontsize="small", color=PALE)
        frame(ax, 4 * width + 3 * gap + 0.4, 4.6)
        ax.set_title(title, fontsize="small", pad=22)
    saved(figure, "average-gradients")


def average_cell(ax: Any, left: float, top: float, text: str, width: float) -> None:
    """Draw a number above a strip in the colours of the four ranks it comes from."""
    ax.add_patch(Rectangle((left, top), width, 0.78, facecolor=PLAIN))
    for rank in range(4):
        ax.add_patch(Rectangle((left + rank * width / 4, top + 0.78), width / 4, 0.22, facecolor=fill(rank, None)))
    ax.text(left + width / 2, top + 0.39, text, ha="center", va="center", fontsize="small")


def ring() -> None:
    """Draw which block each rank has in each step."""

    def program() -> list[int]:
        line = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("ring",))
        blocks = [np.array(line.get_rank())]
        for _ in range(3):
            blocks.append(line.shift(blocks[-1]))
        return [int(block) for block in blocks]

    figure, ax = pyplot.subplots(figsize=(6.6, 3.0), layout="constrained")
    for rank, blocks in enumerate(dist.run(program, 4)):
        ax.text(2.2 * rank + 0.5, -0.3, f"rank {rank}", ha="center", fontsize="small", color=PALE)
        for step, block in enumerate(blocks):
            cell(ax, 2.2 * rank, 1.5 * step, block, block)
            if step < 3:
                start, end = (2.2 * rank + 1.05, 1.5 * step + 0.7), (2.2 * rank + 2.15, 1.5 * step + 1.75)
                how = {"color": PALE} if rank < 3 else {"color": PALE, "linestyle": "--"}
                ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", **how})
            if rank == 0 and step > 0:  # the other end of the arrow that leaves the last rank
                how = {"arrowstyle": "-|>", "color": PALE, "linestyle": "--"}
                ax.annotate("", (-0.05, 1.5 * step + 0.25), (-1.15, 1.5 * step - 0.8), arrowprops=how)
    for step in range(4):
        ax.text(-1.5, 1.5 * step + 0.5, f"step {step}", ha="right", va="center", fontsize="small", color=PALE)
    frame(ax, 7.6, 5.5)
    ax.set_xlim(-1.3, 8.9)
    ax.set_title("the block that each rank has; dashed: the last rank sends to the first", fontsize="small", pad=22)
    saved(figure, "ring")


def workers() -> None:
    """Draw when each of three workers computes which task, and when rank 0 hands it out."""
    free = [(0.0, rank) for rank in (1, 2, 3)]
    latest = -_TRIANGLE
    figure, ax = pyplot.subplots(figsize=(8, 2.6), layout="constrained")
    for task in range(20):
        began, rank = heapq.heappop(free)
        length = 0.4 + 0.1 * task  # the program's tasks get longer
        cell(ax, began, 1.2 * rank, rank, task, length)
        latest = max(began + 0.04, latest + _TRIANGLE)  # side by side where ranks are free at the same time
        ax.plot(
            latest,
            0.75,
            marker="v",
            color=fill(rank, None),
            markersize=6,
            markeredgecolor=PALE,
            markeredgewidth=0.4,
        )
        heapq.heappush(free, (began + length, rank))
    end = max(free)[0]
    ax.plot([0, end], [0.95, 0.95], color=PALE, linewidth=0.8)
    for rank in range(4):
        of = "rank 0 (master)" if rank == 0 else f"rank {rank}"
        ax.text(
            -0.15, 1.2 * rank + (0.75 if rank == 0 else 0.5), of, ha="right", va="center", fontsize="small", color=PALE
        )
    frame(
        ax, end, 4.6, "rank 0 gives the next task, a triangle in the worker's colour, to the worker that is free first"
    )
    ax.set_aspect("auto")
    ax.set_axis_on()
    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.set_yticks([])
    ax.tick_params(labelsize="small", colors=PALE)
    ax.set_xlabel("time, in units of the tasks", fontsize="small", color=PALE)
    saved(figure, "workers")


# By panel: what ranks 0 and 1 do, as (begin, end, text), and the messages, as (sender, sent, received).
COMPUTE = "compute"
EXCHANGES = {
    "send and recv": (
        [(0, 2.2, COMPUTE), (2.2, 3.2, "send"), (3.2, 6, COMPUTE)],
        [(0, 1.7, COMPUTE), (1.7, 3.6, "recv"), (3.6, 6, COMPUTE)],
        [(0, 2.4, 3.4)],
    ),
    "isend and irecv": (
        [(0, 1.7, COMPUTE), (1.7, 2.0, "isend"), (2.0, 5.7, COMPUTE), (5.7, 6, "wait")],
        [(0, 0.3, "irecv"), (0.3, 5.7, COMPUTE), (5.7, 6, "wait")],
        [(0, 1.9, 3.2)],
    ),
    "sendrecv, or shift": (
        [(0, 2.2, COMPUTE), (2.2, 3.8, "sendrecv"), (3.8, 6, COMPUTE)],
        [(0, 1.7, COMPUTE), (1.7, 3.8, "sendrecv"), (3.8, 6, COMPUTE)],
        [(0, 2.5, 3.5), (1, 2.5, 3.5)],
    ),
}


def messages() -> None:
    """Draw what two ranks do against time while messages travel, in three ways."""
    figure, places = pyplot.subplots(1, 3, figsize=(10, 2.1), layout="constrained")
    for ax, (title, (*ranks, sent)) in zip(places, EXCHANGES.items(), strict=True):
        for rank, doing in enumerate(ranks):
            for begin, end, text in doing:
                is_long = end - begin > 0.5
                cell(ax, begin, 2 * rank, None if text == COMPUTE else rank, text if is_long else "", end - begin)
                if not is_long:
                    ax.text((begin + end) / 2, 2 * rank - 0.25, text, ha="center", fontsize="small")
            ax.text(-0.1, 2 * rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize="small", color=PALE)
        for sender, begin, end in sent:
            style = {"arrowstyle": "-|>", "color": PALE, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (end, 2.0 - sender), (begin, 1.0 + sender), arrowprops=style)
        frame(ax, 6, 3)
        ax.set_title(title, fontsize="small", pad=24)
        ax.set_aspect("auto")
    saved(figure, "messages")


def example(name: str) -> Any:
    """Import a program of examples/howto."""
    sys.path.insert(0, str(ROOT / "examples" / "howto"))
    try:
        return __import__(name)
    finally:
        sys.path.pop(0)


def main() -> None:
    """Draw all."""
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "meshdist"  # the same file each time
    for draw in (training_step, halo_exchange, read_shards, average_gradients, messages, ring, workers):
        draw()


if __name__ == "__main__":
    main()
