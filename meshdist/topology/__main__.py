"""python -m meshdist.topology: show the machine that the ranks run on, or calibrate a cost model on it.

python -m meshdist.topology
meshrun --nproc-per-node 4 -m meshdist.topology --calibrate cost.toml
"""

from __future__ import annotations

import argparse
import os
import sys

import meshdist
from meshdist.cluster.place import is_first_rank
from meshdist.runtime.rank_text import ranks_text
from meshdist.system.command_lines import until_closed
from meshdist.system.option_parser import OptionParser
from meshdist.topology import Topology, calibrate


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = OptionParser(
        prog="python -m meshdist.topology",
        prints=is_first_rank(),
        description="Show the topology of the ranks that meshrun started (of this host alone without it), or measure"
        " their collectives and write a cost model.",
    )
    parser.add_argument("--calibrate", metavar="PATH", help="measure, and write the cost model to this TOML file")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure (default: %(default)s)")
    parser.add_argument(
        "--topology", metavar="PATH", default="auto", help="a TOML file that describes the machine (default: find it)"
    )
    parser.add_argument("--gpus", action="store_true", default=None, help="ask CuPy for the GPUs")
    options: argparse.Namespace = parser.parse_args(arguments)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if "WORLD_SIZE" not in os.environ:
        if options.calibrate:
            print("--calibrate measures between ranks: start it with meshrun --nproc-per-node N", file=sys.stderr)
            return 2
        shown = meshdist.run(lambda: Topology.find(gpus=options.gpus), 1)[0]
        print(tree(shown))
        return 0
    meshdist.init_process_group()
    found = Topology.find(gpus=options.gpus) if options.topology == "auto" else Topology.load(options.topology)
    if options.calibrate:
        cost = calibrate(options.seconds, found)
        found = cost.topology
        if meshdist.get_rank() == 0:
            cost.save(options.calibrate)
    if meshdist.get_rank() == 0:
        print(tree(found))
        if options.calibrate and cost.note:
            print(cost.note, file=sys.stderr)
    meshdist.destroy_process_group()
    return 0


def tree(topology: Topology) -> str:
    """Return one line per part of a topology, indented below its parent."""
    depth: dict[str, int] = {}
    lines = [str(topology)]
    for part in topology.parts:
        depth[part.name] = 1 if part.parent is None else depth[part.parent] + 1
        told = [part.kind]
        if part.cores:
            told.append(f"{part.cores} cores")
        if part.link is not None:
            told.append(f"link {part.link}")
        if part.ranks:
            told.append(ranks_text(part.ranks))
        if len(part.ranks) > 1:
            told.append(f"memory {part.memory}")
        lines.append(f"{'  ' * depth[part.name]}{part.name}: {'; '.join(told)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(until_closed(main))
