"""python -m meshdist.doctor: looks at this machine; as the ranks of a job, at the cluster as well.

python -m meshdist.doctor
meshrun --nproc-per-node 2 -m meshdist.doctor
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from meshdist.doctor import libraries, machine, network
from meshdist.doctor.finding import ERROR, WARNING, Finding, run_checks
from meshdist.errors import DistError

MEET_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 where something will fail."""
    parser = argparse.ArgumentParser(
        prog="python -m meshdist.doctor",
        description="Look at what meshdist needs of this machine; started by a launcher, at the whole cluster.",
        epilog="The exit status is 1 where there is an error, and with --strict where there is a warning; else 0.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: a list of name, status, text and cure")
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
    """Return this rank, and what rank 0 learns of the cluster; rank 0 and nothing where there is no job."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0, []
    from meshdist.doctor.cluster import look_around
    from meshdist.rendezvous import rendezvous

    rank = int(os.environ["RANK"])
    try:
        store, rank, size = rendezvous("env://", timeout=MEET_S)
        with store:
            return rank, look_around(store, rank, size, [finding.as_dict() for finding in own])
    except (DistError, ValueError) as error:
        return 0, [Finding("job", ERROR, f"rank {rank} does not meet the others: {error}")]


def _page(found: Sequence[Finding]) -> str:
    bad = sum(finding.status in (WARNING, ERROR) for finding in found)
    end = "nothing stands in the way" if not bad else f"{bad} of {len(found)} lines ask for something to be done"
    return "\n".join([*map(str, found), end])


if __name__ == "__main__":
    sys.exit(main())
