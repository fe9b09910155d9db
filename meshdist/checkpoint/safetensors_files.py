"""Files of safetensors: 8 bytes of length, a header in JSON, the arrays one after the other; Hugging Face's index."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshdist.checkpoint.manifest import UNREADABLE, StoredArray
from meshdist.checkpoint.rank_agreement import CheckpointError
from meshdist.checkpoint.stored_types import CODES, MOST_SHOWN, checked_shape, code_of, dtype_of, in_safetensors

# Data begins at a page, so that pages of the file are those of the arrays.
PAGE_BYTES = 4096
# As the reference implementation has it.
MOST_HEADER_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"
# Tells a file of a checkpoint, whose manifest may be lost, from those of others.
_WRITER = "meshdist.checkpoint"


class FilePlan(NamedTuple):
    """A file before it is written.

    Attributes:
        name: Its name.
        header: Its first bytes.
        nbytes: Its size.
    """

    name: str
    header: bytes
    nbytes: int


def lay_out(
    arrays: Mapping[str, tuple[tuple[int, ...], str]], most_bytes: int
) -> tuple[list[FilePlan], dict[str, StoredArray]]:
    """Return the files for arrays of these shapes and dtypes, of up to `most_bytes` or one array each."""
    # Larger elements first: all arrays are then aligned to their elements.
    order = sorted(arrays, key=lambda name: (-dtype_of(arrays[name][1]).alignment, name))
    groups: list[list[str]] = [[]]
    filled = 0
    for name in order:
        nbytes = nbytes_of(*arrays[name])
        if groups[-1] and filled + nbytes > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    files, stored = [], {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else "model.safetensors"
        header, begin = _header({name: arrays[name] for name in names})
        for name in names:
            shape, dtype = arrays[name]
            stored[name] = StoredArray(shape, dtype, file, begin)
            begin += nbytes_of(shape, dtype)
        files.append(FilePlan(file, header, begin))
    return files, {name: stored[name] for name in arrays}


def nbytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of an array of this shape and dtype."""
    return math.prod(shape) * dtype_of(dtype).itemsize


def _header(arrays: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[bytes, int]:
    # Transformers opens files of format "pt" only; the files of all frameworks are alike.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "writer": _WRITER}}
    begin = 0
    for name, (shape, dtype) in arrays.items():
        end, in_file = begin + nbytes_of(shape, dtype), in_safetensors(dtype)
        entries[name] = {
            "dtype": code_of(in_file.name),
            "shape": list(in_file.shape(shape)),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES - 8
    if length > MOST_HEADER_BYTES:
        raise ValueError(f"the header has {length} bytes, more than safetensors allows; set max_file_bytes lower")
    return length.to_bytes(8, "little") + text.ljust(length), length + 8


def index_of(stored: Mapping[str, StoredArray]) -> bytes:
    """Return Hugging Face's index: the file of each array."""
    total = sum(array.nbytes for array in stored.values())
    found = {"metadata": {"total_size": total}, "weight_map": {name: stored[name].file for name in sorted(stored)}}
    return json.dumps(found, indent=2).encode() + b"\n"


def read_header(path: Path) -> dict[str, StoredArray]:
    """Return the arrays of a file of safetensors.

    Raises:
        CheckpointError: It is none, or damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
            raise CheckpointError(f"{path} is not a safetensors file, or is truncated: it has {size} bytes")
        text = file.read(length)
    try:
        entries = json.loads(text.decode())
        entries.pop("__metadata__", None)
        "".join(entries).encode()  # text that can be printed
        spans = {name: _span(*entry["data_offsets"]) for name, entry in entries.items()}
    except UNREADABLE:
        raise CheckpointError(
            f"{path} is not a safetensors file, or is damaged: its header does not describe arrays"
        ) from None
    arrays, expected = {}, 0
    for name in sorted(spans, key=lambda name: spans[name]):
        arrays[name] = _stored(path, name, entries[name], expected, size - 8 - length)
        arrays[name].offset = 8 + length + expected
        expected = spans[name][1]
    if expected != size - 8 - length:
        raise CheckpointError(f"{path} is truncated or damaged: {expected} bytes of arrays, {size - 8 - length} found")
    return {name: arrays[name] for name in entries}


def is_of_checkpoint(path: Path) -> bool:
    """Return whether `save` has written this file, which `read_header` has read."""
    with path.open("rb") as file:
        about = json.loads(file.read(int.from_bytes(file.read(8), "little"))).get("__metadata__")
    return isinstance(about, dict) and about.get("writer") == _WRITER


def _span(begin: int, end: int) -> tuple[int, int]:
    return operator.index(begin), operator.index(end)


def _stored(path: Path, name: str, entry: dict[str, Any], expected: int, most: int) -> StoredArray:
    begin, end = entry["data_offsets"]
    code, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(code, str) or code not in CODES:
        raise CheckpointError(
            f"{path}: array {name!r} has the unsupported dtype {code!s:.80}; supported are {', '.join(CODES)}"
        )
    try:
        checked = checked_shape(shape, CODES[code])
        nbytes = nbytes_of(checked, CODES[code])
    except ValueError:
        checked, nbytes = (), -1
    except TypeError as error:
        raise CheckpointError(f"{path}: array {name!r}: {error}") from None
    if begin != expected or end - begin != nbytes or end > most:
        raise CheckpointError(
            f"{path} is damaged: array {name!r} of {code} and shape {str(shape)[:MOST_SHOWN]} is said to lie at bytes"
            f" {begin} to {end}"
        )
    return StoredArray(checked, CODES[code], path.name)
