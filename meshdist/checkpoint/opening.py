"""What is in a folder or file: a checkpoint, or files of safetensors of others; its arrays, read and checked."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from meshdist.checkpoint import safetensors_files
from meshdist.checkpoint.byte_runs import Index, overlap_of, read_block, whole, within
from meshdist.checkpoint.checksum import Checksum, checksum_of
from meshdist.checkpoint.commit import named_steps
from meshdist.checkpoint.direct_io import DirectFile, HugePages
from meshdist.checkpoint.file_access import BINARY, CachedFile, local_path
from meshdist.checkpoint.manifest import MANIFEST, UNREADABLE, Manifest, StoredArray, check_file_name
from meshdist.checkpoint.partial_checksums import Grid, PartSums, sums_within
from meshdist.checkpoint.rank_agreement import CheckpointError
from meshdist.checkpoint.stored_types import dtype_of, is_known
from meshdist.runtime.log import RankLog

_log = RankLog()


def latest(directory: str | Path) -> Path | None:
    """Return the newest checkpoint in a directory, which is that of the highest step; None if there is none.

    A folder `step-<n>` without `checkpoint.json` is no checkpoint. If it has a higher step, a warning is logged.

    Example:
        >>> from meshdist.checkpoint import latest
        >>> latest("no-such-folder")
    """
    for path in reversed(named_steps(local_path(directory)).values()):
        if (path / MANIFEST).exists():
            return path
        if path.is_dir():
            _log.warning("%s is skipped as it has no %s: remove it, or load it by its own name", path, MANIFEST)
    return None


class Opened:
    """A checkpoint, or files of safetensors of others.

    Attributes:
        folder: Where the files are.
        manifest: What is in them.
        parts: The sums of the pieces of which only a part was read, with what other ranks read.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.parts: list[PartSums] = []
        self._buffers = HugePages()

    @classmethod
    def at(cls, path: str | Path) -> Opened:
        """Return what is at `path`: a checkpoint, the newest in a folder, a file of safetensors, or a folder of them.

        Raises:
            FileNotFoundError: There is none of these.
            CheckpointError: It is damaged.
            ValueError: `path` is a URL.
        """
        path = local_path(path)
        if path.is_file() and path.name.endswith(".index.json"):
            return cls(path.parent, _of_index(path))
        if path.is_file() and path.name != MANIFEST:
            return cls(path.parent, Manifest("safetensors", safetensors_files.read_header(path)))
        folder = path.parent if path.is_file() else path
        if not folder.exists():
            raise FileNotFoundError(f"there is no checkpoint at {path}: no such folder")
        if (folder / MANIFEST).exists():
            return cls._checked(folder)
        while (newest := latest(folder)) is not None:
            try:
                return cls._checked(newest)
            except (CheckpointError, FileNotFoundError):
                if newest.exists():  # else a job that keeps few checkpoints has removed it meanwhile
                    raise
        return cls(folder, _foreign(folder))

    @classmethod
    def _checked(cls, folder: Path) -> Opened:
        opened = cls(folder, Manifest.read(folder / MANIFEST))
        opened.check_files()
        return opened

    def check_files(self) -> None:
        """Raise CheckpointError where a file is missing, has a different size, or another header than was written.

        Hugging Face's index may be missing: it is for other programs.
        """
        for name in self.manifest.files:
            if name != safetensors_files.INDEX or (self.folder / name).exists():
                self.check_file(name)
        if self.manifest.format == "zarr":
            return
        for name, stored in self.manifest.arrays.items():
            size = self.manifest.files.get(stored.file, (0, 0, 0))[0]
            end = (stored.offset or 0) + (stored.nbytes if is_known(stored.dtype) else 0)
            if end > size:
                raise CheckpointError(
                    f"{self.folder / MANIFEST} is damaged, or was not written by meshdist: array {name!r} is not in"
                    f" {stored.file}, which has {size} bytes"
                )

    def check_file(self, name: str) -> None:
        """Raise CheckpointError if a file is missing, has a different size, or another header than was written."""
        nbytes, num_first, crc = self.manifest.files[name]
        path = self.folder / name
        if not path.exists():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != nbytes:
            raise CheckpointError(f"{path} is damaged: it has {path.stat().st_size} bytes, {nbytes} were written")
        with path.open("rb") as file:
            if zlib.crc32(file.read(min(num_first, nbytes))) != crc:
                raise CheckpointError(f"{path} is damaged: the checksum of its header does not match")

    def read(
        self, name: str, index: Index | None = None, into: Any = None, *, shared: bool = False, grid: Grid | None = None
    ) -> Any:
        """Return an array, or a block of it.

        Args:
            name: The array.
            index: The block; None: all of it.
            into: A NumPy array that becomes the block and is returned; None: a new one.
            shared: Other ranks read the same bytes: all through the page cache, so that the disk is read once.
            grid: The blocks that the ranks read together: `parts` gets the sums of pieces that are not whole in this
                one. None: such pieces are not verified.

        Raises:
            CheckpointError: It is damaged, as the checksum of a piece shows that lies in the block.
        """
        stored = self.manifest.arrays[name]
        index = whole(stored.shape) if index is None else index
        path = self.folder / stored.file
        try:
            dtype_of(stored.dtype)
        except TypeError as error:
            raise CheckpointError(f"{path}: array {name!r}: {error}") from None
        checksum = None
        if self.manifest.format == "zarr":
            from meshdist.checkpoint import zarr_files

            array = zarr_files.read(path, stored, index)
            if into is not None:
                into[...] = array
                array = into
        else:
            # What is read as it was written, as on the same mesh, is summed up on the way.
            checksum = Checksum() if any(piece == index for piece, _ in stored.pieces) else None
            array = self._read_file(path, name, stored, index, into, checksum, shared)
        self._check(name, array, index, grid, None if checksum is None else checksum.text())
        return array

    def _read_file(
        self,
        path: Path,
        name: str,
        stored: StoredArray,
        index: Index,
        into: Any,
        checksum: Checksum | None,
        shared: bool,
    ) -> Any:
        also = [] if checksum is None else [checksum]
        fd = os.open(path, os.O_RDONLY | BINARY)
        file = CachedFile(fd) if shared else DirectFile(fd, path, self._buffers)
        try:
            return read_block(file, stored.offset or 0, stored.shape, index, dtype_of(stored.dtype), into, also)
        except EOFError as error:
            raise CheckpointError(f"{path} is damaged: array {name!r} is truncated, {error}") from None
        except OSError as error:
            raise OSError(error.errno, f"array {name!r}: {error.strerror}", str(path)) from None
        finally:
            file.close()
            os.close(fd)

    def mapped(self, name: str) -> Any:
        """Return an array of format npy or safetensors as a map of its file, whose changes are not written."""
        stored = self.manifest.arrays[name]
        if 0 in stored.shape or self.manifest.format == "zarr" or not is_known(stored.dtype):
            return self.read(name)
        dtype = dtype_of(stored.dtype).newbyteorder("<")
        return np.memmap(self.folder / stored.file, dtype, "c", stored.offset or 0, stored.shape)

    def _check(self, name: str, array: Any, index: Index, grid: Grid | None, found: str | None) -> None:
        """Raise CheckpointError where a piece that lies in a block is not as it was written; sum up parts of pieces.

        Args:
            name: The array.
            array: The block.
            index: Where it is.
            grid: The blocks of all ranks; None: other ranks do not read parts.
            found: The checksum of all of it; None: not known.
        """
        for number, (piece, text) in enumerate(self.manifest.arrays[name].pieces):
            part = overlap_of(piece, index)
            if part == piece:
                if (
                    found if found is not None and piece == index else checksum_of(array[within(piece, index)])
                ) != text:
                    raise self.damage(name, piece)
            elif part is not None and grid is not None:
                sums = sums_within(array[within(part, index)], part, piece)
                self.parts.append(PartSums(name, number, grid, part, sums))

    def damage(self, name: str, piece: Index) -> CheckpointError:
        """Return the error of a piece that is not as it was written."""
        at = ", ".join(f"{start}:{stop}" for start, stop in piece)
        return CheckpointError(
            f"{self.folder / self.manifest.arrays[name].file} is damaged: array {name!r} is not what was written, at"
            f" [{at}]; load another checkpoint"
        )


