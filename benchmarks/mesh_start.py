"""Time a real 3-d mesh with all its groups on 8 processes beside their start, and count its requests to the store.

python benchmarks/mesh_start.py
python benchmarks/mesh_start.py --ranks 8 --rounds 9 --json out.json

What each rank does is in sidebyside/mesh_start.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from sidebyside import machine, report
from sidebyside.libraries import BENCHMARKS, LIBRARIES, environment, installed
from sidebyside.options import positive

METHOD = """\
{ranks} processes, started by meshrun. The median of {rounds} rounds and, in brackets, the shortest; in each round \
one launch makes the mesh and one does not. A launch is timed from outside, from the start of meshrun to its end. \
Inside, a rank joins and meets all others in a barrier; then it makes a mesh of 2 x 2 x {last} with the groups of \
its three axes, its three planes and all of it. The times inside are those of the slowest rank of a round, the \
requests those of the rank that made most, of all rounds. Groups connect with their first call; those along the \
three axes are timed as well."""


class StartError(RuntimeError):
    """What was to be timed failed; the message shows its output."""


def launch(what: str, ranks: int) -> dict[str, float]:
    """Return the seconds of a launch, and what its ranks measured: the most of each."""
    (library,) = (library for library in LIBRARIES if library.name == "meshdist")
    script = str(BENCHMARKS / "sidebyside" / "mesh_start.py")
    with tempfile.TemporaryDirectory() as directory:
        begin = perf_counter()
        run = subprocess.run(
            [*library.launcher(ranks), script, what, directory],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        elapsed = perf_counter() - begin
        if run.returncode:
            raise StartError(f"the launch ended with {run.returncode}:\n{run.stderr}")
        found = [json.loads(path.read_text()) for path in Path(directory).iterdir()]
    if len(found) != ranks:
        raise StartError(f"{len(found)} of {ranks} ranks left what they measured:\n{run.stderr}")
    return {"launch": elapsed, **{key: max(each[key] for each in found) for key in found[0]}}


def measure(ranks: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return for launches with and without the mesh what was measured in each round; one before does not count."""
    results: dict[str, dict[str, list[float]]] = {"mesh": {}, "nothing": {}}
    for number in range(rounds + 1):
        for what, of_rounds in results.items():
            for key, value in launch(what, ranks).items():
                of_rounds.setdefault(key, []).extend([value] if number else [])
    return results


def rows(results: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """Return the cells of the table."""
    mesh, nothing = results["mesh"], results["nothing"]
    return [
        ["launch with the mesh", report.median_and_least(mesh["launch"])],
        ["launch without", report.median_and_least(nothing["launch"])],
        ["joining, inside a rank", report.median_and_least(mesh["join"])],
        ["the mesh and its groups, inside a rank", report.median_and_least(mesh["mesh"])],
        ["the first all_reduce along each axis", report.median_and_least(mesh["first calls"])],
        ["requests to the store of a rank, for the mesh", str(int(max(mesh["requests"])))],
        ["for the first calls", str(int(max(mesh["requests of first calls"])))],
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a 3-d mesh on real processes, and count its store requests.")
    add = parser.add_argument
    add("--ranks", type=positive, default=8, help="a multiple of 4 (default: %(default)s)")
    add("--rounds", type=positive, default=5, help="(default: %(default)s)")
    report.add_output_options(parser)
    args = parser.parse_args()
    if args.ranks % 4:
        parser.error(f"--ranks must be a multiple of 4, for a mesh of 2 x 2 x (ranks / 4), got {args.ranks}")
    return args


def main() -> int:
    args = parse()
    versions = installed(["meshdist"])
    try:
        results: dict[str, Any] = measure(args.ranks, args.rounds)
    except StartError as error:
        print(f"mesh_start.py: {error}", file=sys.stderr)
        return 1
    body = METHOD.format(rounds=args.rounds, ranks=args.ranks, last=args.ranks // 4)
    body += "\n\n" + report.table(["", f"{args.ranks} processes"], rows(results))
    report.publish(args, "A mesh on real processes", machine.describe(versions), body, results)
    return 0 if max(results["mesh"]["requests"]) <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
