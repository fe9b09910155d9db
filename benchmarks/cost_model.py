"""Compare what the calibrated cost model predicts with what collectives then take.

python benchmarks/cost_model.py
python benchmarks/cost_model.py --ranks 2 --seconds 5 --sizes 65536,1048576 --json out.json

One job calibrates (`python -m meshdist.topology --calibrate`) and ends; then a fresh job of each number of ranks is
measured, case after case and round after round, and compared with what the file says that the first one left.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sidebyside import machine, report
from sidebyside.cases import KIB, MIB, Case
from sidebyside.jobs import Job, JobError
from sidebyside.libraries import environment, installed
from sidebyside.options import names_from, positive, positive_float, positives
from sidebyside.rounds import iterations_for

from meshdist import CostModel

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor", "broadcast")
GOAL = 1.5
METHOD = """\
Predicted by a model that was calibrated for {seconds:g} s by {most} ranks, measured in jobs started after it \
had ended, in {rounds} rounds: the time that a quarter of the rounds beat, which is what the model predicts, as what \
other processes of a busy machine add is not the model's to know; beside it the median and, in brackets, the shortest. \
The size is that of the longer array of a call. The ratio is predicted / measured; the model is to be within a factor \
of {goal}."""


class CalibrationError(RuntimeError):
    """The job that calibrates failed; the message shows its output."""


def calibrated(ranks: int, seconds: float, path: Path | None) -> CostModel:
    """Return the model that a job of so many ranks writes, kept at `path` if given."""
    with tempfile.TemporaryDirectory() as folder:
        file = path or Path(folder) / "cost.toml"
        command = [sys.executable, "-m", "meshdist.launch.meshrun", "-n", str(ranks), "-m", "meshdist.topology"]
        run = subprocess.run(
            [*command, "--calibrate", str(file), "--seconds", str(seconds)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120 + 3 * seconds,
            check=False,
        )
        if run.returncode:
            raise CalibrationError(f"the calibration ended with {run.returncode}:\n{run.stderr}")
        return CostModel.load(file)


def measured(job: Job, cases: list[Case], rounds: int, turn_s: float) -> dict[Case, list[float]]:
    """Return the seconds of a call of each case in every round.

    All cases have their turn in a round, so that a busy moment of the machine falls on one round of a case, not on all.
    """
    iterations: dict[Case, int] = {}
    for case in cases:
        job.take_up(case)
        iterations[case] = iterations_for(job, turn_s)
    times: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            job.take_up(case)
            times[case].append(job.time(iterations[case]))
    return times


def undisturbed(times: list[float]) -> float:
    """Return the time that a quarter of the rounds beat, as the calibration takes it of its own rounds."""
    return float(np.quantile(times, 0.25))


def compared(model: CostModel, ranks: int, times: dict[Case, list[float]]) -> list[dict[str, Any]]:
    """Return each case with its times, the prediction, and the ratio of the two."""
    found = []
    for case, seconds in times.items():
        predicted = model.predict(case.collective, case.nbytes, ranks)
        ratio = predicted / undisturbed(seconds)
        found.append({**case._asdict(), "ranks": ranks, "times": seconds, "predicted": predicted, "ratio": ratio})
    return found


def within(results: list[dict[str, Any]], goal: float = GOAL) -> str:
    """Return how many ratios are within the goal, and the worst, in words."""
    good = sum(1 for each in results if 1 / goal <= each["ratio"] <= goal)
    worst = max((each["ratio"] for each in results), key=lambda ratio: abs(math.log(ratio)))
    return f"{good} of {len(results)} within a factor of {goal}; the farthest is {worst:.2f}"


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of each row of the table."""
    return [
        [
            each["collective"],
            str(each["ranks"]),
            report.size(each["nbytes"]),
            report.duration(each["predicted"]),
            report.duration(undisturbed(each["times"])),
            report.median_and_least(each["times"]),
            f"{each['ratio']:.2f}",
        ]
        for each in results
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the times that the cost model predicts with measured ones.")
    add = parser.add_argument
    add("--ranks", type=positives, default=[2, 4], metavar="N,...", help="numbers of ranks to measure (default: 2,4)")
    add("--seconds", type=positive_float, default=10.0, help="how long to calibrate (default: %(default)s)")
    sizes = [64 * KIB << step for step in range(11)]
    assert sizes[-1] == 64 * MIB
    add("--sizes", type=positives, default=sizes, metavar="BYTES,...", help="(default: powers of 2 to 64 MiB)")
    add("--collectives", type=names_from(COLLECTIVES), default=list(COLLECTIVES[:3]), metavar="NAME,...")
    add("--rounds", type=positive, default=15, help="(default: %(default)s)")
    add("--turn", type=positive_float, default=0.02, help="seconds of a case in a round (default: %(default)s)")
    add("--model", type=Path, metavar="PATH", help="keep the calibrated model in this TOML file")
    report.add_output_options(parser)
    args = parser.parse_args()
    if min(args.ranks) < 2:
        parser.error(f"--ranks must be at least 2 each, got {min(args.ranks)}")
    return args


def main() -> int:
    args = parse()
    # glibc would give arrays of some MiB the small pages that earlier ones, and the checks of their results, have left:
    # on those they take up to twice as long as on the large pages of an array that a program makes once.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "131072")
    versions = installed(["meshdist"])
    (library,) = versions
    results = []
    cases = [Case(collective, nbytes, "float32") for collective in args.collectives for nbytes in args.sizes]
    try:
        model = calibrated(max(args.ranks), args.seconds, args.model)
        for ranks in args.ranks:
            with Job(library, ranks) as job:
                results += compared(model, ranks, measured(job, cases, args.rounds, args.turn))
    except (CalibrationError, JobError) as error:
        print(f"cost_model.py: {error}", file=sys.stderr)
        return 1
    body = METHOD.format(seconds=args.seconds, most=max(args.ranks), rounds=args.rounds, goal=GOAL)
    head = ["collective", "ranks", "size", "predicted", "measured", "median (shortest)", "ratio"]
    body += f"\n\n{report.table(head, rows(results))}\n\n{within(results)}."
    report.publish(args, "Cost model", machine.describe(versions), body, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
