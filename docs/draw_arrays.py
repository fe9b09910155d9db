"""Draws the pictures of tensor.md and tensor-parallel.md from arrays: `python docs/draw_arrays.py`."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

import meshdist
from meshdist.mesh.show.words import frame
from meshdist.system.drawing_style import fill
from meshdist.tensor import DTensor, Partial, Replicate, Shard

IMAGES = Path(__file__).parent / "images"
# The placements of an array of (6, 8) on a mesh of (2, 2), and the block of rank 2.
PICTURES = {
    "rows": ({"dp": Shard(0)}, (3, 8)),
    "blocks": ({"dp": Shard(0), "tp": Shard(1)}, (3, 4)),
    "nested": ({"dp": Shard(0), "tp": Shard(0)}, (2, 8)),
    "sizes": ({"dp": Shard(0, sizes=(4, 2)), "tp": Shard(1, sizes=(8, 0))}, (2, 8)),
    "pending": ({"tp": Partial()}, (6, 8)),
    "cut-pending": ({"dp": Shard(0), "tp": Partial()}, (3, 8)),
}
# The arrays of two layers on an axis of 2 ranks, their shapes and placements: for tensor-parallel.md.
LAYERS = {
    "x": ((4, 4), Replicate()),
    "w1, by columns": ((4, 8), Shard(1)),
    "hidden": ((4, 8), Shard(1)),
    "w2, by rows": ((8, 4), Shard(0)),
    "hidden @ w2": ((4, 4), Partial()),
    "y, sequence parallel": ((4, 4), Shard(0)),
}


def draw_blocks(x: DTensor, ax: Any) -> None:
    """Draw the blocks of an array without the words around them."""
    x.show("plot", ax=ax)
    ax.get_legend().remove()
    ax.set(title="", ylim=(ax.dataLim.y1 + 0.1, -0.4))


def legend(figure: Any, rank: int = 0, band: str = "ranks that hold a copy or, with +, a term of a sum") -> None:
    """Explain, below all panels, the frame around what `rank` holds, and in the words `band`, if any, the band."""
    bands = tuple(Patch(facecolor=fill(rank, None)) for rank in range(2))
    handles, labels = [frame(""), *[bands] * bool(band)], [f"held by rank {rank}", *[band] * bool(band)]
    how = {"handler_map": {tuple: HandlerTuple(ndivide=None, pad=0)}, "fontsize": "small", "frameon": False}
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), **how)


def draw_layers() -> None:
    """Draw the arrays of two layers in two rows."""
    mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    figure, places = pyplot.subplots(2, 3, figsize=(7.0, 5.0), layout="constrained")
    for ax, (title, (shape, placement)) in zip(places.flat, LAYERS.items(), strict=True):
        block = [rows // (1 + (dim == getattr(placement, "dim", None))) for dim, rows in enumerate(shape)]
        draw_blocks(DTensor.from_local(meshdist.zeros(block), mesh, {"tp": placement}, shape=shape), ax)
        ax.set_title(f"{title}\n{placement!r}", fontsize="medium")
    legend(figure)
    figure.savefig(IMAGES / "array-layers.svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Draw each array as rank 2 sees it."""
    mpl.use("agg")
    # The same file each time: no date, and no random names.
    mpl.rcParams["svg.hashsalt"] = "meshdist"
    IMAGES.mkdir(exist_ok=True)
    with meshdist.dry_run(world_size=4, rank=2):
        mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name, (placements, block) in PICTURES.items():
            x = DTensor.from_local(meshdist.zeros(block), mesh, placements, shape=(6, 8))
            figure, ax = pyplot.subplots(figsize=(3.6, 2.9), layout="constrained")
            draw_blocks(x, ax)
            is_pending = any(isinstance(placement, Partial) for placement in placements.values())
            band = "ranks with a term" if is_pending else "ranks with a copy"
            legend(figure, 2, band if is_pending or len(placements) == 1 else "")
            written = ", ".join(f"{axis!r}: {placement!r}" for axis, placement in placements.items())
            ax.set_title("{" + written.replace("}, '", "},\n'") + "}", fontsize="small")
            figure.savefig(IMAGES / f"array-{name}.svg", bbox_inches="tight", metadata={"Date": None})
            pyplot.close(figure)
    with meshdist.dry_run(world_size=2):
        draw_layers()


if __name__ == "__main__":
    main()
