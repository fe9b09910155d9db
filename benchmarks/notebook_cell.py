"""Time the cells of a notebook: how long after it was run a cell has begun on all of its workers.

python benchmarks/notebook_cell.py
python benchmarks/notebook_cell.py --workers 4 --rounds 50 --json out.json

The cells go the way of `%%mesh`, but for IPython. Ends with status 1 where a later cell needs 50 ms or more to begin.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

from sidebyside import machine, report
from sidebyside.libraries import installed
from sidebyside.options import positive

from meshdist.notebook.pool import Completion, Pool

GOAL_S = 0.050
BEGUN = "import time\nprint(time.monotonic_ns())"
SUMS = f"{BEGUN}\nsums = mesh['all'].all_reduce(np.zeros(1000))"

METHOD = """\
{workers} workers on this host. The median of {rounds} rounds and, in brackets, the shortest. A cell is timed from \
when the notebook runs it: until its first line has run on the last of the workers, by the clock of the host, and \
until the notebook has the answers of all. The first cell of a round starts the workers; those after it find them \
there."""


class CellError(RuntimeError):
    """A cell that was to be timed failed."""


class Clock:
    """Runs cells that begin with `BEGUN`, and knows when they did.

    Args:
        workers: On how many workers.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._begun_ns: list[int] = []
        self._pool = Pool(workers, "gloo", 60.0, lambda rank, line: self._begun_ns.append(int(line)))

    def time(self, source: str, axes: tuple[tuple[str, int], ...] = ()) -> tuple[float, float]:
        """Return the seconds until a cell had begun on all workers, and until it was over."""
        self._begun_ns.clear()
        began_ns = time.monotonic_ns()
        outcome = self._pool.run(source, axes)
        over_ns = time.monotonic_ns()
        if not outcome.is_good or len(self._begun_ns) != self._workers:
            raise CellError(f"a cell went wrong: {_why(outcome)}")
        return (max(self._begun_ns) - began_ns) / 1e9, (over_ns - began_ns) / 1e9

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def _why(outcome: Completion) -> str:
    said = [answer.summary for answer in outcome.answers.values() if answer.summary]
    return "; ".join([*said, *outcome.ended.values()]) or "not all workers have said when they began"


def measure(workers: int, rounds: int, cells: int) -> dict[str, list[tuple[float, float]]]:
    """Return for each kind of cell the two times of every round; of those that come again, the median of the round."""
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        clock = Clock(workers)
        try:
            times.setdefault("the first cell", []).append(clock.time(BEGUN))
            again = [clock.time(BEGUN) for _ in range(cells)]
            times.setdefault("a later cell", []).append(_middle(again))
            axes = (("all", workers),)
            times.setdefault("the first one with a mesh and an all_reduce", []).append(clock.time(SUMS, axes))
            again = [clock.time(SUMS, axes) for _ in range(cells)]
            times.setdefault("a later one with a mesh and an all_reduce", []).append(_middle(again))
        finally:
            clock.close()
    return times


def _middle(times: list[tuple[float, float]]) -> tuple[float, float]:
    begun, over = zip(*times, strict=True)
    return median(begun), median(over)


def rows(times: dict[str, list[tuple[float, float]]]) -> list[list[str]]:
    """Return the cells of the table."""
    return [
        [title, *(report.median_and_least(column) for column in zip(*found, strict=True))]
        for title, found in times.items()
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time how soon a notebook's cell begins on its workers.")
    add = parser.add_argument
    add("--workers", type=positive, default=4, help="(default: %(default)s)")
    add("--rounds", type=positive, default=5, help="each with new workers (default: %(default)s)")
    add("--cells", type=positive, default=20, help="of each kind in a round (default: %(default)s)")
    report.add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    args = parse()
    try:
        times = measure(args.workers, args.rounds, args.cells)
    except CellError as error:
        print(f"notebook_cell.py: {error}", file=sys.stderr)
        return 1
    body = METHOD.format(workers=args.workers, rounds=args.rounds)
    body += "\n\n" + report.table(["", "has begun on all", "is over"], rows(times))
    report.publish(args, "A notebook's cells", machine.describe(installed(["meshdist"])), body, times)
    return 0 if median(begun for begun, _ in times["a later cell"]) < GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
