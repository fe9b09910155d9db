"""python -m meshdist.checkpoint: say what is in a checkpoint, check it, or convert it to another format.

python -m meshdist.checkpoint info runs/step-100
python -m meshdist.checkpoint verify runs
python -m meshdist.checkpoint convert runs/step-100 step-100-npy --format npy
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshdist.checkpoint.block_owners import Held, Mine, Piece
from meshdist.checkpoint.byte_runs import whole
from meshdist.checkpoint.file_access import local_path
from meshdist.checkpoint.manifest import FORMATS
from meshdist.checkpoint.opening import Opened
from meshdist.checkpoint.rank_agreement import CheckpointError, Peers
from meshdist.checkpoint.verification import check_checkpoint, progressing, rows, summary
from meshdist.checkpoint.writing import Target, make_plan, write
from meshdist.profiler.tables import text_table
from meshdist.system.command_lines import until_closed
from meshdist.system.option_parser import OptionParser


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = OptionParser(prog="python -m meshdist.checkpoint", description="Look at a checkpoint.")
    commands = parser.add_commands(
        info="list its arrays",
        verify="read all of it and compare checksums; status 1 if it is damaged",
        convert="write it again in another format",
    )
    for command in commands:
        command.add_argument(
            "path", type=Path, help="a checkpoint, a folder of them (the newest is taken), or safetensors files"
        )
    *_, converting = commands
    converting.add_argument("to", type=Path, help="the new folder")
    converting.add_argument("--format", choices=FORMATS, default="safetensors", help="(default: %(default)s)")
    converting.add_argument(
        "--max-file-bytes",
        type=int,
        default=4 << 30,
        metavar="N",
        help="the largest size of a safetensors file (default: 4 GiB)",
    )
    options: argparse.Namespace = parser.parse_args(arguments)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        opened = Opened.at(options.path)
        if options.command == "info":
            show(rows(opened))
            print(f"{shown(opened, options.path)}: {summary(opened)}")
        elif options.command == "verify":
            return verify(opened, options.path)
        else:
            if os.path.lexists(local_path(options.to)):
                raise FileExistsError(f"{options.to} exists already; convert to another folder")
            made = convert(opened, options.to, options.format, options.max_file_bytes)
            print(f"{made}: {summary(Opened.at(made))}")
    except BrokenPipeError:  # `until_closed` ends quietly
        raise
    except (CheckpointError, OSError, ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def shown(opened: Opened, path: Path) -> Path:
    """Return the file that was asked for, or the checkpoint that was found in a folder."""
    return path if path.is_file() else opened.folder


def verify(opened: Opened, path: Path) -> int:
    found = 0
    for sentence in check_checkpoint(opened, progressing(opened.manifest.arrays, "checked")):
        print(sentence, file=sys.stderr)
        found = 1
    if not found:
        checked = (
            "is as it was written" if opened.manifest.structure is not None else "can be read; it has no checksums"
        )
        print(f"{shown(opened, path)} {checked}: {summary(opened)}")
    return found


def convert(opened: Opened, folder: Path, format: str, max_file_bytes: int) -> Path:
    """Write what is in a checkpoint to `folder`, an array at a time; what is read is checked."""
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


def show(table: Sequence[Sequence[str]]) -> None:
    """Print a table: on a terminal with rich, if it is installed (extra `rich`), and else with a line for each row."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(text_table(table))
        return
    if not sys.stdout.isatty():
        print(text_table(table))
        return
    head, *others = table
    drawn = Table()
    for name in head:
        drawn.add_column(name, justify="right" if name in ("size", "pieces") else "left", overflow="fold")
    for row in others:
        drawn.add_row(*row)
    Console().print(drawn)


if __name__ == "__main__":
    sys.exit(until_closed(main))
