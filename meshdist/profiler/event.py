"""Event: one recorded call of one rank; Track: all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from types import CodeType
from typing import Any

from meshdist.profiler.recording import AsyncCall, GroupRecording, SyncCall


@dataclass(frozen=True)
class Event:
    """One call of one rank. Times are nanoseconds of the rank's `perf_counter_ns`, or of rank 0's once they are merged.

    Attributes:
        name: What was called.
        group: The label of the group: the axis, of a group of a mesh.
        ranks: The global ranks of the group.
        begin_ns, end_ns: When it began, and when it was done.
        held_ns: For how long it held up the caller: of a sync call all of its time, of an async one its start and the
            waits for it.
        wait_ns: How much of that went by before the others had come; None where that is not known: of sync calls of one
            rank alone.
        nbytes: The longer of what the rank gave and what it got.
        site: File and line of the call, with a colon between.
        is_async: It was begun with `async_op=True`, or by isend or irecv.
        failed: It ended with an error.
        peer: Of a message, the global rank of the other side, -1 where none has come; None for a collective.
        tag: Of a message.
        key: The name of the group, and the place of the call among those of the group: of a collective the same on all
            its ranks.
        waits_for: The global rank that came last, where this one waited for it.
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    begin_ns: int
    end_ns: int
    held_ns: int
    wait_ns: int | None
    nbytes: int
    site: str
    is_async: bool
    failed: bool
    peer: int | None
    tag: int
    key: tuple[str, int]
    waits_for: int | None = None

    @property
    def is_message(self) -> bool:
        """Whether it is a message, and not a collective."""
        return self.peer is not None

    @property
    def is_send(self) -> bool:
        """Whether it is a message that the rank sent."""
        return self.is_message and "send" in self.name


@dataclass(frozen=True)
class Track:
    """What one rank recorded.

    Attributes:
        rank: Its global rank.
        host: The name of its host.
        begin_ns, end_ns: When recording began and ended.
        events: Its calls, by when they began.
        num_dropped: How many more there were.
    """

    rank: int
    host: str
    begin_ns: int
    end_ns: int
    events: list[Event] = field(repr=False)
    num_dropped: int = 0

    @property
    def seconds(self) -> float:
        """How long recording took."""
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def share(self) -> float:
        """The share of the time for which calls held up the rank, 0 to 1 where one thread makes all calls."""
        return sum(event.held_ns for event in self.events) / max(self.end_ns - self.begin_ns, 1)


def events_of(group: GroupRecording, now_ns: int) -> list[Event]:
    """Return the calls of a group; what is on its way still ends now."""
    events, num_collectives = [], 0
    for recorded in list(group.calls):
        event = _event(group, recorded, num_collectives, now_ns)
        num_collectives += not event.is_message
        events.append(event)
    return events


def _event(group: GroupRecording, recorded: Any, number: int, now_ns: int) -> Event:
    is_async = isinstance(recorded, AsyncCall)
    call = SyncCall(*(recorded.call if is_async else recorded))
    begin_ns, end_ns, held_ns, wait_ns = call.begin_ns, call.end_ns, call.end_ns - call.begin_ns, None
    peer, failed = call.peer, call.failed
    other = group.ranks[peer] if peer is not None and peer >= 0 else peer
    if call.was_async:
        wait_ns = 0
    if is_async:
        end_ns = now_ns if recorded.end_ns is None else recorded.end_ns
        wait_ns, held_ns = recorded.blocked_ns, held_ns + recorded.blocked_ns
        failed = recorded.failed
        other = other if recorded.source is None else recorded.source
    return Event(
        name=call.name,
        group=group.label,
        ranks=group.ranks,
        begin_ns=begin_ns,
        end_ns=end_ns,
        held_ns=held_ns,
        wait_ns=wait_ns,
        nbytes=call.nbytes,
        site=_line(call.code, call.instruction),
        is_async=is_async or call.was_async,
        failed=failed,
        peer=other,
        tag=call.tag,
        key=(group.name, number if peer is None else -1),
    )


def _line(code: CodeType, instruction: int) -> str:
    lines = (line for begin, end, line in code.co_lines() if begin <= instruction < end and line is not None)
    return f"{PurePath(code.co_filename).name}:{next(lines, code.co_firstlineno)}"
