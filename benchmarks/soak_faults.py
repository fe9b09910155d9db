"""Random programs with a fault at a random moment: who notices, when, and what is said.

    python benchmarks/soak_faults.py --seconds 600
    python benchmarks/soak_faults.py --faults kill,stop --tcp

Every trial is a world of fresh processes that plays the programs of soak.py until one rank is killed, stopped or
interrupted, raises, ends, or makes another call than the others. All others have to raise within a second (where a rank
is stopped, or does not join the next world, a second after the timeout), the message has to name that rank, and nothing
may be left of the trial.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from sidebyside.machine import describe
from sidebyside.options import names_from, positive, positive_float
from sidebyside.report import duration, publish, table
from soaking.faults import FAULTS, Ranks, Trial, draw, verdict
from soaking.held import held, held_table, shared_files_of
from soaking.options import add_options, way

_END_S = 20.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Inject faults into random programs.")
    add_options(parser, "trial", timeout_s=4.0)
    parser.add_argument("--trials", type=positive, default=1 << 30, metavar="N", help="at most so many")
    parser.add_argument("--faults", type=names_from(FAULTS), default=list(FAULTS), help="(default: all)")
    parser.add_argument("--slack", type=positive_float, default=1.0, help="added to every bound, s; for a busy machine")
    return parser.parse_args()


def variables(args: argparse.Namespace, rank: int) -> dict[str, str]:
    """Return what the environment of a rank has besides."""
    if args.tcp:
        return {"MESHDIST_DISABLE_SHM": "1"}
    return {"MESHDIST_HOST_ID": f"host {rank % args.hosts}"} if args.hosts > 1 else {}


def attempt(trial: Trial, args: argparse.Namespace, folder: Path) -> tuple[list[float], list[str]]:
    """Return how long the others took to notice, and what was not as it has to be."""
    ranks = Ranks(trial, lambda rank: {"TMPDIR": str(folder), **variables(args, rank)})
    pids = [process.pid for process in ranks.processes]
    try:
        began_s, ends = ranks.run()
    finally:
        left = ranks.close(_END_S)
    wrong = verdict(trial, pids, began_s, ends, args.slack)
    wrong += [f"rank {rank} does not end" for rank in left if not (rank == trial.victim and trial.fault == "stop")]
    wrong += [f"{path} is left" for path in [*folder.iterdir(), *shared_files_of(pids)]]
    return [end.at_s - began_s for rank, end in ends.items() if rank != trial.victim], wrong


def main() -> int:
    args = arguments()
    if args.no_core:
        os.environ["MESHDIST_CORE"] = "python"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it
    seed = int.from_bytes(os.urandom(3), "little") if args.seed is None else args.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    noticed: dict[str, list[float]] = defaultdict(list)
    trials: dict[str, int] = defaultdict(int)
    moments: dict[str, dict[str, int]] = {}
    num_wrong, number, began = 0, args.first, time.monotonic()
    while time.monotonic() - began < args.seconds and number - args.first < args.trials:
        trial = draw(seed, number, args.ranks, args.timeout, args.faults)
        with tempfile.TemporaryDirectory(prefix="soak") as folder:
            times, wrong = attempt(trial, args, Path(folder))
        for sentence in wrong:
            print(f"soak_faults.py: {trial} (--seed {seed} --first {number}): {sentence}", file=sys.stderr)
        noticed[trial.fault] += times
        trials[trial.fault] += 1
        num_wrong += bool(wrong)
        number += 1
        moments["at the end"] = held()
        if number - args.first == len(args.faults):
            moments = {"after one of each fault": held(), **moments}
    seconds = time.monotonic() - began
    text = (
        f"Seed {seed}: {number - args.first:,} faults in {seconds:.0f} s, "
        f"{num_wrong} of them with an unexpected outcome. Who waits for a stopped rank, or for a killed one to join the"
        f" next world, notices at the timeout, which is {args.timeout:g} s."
    )
    rows = [
        (fault, f"{trials[fault]:,}", *((duration(median(times)), duration(max(times))) if times else ("", "")))
        for fault, times in sorted(noticed.items())
    ]
    publish(
        args,
        f"Faults in random programs on {args.ranks} ranks {way(args)}",
        describe({}) | ({"compiled core": "not used"} if args.no_core else {}),
        "\n\n".join(
            (
                text,
                table(("fault", "times", "others notice after", "the last"), rows),
                held_table(moments, "the process that starts them"),
            )
        ),
        {"held": moments, **{fault: {"trials": trials[fault], "noticed_s": noticed[fault]} for fault in trials}},
    )
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
