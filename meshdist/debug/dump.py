"""The state of a rank as plain data: for `flight_recorder`, for dumps, and for the reports of other ranks."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from meshdist._version import __version__
from meshdist.core import Record
from meshdist.debug.stacks import Stack, stack_of_error, stacks
from meshdist.groups.world import current_world
from meshdist.runtime.departure import PeerFailure, describe, in_words
from meshdist.runtime.flight_recorder import DIRECTORY_VARIABLE, clock, facts_in, site_in

if TYPE_CHECKING:
    from meshdist.groups.world import World

FORMAT = 1
GAVE_UP, TIMED_OUT = "gave up", "timed out"
"""The reasons of the last state of a rank whose wait failed: by its timeout, or by another error."""
BY_SIGNAL, BY_CALL = "SIGUSR1", "asked for by flight_recorder()"
"""The reasons of a state after which the rank has gone on."""

MOST_OLD_S = 10.0
"""Ranks in a long wait publish their states more often than this."""
RECORDS_SENT = 50
"""How many calls a state for other ranks has at least."""


def flight_recorder(directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Return the last 2,000 calls of this rank, and what it does now; recording is always on.

    `python -m meshdist.debug report DIR` reads the files of all ranks and reports what went wrong. Files are also
    written to the directory named by MESHDIST_FLIGHT_RECORDER_DIR when a call fails, when an exception ends the rank,
    when the process is asked to end by SIGTERM, as meshrun does with the other ranks, and when it gets SIGUSR1, unless
    the script handles that signal.

    Args:
        directory: Where to write the state as well, as `rank_<rank>.json`; made if missing. None writes nothing.

    Returns:
        Plain data: `rank`, `world_size`, `host`, `pid`, `time_s`; `shrunk`, how often the world was shrunk; `groups` by
        name with `label`, `ranks` and the number of `calls`; `stack`, the lines of the rank's thread, `place`, the
        innermost line of your code, and `in_call`, whether it waits for this package; in a file, if an exception has
        ended the rank, `raised` with its `error` and `time_s`, and `stack` is that of the exception; `awaits`, if the
        rank waits for any of some async calls: the indices of these `calls` in `records`, and `since_s`; and `records`,
        the oldest first. Each has: `group`, its `label`, `sequence` (1 for the group's first collective; messages have
        their own numbers), `call`, `kind` (collective or message), `text`, `sent` and `received` (dtype and shape of
        each array), `root` (a rank of the group), `tag`, `created_s`, `started_s` and `completed_s` (seconds since
        1970; None for not yet), `timeout_s`, `state` (queued, started, completed or failed), `site` (file and line of
        the user's call, as train.py:12), `function` and, if it failed, `error`, and `peer` if the end of another rank
        is the cause: its global `rank`, `exit` and `how`, the same in words.

    Raises:
        ValueError: There is no world.
        OSError: The file cannot be written.

    Example:
        >>> import meshdist as dist
        >>> def main():
        ...     dist.barrier()
        ...     return [record["text"] for record in dist.flight_recorder()["records"]]
        >>> dist.run(main, 2)
        [['barrier()'], ['barrier()']]
    """
    world = current_world()
    state = rank_state(world, BY_CALL)
    if directory is not None:
        write_state(state, directory)
    return state