def _of_index(path: Path) -> Manifest:
    """Return the arrays of Hugging Face's index of files."""
    try:
        by_name = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(by_name.values()))
    except UNREADABLE:
        raise CheckpointError(f"{path} is damaged, or is not an index: it has no weight_map") from None
    try:
        for file in files:
            check_file_name(file)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged, or is not an index: {error}") from None
    missing = [file for file in files if not (path.parent / file).is_file()]
    if missing:
        raise CheckpointError(f"{path.parent / missing[0]} is missing: {path.name} names it")
    arrays: dict[str, StoredArray] = {}
    for file in files:
        arrays |= safetensors_files.read_header(path.parent / file)
    lacking = sorted(name for name, file in by_name.items() if name not in arrays or arrays[name].file != file)
    if lacking:
        raise CheckpointError(
            f"{path.parent / by_name[lacking[0]]} lacks array {lacking[0]!r}, which {path.name} names"
        )
    return Manifest("safetensors", arrays)


def _foreign(folder: Path) -> Manifest:
    """Return the arrays of all files of safetensors in a folder; warn where they are those of `save`."""
    found = _all_files(folder)
    files = sorted({array.file for array in found.arrays.values()})
    if any(safetensors_files.is_of_checkpoint(folder / file) for file in files):
        _log.warning(
            "%s was written by meshdist.checkpoint.save, and its %s is missing: its arrays are read by name, without"
            " the tree, small values and checksums, and with the dtypes of safetensors; copy that file as well",
            *(folder, MANIFEST),
        )
    return found


def _all_files(folder: Path) -> Manifest:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if indices:
        return _of_index(indices[0])
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"there is no checkpoint in {folder}: no step-<n>, {MANIFEST} or *.safetensors")
    arrays: dict[str, StoredArray] = {}
    for file in files:
        for name, stored in safetensors_files.read_header(file).items():
            if name in arrays:
                raise CheckpointError(f"{file} and {folder / arrays[name].file} both have an array {name!r}; load one")
            arrays[name] = stored
    return Manifest("safetensors", arrays)
