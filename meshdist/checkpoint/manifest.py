"""The manifest of a checkpoint, checkpoint.json: its tree, where its arrays lie, and their checksums."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshdist.checkpoint.byte_runs import Index
from meshdist.checkpoint.rank_agreement import CheckpointError
from meshdist.checkpoint.stored_types import dtype_of

MANIFEST = "checkpoint.json"
VERSION = 1


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
        format: "safetensors", "npy" or "zarr".
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
            CheckpointError: It is damaged, or of a later version.
        """
        text = path.read_bytes()
        first, _, body = text.partition(b"\n")
        try:
            found = json.loads(text)
            is_whole = first == b'{"crc32": %d,' % zlib.crc32(body)
        except ValueError:
            is_whole = False
        if not is_whole:
            raise CheckpointError(f"{path} is damaged: its checksum does not match; load another checkpoint")
        version = found.pop("version")
        del found["crc32"]
        if version > VERSION:
            raise CheckpointError(f"{path} is of version {version}; this meshdist reads up to {VERSION}: update it")
        arrays = {name: _stored(**item) for name, item in found.pop("arrays").items()}
        return cls(arrays=arrays, **found)


def _stored(shape: list[int], pieces: list[Any], **others: Any) -> StoredArray:
    listed = [(tuple((start, stop) for start, stop in index), text) for index, text in pieces]
    return StoredArray(shape=tuple(shape), pieces=listed, **others)
