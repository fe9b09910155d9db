"""How much a topology file may say, so that one that is broken, or malicious, costs an error and not all memory."""

from __future__ import annotations

import os
import re

MOST_BYTES = 64 << 20
"""Of a file; the parts of 65,536 ranks, one by one, are a quarter of that."""

MOST_PARTS = 1 << 18
"""Hosts, sockets, GPUs and switches together, however few lines they stand in."""

MOST_RANKS = 1 << 20

_MOST_DOTS = 32
_STRING = re.compile(r""""(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_DOTTED = re.compile(rf"(?:[\w\"'-]+[ \t]*\.[ \t]*){{{_MOST_DOTS}}}")


def read_bounded(path: str | os.PathLike[str]) -> str:
    """Return the text of a file that is to be read as TOML.

    Raises:
        ValueError: It is too large, or has keys of very many words, whose reading takes time by their square.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"a topology file has at most {MOST_BYTES >> 20} MiB, and this has more")
    text = data.decode()
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > _MOST_DOTS and _DOTTED.search(_STRING.sub("_", line)):
            raise ValueError(f"line {number} has a key of more than {_MOST_DOTS} words with dots between them")
    return text


def check_number(of: str, number: int, most: int) -> None:
    """Check how many of something a file asks for.

    Raises:
        ValueError: Too many.

    Example:
        >>> check_number("parts", 10**12, MOST_PARTS)
        Traceback (most recent call last):
        ValueError: a topology has at most 262144 parts, and this asks for 1000000000000
    """
    if number > most:
        raise ValueError(f"a topology has at most {most} {of}, and this asks for {number}")
