"""Writing a checkpoint: every rank its pieces into files that the first has made; then the first gives it its name."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshdist._version import __version__
from meshdist.checkpoint import npy_files, safetensors_files
from meshdist.checkpoint.block_owners import Held, Mine, Piece, Progress
from meshdist.checkpoint.byte_runs import write_block
from meshdist.checkpoint.checksum import Checksum
from meshdist.checkpoint.commit import Claim, new_folder, prune, publish, remove_remains, steps_of, write_file
from meshdist.checkpoint.direct_io import DirectFile, HugePages
from meshdist.checkpoint.file_access import BINARY, is_in_memory
from meshdist.checkpoint.manifest import MANIFEST, Manifest, StoredArray
from meshdist.checkpoint.rank_agreement import CheckpointError, Peers


@dataclass
class Plan:
    """What a save writes, alike on all ranks; for the next save of the same arrays as well.

    Attributes:
        format: One of FORMATS.
        pieces: The blocks of each array.
        files: The files that are made before they are written; none for zarr, which makes its own.
        stored: Where each array will lie.
    """

    format: str
    pieces: dict[str, list[Piece]]
    files: list[safetensors_files.FilePlan] = field(default_factory=list)
    stored: dict[str, StoredArray] = field(default_factory=dict)


def make_plan(format: str, held: Mapping[str, Mapping[int, Held]], pieces: dict[str, list[Piece]], most: int) -> Plan:
    """Return the plan for arrays that ranks hold so; a file of safetensors has up to `most` bytes of arrays."""
    arrays = {name: (first.shape, first.dtype) for name, by_rank in held.items() for first in [*by_rank.values()][:1]}
    plan = Plan(format, pieces)
    if format == "safetensors":
        plan.files, plan.stored = safetensors_files.lay_out(arrays, most)
    elif format == "npy":
        plan.files, plan.stored = npy_files.lay_out(arrays)
    else:
        names = {name: npy_files.file_name(name) for name in arrays}
        plan.stored = {name: StoredArray(*arrays[name], file=names[name]) for name in arrays}
    return plan


class Target(NamedTuple):
    """Where a checkpoint goes.

    Attributes:
        folder: Its folder when it is complete; the one above it is claimed meanwhile.
        step: The training step.
        overwrite: Replace a folder of that name.
        keep: How many checkpoints to keep, this one among them; None: all.
    """

    folder: Path
    step: int
    overwrite: bool = False
    keep: int | None = None


def write(
    peers: Peers,
    plan: Plan,
    mine: Sequence[Mine],
    structure: list[Any] | None,
    target: Target,
    seen: dict[Path, set[int]],
    progress: Progress = iter,
) -> Path:
    """Write a checkpoint; all ranks call it. Where it fails, on any rank, it leaves nothing.

    Args:
        peers: The ranks.
        plan: The same on all.
        mine: What this rank writes.
        structure: The tree; that of the first rank counts.
        target: Where it goes.
        seen: On the first rank, the steps in each folder after this job's last save into it.
        progress: Passes on what is written, as a progress bar does.

    Returns:
        The folder.
    """
    with ExitStack() as stack:
        claims: list[Claim] = []

        def prepare() -> Path:
            folder = target.folder.parent
            folder.mkdir(parents=True, exist_ok=True)
            claims.append(stack.enter_context(Claim(folder)))
            remove_remains(claims[0])
            _check_target(target, seen)
            made = new_folder(folder, target.folder)
            stack.callback(shutil.rmtree, made, ignore_errors=True)
            _make_files(made, plan)
            return made

        made = peers.by_first(prepare)
        headers = {file.name: file.header for file in plan.files} if peers.rank == 0 else {}
        turn = peers.rank / peers.size
        written = peers.together(lambda: _write_pieces(made, plan, mine, headers, progress, turn))

        def commit() -> Path:
            manifest = _manifest(plan, written, structure, target, peers.size)
            if plan.format == "safetensors":
                index = safetensors_files.index_of(plan.stored)
                write_file(made / safetensors_files.INDEX, index)
                manifest.files[safetensors_files.INDEX] = (len(index), len(index), zlib.crc32(index))
            write_file(made / MANIFEST, manifest.to_bytes())
            claims[0].check()
            publish(made, target.folder)
            if target.keep is not None:
                prune(target.folder.parent, target.keep, target.folder)
            seen[target.folder.parent] = set(steps_of(target.folder.parent))
            stack.close()  # before other ranks return, whose end may be that of this one
            return target.folder

        return peers.by_first(commit)


def _check_target(target: Target, seen: Mapping[Path, set[int]]) -> None:
    directory = target.folder.parent
    if os.path.lexists(target.folder):
        if target.folder.is_symlink() or not (target.folder / MANIFEST).is_file():
            raise FileExistsError(f"{target.folder} exists and is not a checkpoint: move it away, or save another step")
        if not target.overwrite:
            raise FileExistsError(f"{target.folder} exists already; save another step, or pass overwrite=True")
    steps = steps_of(directory)
    if directory in seen and (others := sorted(set(steps) - seen[directory])):
        writer = Manifest.read(steps[others[-1]] / MANIFEST).writer
        raise CheckpointError(
            f"{steps[others[-1]]} came from another job, process {writer.get('pid')} on {writer.get('host')}, while"
            " this one was running; give each job its own folder"
        )


def _make_files(folder: Path, plan: Plan) -> None:
    """Make the files, as large as they will be: a disk that is too full is noticed here."""
    if plan.format == "zarr":
        from meshdist.checkpoint import zarr_files

        zarr_files.make(folder, plan.stored, plan.pieces)
    in_memory = is_in_memory(folder)
    if in_memory:
        _check_room(folder, sum(file.nbytes for file in plan.files))
    for file in plan.files:
        path = folder / file.name
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | BINARY, 0o666)
        try:
            _allocate(fd, file.nbytes, in_memory)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            os.close(fd)


def _allocate(fd: int, nbytes: int, in_memory: bool) -> None:
    if hasattr(os, "posix_fallocate") and not in_memory:  # where it would write zeros
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.ftruncate(fd, nbytes)


def _check_room(folder: Path, nbytes: int) -> None:
    system = shutil.disk_usage(folder)
    if system.total and system.free < nbytes:  # a total of 0: there is no limit
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _write_pieces(
    folder: Path, plan: Plan, mine: Sequence[Mine], headers: dict[str, bytes], progress: Progress, turn: float
) -> list[tuple[str, int, str]]:
    """Write this rank's pieces, and the headers of files; return the checksum of each with its array and number.

    `turn` is the rank over the number of ranks.
    """
    if plan.format == "zarr":
        from meshdist.checkpoint import zarr_files

        return zarr_files.write(folder, plan.stored, mine, progress)
    found = []
    opened = _OpenFile(folder)
    try:
        for name, number, piece, elements in progress(_in_order(folder, plan, mine, turn)):
            stored, checksum = plan.stored[name], Checksum()
            file = opened.switch_to(stored.file, headers.pop(stored.file, b""))
            write_block(file, stored.offset or 0, stored.shape, piece.block, elements(), [checksum])
            found.append((name, number, checksum.text()))
        for name, header in headers.items():
            opened.switch_to(name, header)
        opened.close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(opened.path)) from None
    finally:
        opened.abandon()
    return found


class _OpenFile:
    """The one file that is written: there may be thousands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buffers = HugePages()
        self._file: DirectFile | None = None
        self.path = folder

    def switch_to(self, name: str, header: bytes) -> DirectFile:
        """Return the file `name`, which begins with `header`; what was written before is on the disk then."""
        if self._file is None or self._folder / name != self.path:
            self.close()
            self.path = self._folder / name
            self._file = DirectFile(os.open(self.path, os.O_WRONLY | BINARY), self.path, self._buffers)
        if header:
            self._file.write(np.frombuffer(header, np.uint8), 0)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fd)
        self.abandon()

    def abandon(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
            os.close(file.fd)


def _in_order(folder: Path, plan: Plan, mine: Sequence[Mine], turn: float) -> list[Mine]:
    """Return the pieces as they lie in the files.

    In memory, each rank begins with another file: writes to one file wait for each other there.
    """
    ordered = sorted(mine, key=lambda one: _place(plan.stored[one.name]))
    if not is_in_memory(folder):
        return ordered
    first = plan.files[int(turn * len(plan.files))].name if plan.files else ""
    begin = next((i for i, one in enumerate(ordered) if plan.stored[one.name].file >= first), 0)
    return ordered[begin:] + ordered[:begin]


def _place(stored: StoredArray) -> tuple[str, int]:
    return stored.file, stored.offset or 0


def _manifest(
    plan: Plan,
    written: Sequence[Sequence[tuple[str, int, str]]],
    structure: list[Any] | None,
    target: Target,
    num_ranks: int,
) -> Manifest:
    sums = {(name, number): text for by_rank in written for name, number, text in by_rank}
    arrays = {}
    for name, stored in plan.stored.items():
        pieces = [(piece.block, sums[name, number]) for number, piece in enumerate(plan.pieces[name])]
        arrays[name] = StoredArray(stored.shape, stored.dtype, stored.file, stored.offset, pieces)
    files = {file.name: (file.nbytes, len(file.header), zlib.crc32(file.header)) for file in plan.files}
    writer = {"host": socket.gethostname(), "pid": os.getpid(), "ranks": num_ranks, "meshdist": __version__}
    return Manifest(plan.format, arrays, structure, target.step, files, writer)
