"""Match the calls of different ranks, and find how long each waited and for which rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import itemgetter

from meshdist.profiler.event import Event, Track


def shifted(track: Track, offset_ns: int) -> Track:
    events = [_moved(event, offset_ns) for event in track.events]
    return replace(track, begin_ns=track.begin_ns + offset_ns, end_ns=track.end_ns + offset_ns, events=events)


def _moved(event: Event, offset_ns: int) -> Event:
    parts = tuple(_moved(part, offset_ns) for part in event.parts)
    return replace(event, begin_ns=event.begin_ns + offset_ns, end_ns=event.end_ns + offset_ns, parts=parts)


def with_waits(tracks: Sequence[Track]) -> list[Track]:
    """Return the tracks of several ranks; each call has the rank it waited for, and a sync one the time it waited.

    A collective ends only after the last rank has begun it; until then the other ranks wait for that rank. A receiver
    waits until the message is sent, and an unbuffered sender waits until the receiver calls. An async call waits as
    well, whatever its rank does meanwhile.
    """
    last, partners = last_of_collectives(tracks), {}
    for one, other in pairs(tracks):
        partners[id(one)], partners[id(other)] = other, one
    return [
        replace(track, events=[_waited(event, track.rank, last, partners) for event in track.events])
        for track in tracks
    ]


def last_of_collectives(tracks: Sequence[Track]) -> dict[tuple[str, int], tuple[int, int]]:
    last: dict[tuple[str, int], tuple[int, int]] = {}
    for track in tracks:
        for event in track.events:
            if event.is_collective:
                last[event.key] = max(last.get(event.key, (event.begin_ns, track.rank)), (event.begin_ns, track.rank))
    return last


def pairs(tracks: Sequence[Track]) -> list[tuple[Event, Event]]:
    """Return the send and receive events of each message that both sides recorded, parts of exchanges included.

    Messages of one sender, receiver, group and tag arrive in order.
    """
    sent = _lines(tracks, sends=True)
    received = _lines(tracks, sends=False)
    return [pair for line, events in sent.items() for pair in zip(events, received.get(line, []), strict=False)]


def _lines(tracks: Iterable[Track], sends: bool) -> dict[tuple[str, int, int | None, int], list[Event]]:
    lines: dict[tuple[str, int, int | None, int], list[Event]] = {}
    for track in tracks:
        for event in (message for call in track.events for message in call.parts or (call,)):
            if event.is_message and event.is_send == sends and not event.failed:
                sides = (track.rank, event.peer) if sends else (event.peer, track.rank)
                lines.setdefault((event.key[0], *sides, event.tag), []).append(event)
    return lines


def _waited(event: Event, rank: int, last: dict[tuple[str, int], tuple[int, int]], partners: dict[int, Event]) -> Event:
    if event.parts:
        # The call ends only after all messages to this rank have been sent.
        others = [(partners[id(part)], part.peer) for part in event.parts if id(part) in partners]
        came = [(other.begin_ns, peer) for other, peer in others if other.begin_ns <= event.end_ns]
        if not came:
            return event
        came_ns, who = max(came, key=itemgetter(0))
    elif event.is_message:
        partner = partners.get(id(event))
        if partner is None:
            return event
        came_ns, who = partner.begin_ns, event.peer
        if event.is_send and event.end_ns < came_ns:
            return event if event.is_async else replace(event, wait_ns=0)  # it was buffered
    else:
        came_ns, who = last[event.key]
    late_ns = min(max(came_ns - event.begin_ns, 0), event.end_ns - event.begin_ns)
    wait_ns = event.wait_ns if event.is_async else late_ns
    return replace(event, wait_ns=wait_ns, waits_for=who if late_ns and who != rank else None, late_ns=late_ns)
