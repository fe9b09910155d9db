"""Totals: the recorded calls of all ranks by group and name, and the rank that the others waited for most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshdist.profiler.event import Track


@dataclass(frozen=True)
class Total:
    """The calls of one name on groups of one label, over all recorded ranks.

    Attributes:
        calls: The number of calls; a collective of four ranks counts four times.
        nbytes: Their bytes.
        held_s: The time for which they blocked their callers, in seconds.
        wait_s: The part of it spent waiting for other ranks; None if unknown.
        longest_s: The longest call.
    """

    calls: int = 0
    nbytes: int = 0
    held_s: float = 0.0
    wait_s: float | None = None
    longest_s: float = 0.0


def totals(tracks: Sequence[Track]) -> dict[str, dict[str, Total]]:
    found: dict[str, dict[str, Total]] = {}
    for track in tracks:
        for event in track.events:
            of_group = found.setdefault(event.group, {})
            before = of_group.get(event.name, Total())
            wait_s = before.wait_s
            if event.wait_ns is not None:
                wait_s = (wait_s or 0.0) + event.wait_ns / 1e9
            of_group[event.name] = Total(
                before.calls + 1,
                before.nbytes + event.nbytes,
                before.held_s + event.held_ns / 1e9,
                wait_s,
                max(before.longest_s, (event.end_ns - event.begin_ns) / 1e9),
            )
    return {
        label: dict(sorted(of_group.items(), key=lambda item: -item[1].held_s))
        for label, of_group in sorted(found.items(), key=lambda item: -sum(one.held_s for one in item[1].values()))
    }


@dataclass(frozen=True)
class Slowest:
    """The rank that the others waited for most.

    Attributes:
        rank: The global rank.
        wait_s: The total waiting time of the other ranks, in seconds.
        calls: The number of calls in which they waited.
    """

    rank: int
    wait_s: float
    calls: int


def slowest_rank(tracks: Sequence[Track]) -> Slowest | None:
    waits: dict[int, tuple[int, int]] = {}
    for track in tracks:
        for event in track.events:
            if event.waits_for is not None and event.wait_ns is not None:
                nanoseconds, calls = waits.get(event.waits_for, (0, 0))
                waits[event.waits_for] = nanoseconds + event.wait_ns, calls + 1
    if not waits:
        return None
    rank = max(waits, key=lambda other: waits[other])
    return Slowest(rank, waits[rank][0] / 1e9, waits[rank][1])
