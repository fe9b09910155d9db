"""The parts that a topology is made of: a tree of networks, hosts, sockets, switches and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshdist.topology.link import MEMORY, Link

KINDS = ("network", "host", "socket", "switch", "gpu")


@dataclass(frozen=True)
class Part:
    """Describe one part of a machine.

    Attributes:
        name: Unique in its topology.
        kind: "network", "host", "socket", "switch" or "gpu".
        parent: The part that this one is linked to on the way to the rest; None for the root.
        link: To the parent. The root has none.
        memory: The way between ranks that sit on this very part.
        ranks: The global ranks that run here.
        cores: How many processors it has, those of parts below it included; 0 where unknown.

    Raises:
        ValueError: An unknown kind, a parent without a link or a link without a parent.
    """

    name: str
    kind: str
    parent: str | None = None
    link: Link | None = None
    memory: Link = MEMORY
    ranks: tuple[int, ...] = ()
    cores: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"topology: the kind of {self.name!r} must be one of {', '.join(map(repr, KINDS))}, got {self.kind!r}"
            )
        if (self.parent is None) != (self.link is None):
            has, lacks = ("a parent", "link") if self.link is None else ("a link", "parent")
            raise ValueError(
                f"topology: part {self.name!r} has {has} but no {lacks}; give both, or neither for the root"
            )


def checked_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return `parts` in an order in which parents precede children, siblings as they were given.

    Raises:
        ValueError: Names that repeat, an unknown parent, not exactly one root, or a circle.
    """
    if not parts:
        raise ValueError("topology: expected at least one part, got none")
    by_name: dict[str, Part] = {}
    for part in parts:
        if by_name.setdefault(part.name, part) is not part:
            raise ValueError(f"topology: two parts are called {part.name!r}; give each a name of its own")
    roots = [part for part in parts if part.parent is None]
    if len(roots) != 1:
        names = ", ".join(repr(part.name) for part in roots) or "none"
        raise ValueError(
            f"topology: exactly one part must have no parent, the root, but {len(roots)} have none ({names});"
            " link hosts that are not linked through a part of kind 'network'"
        )
    children = _children(parts, by_name)
    ordered, waiting = [], [roots[0]]
    while waiting:
        part = waiting.pop()
        ordered.append(part)
        waiting.extend(reversed(children.get(part.name, [])))
    if len(ordered) < len(parts):
        reached = {part.name for part in ordered}
        lost = [part.name for part in parts if part.name not in reached]
        raise ValueError(f"topology: the parents of {_some(lost)} run in a circle and never reach {roots[0].name!r}")
    return tuple(ordered)


def _children(parts: Sequence[Part], by_name: dict[str, Part]) -> dict[str, list[Part]]:
    """Return the parts below each part."""
    children: dict[str, list[Part]] = {}
    for part in parts:
        if part.parent is None:
            continue
        if part.parent not in by_name:
            raise ValueError(
                f"topology: the parent of {part.name!r} is {part.parent!r}, which is no part; there are"
                f" {_some(by_name)}"
            )
        children.setdefault(part.parent, []).append(part)
    return children


def checked_ranks(parts: Sequence[Part]) -> int:
    """Return how many ranks there are, after checking that they are 0, 1, 2, ... and each sits on one part.

    Raises:
        ValueError: A rank is missing, sits in two places, or is negative; or there is none.
        TypeError: A rank is no integer.
    """
    place: dict[int, str] = {}
    for part in parts:
        for rank in part.ranks:
            if isinstance(rank, bool) or not isinstance(rank, int):
                raise TypeError(f"topology: ranks of {part.name!r} must be integers, got {rank!r}")
            if rank in place:
                raise ValueError(f"topology: rank {rank} is on {place[rank]!r} and on {part.name!r}; it can be on one")
            place[rank] = part.name
    if not place:
        raise ValueError("topology: no part has ranks; say where they run, as `ranks` of hosts, sockets or GPUs")
    missing = sorted(set(range(len(place))) - set(place))
    if missing:
        odd = max(place) if min(place) >= 0 else min(place)
        raise ValueError(
            f"topology: {len(place)} ranks must be numbered 0 to {len(place) - 1}, but rank {missing[0]} is nowhere"
            f" and rank {odd} is on {place[odd]!r}"
        )
    return len(place)


def _some(names: Sequence[str] | dict[str, Part], most: int = 8) -> str:
    shown = [repr(name) for name in list(names)[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
