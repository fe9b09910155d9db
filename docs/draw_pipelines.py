"""Draws the pictures of pipelines.md from schedules: `python docs/draw_pipelines.py`."""

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot

from meshdist.parallel import gpipe, interleaved, looped_bfs, one_f_one_b, zbv, zero_bubble

IMAGES = Path(__file__).parent / "images"
RANKS, MICROBATCHES = 4, 8
PICTURES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "looped-bfs": looped_bfs,
    "interleaved": interleaved,
    "zb-h1": zero_bubble,
    "zbv": zbv,
}


def main() -> None:
    """Draw each schedule with a backward pass that takes twice as long as its forward pass."""
    mpl.use("agg")
    # The same file each time: no date, and no random names.
    mpl.rcParams["svg.hashsalt"] = "meshdist"
    mpl.rcParams["svg.fonttype"] = "none"  # labels as text, which is smaller
    IMAGES.mkdir(exist_ok=True)
    for name, build in PICTURES.items():
        figure, ax = pyplot.subplots(figsize=(11.0, 2.4), layout="constrained")
        build(RANKS, MICROBATCHES).show("plot", ax=ax)
        figure.savefig(IMAGES / f"pipeline-{name}.svg", bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    main()
