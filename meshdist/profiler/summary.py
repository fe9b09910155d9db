"""Tables and sentences about a timeline."""

from __future__ import annotations

from collections.abc import Sequence

from meshdist.profiler.event import Track
from meshdist.profiler.tables import bytes_text
from meshdist.profiler.totals import Slowest, Total

_HEAD = ("group", "call", "calls", "bytes", "time", "of it waiting", "share", "mean", "longest", "bytes/s")
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


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
            f"{said}, on average of {len(tracks)} ranks; least on rank {least} ({shares[least]:.1%}), most on rank"
            f" {most} ({shares[most]:.1%})"
        ]
    if slowest is not None:
        lines.append(
            f"slowest: rank {slowest.rank}; the others waited {duration_text(slowest.wait_s)} for it, in"
            f" {slowest.calls} of their calls"
        )
    lines += [
        f"rank {track.rank}: {track.num_dropped} calls more were not kept" for track in tracks if track.num_dropped
    ]
    return lines


def duration_text(seconds: float) -> str:
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return "0"
