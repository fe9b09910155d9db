"""Random programs on some ranks, for as long as wanted, compared with NumPy.

    python benchmarks/soak.py --seconds 600
    python benchmarks/soak.py --seconds 600 --tcp          # every rank a host of its own
    python benchmarks/soak.py --seconds 600 --hosts 2      # two hosts, as far as the ranks know

A program is made of a mesh, some groups and some dozen calls on them: collectives, messages and objects, async or not,
on arrays of all dtypes, sizes and places in memory, shared ones among them. All follow from a seed and the program's
number, so every rank knows by itself what is due, and what went wrong can be made again: what is printed says how.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from sidebyside.machine import describe
from sidebyside.options import positive
from sidebyside.report import publish, table
from soaking import rank
from soaking.options import add_options

import meshdist as dist


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run random programs and compare them with NumPy.")
    add_options(parser, "program", timeout_s=60.0)
    parser.add_argument("--steps", type=positive, default=40, help="calls of a program (default: %(default)s)")
    return parser.parse_args()


def on_a_host(number: int, hosts: int, *others: object) -> None:
    """Have a rank believe in its host, and play."""
    if hosts > 1:
        os.environ["MESHDIST_HOST_ID"] = f"host {number % hosts}"
    rank.main(number, *others)  # type: ignore[arg-type]


def main() -> int:
    args = arguments()
    seed = int.from_bytes(os.urandom(3), "little") if args.seed is None else args.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    if args.tcp:
        os.environ["MESHDIST_DISABLE_SHM"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        plan = (args.hosts, seed, args.first, args.seconds, args.steps, args.timeout, folder)
        try:
            dist.spawn(on_a_host, plan, args.ranks)
        except (dist.ProcessRaisedException, dist.ProcessExitedException) as error:
            print(f"soak.py: seed {seed}: {error}", file=sys.stderr)
            return 1
        done = [json.loads((Path(folder) / f"{number}.json").read_text()) for number in range(args.ranks)]
    publish(args, title(args), describe({}), section(done, seed, time.monotonic() - began), done)
    return 0


def title(args: argparse.Namespace) -> str:
    way = "over TCP" if args.tcp else f"on {args.hosts} hosts" if args.hosts > 1 else "over shared memory"
    return f"Soak: random programs on {args.ranks} ranks {way}"


def section(done: list[dict[str, object]], seed: int, seconds: float) -> str:
    """Return what was done, in words and as a table."""
    calls: Counter[str] = sum((Counter(one["calls"]) for one in done), Counter())  # type: ignore[call-overload]
    num_async, num_bytes = (sum(int(one[name]) for one in done) for name in ("async", "bytes"))  # type: ignore[call-overload]
    text = (
        f"Seed {seed}: {done[0]['programs']:,} programs in {seconds:.0f} s, {calls.total():,} calls of a rank, "
        f"{num_async:,} of them async, with {num_bytes / (1 << 30):.1f} GiB of arrays. "
        "No value was wrong, no call failed."
    )
    return text + "\n\n" + table(("call", "times"), [(kind, f"{count:,}") for kind, count in sorted(calls.items())])


if __name__ == "__main__":
    sys.exit(main())
