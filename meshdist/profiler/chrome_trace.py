"""Tracks as a trace in Chrome's JSON format, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshdist.profiler.call_matching import pairs
from meshdist.profiler.event import Event, Track
from meshdist.system.plurals import counted

# Perfetto treats the thread whose number is that of its process as main thread, and merges other lines into it.
_PROCESS = 1
# Shorter waits are invisible, and would add a slice to nearly every call.
_SHOWN_WAIT_NS = 1000


def chrome_trace(tracks: Sequence[Track]) -> dict[str, Any]:
    """Return the trace of the tracks of all ranks, on one clock.

    Ranks are threads of one process, since viewers keep the order of threads but not of processes. Each rank has a line
    for its sync calls; concurrent async calls, and calls of other threads, have lines below it. A slice inside a call
    shows its wait for the last rank, if known. Arrows connect sends and receives.
    """
    zero_ns = min((track.begin_ns for track in tracks), default=0)
    lines: dict[int, int] = {}
    num_lines = [_lay_out(track, lines) for track in tracks]
    apart = 10 ** len(str(max(num_lines, default=0)))  # the lines of rank 2 are 30, 31, ... if all ranks have few
    hosts = list(dict.fromkeys(track.host for track in tracks))
    error_prefix = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    shown: list[dict[str, Any]] = [_name("process", 0, f"ranks on {error_prefix}")]
    for track, count in zip(tracks, num_lines, strict=True):
        first = apart * (1 + track.rank)
        for event in track.events:
            lines[id(event)] += first
            lines.update((id(part), lines[id(event)]) for part in event.parts)
        threads = {lines[id(event)] for event in track.events if not event.is_async}
        shown += _names(track, range(first, first + max(count, 1)), threads, len(hosts) > 1)
        for event in track.events:
            shown += _slices(event, lines[id(event)], zero_ns)
    for number, (sent, received) in enumerate(pairs(tracks)):
        shown += _arrow(number, sent, received, lines, zero_ns)
    about = {
        f"rank {track.rank}": f"{counted(track.num_dropped, 'call')} dropped" for track in tracks if track.num_dropped
    }
    return {"traceEvents": shown, "displayTimeUnit": "ns", "otherData": about}


def _lay_out(track: Track, lines: dict[int, int]) -> int:
    """Give each event the first free line, sync calls first; return the number of lines."""
    ends: list[int] = []
    for event in sorted(track.events, key=lambda event: (event.is_async, event.begin_ns)):
        first = 1 if event.is_async else 0
        ends += [0] * (first - len(ends))
        line = next((k for k in range(first, len(ends)) if ends[k] <= event.begin_ns), len(ends))
        ends[line : line + 1] = [event.end_ns]
        lines[id(event)] = line
    return len(ends)


def _names(track: Track, lines: range, threads: set[int], with_host: bool) -> Iterator[dict[str, Any]]:
    """Yield the names of the lines of a rank; `threads` are those with sync calls: the first, and of other threads."""
    rank = f"rank {track.rank} on {track.host}" if with_host else f"rank {track.rank}"
    for number, line in enumerate(lines):
        kind = "thread" if line in threads else "async"
        yield _name("thread", line, rank if number == 0 else f"rank {track.rank}, {kind} {number}")
        yield {**_name("thread", line, ""), "name": "thread_sort_index", "args": {"sort_index": line}}


def _name(kind: str, line: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": line, "name": f"{kind}_name", "args": {"name": name}}


def _slices(event: Event, line: int, zero_ns: int) -> Iterator[dict[str, Any]]:
    place = {"ph": "X", "pid": _PROCESS, "tid": line, "ts": (event.begin_ns - zero_ns) / 1e3}
    about: dict[str, Any] = {"group": event.group, "ranks": list(event.ranks), "bytes": event.nbytes, "at": event.site}
    if event.is_message:
        about |= {"to" if event.is_send else "from": event.peer, "tag": event.tag}
    for part in event.parts:
        about.setdefault("to" if part.is_send else "from", []).append(part.peer)
    if event.wait_ns is not None:
        about["waited_us"] = event.wait_ns / 1e3
    if event.failed:
        about["failed"] = True
    duration_us = (event.end_ns - event.begin_ns) / 1e3
    yield {**place, "name": f"{event.name} {event.group}", "cat": event.group, "dur": duration_us, "args": about}
    if event.waits_for is not None and event.late_ns >= _SHOWN_WAIT_NS:
        yield {**place, "name": f"waits for rank {event.waits_for}", "cat": "wait", "dur": event.late_ns / 1e3}


def _arrow(number: int, sent: Event, received: Event, lines: dict[int, int], zero_ns: int) -> Iterator[dict[str, Any]]:
    common = {"name": "message", "cat": "message", "id": number, "pid": _PROCESS}
    begin_us, end_us = (sent.begin_ns - zero_ns) / 1e3, (received.end_ns - 1 - zero_ns) / 1e3  # inside the slice
    yield {**common, "ph": "s", "tid": lines[id(sent)], "ts": begin_us}
    # "e": the arrow ends at the enclosing slice, not at the next one.
    yield {**common, "ph": "f", "bp": "e", "tid": lines[id(received)], "ts": end_us}
