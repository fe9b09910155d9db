"""Tracks as a trace in the JSON format of Chrome, which https://ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshdist.profiler.event import Event, Track
from meshdist.profiler.matching import pairs

# Shorter waits are not to be seen, and would be a second slice for nearly every call.
_SHOWN_WAIT_NS = 1000


def chrome_trace(tracks: Sequence[Track]) -> dict[str, Any]:
    """Return what the JSON file holds.

    Each rank is a process of the trace. Its first line has the sync calls; async calls, and those of other threads,
    that were on their way at the same time have lines of their own. Inside a call is, where it is known, the wait for
    the rank that came last. An arrow leads from each message as it was sent to where it was received.

    Args:
        tracks: Of all ranks, by one clock.
    """
    zero_ns = min((track.begin_ns for track in tracks), default=0)
    lines: dict[int, int] = {}
    shown: list[dict[str, Any]] = []
    for track in tracks:
        shown += _names(track, _lay_out(track, lines))
        for event in track.events:
            shown += _slices(event, track.rank, lines[id(event)], zero_ns)
    for number, (sent, received) in enumerate(pairs(tracks)):
        shown += _arrow(number, sent, received, lines, zero_ns)
    about = {f"rank {track.rank}": f"{track.num_dropped} calls dropped" for track in tracks if track.num_dropped}
    return {"traceEvents": shown, "displayTimeUnit": "ns", "otherData": about}


def _lay_out(track: Track, lines: dict[int, int]) -> int:
    """Give each event the first line on which nothing else is meanwhile, sync calls first; return how many lines."""
    ends: list[int] = []
    for event in sorted(track.events, key=lambda event: (event.is_async, event.begin_ns)):
        first = 1 if event.is_async else 0
        ends += [0] * (first - len(ends))
        line = next((k for k in range(first, len(ends)) if ends[k] <= event.begin_ns), len(ends))
        ends[line : line + 1] = [event.end_ns]
        lines[id(event)] = line
    return len(ends)


def _names(track: Track, num_lines: int) -> Iterator[dict[str, Any]]:
    process = {"ph": "M", "pid": track.rank}
    yield {**process, "name": "process_name", "args": {"name": f"rank {track.rank} on {track.host}"}}
    yield {**process, "name": "process_sort_index", "args": {"sort_index": track.rank}}
    for line in range(num_lines):
        name = "calls" if line == 0 else f"at the same time {line}"
        yield {**process, "tid": line, "name": "thread_name", "args": {"name": name}}
        yield {**process, "tid": line, "name": "thread_sort_index", "args": {"sort_index": line}}


def _slices(event: Event, rank: int, line: int, zero_ns: int) -> Iterator[dict[str, Any]]:
    place = {"ph": "X", "pid": rank, "tid": line, "ts": (event.begin_ns - zero_ns) / 1e3}
    about: dict[str, Any] = {"group": event.group, "ranks": list(event.ranks), "bytes": event.nbytes, "at": event.site}
    if event.is_message:
        about |= {"to" if event.is_send else "from": event.peer, "tag": event.tag}
    if event.wait_ns is not None:
        about["waited_us"] = event.wait_ns / 1e3
    if event.failed:
        about["failed"] = True
    duration_us = (event.end_ns - event.begin_ns) / 1e3
    yield {**place, "name": f"{event.name} {event.group}", "cat": event.group, "dur": duration_us, "args": about}
    if event.waits_for is not None and (event.wait_ns or 0) >= _SHOWN_WAIT_NS:
        waits = f"waits for rank {event.waits_for}"
        yield {**place, "name": waits, "cat": "wait", "dur": (event.wait_ns or 0) / 1e3}


def _arrow(number: int, sent: Event, received: Event, lines: dict[int, int], zero_ns: int) -> Iterator[dict[str, Any]]:
    common = {"name": "message", "cat": "message", "id": number}
    begin_us, end_us = (sent.begin_ns - zero_ns) / 1e3, (received.end_ns - 1 - zero_ns) / 1e3  # inside of it
    yield {**common, "ph": "s", "pid": received.peer, "tid": lines[id(sent)], "ts": begin_us}
    # "e": the arrow ends at the slice that is there at this time, not at the next one.
    yield {**common, "ph": "f", "bp": "e", "pid": sent.peer, "tid": lines[id(received)], "ts": end_us}
