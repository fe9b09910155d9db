"""Arrays of Zarr's format 3, by the package zarr: a chunk is what one rank writes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshdist.checkpoint.block_owners import Mine, Piece, Progress
from meshdist.checkpoint.byte_runs import Index, shape_of
from meshdist.checkpoint.checksum import checksum_of
from meshdist.checkpoint.manifest import UNREADABLE, StoredArray
from meshdist.checkpoint.rank_agreement import CheckpointError
from meshdist.checkpoint.stored_types import dtype_of, in_numpy

_METADATA = "zarr.json"

# What zarr raises where metadata are wrong.
_WRONG = (*UNREADABLE, FileNotFoundError, IndexError, NotImplementedError)


def zarr_module() -> Any:
    """Return the package zarr.

    Raises:
        ValueError: It is not installed, or too old.
    """
    try:
        import zarr
    except ImportError:
        raise ValueError("format 'zarr' needs the package zarr: pip install 'zarr>=3'") from None
    if int(zarr.__version__.partition(".")[0]) < 3:
        raise ValueError(f"format 'zarr' needs zarr 3 or later, got {zarr.__version__}: pip install 'zarr>=3'")
    return zarr


def make(folder: Path, stored: Mapping[str, StoredArray], pieces: Mapping[str, Sequence[Piece]]) -> None:
    """Make a group, and in it an array for each; no chunk is written yet."""
    zarr = zarr_module()
    group = zarr.open_group(str(folder), mode="w", zarr_format=3)
    for name, array in stored.items():
        _create(group, array, [piece.block for piece in pieces[name]])


def _create(group: Any, array: StoredArray, blocks: Sequence[Index]) -> Any:
    chunks, dtype = _chunk_shape(array, blocks), in_numpy(array.dtype).name
    return group.create_array(array.file, shape=array.shape, chunks=chunks, dtype=dtype, compressors=None)


def _chunk_shape(array: StoredArray, blocks: Sequence[Index]) -> tuple[int, ...]:
    # The largest piece: the others are the last ones of a dimension.
    shapes = [shape_of(block) for block in blocks] or [array.shape]
    return tuple(max(1, *rows) for rows in zip(*shapes, [0] * len(array.shape), strict=True))


def _truncated_chunk(path: Path, array: StoredArray) -> str | None:
    """Return what to say of a chunk of an array whose file has a wrong size; None if there is none."""
    expected = math.prod(_chunk_shape(array, [block for block, _ in array.pieces])) * dtype_of(array.dtype).itemsize
    for chunk in [path / "c", *sorted((path / "c").rglob("*"))]:
        if chunk.is_file() and (nbytes := chunk.stat().st_size) != expected:
            return f"{chunk} is damaged: it has {nbytes} bytes, {expected} were written"
    return None


def write(
    folder: Path, stored: Mapping[str, StoredArray], mine: Sequence[Mine], progress: Progress
) -> list[tuple[str, int, str]]:
    """Write this rank's chunks; return the checksum of each piece with its array and number."""
    zarr = zarr_module()
    found = []
    for name, number, piece, get in progress(mine):
        elements = get()
        array = zarr.open_array(str(folder / stored[name].file), mode="r+")
        native = elements.astype(elements.dtype.newbyteorder("="), copy=False)  # the view below keeps the bytes
        places = [start // rows for (start, _), rows in zip(piece.block, array.chunks, strict=True)]
        chunk = (folder / stored[name].file).joinpath("c", *map(str, places))
        try:
            array[tuple(slice(*span) for span in piece.block)] = native.view(in_numpy(stored[name].dtype).name)
            if chunk.exists():  # zarr writes no chunk of zeros
                _sync(chunk)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(chunk)) from None
        found.append((name, number, checksum_of(elements)))
    return found


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def wrong_metadata(folder: Path, stored: Iterable[StoredArray]) -> Iterator[str]:
    """Yield a sentence for each zarr.json, of the group and of its arrays, that is not as `make` has written it.

    Attributes and names of dimensions may be others, since they do not change what is read.
    """
    zarr = zarr_module()
    try:
        zarr.open_group(str(folder), mode="r", zarr_format=3)
    except _WRONG as error:
        yield f"{folder / _METADATA} is missing or damaged: {error or type(error).__name__}"
    group = zarr.open_group(zarr.storage.MemoryStore(), mode="w", zarr_format=3)
    for array in stored:
        path = folder / array.file
        try:
            found = zarr.open_array(str(path), mode="r", zarr_format=3).metadata.to_dict()
        except _WRONG as error:
            yield f"{path / _METADATA} is missing or damaged: {error or type(error).__name__}"
            continue
        expected = _create(group, array, [block for block, _ in array.pieces]).metadata.to_dict()
        for key in sorted((expected.keys() | found.keys()) - {"attributes", "dimension_names"}):
            if found.get(key) != expected.get(key):
                yield f"{path / _METADATA} is damaged: {key} is {found.get(key)}, {expected.get(key)} was written"


def read(path: Path, stored: StoredArray, index: Index) -> Any:
    """Return a block of an array.

    Raises:
        CheckpointError: The array is damaged.
    """
    zarr = zarr_module()
    try:
        array = zarr.open_array(str(path), mode="r")
        is_same = (array.shape, array.dtype) == (stored.shape, np.dtype(in_numpy(stored.dtype).name))
        if not is_same:
            raise CheckpointError(f"{path} is damaged: it is not {stored.dtype} of shape {stored.shape}")
        if 0 in array.chunks:
            raise CheckpointError(f"{path} is damaged: its chunks have shape {array.chunks}")
        block = np.asarray(array[tuple(slice(*span) for span in index)])
    except _WRONG as error:
        raise CheckpointError(_truncated_chunk(path, stored) or f"{path} is damaged: {error}") from None
    return block.view(dtype_of(stored.dtype)) if block.dtype != dtype_of(stored.dtype) else block
