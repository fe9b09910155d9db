"""Kill jobs with SIGKILL at random moments of their saves, and read every byte of the last checkpoint after each.

python benchmarks/checkpoint_kills.py
python benchmarks/checkpoint_kills.py --kills 20 --ranks 4 --markdown benchmarks/RESULTS.md

The ranks save one step after the other, in formats safetensors and npy, every third job asynchronously. All of them are
killed at a moment of the saves that follow the first one; the steps go on from job to job, in one folder.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
from sidebyside import machine, report
from sidebyside.libraries import installed
from sidebyside.options import positive

import meshdist as dist
from meshdist.checkpoint import load, save
from meshdist.checkpoint.opening import Opened
from meshdist.checkpoint.verification import check_checkpoint
from meshdist.tensor import DTensor, Shard

METHOD = """\
{ranks} ranks save a DTensor of 4 MiB, a plain array and the step, again and again; all are killed with SIGKILL, up to
{within_s} s after the first of these saves. The last checkpoint is whole if every checksum is right and every element
is that of its step, which is no older than the last one that was complete. Every third job saves asynchronously, every
second one in format npy."""
SHAPE = (1024, 1024)


def save_steps(
    folder: Path, rendezvous: Path, rank: int, ranks: int, first: int, options: dict[str, Any], out: int
) -> None:
    """Save one step after the other, and write a byte to `out` after the first."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    rows = SHAPE[0] // ranks
    for step in range(first, first + 100_000):
        w = DTensor.from_local(np.full((rows, SHAPE[1]), step, np.float32), mesh, [Shard(0)], (rows * ranks, SHAPE[1]))
        save(folder, {"w": w, "b": np.full(1000, step), "step": step}, step=step, keep=3, **options)
        if step == first:
            os.write(out, b"1")


def started(*arguments: Any) -> int:
    """Return the process of a new rank."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            save_steps(*arguments)
        os._exit(1)
    return pid


def kill(folder: Path, number: int, first: int, ranks: int, within_s: float, chance: random.Random) -> int:
    """Run a job and kill it; return the oldest step that may be the newest now."""
    options = {"format": ("safetensors", "npy")[number % 2], "asynchronous": number % 3 == 2}
    with tempfile.TemporaryDirectory() as place:
        reads, writes = os.pipe()
        pids = [started(folder, Path(place) / "store", rank, ranks, first, options, writes) for rank in range(ranks)]
        os.close(writes)
        if len(os.read(reads, 1)) == 0:
            raise SystemExit(f"job {number} failed to save")
        sleep(chance.uniform(0, within_s))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        os.close(reads)
    return first - options["asynchronous"]


def wrong(folder: Path, least: int) -> tuple[list[str], int]:
    """Return what is wrong with the newest checkpoint, and its step."""
    opened = Opened.at(folder)
    found = list(check_checkpoint(opened))
    tree = load(folder)
    step = tree["step"]
    if not (step == opened.manifest.step and step >= least):
        found.append(f"{opened.folder} is of step {step}; it should be of step {least} or later")
    if not ((tree["w"] == step).all() and (tree["b"] == step).all()):
        found.append(f"{opened.folder} has elements of another step")
    return found, step


def measure(args: argparse.Namespace, folder: Path) -> dict[str, int]:
    """Return the counts of the table's rows."""
    chance, step, counts = random.Random(args.seed), 0, {"whole": 0, "damaged": 0, "interrupted": 0}
    for number in range(args.kills):
        least = kill(folder, number, step, args.ranks, args.within_s, chance)
        counts["interrupted"] += any(folder.glob(".step-*"))
        found, newest = wrong(folder, max(0, least))
        counts["damaged" if found else "whole"] += 1
        for sentence in found:
            print(sentence, file=sys.stderr)
        step = newest + 1
    return counts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill jobs at random moments of their saves.")
    parser.add_argument("--kills", type=positive, default=200, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=positive, default=2, help="(default: %(default)s)")
    parser.add_argument("--within-s", type=float, default=0.2, help="the latest moment (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    report.add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    args = parse()
    folder, began = Path(tempfile.mkdtemp(dir=args.folder)), perf_counter()
    try:
        counts = measure(args, folder)
    finally:
        shutil.rmtree(folder)
    rows = [
        ["last checkpoints whole", f"{counts['whole']} of {args.kills}"],
        ["damaged, or older than the last one that was complete", str(counts["damaged"])],
        ["killed while a checkpoint was being written", str(counts["interrupted"])],
    ]
    body = f"{METHOD.format(ranks=args.ranks, within_s=args.within_s)}\n\n{report.table(['', 'number'], rows)}"
    described = machine.describe(installed(["meshdist"]))
    report.publish(args, "Checkpoints of jobs that are killed", described, body, {"seconds": [perf_counter() - began]})
    return 1 if counts["damaged"] else 0


if __name__ == "__main__":
    sys.exit(main())
