"""Compare checkpoints with dd, with torch's DCP and with a memcpy, in turns of one run.

OMP_NUM_THREADS=1 meshrun -n 4 benchmarks/checkpoint.py
OMP_NUM_THREADS=1 meshrun -n 2 benchmarks/checkpoint.py --gib 0.25 --rounds 5 --markdown benchmarks/RESULTS.md

In a round, each in its turn writes as many bytes, with fsync, and reads them: dd, with as many processes as there are
ranks, meshdist and torch; meshdist also reads them as columns. What is read is dropped from the page cache before.
Last, as many bytes are copied by NumPy to memory that is in use, and an asynchronous save is started: of arrays cut
along rows, along columns, and of many small ones. A time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from sidebyside import machine, report
from sidebyside.libraries import installed
from sidebyside.options import positive

import meshdist as dist
from meshdist.checkpoint import load, save
from meshdist.tensor import DTensor, Shard

METHOD = """\
{ranks} ranks save {arrays} arrays of {each}, cut along their rows, to {files}, and load them again, in turns with `dd`
(as many processes, `conv=fsync`) and torch's DCP; files are dropped from the page cache before they are read.
Asynchronous saves are also those of as many bytes cut along columns, and of {small} arrays of 256 KiB. The first one,
which takes new memory, is not counted.
The median of {rounds} rounds and, in brackets, the shortest; ratios are taken within a round."""


class Contender(Protocol):
    """What writes and reads, in a folder."""

    name: str

    def save(self, folder: Path) -> object: ...  # noqa: D102
    def load(self, folder: Path) -> object: ...  # noqa: D102


class Processes:
    """dd, once for each rank."""

    name = "dd"

    def __init__(self, mib: int) -> None:
        self._mib = mib

    def save(self, folder: Path) -> None:
        """Write a file of zeros."""
        dd("if=/dev/zero", f"of={folder / str(dist.get_rank())}", "bs=1M", f"count={self._mib}", "conv=fsync")

    def load(self, folder: Path) -> None:
        """Read it."""
        dd(f"if={folder / str(dist.get_rank())}", "of=/dev/null", "bs=8M")


class Meshdist:
    """meshdist.checkpoint."""

    name = "meshdist"

    def __init__(self, tree: dict[str, DTensor]) -> None:
        self._tree = tree

    def save(self, folder: Path) -> None:
        """Save to `folder`."""
        save(folder, self._tree, step=0)

    def load(self, folder: Path) -> None:
        """Load from `folder`, in place."""
        load(folder, self._tree, in_place=True)


class Columns(Meshdist):
    """meshdist.checkpoint, which loads as columns what was saved as rows."""

    name = "meshdist, columns"

    def __init__(self, tree: dict[str, DTensor], columns: dict[str, DTensor]) -> None:
        super().__init__(tree)
        self._columns = columns

    def load(self, folder: Path) -> None:
        """Load from `folder`, in place."""
        load(folder, self._columns, in_place=True)


class Torch:
    """The same arrays as DTensors of torch, and its DCP."""

    name = "torch DCP"

    def __init__(self, arrays: int, rows: int) -> None:
        import torch.distributed as tdist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import DTensor as TorchTensor
        from torch.distributed.tensor import Shard as TorchShard

        store = tdist.FileStore(os.environ["CHECKPOINT_BENCH_STORE"], dist.get_world_size())
        tdist.init_process_group("gloo", store=store, rank=dist.get_rank(), world_size=dist.get_world_size())
        mesh = tdist.init_device_mesh("cpu", (dist.get_world_size(),))
        torch = sys.modules["torch"]
        self._dcp = dcp
        self._tree = {
            f"w{n}": TorchTensor.from_local(torch.full((rows, 1024), float(n)), mesh, [TorchShard(0)])
            for n in range(arrays)
        }

    def save(self, folder: Path) -> None:
        """Save to `folder`."""
        self._dcp.save(self._tree, storage_writer=self._dcp.FileSystemWriter(folder, sync_files=True))

    def load(self, folder: Path) -> None:
        """Load from `folder`, in place."""
        self._dcp.load(self._tree, storage_reader=self._dcp.FileSystemReader(folder))


def dd(*arguments: str) -> None:
    subprocess.run(["dd", *arguments], check=True, stderr=subprocess.DEVNULL)


def slowest(work: Callable[[], Any]) -> float:
    """Return how long `work` took on the slowest rank."""
    dist.barrier()
    begin = perf_counter()
    work()
    return float(dist.all_reduce(np.array(perf_counter() - begin), "max"))


def drop_caches(folder: Path) -> None:
    """Drop what is in `folder` from the page cache, which has nothing that is not on the disk."""
    dist.barrier()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    dist.barrier()


def tree_of(arrays: int, rows: int, columns: int, dim: int) -> dict[str, DTensor]:
    """Return arrays of so many rows and columns, cut along a dimension."""
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    block = (rows // size, columns) if dim == 0 else (rows, columns // size)
    return {
        f"w{n}": DTensor.from_local(np.full(block, n, np.float32), mesh, [Shard(dim)], (rows, columns))
        for n in range(arrays)
    }


class Stall:
    """How long asynchronous saves of a tree stop the program, and how long a memcpy of it takes."""

    def __init__(self, name: str, tree: dict[str, DTensor], folder: Path) -> None:
        self._name, self._tree, self._folder = name, tree, folder / name
        self._group = dist.new_group(list(range(dist.get_world_size())))  # whose saver has one plan
        self._mine = [x.to_local() for x in tree.values()]
        self._copies = [np.zeros_like(x) for x in self._mine]

    def times(self, step: int) -> dict[str, float]:
        """Return the times of both, after a save."""
        copied = slowest(lambda: [np.copyto(copy, x) for copy, x in zip(self._copies, self._mine, strict=True)])
        pending: list[Any] = []
        start = partial(save, self._folder, self._tree, step=step, asynchronous=True, keep=1, group=self._group)
        stall = slowest(lambda: pending.append(start()))
        pending[0].wait()
        return {f"memcpy, {self._name}": copied, f"asynchronous save, stall, {self._name}": stall}


def num_small(gib: float) -> int:
    """Return how many arrays of 256 KiB there are."""
    return min(1000, int(gib * 4096))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return the times of all rounds but the first, which does not count."""
    size = dist.get_world_size()
    rows = int(args.gib * (1 << 30)) // (args.arrays * 4096) // size * size
    rows_tree, columns_tree = (tree_of(args.arrays, rows, 1024 // size * size, dim) for dim in (0, 1))
    stalls = [
        Stall("rows", rows_tree, folder),
        Stall("columns", columns_tree, folder),
        Stall("small arrays", tree_of(num_small(args.gib), 256 // size * size, 256, 0), folder),
    ]
    nbytes = sum(x.to_local().nbytes for x in rows_tree.values())
    contenders: list[Contender] = [Processes(nbytes >> 20), Meshdist(rows_tree), Columns(rows_tree, columns_tree)]
    contenders += [Torch(args.arrays, rows // size)] if args.torch else []
    times: dict[str, list[float]] = {}
    for number in range(args.rounds + 1):
        found = {}
        # Others go first in each round, and have the memory for the page cache that was freed just before.
        for contender in contenders[number % len(contenders) :] + contenders[: number % len(contenders)]:
            found |= one_turn(contender, folder / "turn")
        del found[f"{Columns.name}, write"]  # which is that of Meshdist
        for stall in stalls:
            found |= stall.times(number)
        for name, seconds in found.items():
            times.setdefault(name, []).extend([seconds] if number else [])
    return times


def one_turn(contender: Contender, folder: Path) -> dict[str, float]:
    """Return how long a contender takes to write and to read."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    found = {f"{contender.name}, write": slowest(lambda: contender.save(folder))}
    drop_caches(folder)
    found[f"{contender.name}, read"] = slowest(lambda: contender.load(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return found


def body_of(args: argparse.Namespace, times: dict[str, list[float]]) -> str:
    def against(name: str, base: str) -> str:
        if base not in times or name == base:
            return ""
        return f"{median(b / t for t, b in zip(times[name], times[base], strict=True)):.2f}"

    rows = []
    total = {"small arrays": num_small(args.gib) / 4096}
    for name, found in times.items():
        of = name.rpartition(", ")[2]
        is_disk = of in ("write", "read")
        base, other = (f"dd, {of}", f"torch DCP, {of}") if is_disk else (f"memcpy, {of}", "")
        speed = f"{total.get(of, args.gib) / median(found):.2f} GiB/s"
        rows.append([name, report.median_and_least(found), speed, against(name, base), against(name, other)])
    each = report.size(int(args.gib * (1 << 30)) // args.arrays)
    ranks = dist.get_world_size()
    where = "a folder of the temporary files' disk" if args.folder is None else "a folder"
    method = METHOD.format(
        ranks=ranks, arrays=args.arrays, each=each, rounds=args.rounds, files=where, small=num_small(args.gib)
    )
    head = ["", "time", "speed", "speed over dd or memcpy", "speed over torch"]
    return f"{method}\n\n{report.table(head, rows)}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time checkpoints beside dd, torch's DCP and a memcpy.")
    parser.add_argument("--gib", type=float, default=1.0, help="all arrays together (default: %(default)s)")
    parser.add_argument("--arrays", type=positive, default=16, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="(default: %(default)s)")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="without torch")
    report.add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    args = parse()
    dist.init_process_group()
    made = [tempfile.mkdtemp(dir=args.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    folder = Path(str(made[0]))
    os.environ["CHECKPOINT_BENCH_STORE"] = str(folder / "store")
    try:
        times = measure(args, folder)
        if dist.get_rank() == 0:
            title = f"Checkpoints, {dist.get_world_size()} ranks"
            versions = installed(["meshdist", "torch"] if args.torch else ["meshdist"])
            described, launcher = machine.describe(versions), ["meshrun", "-n", str(dist.get_world_size())]
            report.publish(args, title, described, body_of(args, times), times, launcher)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
