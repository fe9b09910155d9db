"""What waiting costs: the processor time of a rank that waits for a message, and how soon it goes on when one has come.

python benchmarks/waiting.py
python benchmarks/waiting.py --rounds 5 --markdown benchmarks/RESULTS.md
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import median
from typing import NamedTuple

from sidebyside import machine, report
from sidebyside.libraries import NAMES, Library, environment, installed
from sidebyside.options import names_from, positive

WAITS_S = (0.0, 0.001, 0.01, 0.1)

METHOD = """\
Rank 1 of 2 waits in recv; so much later, rank 0 sends 8 bytes, which rank 1 sends back. First, the time from the send \
to the end of the receive on rank 0, the median of {rounds} rounds (in each the median of {messages} messages, the \
libraries in turn) and, in brackets, the shortest; then the processor time of rank 1, all its threads, in percent of \
the time that has passed. Rank 0 sleeps meanwhile, so there is a processor for each."""


class Waited(NamedTuple):
    """A round of one library and one wait.

    Attributes:
        there_and_back: The seconds of a message there and back, the median.
        processor: The processor time of the rank that waits, as a share of the time that has passed.
    """

    there_and_back: float
    processor: float


class WaitError(RuntimeError):
    """The ranks of a library failed; the message shows their output."""


def one_round(library: Library, messages: int) -> list[Waited]:
    """Start two ranks of a library; return what they measured for each wait."""
    waits = ",".join(map(str, WAITS_S))
    command = [*library.launcher(2), "-m", "sidebyside.idling", library.script, waits, str(messages)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise WaitError(f"the ranks of {library.name} ended with status {done.returncode}:\n{done.stderr}")
    return [Waited(*times) for times in json.loads(done.stdout)]


def measure(libraries: list[Library], rounds: int, messages: int) -> dict[str, list[list[Waited]]]:
    """Return for each library, by its name, what each round measured for each wait."""
    found: dict[str, list[list[Waited]]] = {library.name: [] for library in libraries}
    for _ in range(rounds):
        for library in libraries:
            found[library.name].append(one_round(library, messages))
    return found


def rows(found: dict[str, list[list[Waited]]]) -> list[list[str]]:
    """Return the cells of the table: a row for each wait."""
    table = []
    for number, wait_s in enumerate(WAITS_S):
        cells = ["at once" if not wait_s else f"after {report.duration(wait_s)}"]
        for rounds in found.values():
            times, shares = zip(*(waits[number] for waits in rounds), strict=True)
            cells += [report.median_and_least(times), f"{100 * median(shares):.1f}%"]
        table.append(cells)
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what waiting for a message costs.")
    add = parser.add_argument
    add("--rounds", type=positive, default=3, help="(default: %(default)s)")
    add("--messages", type=positive, default=50, help="after each wait (default: %(default)s)")
    add("--libraries", type=names_from(NAMES), default=list(NAMES), metavar="NAME,...", help=f"{', '.join(NAMES)}")
    report.add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    args = parse()
    versions = installed(args.libraries)
    try:
        found = measure(list(versions), args.rounds, args.messages)
    except WaitError as error:
        print(f"waiting.py: {error}", file=sys.stderr)
        return 1
    head = ["8 bytes come", *(cell for library in versions for cell in (library.title, "processor"))]
    body = METHOD.format(rounds=args.rounds, messages=args.messages) + "\n\n" + report.table(head, rows(found))
    report.publish(args, "Waiting", machine.describe(versions), body, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
