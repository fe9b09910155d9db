"""Run examples/train_digits.py with a small and a large network on 1, 2 and 4 ranks, and draw the speedup.

    python benchmarks/scaling.py --plot docs/images/scaling.svg

Every rank has one thread. The numbers of ranks take turns in each round.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from sidebyside import machine, report
from sidebyside.libraries import installed, run_example
from sidebyside.options import picture, positive, positives

from meshdist.system.drawing_style import fill

METHOD = """\
`examples/train_digits.py --hidden N`, one thread a rank, data parallel. Steps per second are those of the fastest of \
{rounds} rounds, since other programs on the machine only slow a run down; the numbers of ranks take turns."""


def steps_per_s(hidden: int, ranks: int, steps: int) -> float:
    """Train once and return the steps per second.

    Raises:
        RuntimeError: It failed; the message shows its output.
    """
    run = run_example("train_digits.py", f"{ranks}x1", "--hidden", str(hidden), "--steps", str(steps))
    return float(run["steps_per_s"])


def measure(sizes: Mapping[int, int], ranks: list[int], rounds: int) -> dict[int, dict[int, float]]:
    """Return the steps per second by hidden units and number of ranks; `sizes` has the steps for each size."""
    runs: dict[tuple[int, int], list[float]] = {(hidden, number): [] for hidden in sizes for number in ranks}
    for _ in range(rounds):
        for (hidden, number), done in runs.items():
            done.append(steps_per_s(hidden, number, sizes[hidden]))
    return {hidden: {number: max(runs[hidden, number]) for number in ranks} for hidden in sizes}


def draw(path: Path, found: Mapping[int, Mapping[int, float]], num_cores: int) -> None:
    """Draw the speedup over the fewest ranks, a line for each size of the network."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "meshdist"
    figure = Figure(figsize=(4.6, 2.8), layout="constrained")
    axes = figure.subplots()
    for line, (hidden, speeds) in enumerate(found.items()):
        first = speeds[min(speeds)]
        label = f"{hidden:,} hidden units; one rank: {first:,.0f} steps/s"
        speedups = [speed / first for speed in speeds.values()]
        axes.semilogx(list(speeds), speedups, marker="o", base=2, label=label, color=fill(line, None))
        numbers = sorted(speeds)
        for number, following in zip(numbers[1:], [*numbers[2:], None], strict=True):
            place, text = (number, speeds[number] / first), f"{speeds[number]:,.0f} steps/s"
            # Above a peak and the upper line, below others: there no line runs through it.
            is_peak = following is not None and speeds[following] < speeds[number]
            is_upper = place[1] == max(other[number] / other[min(other)] for other in found.values())
            if (is_peak or is_upper) and 0 <= num_cores - place[1] < 0.15 * num_cores:
                place = number, num_cores  # above the line of the cores, not on it
            where = {"xytext": (0, 6), "va": "bottom"} if is_peak or is_upper else {"xytext": (0, -6), "va": "top"}
            paper = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
            axes.annotate(text, place, textcoords="offset points", ha="center", fontsize=7, bbox=paper, **where)
    numbers = sorted({number for speeds in found.values() for number in speeds})
    axes.axhline(num_cores, color="#999999", linewidth=0.8, linestyle=":")
    axes.text(numbers[0], num_cores, f"{num_cores} cores", va="bottom", fontsize=7, color="#666666")
    axes.margins(x=0.15)  # for the labels of the last points
    axes.set(xlabel="ranks", ylabel="speedup", xticks=numbers, xticklabels=numbers, ylim=(0, 1.25 * num_cores))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False, loc="lower center")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how the digits example scales with the number of ranks.")
    add = parser.add_argument
    add("--hidden", type=positives, default="120,4096", metavar="N,...", help="sizes (default: %(default)s)")
    add("--steps", type=positives, default="300,30", metavar="N,...", help="of each size (default: %(default)s)")
    add("--ranks", type=positives, default="1,2,4", metavar="N,...", help="(default: %(default)s)")
    add("--rounds", type=positive, default=10, help="(default: %(default)s)")
    add("--plot", type=picture, metavar="PATH", help="draw the speedup into this file")
    report.add_output_options(parser)
    args = parser.parse_args()
    if len(args.hidden) != len(args.steps):
        parser.error("--hidden and --steps must have equally many numbers")
    return args


def main() -> int:
    args = parse()
    try:
        found = measure(dict(zip(args.hidden, args.steps, strict=True)), args.ranks, args.rounds)
    except RuntimeError as error:
        print(f"scaling.py: {error}", file=sys.stderr)
        return 1
    head = ["hidden units", *(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in args.ranks)]
    rows = [
        [f"{hidden:,}", *(f"{speed:.0f} steps/s ({speed / speeds[min(speeds)]:.2f})" for speed in speeds.values())]
        for hidden, speeds in found.items()
    ]
    body = METHOD.format(rounds=args.rounds) + "\n\n" + report.table(head, rows)
    report.publish(args, "Scaling", machine.describe(installed(["meshdist"])), body, found)
    if args.plot:
        draw(args.plot, found, len(os.sched_getaffinity(0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
