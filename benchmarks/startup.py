"""Time the start: the import of each library, and the launch of a small job with each library's launcher.

python benchmarks/startup.py
python benchmarks/startup.py --ranks 2 --rounds 9 --json out.json

What is launched is in sidebyside/launch_meshdist.py and its likes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from time import perf_counter

from sidebyside import machine, report
from sidebyside.libraries import BENCHMARKS, NAMES, Library, environment, installed, python
from sidebyside.options import names_from, positive
from sidebyside.rounds import ratio

METHOD = """\
The median of {rounds} rounds and, in brackets, the shortest; in each round the libraries take turns, after one that \
does not count. A ratio is the median of the rounds' ratios: above 1, meshdist is faster. An import is timed inside a \
fresh interpreter; that of mpi4py.MPI starts MPI as well. A launch is timed from outside, from the start of the \
library's own launcher to its end: {ranks} ranks join, make a 2-d mesh, call one all_reduce along an axis, and leave."""
NUMPY = Library("numpy", "NumPy alone", "import numpy", "numpy.__version__", lambda ranks: [], "")


class StartError(RuntimeError):
    """What was to be timed failed; the message shows its output."""


def import_s(library: Library) -> float:
    """Return how long the import takes in a fresh interpreter."""
    run = python(
        f"from time import perf_counter; begin = perf_counter()\n{library.import_line}\nprint(perf_counter() - begin)",
        library.python(),
    )
    if run.returncode:
        raise StartError(f"{library.import_line!r} failed:\n{run.stderr}")
    return float(run.stdout)


def launch_s(library: Library, ranks: int) -> float:
    """Return how long the whole run of the small job takes."""
    script = str(BENCHMARKS / "sidebyside" / f"launch_{library.script}.py")
    begin = perf_counter()
    run = subprocess.run(
        [*library.launcher(ranks), script], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    elapsed = perf_counter() - begin
    if run.returncode:
        raise StartError(f"the launch with {library.name} ended with {run.returncode}:\n{run.stderr}")
    return elapsed


def measure(libraries: list[Library], ranks: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return for imports and launches, and each library, the seconds of every round."""
    times: dict[str, dict[str, list[float]]] = {"import": {}, "launch": {}}
    for number in range(rounds + 1):  # the first fills the caches of files and bytecode
        for library in [*libraries, NUMPY]:
            elapsed = {"import": import_s(library)}
            if library is not NUMPY:
                elapsed["launch"] = launch_s(library, ranks)
            for what, seconds in elapsed.items():
                times[what].setdefault(library.name, []).extend([seconds] if number else [])
    return times


def rows(times: dict[str, dict[str, list[float]]], libraries: list[Library], ranks: int) -> list[list[str]]:
    """Return the cells of both rows: each column's times, and the ratio to meshdist of the columns behind it."""
    titles = {"import": "import", "launch": f"launch of {ranks} ranks"}
    table = []
    for what, title in titles.items():
        found = times[what]
        columns = [library.name for library in [*libraries, NUMPY]]
        cells = [report.median_and_least(found[name]) if name in found else "" for name in columns]
        ratios = [f"{ratio(found, [library.name]):.2f}" for library in libraries if library.name != "meshdist"]
        table.append([title, *cells, *ratios])
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the import and the launch of meshdist, torch and Open MPI.")
    add = parser.add_argument
    add("--ranks", type=positive, default=4, help="ranks that are launched, an even number (default: %(default)s)")
    add("--rounds", type=positive, default=5, help="(default: %(default)s)")
    add("--libraries", type=names_from(NAMES), default=list(NAMES), metavar="NAME,...", help=f"{', '.join(NAMES)}")
    report.add_output_options(parser)
    args = parser.parse_args()
    if args.ranks % 2:
        parser.error(f"--ranks must be even, for a mesh of (ranks / 2) x 2, got {args.ranks}")
    if "meshdist" not in args.libraries:
        parser.error("--libraries must name meshdist, which the others are compared with")
    return args


def main() -> int:
    args = parse()
    versions = installed(args.libraries)
    libraries = list(versions)
    try:
        times = measure(libraries, args.ranks, args.rounds)
    except StartError as error:
        print(f"startup.py: {error}", file=sys.stderr)
        return 1
    others = [library.title for library in libraries if library.name != "meshdist"]
    head = ["", *(library.title for library in [*libraries, NUMPY]), *(f"{other} / meshdist" for other in others)]
    body = METHOD.format(rounds=args.rounds, ranks=args.ranks)
    body += "\n\n" + report.table(head, rows(times, libraries, args.ranks))
    report.publish(args, "Start", machine.describe(versions), body, times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
