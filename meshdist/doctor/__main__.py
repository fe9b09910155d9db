"""python -m meshdist.doctor: check this machine; as the ranks of a job, the cluster as well.

python -m meshdist.doctor
meshrun --nproc-per-node 2 -m meshdist.doctor
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from meshdist.cluster.place import is_first_rank
from meshdist.doctor import libraries, machine, network
from meshdist.doctor.finding import ERROR, WARNING, Finding, run_checks
from meshdist.errors import DistError
from meshdist.system.command_lines import until_closed
from meshdist.system.option_parser import OptionParser
from meshdist.system.plurals import counted
from meshdist.system.terminal import terminal_width

MEET_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if there is an error, else 0."""
    parser = OptionParser(
        prog="python -m meshdist.doctor",
        prints=is_first_rank(),
        description="Check what meshdist needs of this machine; under a launcher, of the whole cluster.",
        epilog="The exit status is 1 after an error, with --strict also after a warning; else 0.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: a list of name, status, text and remedy")
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings as well")
    given = parser.parse_args(arguments)
    own = list(run_checks((*machine.CHECKS, *network.CHECKS, *libraries.CHECKS)))
    rank, others = _with_the_others(own)
    found = [*own, *others]
    if rank == 0:
        print(json.dumps([finding.as_dict() for finding in found], indent=1) if given.json else _page(found))
    bad = (ERROR, WARNING) if given.strict else (ERROR,)
    return int(any(finding.status in bad for finding in found))


def _with_the_others(own: list[Finding]) -> tuple[int, list[Finding]]:
    """Return this rank and, on rank 0, the findings about the cluster; rank 0 and no findings outside of a job."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0, []
    from meshdist.bootstrap.rendezvous import rendezvous
    from meshdist.doctor.host_connections import check_cluster

    rank = int(os.environ["RANK"])
    try:
        store, rank, size = rendezvous("env://", timeout=MEET_S)
        with store:
            return rank, check_cluster(store, rank, size, [finding.as_dict() for finding in own])
    except (DistError, ValueError) as error:
        return 0, [Finding("job", ERROR, f"rank {rank} cannot join the others: {error}")]


def _page(found: Sequence[Finding]) -> str:
    bad = sum(finding.status in (WARNING, ERROR) for finding in found)
    needs = "needs" if bad == 1 else "need"
    end = f"{bad} of {counted(len(found), 'check')} {needs} attention" if bad else "no problems found"
    width = terminal_width()
    return "\n".join([*(finding.folded(width) for finding in found), end])


if __name__ == "__main__":
    sys.exit(until_closed(main))
