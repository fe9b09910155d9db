"""Event: a recorded call of a rank. Track: all events of a rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePath
from types import CodeType
from typing import Any

from meshdist.profiler.recording import AsyncCall, GroupRecording, SyncCall
from meshdist.runtime.call_site import line_of, place_in


@dataclass(frozen=True)
class Event:
    """One call of one rank. Times are in nanoseconds on the rank's `perf_counter_ns`, or on rank 0's after merging.

    Attributes:
        name: The function.
        group: The label of the group: the axis, for a group of a mesh.
        ranks: The global ranks of the group.
        begin_ns, end_ns: The begin and the completion.
        held_ns: The time for which the call blocked its caller: the duration of a sync call; for an async one, the
            start and all waits.
        wait_ns: The part of it spent waiting for other ranks; None if unknown (sync calls of an unmerged profile).
        nbytes: The larger of input and output.
        site: File and line of the call, separated by a colon.
        is_async: The call had `async_op=True`, or was isend or irecv.
        failed: The call raised.
        peer: For a message, the global rank of the other side, -1 if none has matched; None for other calls.
        tag: The tag of a message.
        key: The name of the group, and the index of the call on it; equal on all ranks of a collective.
        waits_for: The global rank that this call waited for, the last one to begin it.
        late_ns: From the begin of this call to that of the rank it waited for, or to its end.
        parts: The messages of `sendrecv`, `shift` and `halo_exchange`, with the times of the whole call.
        sets_up: This call set up the group, as its first one does.
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
    late_ns: int = 0
    parts: tuple[Event, ...] = ()
    sets_up: bool = False

    @property
    def is_message(self) -> bool:
        """Whether this is a message; `sendrecv`, `shift` and `halo_exchange` have some as `parts`."""
        return self.peer is not None

    @property
    def is_collective(self) -> bool:
        """Whether all ranks of the group make this call together."""
        return self.peer is None and not self.parts

    @property
    def is_send(self) -> bool:
        """Whether this is a sent message."""
        return self.is_message and "send" in self.name


@dataclass(frozen=True)
class Track:
    """The recording of one rank.

    Attributes:
        rank: The global rank.
        host: The name of its host.
        begin_ns, end_ns: The begin and end of recording.
        events: The calls, sorted by begin.
        num_dropped: The number of calls beyond the limit.
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
        """The share of time for which calls blocked the rank, 0 to 1 if one thread makes all calls."""
        return self.share_since(self.begin_ns)

    def share_since(self, begin_ns: int) -> float:
        """Return the same of the time from `begin_ns` on."""
        held = (min(event.held_ns, event.end_ns - begin_ns) for event in self.events if event.end_ns > begin_ns)
        return sum(held) / max(self.end_ns - max(self.begin_ns, begin_ns), 1)


def events_of(group: GroupRecording, now_ns: int) -> list[Event]:
    events, num_collectives = [], 0
    for recorded in list(group.calls):
        event = _event(group, recorded, num_collectives, now_ns)
        num_collectives += event.is_collective
        events.append(event)
    if events and group.begins_with_set_up:
        events[0] = replace(events[0], sets_up=True)
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
    whole = Event(
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
        key=(group.name, number if peer is None and not call.parts else -1),
    )
    parts = tuple(
        replace(
            whole,
            name="isend" if part.is_send else "irecv",
            peer=group.ranks[part.peer] if part.peer >= 0 else part.peer,
            tag=part.tag,
            nbytes=part.nbytes,
        )
        for part in call.parts
    )
    return replace(whole, parts=parts) if parts else whole


def _line(code: CodeType, instruction: int) -> str:
    return PurePath(place_in(code.co_filename, line_of(code, instruction))).name
