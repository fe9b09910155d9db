"""Time meshes at sizes that no machine here has: one rank of up to 131,072, in meshdist and torch.

python benchmarks/mesh_scale.py
python benchmarks/mesh_scale.py --rounds 9 --json out.json

What is timed is in sidebyside/scale.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from sidebyside import machine, report
from sidebyside.libraries import BENCHMARKS, Library, environment, installed
from sidebyside.options import names_from, positive
from sidebyside.rounds import ratio

METHOD = """\
One rank of a world without the others: meshdist in a dry run, torch over its fake backend. The median of {rounds} \
rounds and, in brackets, the shortest; in each round the libraries take turns, each in a fresh interpreter that has \
made a small mesh before. A ratio is the median of the rounds' ratios: above 1, meshdist is faster. A slice is \
`mesh["tp"]`, along one of the two axes of a square mesh. The mesh of four axes is made with the groups of all axes \
and all slices of two axes: with meshdist in both orders, with torch in the one that it has."""
NAMES = ("meshdist", "torch")
TITLES = {
    "world of 65536": "begin a world of 65,536 ranks",
    "mesh of 256 x 256": "init_device_mesh of 256 x 256",
    "first slice of 65536": "slice it for the first time",
    "slice of 65536": "slice it again",
    "slice of 256": "slice a mesh of 16 x 16 again",
    "mesh of 64 x 32 x 32 x 2": "mesh of 64 x 32 x 32 x 2, groups, slices",
}


class ScaleError(RuntimeError):
    """What was to be timed failed; the message shows its output."""


def times_of(library: Library) -> dict[str, float]:
    """Return the seconds of each case in a fresh interpreter."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCHMARKS / "sidebyside" / "scale.py"), library.name],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if run.returncode:
        raise ScaleError(f"the meshes of {library.name} ended with {run.returncode}:\n{run.stderr}")
    times: dict[str, float] = json.loads(run.stdout)
    return times


def measure(libraries: list[Library], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return for each case and library the seconds of every round."""
    times: dict[str, dict[str, list[float]]] = {case: {} for case in TITLES}
    for number in range(rounds):
        turn = number % len(libraries)
        for library in (*libraries[turn:], *libraries[:turn]):
            found = times_of(library)
            for case in TITLES:
                times[case].setdefault(library.name, []).append(found[case])
    return times


def rows(times: dict[str, dict[str, list[float]]], libraries: list[Library]) -> list[list[str]]:
    """Return the cells of each case's row: the times, and the ratio of the second library to meshdist."""
    table = []
    for case, title in TITLES.items():
        cells = [report.median_and_least(times[case][library.name]) for library in libraries]
        ratios = [f"{ratio(times[case], [other.name]):.1f}" for other in libraries if other.name != "meshdist"]
        table.append([title, *cells, *ratios])
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time meshes of up to 131,072 ranks in meshdist and torch.")
    add = parser.add_argument
    add("--rounds", type=positive, default=5, help="(default: %(default)s)")
    add("--libraries", type=names_from(NAMES), default=list(NAMES), metavar="NAME,...", help=f"{', '.join(NAMES)}")
    report.add_output_options(parser)
    args = parser.parse_args()
    if "meshdist" not in args.libraries:
        parser.error("--libraries must name meshdist, which the others are compared with")
    return args


def main() -> int:
    args = parse()
    versions = installed(args.libraries)
    libraries = list(versions)
    try:
        times = measure(libraries, args.rounds)
    except ScaleError as error:
        print(f"mesh_scale.py: {error}", file=sys.stderr)
        return 1
    titles = ["torch (fake)" if library.name == "torch" else library.title for library in libraries]
    head = ["", *titles, *(f"{title} / meshdist" for title in titles[1:])]
    body = METHOD.format(rounds=args.rounds) + "\n\n" + report.table(head, rows(times, libraries))
    report.publish(args, "Meshes at scale", machine.describe(versions), body, times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
