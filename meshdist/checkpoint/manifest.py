"""The manifest of a checkpoint, checkpoint.json: its tree, where its arrays lie, and their checksums."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshdist.checkpoint.byte_runs import Index
from meshdist.checkpoint.rank_agreement import CheckpointError
from meshdist.checkpoint.stored_types import MOST_SHOWN, checked_shape, dtype_of
from meshdist.checkpoint.tree_names import check_structure

MANIFEST = "checkpoint.json"
VERSION = 1
FORMATS = ("safetensors", "npy", "zarr")
# What reading JSON of others, and what should be in it, may raise.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
# In bytes, what every file system takes: longer ones would be an OSError where a file is looked for.
_LONGEST_NAME, _LONGEST_PATH = 255, 1024


@dataclass
class StoredArray:
    """An array of a checkpoint.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype.
        file: Its file or, for zarr, its folder, in that of the checkpoint.
        offset: Where in the file it begins; None where the format says that.
        pieces: The blocks that ranks wrote, and the checksum of each; empty for the files of others.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int | None = None
    pieces: list[tuple[Index, str]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * dtype_of(self.dtype).itemsize


@dataclass
class Manifest:
    """What is in a checkpoint.

    Attributes:
        format: One of FORMATS.
        arrays: The arrays by name.
        structure: The tree, as `tree_names.Named` has it; None for the files of others.
        step: The training step; None for the files of others.
        files: For each file that is no array's alone, its bytes, and how many of them at its start are summed up in a
            CRC-32, which is the third number.
        writer: The host, process and number of ranks that wrote it.
    """

    format: str
    arrays: dict[str, StoredArray]
    structure: list[Any] | None = None
    step: int | None = None
    files: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    writer: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON, whose first line has the CRC-32 of the others."""
        body = json.dumps({"version": VERSION, **asdict(self)}, allow_nan=False).encode() + b"\n"
        return b'{"crc32": %d,\n' % zlib.crc32(body[1:]) + body[1:]

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Return the manifest in a file.

        Raises:
            CheckpointError: It is damaged, of a later version, or says what no save writes.
        """
        text = path.read_bytes()
        first, _, body = text.partition(b"\n")
        try:
            found = json.loads(text)
            is_whole = first == b'{"crc32": %d,' % zlib.crc32(body)
        except (ValueError, RecursionError):
            is_whole = False
        if not is_whole:
            raise CheckpointError(f"{path} is damaged: its checksum does not match; load another checkpoint")
        try:
            version = found.pop("version")
            del found["crc32"]
            if version > VERSION:
                raise CheckpointError(f"{path} is of version {version}; this meshdist reads up to {VERSION}: update it")
            return cls._checked(**found)
        except UNREADABLE as error:
            what = f"{type(error).__name__} {error}"[: 2 * MOST_SHOWN].encode(errors="backslashreplace").decode()
            raise CheckpointError(f"{path} is damaged, or was not written by meshdist: {what}") from None

    @classmethod
    def _checked(cls, arrays: dict[str, Any], **others: Any) -> Manifest:
        stored = {name: _stored(name, **item) for name, item in arrays.items()}
        found = cls(arrays=stored, **others)
        json.dumps([*stored, found.writer], ensure_ascii=False).encode()  # text that can be printed
        if found.format not in FORMATS:
            raise ValueError(f"format {found.format!r:.80} is not one of {', '.join(FORMATS)}")
        if found.structure is not None:
            check_structure(found.structure, stored)
        for name, numbers in found.files.items():
            check_file_name(name)
            if len(numbers) != 3 or not all(map(_is_count, numbers)):
                raise ValueError(f"{name!r}: {numbers!r:.80} is not its size, that of its header, and a checksum")
        if not (found.step is None or _is_count(found.step)):
            raise ValueError(f"step {found.step!r:.80}")
        if found.writer and not (_is_count(found.writer["ranks"]) and {"pid", "host"} <= found.writer.keys()):
            raise ValueError(f"writer {found.writer!r:.80}")
        return found


def _stored(name: str, shape: list[int], pieces: list[Any], dtype: str, file: str, offset: int | None) -> StoredArray:
    check_file_name(file)
    if not (offset is None or _is_count(offset)):
        raise ValueError(f"array {name!r} begins at {offset!r:.80}")
    stored = StoredArray(checked_shape(shape, dtype), dtype, file, offset)
    for index, text in pieces:
        block = tuple((start, stop) for start, stop in index)
        spans = zip(block, stored.shape, strict=True)
        if not isinstance(text, str) or not all(_is_count(a) and 0 <= a <= b <= rows for (a, b), rows in spans):
            raise ValueError(f"array {name!r} of shape {stored.shape} has no block {str(index)[:MOST_SHOWN]}")
        stored.pieces.append((block, text))
    return stored


def _is_count(x: Any) -> bool:
    return type(x) is int and x >= 0


def check_file_name(name: Any) -> None:
    """Raise ValueError unless `name` is that of a file in the same folder, or in one below it."""
    try:
        path = Path(name)
        longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
        is_short = 0 < longest <= _LONGEST_NAME and len(os.fsencode(path)) <= _LONGEST_PATH
        is_inside = not path.is_absolute() and not path.drive and ".." not in path.parts and "\0" not in name
    except (TypeError, ValueError):
        is_short = is_inside = False
    if not is_short or not is_inside:
        raise ValueError(f"{name!r:.80} is not the name of a file in this folder")
