"""Random programs on some ranks, for as long as wanted, compared with NumPy.

    python benchmarks/soak.py --seconds 600
    python benchmarks/soak.py --seconds 600 --tcp          # every rank a host of its own
    python benchmarks/soak.py --seconds 600 --hosts 2      # two hosts, as far as the ranks know
    python benchmarks/soak.py --seconds 600 --link --timeout 120    # two namespaces, a link with faults

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
from typing import Any

from sidebyside.machine import describe
from sidebyside.options import positive
from sidebyside.report import publish, table
from soaking import link, rank
from soaking.held import held_table, most
from soaking.options import add_options, way

import meshdist as dist


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run random programs and compare them with NumPy.")
    paths = add_options(parser, "program", timeout_s=60.0)
    paths.add_argument("--link", action="store_true", help="on two network namespaces with a faulty link between them")
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
    if args.no_core:
        os.environ["MESHDIST_CORE"] = "python"
    if args.tcp:
        os.environ["MESHDIST_DISABLE_SHM"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        plan = (seed, args.first, args.seconds, args.steps, args.timeout, folder)
        faults: Counter[str] = Counter()
        try:
            if args.link:
                faults = over_a_link(plan, args.ranks)
            else:
                dist.spawn(on_a_host, (args.hosts, *plan), args.ranks)
        except (dist.ProcessRaisedException, dist.ProcessExitedException, RuntimeError, PermissionError) as error:
            print(f"soak.py: seed {seed}: {error}", file=sys.stderr)
            return 1
        done = [json.loads((Path(folder) / f"{number}.json").read_text()) for number in range(args.ranks)]
    publish(args, title(args), describe({}), section(done, seed, time.monotonic() - began, faults), done)
    return 0


def over_a_link(plan: tuple[object, ...], ranks: int) -> Counter[str]:
    """Play on two hosts with a faulty link between them; return the link's faults.

    Raises:
        RuntimeError: A rank failed; it has printed its traceback.
        PermissionError: There are no namespaces or tun devices here.
    """
    with link.faulty_hosts() as hosts:
        num_failed, faults = link.play_over(hosts, [str(each) for each in plan], ranks, int(str(plan[0])))
    if num_failed:
        raise RuntimeError(f"{num_failed} ranks failed, after these faults of the link: {dict(faults)}")
    return faults


def title(args: argparse.Namespace) -> str:
    between = "on two hosts, the link between them with faults" if args.link else way(args)
    return f"Soak: random programs on {args.ranks} ranks {between}"


def section(done: list[dict[str, Any]], seed: int, seconds: float, faults: Counter[str]) -> str:
    """Return what was done, in words and as tables."""
    calls: Counter[str] = sum((Counter(one["calls"]) for one in done), Counter())
    num_async, num_bytes = (sum(one[name] for one in done) for name in ("async", "bytes"))
    text = (
        f"Seed {seed}: {done[0]['programs']:,} programs in {seconds:.0f} s, {calls.total():,} calls of a rank, "
        f"{num_async:,} of them async, with {num_bytes / (1 << 30):.1f} GiB of arrays. "
        "No value was wrong, no call failed."
    )
    counts = [
        table((what, "times"), [(kind, f"{count:,}") for kind, count in sorted(times.items())])
        for what, times in (("call", calls), ("fault of the link", faults))
        if times
    ]
    moments = {moment: most(one["held"][moment] for one in done) for moment in done[0]["held"]}
    return "\n\n".join((text, *counts, held_table(moments, "a rank, at most,")))


if __name__ == "__main__":
    sys.exit(main())
