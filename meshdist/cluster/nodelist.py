"""Slurm's nodelists: "node[1-3,7],gpu-05"."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_MOST_NODES = 1_000_000
# Patterns, which are compiled at their first use: few jobs have a nodelist.
_ITEM = r"(?:[^\[\],]|\[[^\[\]]*\])+"
_PART = r"\[([^\[\]]*)\]|([^\[\]]+)"
_RANGE = r"([0-9]{1,18})(?:-([0-9]{1,18}))?"


def expand_nodelist(text: str) -> list[str]:
    """Return the host names of a nodelist, in order; raise ValueError if it is not one.

    Brackets hold numbers and ranges, which keep their leading zeros; a name may have several brackets.
    """
    nodes = list(itertools.islice(_expanded(text), _MOST_NODES + 1))
    if len(nodes) > _MOST_NODES:
        raise ValueError(f"the nodelist {text!r} has more than {_MOST_NODES} hosts")
    return nodes


def _expanded(text: str) -> Iterator[str]:
    position = 0
    while True:
        item = re.compile(_ITEM).match(text, position)
        if item is None:
            raise _wrong(text, position)
        choices = [
            [literal] if literal else _numbers(text, ranges) for ranges, literal in re.findall(_PART, item.group())
        ]
        yield from map("".join, itertools.product(*choices))
        position = item.end()
        if position == len(text):
            return
        if text[position] != ",":
            raise _wrong(text, position)
        position += 1


def _numbers(text: str, ranges: str) -> list[str]:
    numbers: list[str] = []
    for each in ranges.split(","):
        found = re.fullmatch(_RANGE, each)
        if found is None:
            raise ValueError(
                f"the nodelist {text!r}: expected a number or a range such as 1-3 in brackets, got {each!r}"
            )
        first, last = found.group(1), found.group(2) or found.group(1)
        if not 0 <= int(last) - int(first) < _MOST_NODES:
            raise ValueError(f"the nodelist {text!r}: the range {each} ends before it begins, or is too long")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _wrong(text: str, position: int) -> ValueError:
    if position >= len(text):
        return ValueError(f"the nodelist {text!r}: expected a host name at its end")
    return ValueError(
        f"the nodelist {text!r}: did not expect {text[position]!r} at character {position + 1}; expected host names "
        "such as node[1-3,7],gpu-05"
    )
