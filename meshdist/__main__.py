"""python -m meshdist: say which commands there are."""

from __future__ import annotations

import sys

from meshdist.system.command_lines import until_closed

_HELP = """\
meshrun                        start the ranks of a script, or of a module, on this host or on several
python -m meshdist.bench       measure collectives and messages
python -m meshdist.checkpoint  show, verify and convert checkpoints
python -m meshdist.debug       show what the ranks of a job do, or report what went wrong in one that has ended
python -m meshdist.doctor      check what meshdist needs of this machine
python -m meshdist.launch      the same as meshrun
python -m meshdist.topology    show the topology of the ranks, or measure a cost model

Each has --help."""


def main() -> int:
    """Print the commands; return the exit status."""
    wrong = [argument for argument in sys.argv[1:] if argument not in ("-h", "--help")]
    if wrong and f" meshdist.{wrong[0]} " in _HELP:
        print(f"python -m meshdist: write python -m meshdist.{' '.join(wrong)}", file=sys.stderr)
        return 2
    if wrong:
        print(f"python -m meshdist: expected no argument, got {' '.join(wrong)}; the commands are:\n", file=sys.stderr)
    print(_HELP, file=sys.stderr if wrong else sys.stdout)
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(until_closed(main))
