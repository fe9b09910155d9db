"""What is in a checkpoint, and whether it is as it was written."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from meshdist.checkpoint import npy_files, safetensors_files
from meshdist.checkpoint.opening import Opened
from meshdist.checkpoint.rank_agreement import CheckpointError
from meshdist.profiler.tables import bytes_text
from meshdist.system.plurals import counted


def check_checkpoint(opened: Opened, names: Iterable[str] | None = None) -> Iterator[str]:
    """Yield what is wrong with a checkpoint, a sentence for each array or file; read all of it.

    Args:
        opened: The checkpoint.
        names: The arrays to check, as a progress bar gives them; None: all.
    """
    yield from _wrong_headers(opened)
    for name in opened.manifest.arrays if names is None else names:
        try:
            pieces = opened.manifest.arrays[name].pieces
            for block, _ in pieces:
                opened.read(name, block)  # piece by piece: an array may be larger than the memory
            if not pieces:
                opened.read(name)
        except (CheckpointError, OSError) as error:
            yield str(error)


def _wrong_headers(opened: Opened) -> Iterator[str]:
    manifest, folder = opened.manifest, opened.folder
    files = {array.file for array in manifest.arrays.values()}
    try:
        if manifest.format == "npy":
            for array in manifest.arrays.values():
                npy_files.check_header(folder / array.file, array)
        if manifest.format == "safetensors" and manifest.structure is not None:
            for file in sorted(files):
                safetensors_files.read_header(folder / file)
            if safetensors_files.INDEX in manifest.files:
                opened.check_file(safetensors_files.INDEX)
        if manifest.format == "zarr":
            from meshdist.checkpoint import zarr_files

            yield from zarr_files.wrong_metadata(folder, manifest.arrays.values())
    except (CheckpointError, OSError) as error:
        yield str(error)


def rows(opened: Opened) -> list[list[str]]:
    """Return a table of the arrays: a row of headings, then name, dtype, shape, bytes, pieces and file of each."""
    table = [["array", "dtype", "shape", "size", "pieces", "file"]]
    for name, array in opened.manifest.arrays.items():
        shape = ", ".join(map(str, array.shape))
        table.append([name, array.dtype, f"({shape})", bytes_text(array.nbytes), str(len(array.pieces)), array.file])
    return table


def summary(opened: Opened) -> str:
    """Return a line on the whole."""
    manifest = opened.manifest
    total = sum(array.nbytes for array in manifest.arrays.values())
    by = manifest.writer
    written = f", written by {counted(by['ranks'], 'rank')} (process {by['pid']} on {by['host']})" if by else ""
    step = "" if manifest.step is None else f"step {manifest.step}, "
    return f"{step}{counted(len(manifest.arrays), 'array')}, {bytes_text(total)}, {manifest.format}{written}"


def progressing(items: Iterable[Any], what: str) -> Iterable[Any]:
    """Return `items` with a progress bar, on a terminal and if tqdm is installed (extra `examples`)."""
    if not sys.stderr.isatty():
        return items
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[Any] = tqdm(items, desc=what, unit="array")
    return bar
