"""Draws the pictures of meshes.md, and that of topology.md: `python docs/draw_meshes.py`."""

from pathlib import Path

import matplotlib as mpl

import meshdist

IMAGES = Path(__file__).parent / "images"


def main() -> None:
    """Draw one mesh three times, and a topology."""
    mpl.use("agg")
    # The same file each time: no date, and no random names.
    mpl.rcParams["svg.hashsalt"] = "meshdist"
    IMAGES.mkdir(exist_ok=True)
    with meshdist.dry_run(world_size=8, rank=6, ranks_per_host=4):
        mesh = meshdist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        for name, axis in (("hosts", None), ("tp", "tp"), ("dp", "dp")):
            ax = mesh.show("plot", axis=axis)
            ax.figure.savefig(IMAGES / f"mesh-{name}.svg", bbox_inches="tight", metadata={"Date": None})
    ax = meshdist.Topology.uniform(2, 8, gpus=8).draw()
    ax.figure.savefig(IMAGES / "topology.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