def write_state(state: dict[str, Any], directory: str | os.PathLike[str]) -> str:
    """Write a rank's state into `directory` atomically; return the file.

    Nothing is imported here: SIGTERM may interrupt the import, whose lock the thread that answers would wait for.
    """
    os.makedirs(directory, exist_ok=True)
    path = _file_of(state["rank"], directory)
    # Another thread of the rank may write the same file.
    draft = os.path.join(directory, f".{os.path.basename(path)}.{os.getpid()}-{threading.get_ident()}")
    try:
        with open(draft, "w") as file:
            json.dump(state, file)
            file.write("\n")
        os.replace(draft, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    return path


def _file_of(rank: int, directory: str | os.PathLike[str]) -> str:
    return os.path.join(directory, f"rank_{rank}.json")


def dump_fault(world: World, reason: str) -> None:
    """Write the state of a rank whose call failed, or that has raised, to the environment's directory; never raise."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return
    try:
        path = write_state(rank_state(world, reason), directory)
    except OSError as error:
        world.log.warning("cannot write the flight recorder's file to %s: %s", directory, error)
    else:
        world.log.info("the flight recorder's last calls are in %s", path)


def dump_terminated(world: World) -> None:
    """Write the state of a rank that is asked to end, unless its file is of the call that failed just before."""
    records = world.recorder.records()
    has_failed = bool(records) and records[-1].error is not None
    if not (has_failed and _has_written(world, os.environ.get(DIRECTORY_VARIABLE, ""))):
        dump_fault(world, "SIGTERM")


def _has_written(world: World, directory: str) -> bool:
    """Return whether the file of the rank in `directory` is of this process, and not of an earlier job."""
    try:
        with open(_file_of(world.rank, directory)) as file:
            written = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(written, dict) and (written.get("pid"), written.get("host")) == (
        world.card.pid,
        world.card.host_name,
    )


def rank_state(world: World, reason: str, most: int | None = None) -> dict[str, Any]:
    """Return what a rank does and has done, as plain data.

    `most` limits the records to the last ones, besides those of unfinished calls; None keeps all in the ring.
    """
    # Records have times of a monotonic clock; convert them to wall-clock time, which may jump between two looks at it.
    now_ns = time.time_ns()
    offset = now_ns - clock()
    records = world.recorder.records()
    if most is not None and len(records) > most:
        records = [record for record in records[:-most] if not record.completed] + records[-most:]
    card = world.card
    found = stacks(None if world.ranks_are_processes else (world.thread,))
    own = found.get(world.thread) or Stack([], None, False)
    state = {
        "format": FORMAT,
        "meshdist": __version__,
        "reason": reason,
        "rank": world.rank,
        "world_size": world.size,
        "shrunk": world.num_shrunk,
        "host": card.host_name,
        "pid": card.pid,
        "time_s": now_ns / 1e9,
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
        "awaits": _awaits(world, records, offset),
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
    return state if world.raised is None else {**state, **_end(*world.raised)}


def _awaits(world: World, records: list[Record], offset: int) -> dict[str, Any] | None:
    """Return the async calls of which the rank waits for any, and since when; None if it does not."""
    waiting = world.progress.waiting.get(world.thread)
    if waiting is None:
        return None
    places = {id(record): place for place, record in enumerate(records) if not record.completed}
    calls = [places[id(work.record)] for work in waiting.works if id(work.record) in places]
    return {"calls": calls, "since_s": _seconds(waiting.since_ns, offset)}


def _end(error: BaseException, time_s: float) -> dict[str, Any]:
    """Return what is different in the state of a rank that an exception has ended."""
    lines, place, in_call = stack_of_error(error)
    return {
        "stack": lines,
        "place": place,
        "in_call": in_call,
        "raised": {"error": in_words(error), "time_s": time_s},
    }


def _record(record: Record, offset: int) -> dict[str, Any]:
    facts = facts_in(record)
    site, function = site_in(record)
    data = {
        "group": facts.group,
        "label": facts.label,
        "sequence": record.sequence,
        "call": facts.name,
        "kind": "message" if facts.is_message else "collective",
        "text": facts.text,
        "sent": [[dtype, list(shape)] for dtype, shape in facts.sent],
        "received": [[dtype, list(shape)] for dtype, shape in facts.received],
        "root": facts.root,
        "tag": facts.tag,
        "created_s": _seconds(record.created, offset),
        "started_s": _seconds(record.started, offset),
        "completed_s": _seconds(record.completed, offset),
        "timeout_s": facts.timeout_s if facts.timeout_s != float("inf") else None,
        "state": _state(record),
        "site": site,
        "function": function,
    }
    if record.error is not None:
        data["error"] = record.error
        data.update(_peers_end(record.peer))
    return data


def _peers_end(failure: PeerFailure | None) -> dict[str, Any]:
    if failure is None or failure.rank is None:
        return {}
    return {"peer": {"rank": failure.rank, "exit": failure.departure.exit.value, "how": describe(failure.departure)}}


def _state(record: Record) -> str:
    if record.error is not None:
        return "failed"
    if record.completed:
        return "completed"
    return "started" if record.started else "queued"


def _seconds(time_ns: int, offset: int) -> float | None:
    return (time_ns + offset) / 1e9 if time_ns else None
