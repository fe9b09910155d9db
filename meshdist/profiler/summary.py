"""The totals of a timeline by group and name, the slowest rank, and tables and sentences about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshdist.profiler.event import Track
from meshdist.profiler.tables import bytes_text, text_width
from meshdist.system.digits import three_digits

_HEAD = ("group", "call", "calls", "bytes", "time", "waiting", "share", "mean", "longest", "bytes/s")
_NAMES = _HEAD[:2]
# The columns of the two tables for narrow terminals.
_TIMES = (*_NAMES, "calls", "time", "waiting", "share", "mean", "longest")
_VOLUME = (*_NAMES, "calls", "bytes", "bytes/s")
# The share of the time from which on the set-up of groups is told.
_MUCH = 0.05
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


@dataclass(frozen=True)
class Total:
    """The calls of one name on groups of one label, over all recorded ranks.

    Attributes:
        calls: The number of calls; a collective of four ranks counts four times.
        nbytes: The sum of their sizes in bytes.
        held_s: The time for which they blocked their callers, in seconds.
        wait_s: The part of it spent waiting for other ranks, set-up excluded; None if unknown.
        longest_s: The time for which the longest call lasted.
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
            if event.wait_ns is not None and not event.sets_up:
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
        rank: Its global rank.
        wait_s: The total time for which the other ranks waited for it, in seconds.
        calls: The number of calls in which they waited.
    """

    rank: int
    wait_s: float
    calls: int


def slowest_rank(tracks: Sequence[Track]) -> Slowest | None:
    waits: dict[int, tuple[int, int]] = {}
    for track in tracks:
        for event in track.events:
            # Ranks reach the set-up of a group at times that differ by their start, which says nothing of their steps.
            # An async call that waits need not block its rank.
            wait_ns = min(event.wait_ns or 0, event.late_ns)
            if event.waits_for is not None and wait_ns and not event.sets_up:
                nanoseconds, calls = waits.get(event.waits_for, (0, 0))
                waits[event.waits_for] = nanoseconds + wait_ns, calls + 1
    if not waits:
        return None
    rank = max(waits, key=lambda other: waits[other])
    return Slowest(rank, waits[rank][0] / 1e9, waits[rank][1])


def rows(tracks: Sequence[Track], found: dict[str, dict[str, Total]]) -> list[tuple[str, ...]]:
    num_ranks, seconds = len(tracks), sum(track.seconds for track in tracks)
    table: list[tuple[str, ...]] = [_HEAD]
    for label, of_group in found.items():
        for name, total in of_group.items():
            waiting = "" if total.wait_s is None else duration_text(total.wait_s / num_ranks)
            table.append(
                (
                    label,
                    name,
                    f"{total.calls / num_ranks:.1f}".removesuffix(".0"),
                    bytes_text(total.nbytes / num_ranks),
                    duration_text(total.held_s / num_ranks),
                    waiting,
                    f"{total.held_s / max(seconds, 1e-9):.1%}",
                    duration_text(total.held_s / total.calls),
                    duration_text(total.longest_s),
                    f"{bytes_text(total.nbytes / total.held_s)}/s" if total.nbytes and total.held_s else "",
                )
            )
    return table


def fitting(
    table: list[tuple[str, ...]], width: int, width_of: Callable[[Sequence[Sequence[str]]], int]
) -> list[list[tuple[str, ...]]]:
    """Return `rows` as one table, or as several if `width_of` says that one is wider than `width`; 0 is any width.

    Where names are short, one is of times and one of bytes; else each has as many columns as fit.
    """
    if width <= 0 or width_of(table) <= width:
        return [table]
    parts = [_columns(table, _TIMES), _columns(table, _VOLUME)]
    return parts if all(text_width(part) <= width for part in parts) else _packed(table, width)


def _columns(table: list[tuple[str, ...]], names: Sequence[str]) -> list[tuple[str, ...]]:
    part = [_HEAD.index(name) for name in names]
    return [tuple(row[column] for column in part) for row in table]


def _packed(table: list[tuple[str, ...]], width: int) -> list[list[tuple[str, ...]]]:
    """Return tables that have the names and, of the other columns, one after the other as many as fit."""
    parts = [[*_NAMES]]
    for name in (*_TIMES[len(_NAMES) :], "bytes", "bytes/s"):
        if len(parts[-1]) > len(_NAMES) and text_width(_columns(table, [*parts[-1], name])) > width:
            parts.append([*_NAMES])
        parts[-1].append(name)
    return [_columns(table, part) for part in parts]


def sentences(tracks: Sequence[Track], slowest: Slowest | None) -> list[str]:
    shares = {track.rank: track.share for track in tracks}
    most = max(shares, key=lambda rank: shares[rank])
    seconds = sum(track.seconds for track in tracks) / len(tracks)
    said = f"in communication: {sum(shares.values()) / len(shares):.1%} of {duration_text(seconds)}"
    if len(tracks) == 1:
        lines = [f"{said}, rank {most}"]
    else:
        least = min(shares, key=lambda rank: shares[rank])
        lines = [
            f"{said}, averaged over {len(tracks)} ranks; least on rank {least} ({shares[least]:.1%}), most on rank"
            f" {most} ({shares[most]:.1%})"
        ]
    lines += _set_up(tracks)
    if slowest is not None:
        lines.append(
            f"slowest: rank {slowest.rank}; the others waited {duration_text(slowest.wait_s)} for it, in"
            f" {slowest.calls} of their calls"
        )
    lines += [
        f"rank {track.rank}: {track.num_dropped} further calls were not recorded"
        for track in tracks
        if track.num_dropped
    ]
    return lines


def _set_up(tracks: Sequence[Track]) -> list[str]:
    """Say how long the first calls of groups took, which set them up, where that is much of the time."""
    found: dict[str, float] = {}
    for track in tracks:
        for event in track.events:
            if event.sets_up:
                found[event.group] = found.get(event.group, 0.0) + event.held_ns / 1e9 / len(tracks)
    if sum(found.values()) < _MUCH * sum(track.seconds for track in tracks) / len(tracks):
        return []
    each = ", ".join(f"{label} {duration_text(seconds)}" for label, seconds in found.items())
    return [
        f"of that, set-up of groups in their first calls: {each}; to exclude it, call a barrier on each group before"
        " the profile"
    ]


def duration_text(seconds: float) -> str:
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{three_digits(seconds / unit)} {name}"
    return "0"
