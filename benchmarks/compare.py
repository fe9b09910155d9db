"""Compare the collectives of meshdist with those of torch.distributed (gloo) and Open MPI (mpi4py) on this host.

    python benchmarks/compare.py
    python benchmarks/compare.py --libraries meshdist-mpi,mpi
    python benchmarks/compare.py --ranks 4 --collectives all_reduce --sizes 8,65536 --rounds 11 --json out.json

Each library's ranks are started once and wait, blocked, until it is their turn: see sidebyside/rounds.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from sidebyside import machine, report
from sidebyside.cases import COLLECTIVES, Case, cases_of
from sidebyside.contender import COALESCED, OUTSTANDING
from sidebyside.jobs import Job, JobError
from sidebyside.libraries import NAMES, OVER_MPI, Library, installed
from sidebyside.options import names_from, positive, positive_float, positives
from sidebyside.rounds import measure, ratio

METHOD = """\
Time of one call on the slowest rank: the median of {rounds} rounds and, in brackets, the shortest. In each round the \
libraries take turns, for about {seconds:g} s each. A ratio is the median of the rounds' ratios: above 1, meshdist is \
faster. {dtype} elements, in-place SUM; a size is that of the longer array of the call; send_recv is there and back; \
all_reduce_outstanding is {outstanding} async calls and the wait for all, all_reduce_coalesced one call of {coalesced} \
arrays, and the size that of all of them. \
All with OMP_NUM_THREADS=1, without binding to cores."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare meshdist's collectives with torch's gloo and Open MPI.")
    add = parser.add_argument
    add("--ranks", type=positive, default=2, help="how many ranks (default: %(default)s)")
    add("--sizes", type=positives, metavar="BYTES,...", help="sizes in bytes (default: some for each collective)")
    add(
        "--collectives",
        type=names_from(COLLECTIVES),
        default=list(COLLECTIVES),
        metavar="NAME,...",
        help=f"which: {', '.join(COLLECTIVES)} (default: all)",
    )
    add(
        "--libraries",
        type=names_from((*NAMES, OVER_MPI.name)),
        default=list(NAMES),
        metavar="NAME,...",
        help=f"{', '.join(NAMES)} (default: all), {OVER_MPI.name} (backend mpi)",
    )
    add("--dtype", choices=["float32", "float64"], default="float32", help="(default: %(default)s)")
    add("--rounds", type=positive, default=7, help="(default: %(default)s)")
    add("--seconds", type=positive_float, default=0.2, help="of each library in a round (default: %(default)s)")
    report.add_output_options(parser)
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"--ranks must be at least 2, got {args.ranks}")
    if own_name(args.libraries) is None:
        parser.error(f"--libraries must name meshdist, or {OVER_MPI.name}, which the others are compared with")
    return args


def own_name(names: Iterable[str]) -> str | None:
    """Return which of the libraries the others are compared with."""
    return next((name for name in ("meshdist", OVER_MPI.name) if name in names), None)


def run(args: argparse.Namespace, libraries: list[Library]) -> list[dict[str, Any]]:
    """Start a job of each library, measure all cases, and end the jobs."""
    cases = [case for name in args.collectives for case in cases_of(name, args.sizes, args.dtype)]
    with ExitStack() as stack:
        jobs = [stack.enter_context(Job(library, args.ranks)) for library in libraries]
        results = []
        for case in cases:
            results.append(measure(jobs, case, args.rounds, args.seconds))
            print(" ".join(row(results[-1], libraries)), file=sys.stderr, flush=True)
    return results


def row(result: dict[str, Any], libraries: list[Library]) -> list[str]:
    """Return the cells of a measured case."""
    case, times = Case(result["collective"], result["nbytes"], result["dtype"]), result["times"]
    own = own_name(times) or ""
    others = [library.name for library in libraries if library.name != own]
    ratios = [f"{ratio(times, [other], own):.2f}" for other in others]
    if len(others) > 1:
        ratios.append(f"{ratio(times, others, own):.2f}")
    cells = [report.median_and_least(times[library.name]) for library in libraries]
    return [case.collective, report.size(case.nbytes), *cells, *ratios]


def main() -> int:
    args = parse()
    versions = installed(args.libraries)
    libraries = list(versions)
    own = next((library for library in libraries if library.name == own_name(args.libraries)), None)
    if own is None:
        print(f"compare.py: {own_name(args.libraries)} cannot be measured here", file=sys.stderr)
        return 1
    try:
        results = run(args, libraries)
    except JobError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 1
    others = [library.title for library in libraries if library is not own]
    ratios = [f"{other} / {own.title}" for other in others] + [f"the faster / {own.title}"] * (len(others) > 1)
    head = [f"{args.ranks} ranks", "size", *(library.title for library in libraries), *ratios]
    words = {"seconds": args.seconds, "dtype": args.dtype, "outstanding": OUTSTANDING, "coalesced": COALESCED}
    method = METHOD.format(rounds=args.rounds, **words)
    body = f"{method}\n\n{report.table(head, (row(result, libraries) for result in results), text_columns=2)}"
    title = f"Collectives, {args.ranks} ranks" + (", backend mpi" if own is OVER_MPI else "")
    report.publish(args, title, machine.describe(versions), body, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
