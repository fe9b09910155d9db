"""How much of an async all_reduce is hidden behind what its caller does meanwhile.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --ranks 1,2 --size 67108864 --markdown benchmarks/RESULTS.md

An all_reduce between processes of one host is work of the processors, which copy and add. Where every core computes
already, as with two ranks on two cores, only its waits can be hidden behind computing; behind waiting, all of it can.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import median
from typing import NamedTuple

from sidebyside import machine, report
from sidebyside.libraries import LIBRARIES, environment
from sidebyside.options import positive, positives

METHOD = """\
An async all_reduce of {size} of float32 on {ranks} ranks with {cores} cores, and what its caller does meanwhile, \
chosen to take about as long: "matmul" multiplies matrices, "ufuncs" adds and multiplies arrays that fit the cache, \
"Python" runs bytecode and holds the interpreter's lock, "waits" sleeps, as a caller does that waits for a disk or a \
GPU. Medians of {rounds} rounds; in each, all kinds take turns: the all_reduce alone, the other work alone, both. \
Processor time is that of a rank for the all_reduce alone. Hidden is by how much both together are shorter than one \
after the other, as a share of the shorter of the two; where both need all the cores, there is nothing to hide."""


class Times(NamedTuple):
    """Seconds on the slowest rank, of one round.

    Attributes:
        alone: The all_reduce.
        cpu: The processor time of that.
        work: What the caller does.
        both: Both at once.
    """

    alone: float
    cpu: float
    work: float
    both: float


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how much of an async all_reduce is hidden.")
    add = parser.add_argument
    add("--ranks", type=positives, default=[2], metavar="N,...", help="(default: 2)")
    add("--size", type=positive, default=64 << 20, metavar="BYTES", help="(default: 64 MiB)")
    add("--rounds", type=positive, default=15, help="(default: %(default)s)")
    report.add_output_options(parser)
    args = parser.parse_args()
    if min(args.ranks) < 2:
        parser.error(f"--ranks must be at least 2, got {min(args.ranks)}")
    return args


def measure(args: argparse.Namespace, ranks: int) -> dict[str, list[Times]]:
    """Start the ranks, and return what they measured."""
    command = [*LIBRARIES[0].launcher(ranks), "-m", "sidebyside.overlapping", str(args.size), str(args.rounds)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the ranks ended with status {done.returncode}:\n{done.stderr}")
    return {kind: [Times(*times) for times in rounds] for kind, rounds in json.loads(done.stdout).items()}


def hidden(times: Times) -> float:
    """Return which share of the shorter of the two did not show.

    Example:
        >>> hidden(Times(alone=0.01, cpu=0.01, work=0.01, both=0.012))
        0.8
    """
    return round((times.alone + times.work - times.both) / min(times.alone, times.work), 6)


def row(kind: str, rounds: list[Times]) -> list[str]:
    """Return the cells of one kind."""
    medians = [report.duration(median(values)) for values in zip(*rounds, strict=True)]
    return [kind, *medians, f"{100 * median(map(hidden, rounds)):.0f}%"]


def main() -> int:
    args = parse()
    for ranks in args.ranks:
        try:
            found = measure(args, ranks)
        except RuntimeError as error:
            print(f"overlap.py: {error}", file=sys.stderr)
            return 1
        described = machine.describe({})
        words = {"size": report.size(args.size), "ranks": ranks, "cores": described["cores"], "rounds": args.rounds}
        head = ["meanwhile", "all_reduce alone", "its processor time", "the other work alone", "both", "hidden"]
        body = METHOD.format(**words) + "\n\n" + report.table(head, (row(*each) for each in found.items()))
        report.publish(args, f"Overlap, {ranks} ranks", described, body, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
