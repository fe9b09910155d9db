"""Fold equal hosts of a topology into one for a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshdist.topology.part import Part

# Up to this many equal hosts are drawn individually.
MOST_EQUAL = 4


class Folded(NamedTuple):
    """The parts to draw, and the label of each host that represents several equal ones."""

    parts: list[Part]
    stands_for: dict[str, str]


def folded(parts: Sequence[Part]) -> Folded:
    """Return the parts with equal hosts folded: more than four on one network with equal links become one."""
    within = _parts_within(parts)
    alike: dict[Any, list[str]] = {}
    for name, below in within.items():
        alike.setdefault(_kind_of(below), []).append(name)
    dropped: set[str] = set()
    stands_for = {}
    for names in alike.values():
        if len(names) > MOST_EQUAL:
            first = within[names[0]]
            dropped.update(part.name for name in names[1:] for part in within[name])
            stands_for[names[0]] = f"{names[0]} … {names[-1]}\n{len(names)} hosts, each {_contents(first)}"
    return Folded([part for part in parts if part.name not in dropped], stands_for)


def _parts_within(parts: Sequence[Part]) -> dict[str, list[Part]]:
    """Return each host's own part and the parts below it. A host linked to a host is a part of that host."""
    top: dict[str, str] = {}
    within: dict[str, list[Part]] = {}
    for part in parts:
        above = top.get(part.parent or "")
        if above is None and part.kind == "host":
            above = part.name
        if above is not None:
            top[part.name] = above
            within.setdefault(above, []).append(part)
    return within


def _kind_of(below: Sequence[Part]) -> tuple[Any, ...]:
    """Return a key that is equal for hosts drawn alike."""
    place = {part.name: number for number, part in enumerate(below)}
    return tuple(
        (part.kind, place.get(part.parent or "", part.parent), part.link, part.memory, len(part.ranks), part.cores)
        for part in below
    )


def _contents(below: Sequence[Part]) -> str:
    counts: dict[str, int] = {}
    for part in below[1:]:
        counts[part.kind] = counts.get(part.kind, 0) + 1
    if not counts:
        return f"{len(below[0].ranks)} rank{'s' * (len(below[0].ranks) != 1)}"
    return ", ".join(f"{count} {kind}{'es' if kind == 'switch' else 's'}" for kind, count in counts.items())
