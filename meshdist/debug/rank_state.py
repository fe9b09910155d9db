"""rank_state: the state of one rank as plain data, for dumps and for other ranks."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from meshdist._version import __version__
from meshdist.debug.stacks import Stack, stacks
from meshdist.runtime.flight_recorder import (
    COMPLETED,
    CREATED,
    ERROR,
    SEQUENCE,
    STARTED,
    Record,
    clock,
    facts_in,
    site_in,
)

if TYPE_CHECKING:
    from meshdist.groups.world import World

FORMAT = 1
GAVE_UP = "gave up"
"""The reason of the last state of a rank whose wait failed."""

RECORDS_SENT = 50
"""How many calls a state for other ranks has at least."""


def rank_state(world: World, reason: str, most: int | None = None) -> dict[str, Any]:
    """Return what a rank does and has done, as plain data.

    `most` limits the records to the last ones, besides those of unfinished calls; None keeps all in the ring.
    """
    # Records have times of a monotonic clock; convert them to wall-clock time.
    offset = time.time_ns() - clock()
    records = world.recorder.records()
    if most is not None and len(records) > most:
        records = [record for record in records[:-most] if not record[COMPLETED]] + records[-most:]
    card = world.card
    found = stacks()
    own = found.get(world.thread) or Stack([], None, False)
    return {
        "format": FORMAT,
        "meshdist": __version__,
        "reason": reason,
        "rank": world.rank,
        "world_size": world.size,
        "shrunk": world.num_shrunk,
        "host": card.host_name,
        "pid": card.pid,
        "time_s": time.time_ns() / 1e9,
        "began_s": _seconds(world.recorder.began, offset),
        "groups": {
            group.name: {
                "label": group.label,
                "ranks": list(group.ranks),
                "backend": group.backend_name,
                "calls": group.num_calls,
                "messages": group.messages.num_messages,
            }
            for group in world.groups
        },
        "records": [_record(record, offset) for record in records],
        "stack": own.lines,
        "place": own.place,
        "in_call": own.in_call,
        "other_threads": {
            thread.name: found[thread.ident].lines
            for thread in threading.enumerate()
            if thread.ident in found and thread.ident != world.thread
        }
        if world.ranks_are_processes
        else {},
    }


def _record(record: Record, offset: int) -> dict[str, Any]:
    facts = facts_in(record)
    site, function = site_in(record)
    data = {
        "group": facts.group,
        "label": facts.label,
        "sequence": record[SEQUENCE],
        "call": facts.name,
        "kind": "message" if facts.is_message else "collective",
        "text": facts.text,
        "sent": [[dtype, list(shape)] for dtype, shape in facts.sent],
        "received": [[dtype, list(shape)] for dtype, shape in facts.received],
        "root": facts.root,
        "tag": facts.tag,
        "created_s": _seconds(record[CREATED], offset),
        "started_s": _seconds(record[STARTED], offset),
        "completed_s": _seconds(record[COMPLETED], offset),
        "timeout_s": facts.timeout_s if facts.timeout_s != float("inf") else None,
        "state": _state(record),
        "site": site,
        "function": function,
    }
    if len(record) > ERROR:
        data["error"] = record[ERROR]
    return data


def _state(record: Record) -> str:
    if len(record) > ERROR:
        return "failed"
    if record[COMPLETED]:
        return "completed"
    return "started" if record[STARTED] else "queued"


def _seconds(time_ns: int, offset: int) -> float | None:
    return (time_ns + offset) / 1e9 if time_ns else None
