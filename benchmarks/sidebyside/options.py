"""Types of command-line arguments, for argparse."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """Read a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def new_file(text: str) -> Path:
    """Read the path of a file to be written, before anything is measured that would be lost otherwise."""
    path = Path(text)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a file in a folder that can be written to, got {text!r}")
    return path


def picture(text: str) -> Path:
    """Read the path of a picture to be drawn."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install matplotlib")
    if Path(text).suffix not in (".svg", ".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .svg, .png or .pdf, got {text!r}")
    return new_file(text)


def positives(text: str) -> list[int]:
    """Read integers of at least 1, with commas between them."""
    return [positive(part) for part in text.split(",")]


def names_from(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what reads some of the `known` names, with commas between them; each counts once."""
    known = tuple(known)

    def read(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not known; choose from {', '.join(known)}")
        return names

    return read
