"""Draws docs/images/collectives.svg from the tables of benchmarks/RESULTS.md: `python docs/draw_collectives.py`.

`benchmarks/compare.py --plot` draws the same from what it has just measured.
"""

import sys
from pathlib import Path

import matplotlib as mpl

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from sidebyside.drawing import draw, points_of_page  # noqa: E402

# The processor of the sections that the README quotes, and the numbers of ranks to draw.
PROCESSOR, RANKS = "AMD EPYC", (2, 4)


def main() -> None:
    """Draw the ratios of the tables."""
    mpl.rcParams["svg.hashsalt"] = "meshdist"  # the same file each time
    points = points_of_page((ROOT / "benchmarks" / "RESULTS.md").read_text(), PROCESSOR)
    picture = ROOT / "docs" / "images" / "collectives.svg"
    draw(picture, [point for point in points if point.ranks in RANKS], f"2 cores of an {PROCESSOR}")


if __name__ == "__main__":
    main()
