"""Run examples/train_digits.py on several meshes: its speed, and whether every mesh computes the same run.

    python benchmarks/training.py
    python benchmarks/training.py --meshes 1x1,2x2 --dtypes float64 --steps 200 --json out.json

The exit status is 1 where the losses of a mesh differ from those of one rank by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from sidebyside import machine, report
from sidebyside.libraries import LIBRARIES, ROOT, environment, installed
from sidebyside.options import names_from, positive

SCRIPT = ROOT / "examples" / "train_digits.py"
TOLERANCES = {"float64": 1e-10, "float32": 1e-4}
ALONE = "1x1"
METHOD = """\
`examples/train_digits.py`, {steps} steps, started by meshrun; DPxTP is the mesh. Steps per second and the share of \
the time in communication are medians of {rounds} rounds, in each of which the meshes take turns. The last columns \
compare each loss with that of the run on one rank (1x1): the largest relative difference, and what is allowed."""

Run = dict[str, Any]


def mesh(text: str) -> str:
    """Read one mesh, DPxTP."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"a mesh is DPxTP, such as 2x2, got {text!r}")
    return text


def meshes(text: str) -> list[str]:
    """Read meshes with commas between them; that of one rank is always among them."""
    return list(dict.fromkeys([ALONE, *map(mesh, text.split(","))]))


def train(shape: str, dtype: str, steps: int) -> Run:
    """Run the example once and return what it wrote.

    Raises:
        RuntimeError: It failed; the message shows its output.
    """
    ranks = math.prod(map(int, shape.split("x")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        options = ["--mesh", shape, "--dtype", dtype, "--steps", str(steps), "--json", str(path)]
        command = [*LIBRARIES[0].launcher(ranks), str(SCRIPT), *options]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise RuntimeError(f"{SCRIPT.name} on mesh {shape} ended with {done.returncode}:\n{done.stderr}")
        run: Run = json.loads(path.read_text())
    return run


def difference(run: Run, reference: Run) -> float:
    """Return the largest relative difference of two runs' losses."""
    pairs = zip(run["losses"], reference["losses"], strict=True)
    return float(max(abs(loss - expected) / abs(expected) for loss, expected in pairs))


def summary(runs: list[Run], reference: Run) -> Run:
    """Return what the rounds of one mesh and dtype come to."""
    return {
        "mesh": runs[0]["mesh"],
        "ranks": runs[0]["world_size"],
        "dtype": runs[0]["dtype"],
        "steps_per_s": median(run["steps_per_s"] for run in runs),
        "comm_share": median(run["comm_share"] for run in runs),
        "test_accuracy": min(run["test_accuracy"] for run in runs),
        "difference": max(difference(run, reference) for run in runs),
        "tolerance": TOLERANCES[runs[0]["dtype"]],
    }


def measure(shapes: list[str], dtypes: list[str], steps: int, rounds: int) -> list[Run]:
    """Return a summary of each dtype and mesh."""
    runs: dict[tuple[str, str], list[Run]] = {(dtype, shape): [] for dtype in dtypes for shape in shapes}
    for _ in range(rounds):
        for (dtype, shape), done in runs.items():
            done.append(train(shape, dtype, steps))
    return [summary(done, runs[dtype, ALONE][0]) for (dtype, _), done in runs.items()]


def row(found: Run) -> list[str]:
    """Return the cells of one summary."""
    return [
        found["dtype"],
        found["mesh"],
        str(found["ranks"]),
        f"{found['steps_per_s']:.0f}",
        f"{found['comm_share']:.0%}",
        f"{found['test_accuracy']:.1%}",
        f"{found['difference']:.1e}",
        f"{found['tolerance']:.0e}",
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the digits example on several meshes.")
    add = parser.add_argument
    add("--meshes", type=meshes, default="1x1,2x1,1x2,4x1,2x2,1x4", metavar="DPxTP,...", help="(default: %(default)s)")
    add("--dtypes", type=names_from(TOLERANCES), default=list(TOLERANCES), metavar="NAME,...", help="(default: both)")
    add("--steps", type=positive, default=600, help="(default: %(default)s)")
    add("--rounds", type=positive, default=3, help="(default: %(default)s)")
    report.add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    args = parse()
    try:
        found = measure(args.meshes, args.dtypes, args.steps, args.rounds)
    except RuntimeError as error:
        print(f"training.py: {error}", file=sys.stderr)
        return 1
    head = ["dtype", "mesh", "ranks", "steps/s", "in communication", "test accuracy", "difference", "allowed"]
    body = METHOD.format(steps=args.steps, rounds=args.rounds)
    body += "\n\n" + report.table(head, map(row, found), text_columns=2)
    report.publish(args, "Training", machine.describe(installed(["meshdist"])), body, found)
    unequal = [case for case in found if not case["difference"] <= case["tolerance"]]  # NaN is unequal, too
    for case in unequal:
        print(f"training.py: the losses on {case['mesh']} in {case['dtype']} are not those of 1x1", file=sys.stderr)
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
