"""Groups and worlds made and destroyed by the thousand, in the same processes: what these hold must not grow.

    python benchmarks/soak_worlds.py
    python benchmarks/soak_worlds.py --tcp --groups 200 --worlds 50

Each group and each world makes an all_reduce, whose sum is compared. If a rank holds more descriptors, threads or files
at the end than after a tenth of them, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from sidebyside.machine import describe
from sidebyside.options import positive
from sidebyside.report import add_output_options, publish
from soaking.held import held, held_table, most

import meshdist as dist

_TIMEOUT_S = 120.0
# What is made once, when it is first needed: a doorbell, a watch on the peer's process, a connection.
_FEW = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make and destroy groups and worlds, and count what is held.")
    add = parser.add_argument
    add("--groups", type=positive, default=2_000, help="(default: %(default)s)")
    add("--worlds", type=positive, default=500, help="(default: %(default)s)")
    add("--ranks", type=positive, default=3, help="(default: %(default)s)")
    add("--tcp", action="store_true", help="no memory is shared: every rank is a host of its own")
    add_output_options(parser)
    return parser.parse_args()


def begin() -> None:
    dist.init_process_group("gloo", timeout=_TIMEOUT_S)


def check(group: dist.ProcessGroup | None, number: int) -> None:
    """Make a call of the whole world.

    Raises:
        ValueError: Its sum is wrong.
    """
    total = dist.all_reduce(np.full(10, number), group=group)
    if total.tolist() != [number * dist.get_world_size()] * 10:
        raise ValueError(f"all_reduce of {number} in group or world {number} gave {total}")


def play(rank: int, num_groups: int, num_worlds: int, folder: str) -> None:
    """Be one rank: make and destroy, and write what was held into a file."""
    moments: dict[str, dict[str, int]] = {}
    begin()
    for number in range(1, num_groups + 1):
        group = dist.new_group()
        check(group, number)
        dist.destroy_process_group(group)
        if number in (max(num_groups // 10, 1), num_groups):
            moments[f"after {number:,} groups"] = held()
    dist.destroy_process_group()
    for number in range(1, num_worlds + 1):
        begin()
        check(None, number)
        if number in (max(num_worlds // 10, 1), num_worlds):
            moments[f"in world {number:,}"] = held()
        dist.destroy_process_group()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(moments))


def main() -> int:
    args = arguments()
    if args.tcp:
        os.environ["MESHDIST_DISABLE_SHM"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        dist.spawn(play, (args.groups, args.worlds, folder), args.ranks)
        of_ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(args.ranks)]
    text = (
        f"{args.groups:,} groups and then {args.worlds:,} worlds, one after the other in the same processes, "
        f"in {time.monotonic() - began:.0f} s. No value was wrong, no call failed."
    )
    moments = {moment: most(each[moment] for each in of_ranks) for moment in of_ranks[0]}
    publish(
        args,
        f"Groups and worlds made and destroyed on {args.ranks} ranks over {'TCP' if args.tcp else 'shared memory'}",
        describe({}),
        text + "\n\n" + held_table(moments, "a rank, at most,"),
        of_ranks,
    )
    first, *_, last = moments.values()
    grown = [name for name in ("descriptors", "threads", "shared files") if last[name] > first[name] + _FEW]
    if grown:
        print(f"soak_worlds.py: a rank holds more and more: {', '.join(grown)}", file=sys.stderr)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
