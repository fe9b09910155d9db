"""Run an example on several meshes: its speed, and whether every mesh computes the same run.

    python benchmarks/training.py
    python benchmarks/training.py --meshes 1x1,2x2 --dtypes float64 --steps 200 --json out.json
    python benchmarks/training.py --example transformer --steps 100

The exit status is 1 where the losses of a mesh differ from those of one rank by more than rounding.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from sidebyside import machine, report
from sidebyside.libraries import installed, run_example
from sidebyside.options import names_from, positive

METHOD = """\
`examples/{script}`, {steps} steps, started by meshrun; {axes} is the mesh. {columns} are medians of {rounds} \
rounds, in each of which the meshes take turns. The last columns compare each loss with that of the run on one rank \
({alone}): the largest relative difference, and what is allowed."""

Run = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A figure of each run: its key in what the example writes, its title and format, and how rounds come together."""

    key: str
    title: str
    format: str
    of_rounds: Callable[[Iterator[float]], float] = median


@dataclass(frozen=True)
class Example:
    """A program that trains on a mesh and writes its losses: what it is started with, and what it is judged by."""

    title: str
    script: str
    axes: str
    meshes: str
    steps: int
    tolerances: dict[str, float]
    columns: tuple[Column, ...]
    summary: str
    by_hand: bool = False

    @property
    def alone(self) -> str:
        """The mesh of one rank."""
        return "x".join("1" * (1 + self.axes.count("x")))

    def check(self, shape: str) -> str:
        """Return a mesh as it was given, or raise ValueError."""
        parts = shape.split("x")
        if len(parts) != 1 + self.axes.count("x") or not all(part.isdecimal() and int(part) for part in parts):
            raise ValueError(
                f"a mesh of {self.script} is {self.axes}, such as {self.meshes.split(',')[-1]}, got {shape!r}"
            )
        return shape


EXAMPLES = {
    "digits": Example(
        title="Training",
        script="train_digits.py",
        axes="DPxTP",
        meshes="1x1,2x1,1x2,4x1,2x2,1x4",
        steps=600,
        tolerances={"float64": 1e-10, "float32": 1e-4},
        columns=(
            Column("steps_per_s", "steps/s", ".0f"),
            Column("comm_share", "in communication", ".0%"),
            Column("test_accuracy", "test accuracy", ".1%", min),
        ),
        summary="Steps per second and the share of the time in communication",
    ),
    "transformer": Example(
        title="Training a transformer",
        script="train_transformer.py",
        axes="DPxTPxPP",
        meshes="1x1x1,2x1x1,1x2x1,1x1x2,2x2x1,2x1x2,1x2x2",
        steps=100,
        tolerances={"float64": 1e-9, "float32": 1e-4},
        columns=(
            Column("steps_per_s", "steps/s", ".1f"),
            Column("by_hand", "steps/s, --plain", ".1f"),
            Column("bubble", "bubble", ".0%"),
        ),
        summary="Steps per second, those of the same network by hand on the flat API (`--plain`), and the bubble of the"
        " pipeline",
        by_hand=True,
    ),
}


def train(example: Example, shape: str, dtype: str, steps: int, *flags: str) -> Run:
    """Run the example once and return what it wrote.

    Raises:
        RuntimeError: It failed; the message shows its output.
    """
    return run_example(example.script, shape, "--dtype", dtype, "--steps", str(steps), *flags)


def difference(run: Run, reference: Run) -> float:
    """Return the largest relative difference of two runs' losses."""
    pairs = zip(run["losses"], reference["losses"], strict=True)
    return float(max(abs(loss - expected) / abs(expected) for loss, expected in pairs))


def both(example: Example, shape: str, dtype: str, steps: int) -> Run:
    """Run the example, and where it has one its version by hand, whose speed becomes the figure "by_hand"."""
    run = train(example, shape, dtype, steps)
    if example.by_hand:
        run["by_hand"] = train(example, shape, dtype, steps, "--plain")["steps_per_s"]
    return run


def summary(example: Example, runs: list[Run], reference: Run) -> Run:
    """Return what the rounds of one mesh and dtype come to."""
    first = runs[0]
    found = {"mesh": first["mesh"], "ranks": math.prod(map(int, first["mesh"].split("x"))), "dtype": first["dtype"]}
    found |= {column.key: column.of_rounds(run[column.key] for run in runs) for column in example.columns}
    found["difference"] = max(difference(run, reference) for run in runs)
    found["tolerance"] = example.tolerances[first["dtype"]]
    return found


def measure(example: Example, shapes: list[str], dtypes: list[str], steps: int, rounds: int) -> list[Run]:
    """Return a summary of each dtype and mesh."""
    runs: dict[tuple[str, str], list[Run]] = {(dtype, shape): [] for dtype in dtypes for shape in shapes}
    for _ in range(rounds):
        for (dtype, shape), done in runs.items():
            done.append(both(example, shape, dtype, steps))
    return [summary(example, done, runs[dtype, example.alone][0]) for (dtype, _), done in runs.items()]


def row(example: Example, found: Run) -> list[str]:
    """Return the cells of one summary."""
    figures = [format(found[column.key], column.format) for column in example.columns]
    compared = [f"{found['difference']:.1e}", f"{found['tolerance']:.0e}"]
    return [found["dtype"], found["mesh"], str(found["ranks"]), *figures, *compared]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run an example on several meshes.")
    add = parser.add_argument
    add("--example", choices=EXAMPLES, default="digits", help="(default: %(default)s)")
    add("--meshes", metavar="SHAPE,...", help="(default: those of the last results)")
    add("--dtypes", type=names_from(("float64", "float32")), metavar="NAME,...", help="(default: both)")
    add("--steps", type=positive, help="(default: 600, of the transformer 100)")
    add("--rounds", type=positive, default=3, help="(default: %(default)s)")
    report.add_output_options(parser)
    args = parser.parse_args()
    example = args.example = EXAMPLES[args.example]
    args.dtypes = args.dtypes or list(example.tolerances)
    args.steps = args.steps or example.steps
    shapes = (args.meshes or example.meshes).split(",")
    try:
        args.meshes = list(dict.fromkeys([example.alone, *map(example.check, shapes)]))
    except ValueError as error:
        parser.error(f"argument --meshes: {error}")
    return args


def main() -> int:
    args = parse()
    example: Example = args.example
    try:
        found = measure(example, args.meshes, args.dtypes, args.steps, args.rounds)
    except RuntimeError as error:
        print(f"training.py: {error}", file=sys.stderr)
        return 1
    head = ["dtype", "mesh", "ranks", *(column.title for column in example.columns), "difference", "allowed"]
    words = {"script": example.script, "axes": example.axes, "columns": example.summary, "alone": example.alone}
    body = METHOD.format(steps=args.steps, rounds=args.rounds, **words)
    body += "\n\n" + report.table(head, [row(example, each) for each in found], text_columns=2)
    report.publish(args, example.title, machine.describe(installed(["meshdist"])), body, found)
    unequal = [case for case in found if not case["difference"] <= case["tolerance"]]  # NaN is unequal, too
    for case in unequal:
        where = f"{case['mesh']} in {case['dtype']}"
        print(f"training.py: the losses on {where} are not those of {example.alone}", file=sys.stderr)
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
