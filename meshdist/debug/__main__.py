"""python -m meshdist.debug: show what the ranks of a running job do, or what went wrong in one that has ended."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshdist.debug.report import ends_on_record, read_dumps, report_on
from meshdist.debug.states import RankSnapshot
from meshdist.debug.wait_drawing import check_drawable, draw_waits
from meshdist.debug.wait_graph import who_waits
from meshdist.errors import DistError
from meshdist.security.credentials import SECRET_FILE_VARIABLE, SECRET_VARIABLE
from meshdist.system.command_lines import until_closed
from meshdist.system.drawing_style import PLOT_FORMATS
from meshdist.system.option_parser import OptionParser
from meshdist.system.terminal import fold, terminal_width

if TYPE_CHECKING:
    from meshdist.debug.attach import Found

_SECRETS = {SECRET_VARIABLE, SECRET_FILE_VARIABLE}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    width = terminal_width()
    try:
        if given.draw is not None:  # before the seconds of asking
            if given.draw.suffix not in PLOT_FORMATS:
                raise ValueError(f"--draw must end in {', '.join(PLOT_FORMATS)}, got {str(given.draw)!r}")
            check_drawable()
        states: Mapping[int, RankSnapshot]
        gone: Mapping[int, str] | None = None
        if given.command == "report":
            states = read_dumps(given.directory)
        else:
            found = _attach(given.store, given.pid)
            print(fold(found.note(), width), end="")
            if found.waiting is not None:
                return 0
            states, gone = found.states, found.gone
        now_s = time.time() if gone is not None else None
        print(fold(report_on(states, gone, now_s), width), end="")
        if given.stacks:
            print(f"\n{fold(stacks_of(states), width)}")
        if given.draw is not None:
            ends = ends_on_record(states) if gone is None else gone
            draw_waits(who_waits(states, ends)).figure.savefig(given.draw, bbox_inches="tight", dpi=120)
            print(f"wrote {given.draw}")
    except BrokenPipeError:  # as of `head`; `until_closed` ends quietly
        raise
    except (ValueError, OSError, ImportError, DistError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(prog="python -m meshdist.debug", description=__doc__)
    report, attached = parser.add_commands(
        report="report what went wrong, from the files of the flight recorders",
        attach="show what the ranks of a running job are doing, and who is waiting for whom",
    )
    report.add_argument("directory", type=Path, help="where the ranks wrote them: MESHDIST_FLIGHT_RECORDER_DIR")
    job = attached.add_mutually_exclusive_group()
    job.add_argument(
        "--pid",
        type=int,
        metavar="PID",
        help="pid of a rank on this host; the store's address and the secret are read from its environment (default:"
        " the only job of this user on this host)",
    )
    job.add_argument(
        "--store",
        metavar="HOST:PORT",
        help="the job's store: MASTER_ADDR and MASTER_PORT of its ranks; the secret is taken from MESHDIST_SECRET or"
        " MESHDIST_SECRET_FILE, as the ranks do, or from ranks on this host",
    )
    for command in (report, attached):
        command.add_argument(
            "--draw", type=Path, metavar="FILE", help=f"draw who is waiting for whom ({', '.join(PLOT_FORMATS)})"
        )
        command.add_argument("--stacks", action="store_true", help="show where each rank is, frame by frame")
    return parser


def _attach(store: str | None, pid: int | None) -> Found:
    """Return what the ranks of a job do; take the access to its store from a rank on this host, if there is one."""
    from meshdist.debug.attach import attach, jobs_here, only_job_here, store_of

    access: Mapping[str, str] = {}
    if pid is not None:
        store, access = store_of(pid)
    elif store is None:
        store, _, access = only_job_here()
    elif _SECRETS.isdisjoint(os.environ):
        access = next((job.access for job in jobs_here() if job.address == store), access)
    os.environ.update(access)
    return attach(store)


def stacks_of(states: Mapping[int, RankSnapshot]) -> str:
    """Return the stack of each rank; ranks with equal stacks together."""
    from meshdist.runtime.rank_text import ranks_text

    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, state in sorted(states.items()):
        alike.setdefault(state.stack, []).append(rank)
    return "\n".join("\n  ".join([f"Stack of {ranks_text(sorted(ranks))}", *stack]) for stack, ranks in alike.items())


if __name__ == "__main__":
    sys.exit(until_closed(main))
