"""Time the way of a newcomer: `git clone`, and the one line of README.md that ends with a trained model.

python benchmarks/first_model.py
python benchmarks/first_model.py --rounds 3 --json out.json

The clone is of the repository that this file is in, without what is not committed. pip gets its packages from its
cache, which the first round, which does not count, fills. Ends with status 1 where the median is 60 s or more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from sidebyside import machine, report
from sidebyside.libraries import ROOT, installed
from sidebyside.options import positive

GOAL_S = 60.0
_LONGEST_S = 600

METHOD = """\
`git clone` of this repository, and in it the line of README.md that makes an environment, installs meshdist with the \
packages of the example, and trains the classifier of digits on 4 ranks. The median of {rounds} rounds and, in \
brackets, the shortest; one before fills pip's cache and does not count. The parts of the line are timed where it has \
`&&`. The training ended with: *{last}*"""


class StepError(RuntimeError):
    """A part of what was to be timed failed; the message shows its output."""


def run(command: str, directory: Path) -> tuple[float, str]:
    """Return how long a command takes in a directory, and what it prints."""
    # As one who has no environment active, and no other copy of the package in the way.
    left_out = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    begin = perf_counter()
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    elapsed = perf_counter() - begin
    if done.returncode:
        raise StepError(f"`{command}` ended with {done.returncode}:\n{done.stdout}")
    return elapsed, done.stdout


def way() -> tuple[dict[str, float], str]:
    """Go the way once; return the seconds of each part, and the last line that was printed."""
    took, last = {}, ""
    with tempfile.TemporaryDirectory() as directory:
        clone = Path(directory) / "meshdist"
        took["git clone"], _ = run(f"git clone -q '{ROOT}' '{clone}'", Path(directory))
        _, commands = run(".ci/run --commands", clone)
        for part in commands.splitlines()[0].split(" && "):
            took[part], printed = run(part, clone)
            last = printed.strip().splitlines()[-1] if printed.strip() else last
    return took, last


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the way from a clone to a trained model.")
    parser.add_argument("--rounds", type=positive, default=3, help="(default: %(default)s)")
    report.add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    args = parse()
    times: dict[str, list[float]] = {}
    last = ""
    try:
        for number in range(args.rounds + 1):
            took, last = way()
            for part, seconds in (*took.items(), ("all of it", sum(took.values()))):
                times.setdefault(part, []).extend([seconds] if number else [])
    except (StepError, subprocess.TimeoutExpired) as error:
        print(f"first_model.py: {error}", file=sys.stderr)
        return 1
    body = METHOD.format(rounds=args.rounds, last=last)
    cells = [
        [part if part == "all of it" else f"`{part}`", report.median_and_least(found)] for part, found in times.items()
    ]
    body += "\n\n" + report.table(["", "time"], cells)
    report.publish(args, "From clone to model", machine.describe(installed(["meshdist"])), body, times)
    return 0 if median(times["all of it"]) < GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
