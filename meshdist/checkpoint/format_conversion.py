"""A checkpoint, or files of others, written again in another format; one process does it, an array at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from meshdist.checkpoint.block_owners import Held, Mine, Piece
from meshdist.checkpoint.byte_runs import whole
from meshdist.checkpoint.opening import Opened
from meshdist.checkpoint.rank_agreement import Peers
from meshdist.checkpoint.verification import progressing
from meshdist.checkpoint.writing import Target, make_plan, write


def convert(opened: Opened, folder: Path, format: str, max_file_bytes: int) -> Path:
    """Write what is in a checkpoint to `folder`, which must not be there yet; what is read is checked."""
    manifest = opened.manifest
    held = {name: {0: Held(array.shape, array.dtype)} for name, array in manifest.arrays.items()}
    pieces = {name: [Piece(whole(array.shape), 0)] * (array.nbytes > 0) for name, array in manifest.arrays.items()}
    plan = make_plan(format, held, pieces, max_file_bytes)
    mine = [
        Mine(name, number, piece, partial(opened.read, name))
        for name, listed in pieces.items()
        for number, piece in enumerate(listed)
    ]
    structure: list[Any] | None = manifest.structure
    if structure is None:
        structure = ["dict", [[name, ["array", name]] for name in manifest.arrays]]
    target = Target(folder.absolute(), manifest.step or 0)
    peers = Peers(None, f"conversion to {folder}")
    return write(peers, plan, mine, structure, target, {}, lambda items: progressing(items, "converted"))
