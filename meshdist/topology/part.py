"""Parts of a topology: a tree of networks, hosts, sockets, switches and GPUs, and the parts of a host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Link:
    """The speed of a connection in each direction: a message takes `latency_s + nbytes / bandwidth` seconds.

    Args:
        latency_s: Seconds until the first byte arrives.
        bandwidth: Bytes per second.

    Raises:
        ValueError: A negative latency, or a bandwidth of 0 or less.
        TypeError: An argument is not a number.

    Example:
        >>> from meshdist.topology import Link
        >>> Link(latency_s=5e-6, bandwidth=12.5e9).seconds(125_000_000)
        0.010005
        >>> print(Link(5e-6, 12.5e9))
        12.5 GB/s, 5 us
    """

    latency_s: float
    bandwidth: float

    def __post_init__(self) -> None:
        for name, value in (("latency_s", self.latency_s), ("bandwidth", self.bandwidth)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Link: {name} must be a number, got {value!r} ({type(value).__name__})")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"Link: latency_s must be 0 or a positive number of seconds, got {self.latency_s}")
        if not self.bandwidth > 0:
            raise ValueError(f"Link: bandwidth must be a positive number of bytes per second, got {self.bandwidth}")

    def seconds(self, nbytes: float) -> float:
        """Return the time of a message of `nbytes` bytes that has the link to itself."""
        return self.latency_s + nbytes / self.bandwidth

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:.3g} GB/s, {self.latency_s * 1e6:.3g} us"


# Defaults without a description or measurement: orders of magnitude of common machines, to compare arrangements.
MEMORY = Link(1e-6, 50e9)
SOCKET_LINK = Link(0.3e-6, 40e9)
GPU_LINK = Link(2e-6, 25e9)
NETWORK = Link(5e-6, 12.5e9)


KINDS = ("network", "host", "socket", "switch", "gpu")


@dataclass(frozen=True)
class Part:
    """One part of a machine.

    Attributes:
        name: Unique in its topology.
        kind: "network", "host", "socket", "switch" or "gpu".
        parent: The part that this one is linked to towards the root; None for the root.
        link: The link to the parent; None for the root.
        memory: The connection between ranks on this same part.
        ranks: The global ranks that run here.
        cores: The number of processors, including those of parts below; 0 if unknown.

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
    """Return `parts` with parents before children, and siblings in the given order."""
    if not parts:
        raise ValueError("topology: expected at least one part, got none")
    by_name: dict[str, Part] = {}
    for part in parts:
        if by_name.setdefault(part.name, part) is not part:
            raise ValueError(f"topology: two parts are called {part.name!r}; give each its own name")
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
        raise ValueError(f"topology: the parents of {_some(lost)} form a cycle and never reach {roots[0].name!r}")
    return tuple(ordered)


def _children(parts: Sequence[Part], by_name: dict[str, Part]) -> dict[str, list[Part]]:
    children: dict[str, list[Part]] = {}
    for part in parts:
        if part.parent is None:
            continue
        if part.parent not in by_name:
            raise ValueError(
                f"topology: the parent of {part.name!r} is {part.parent!r}, which is not a part; there are"
                f" {_some(by_name)}"
            )
        children.setdefault(part.parent, []).append(part)
    return children


def checked_ranks(parts: Sequence[Part]) -> int:
    """Return the number of ranks; check that they are 0, 1, 2, ... and each on one part."""
    place: dict[int, str] = {}
    for part in parts:
        for rank in part.ranks:
            if isinstance(rank, bool) or not isinstance(rank, int):
                raise TypeError(f"topology: ranks of {part.name!r} must be integers, got {rank!r}")
            if rank in place and place[rank] == part.name:
                raise ValueError(f"topology: rank {rank} is listed twice on {part.name!r}; name it once")
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


ROOT = "network"


class Links(NamedTuple):
    memory: Link = MEMORY
    socket: Link = SOCKET_LINK
    gpu: Link = GPU_LINK
    network: Link = NETWORK


def network_part(num_hosts: int) -> list[Part]:
    """Return the root above several hosts; empty for a single host, which is the root itself."""
    return [Part(ROOT, "network")] if num_hosts > 1 else []


def host_parts(name: str, ranks: Sequence[int], sockets: int, gpus: int, links: Links, *, linked: bool) -> list[Part]:
    """Return a host and the parts in it.

    Args:
        name: The host; its sockets are `<name>/socket0` and so on, its GPUs `<name>/gpu0` and so on.
        ranks: They run on the GPUs, else on the sockets, else on the host, in blocks of equal size.
        sockets: The number of sockets; 0 for an undivided host.
        gpus: The number of GPUs, spread over the sockets in blocks.
        links: The links inside the host and to the network.
        linked: There is a network above.
    """
    on_host = () if sockets or gpus else tuple(ranks)
    parent, link = (ROOT, links.network) if linked else (None, None)
    parts = [Part(name, "host", parent, link, links.memory, on_host)]
    if sockets:
        _check_spread(name, "GPUs" if gpus else "ranks", gpus or len(ranks), "sockets", sockets)
    if gpus:
        _check_spread(name, "ranks", len(ranks), "GPUs", gpus)
    for index in range(sockets):
        here = () if gpus else _block(ranks, index, sockets)
        parts.append(Part(f"{name}/socket{index}", "socket", name, links.socket, links.memory, here))
    for index in range(gpus):
        parent = f"{name}/socket{index * sockets // gpus}" if sockets else name
        here = _block(ranks, index, gpus)
        parts.append(Part(f"{name}/gpu{index}", "gpu", parent, links.gpu, links.memory, here))
    return parts


def parts_of_hosts(num_ranks: int, most: int) -> list[Part]:
    counts = [min(most, num_ranks - first) for first in range(0, num_ranks, most)]
    parts = network_part(len(counts))
    for index, count in enumerate(counts):
        ranks = range(index * most, index * most + count)
        parts += host_parts(f"host{index}", ranks, 0, 0, Links(), linked=len(counts) > 1)
    return parts


def _check_spread(host: str, what: str, count: int, over: str, places: int) -> None:
    if places < 0 or count % places:
        raise ValueError(
            f"topology: host {host!r}: {count} {what} cannot be spread evenly over {places} {over};"
            f" make {what} a multiple of {over}"
        )


def _block(ranks: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    size = len(ranks) // count
    return tuple(ranks[index * size : (index + 1) * size])
