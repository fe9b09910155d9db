"""Compare the collectives of meshdist with those of torch.distributed (gloo) between two hosts.

    python benchmarks/between_hosts.py
    python benchmarks/between_hosts.py --per-host 2 --collectives all_reduce --sizes 8,65536 --json out.json

The hosts are network namespaces of this machine, joined by a veth pair: making them needs the rights to. The ranks of
both libraries are started once and wait, blocked, until it is their turn, as in compare.py.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from typing import Any

from sidebyside import machine, report
from sidebyside.cases import COLLECTIVES, Case, cases_of
from sidebyside.hosts import NoHostsError, launcher, two_hosts
from sidebyside.jobs import Job, JobError
from sidebyside.libraries import CLEAR, Library, installed
from sidebyside.options import names_from, positive, positive_float, positives
from sidebyside.rounds import measure, ratio

CHOSEN = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "barrier")
METHOD = """\
Two network namespaces of one machine joined by a veth pair, {per_host} rank(s) in each. Time of one call on the \
slowest rank: the median of {rounds} rounds and, in brackets, the shortest; in each round the libraries take turns, \
for about {seconds:g} s each. A ratio is the median of the rounds' ratios: above 1, meshdist is faster. {dtype} \
elements, in-place SUM; connections of "meshdist" are encrypted, as by default, the others are not; a size is that of \
the longer array of the call; send_recv is there and back. All with OMP_NUM_THREADS=1."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare meshdist's collectives with torch's gloo between two hosts.")
    add = parser.add_argument
    add("--per-host", type=positive, default=1, help="how many ranks on each host (default: %(default)s)")
    add("--sizes", type=positives, metavar="BYTES,...", help="sizes in bytes (default: some for each collective)")
    add(
        "--collectives",
        type=names_from(COLLECTIVES),
        default=[name for name in CHOSEN if name in COLLECTIVES],
        metavar="NAME,...",
        help=f"which: {', '.join(COLLECTIVES)} (default: {', '.join(CHOSEN)})",
    )
    add("--dtype", choices=["float32", "float64"], default="float32", help="(default: %(default)s)")
    add("--rounds", type=positive, default=7, help="(default: %(default)s)")
    add("--seconds", type=positive_float, default=0.2, help="of each library in a round (default: %(default)s)")
    report.add_output_options(parser)
    return parser.parse_args()


def run(args: argparse.Namespace, libraries: list[Library]) -> list[dict[str, Any]]:
    """Start a job of each library between the hosts, measure all cases, and end the jobs."""
    cases = [case for name in args.collectives for case in cases_of(name, args.sizes, args.dtype)]
    with ExitStack() as stack:
        names = stack.enter_context(two_hosts())
        started = [
            library._replace(launcher=partial(launcher, names, encryption="off" if library is CLEAR else "on"))
            for library in libraries
        ]
        jobs = [stack.enter_context(Job(library, 2 * args.per_host)) for library in started]
        results = []
        for case in cases:
            results.append(measure(jobs, case, args.rounds, args.seconds))
            print(" ".join(row(results[-1], libraries)), file=sys.stderr, flush=True)
    return results


def row(result: dict[str, Any], libraries: list[Library]) -> list[str]:
    """Return the cells of a measured case."""
    case, times = Case(result["collective"], result["nbytes"], result["dtype"]), result["times"]
    cells = [report.median_and_least(times[library.name]) for library in libraries]
    others = [library.name for library in libraries if library.name != "meshdist"]
    ratios = [f"{ratio(times, [other]):.2f}" for other in others]
    return [case.collective, report.size(case.nbytes), *cells, *ratios]


def main() -> int:
    args = parse()
    versions = installed(["meshdist", "meshdist-clear", "torch"])
    libraries = list(versions)
    try:
        results = run(args, libraries)
    except (NoHostsError, JobError) as error:
        print(f"between_hosts.py: {error}", file=sys.stderr)
        return 1
    ratios = [f"{library.title} / meshdist" for library in libraries if library.name != "meshdist"]
    head = [f"2 x {args.per_host} ranks", "size", *(library.title for library in libraries), *ratios]
    method = METHOD.format(per_host=args.per_host, rounds=args.rounds, seconds=args.seconds, dtype=args.dtype)
    body = f"{method}\n\n{report.table(head, (row(result, libraries) for result in results), text_columns=2)}"
    title = f"Collectives between two hosts, {args.per_host} rank(s) on each"
    report.publish(args, title, machine.describe(versions), body, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
