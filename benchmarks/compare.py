"""Compare the collectives of meshdist with those of torch.distributed (gloo), Open MPI and MPICH on this host.

    python benchmarks/compare.py
    python benchmarks/compare.py --ranks 2,4,16 --markdown benchmarks/RESULTS.md --plot ratios.svg
    python benchmarks/compare.py --libraries meshdist-mpi,openmpi
    python benchmarks/compare.py --collectives send_recv,recv_from_any,probe_and_recv,exchange,sendrecv,irecv_and_send
    python benchmarks/compare.py --ranks 4 --collectives all_reduce --sizes 8,65536 --rounds 11 --json out.json

Each library's ranks are started once and wait, blocked, until it is their turn: see sidebyside/rounds.py.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from sidebyside import machine, report
from sidebyside.cases import COLLECTIVES, MESSAGES, cases_of, fits
from sidebyside.columns import Columns
from sidebyside.contender import COALESCED, OUTSTANDING
from sidebyside.jobs import Job, JobError
from sidebyside.libraries import NAMES, OVER_MPI, SHARED, Library, installed
from sidebyside.options import names_from, picture, positive, positive_float, positives
from sidebyside.rounds import measure

from meshdist import core

METHOD = """\
Time of one call on the slowest rank: the median of {rounds} rounds and, in brackets, the shortest. In each round the \
libraries take turns, for about {seconds:g} s each. A ratio is the median of the rounds' ratios: above 1, meshdist is \
faster. {dtype} elements, in-place SUM; a size is that of the longer array of the call. send_recv is there and back, \
as are recv_from_any (received from any rank), probe_and_recv (after a probe for any message; torch has none) and \
send_object (a dict that has the array). exchange sends in both directions at the same time, with isend and irecv, \
sendrecv around the ring of all ranks (in torch, which has none, with these two), and irecv_and_send the same by \
irecv, send and the wait. all_reduce_outstanding is {outstanding} async calls and the wait for all, \
all_reduce_coalesced one call of {coalesced} arrays (over MPI, packed by the program, or from 1 MiB on one call for \
each), and the size that of all of them; neither counts in the means. torch has no scan. Arrays of 1 MiB and more have \
pages of their own, new ones in each round, with all libraries: malloc might give them those of earlier ones, on which \
they are up to twice as slow. Shared arrays are those of meshdist.empty. All with OMP_NUM_THREADS=1, without binding \
to cores."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare meshdist's collectives with torch's gloo, Open MPI and MPICH."
    )
    add = parser.add_argument
    add("--ranks", type=positives, default=[2], metavar="N,...", help="how many ranks (default: 2)")
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
        type=names_from((*NAMES, SHARED.name, OVER_MPI.name)),
        default=[*NAMES, SHARED.name],
        metavar="NAME,...",
        help=f"{', '.join(NAMES)}, {SHARED.name} (default: all of these), {OVER_MPI.name} (the mpi backend)",
    )
    add("--dtype", choices=["float32", "float64"], default="float32", help="(default: %(default)s)")
    add("--rounds", type=positive, default=7, help="(default: %(default)s)")
    add("--seconds", type=positive_float, default=0.2, help="of each library in a round (default: %(default)s)")
    add("--plot", type=picture, metavar="PATH", help="draw the ratio to the fastest other library, .svg or .png")
    report.add_output_options(parser)
    args = parser.parse_args()
    if min(args.ranks) < 2:
        parser.error(f"--ranks must be at least 2, got {min(args.ranks)}")
    if not {"meshdist", OVER_MPI.name} & set(args.libraries):
        parser.error(f"--libraries must name meshdist, or {OVER_MPI.name}, which the others are compared with")
    if args.plot is not None and not any(COLLECTIVES[name] for name in args.collectives):
        parser.error("--plot draws ratios by size: --collectives must name one that moves something")
    return args


def run(args: argparse.Namespace, libraries: list[Library], ranks: int) -> list[dict[str, Any]]:
    """Start a job of each library, measure all cases, and end the jobs."""
    cases = [case for name in args.collectives for case in cases_of(name, args.sizes, args.dtype)]
    columns = Columns(libraries)
    with ExitStack() as stack:
        jobs = [stack.enter_context(Job(library, ranks)) for library in libraries]
        results = []
        for case in cases:
            taking_part = [job for job in jobs if job.library.measures(case.collective)]
            if not fits(case, ranks, len(taking_part)):
                print(f"{case.collective} of {report.size(case.nbytes)} is left out: no memory for it", file=sys.stderr)
                continue
            results.append(measure(taking_part, case, args.rounds, args.seconds))
            print(" ".join(columns.row(results[-1])), file=sys.stderr, flush=True)
    return results


def main() -> int:
    args = parse()
    versions = installed(args.libraries)
    libraries = list(versions)
    columns = Columns(libraries)
    if columns.own is None:
        print("compare.py: meshdist cannot be measured here", file=sys.stderr)
        return 1
    if args.plot and not [library for library in libraries if library not in (columns.own, SHARED)]:
        print("compare.py: --plot draws ratios: no library to compare meshdist with was found", file=sys.stderr)
        return 1
    words = {"seconds": args.seconds, "dtype": args.dtype, "outstanding": OUTSTANDING, "coalesced": COALESCED}
    everything = []
    for ranks in args.ranks:
        try:
            results = run(args, libraries, ranks)
        except JobError as error:
            print(f"compare.py: {error}", file=sys.stderr)
            return 1
        everything += results
        table = report.table(columns.head(ranks), [*map(columns.row, results), *columns.means(results)], text_columns=2)
        subject = "Messages" if MESSAGES.issuperset(args.collectives) else "Collectives"
        title = f"{subject}, {ranks} ranks" + (", backend mpi" if columns.own is OVER_MPI else "")
        title += " without the compiled core" if core.module is None else ""
        body = "\n\n".join(filter(None, [METHOD.format(rounds=args.rounds, **words), table, columns.summary(results)]))
        described = machine.describe({library: versions[library] for library in libraries if library is not SHARED})
        report.publish(args, title, described, body, everything)
    if args.plot:
        from sidebyside.drawing import draw, points_of

        draw(args.plot, points_of(everything))
    return 0


if __name__ == "__main__":
    sys.exit(main())
