"""Async calls whose Work was dropped before anything has asked it whether they are done."""

from __future__ import annotations

from pathlib import PurePath
from sys import exc_info
from typing import Any

from meshdist.runtime.flight_recorder import SEQUENCE, facts_in, site_in
from meshdist.runtime.progress import Progress
from meshdist.runtime.waiting import spin_for
from meshdist.runtime.work import in_progress_thread

# How long to wait for the progress thread, which may still run the callbacks of a call that is done.
_LET_GO_S = 0.01


def never_waited_for(forgotten: list[Any], progress: Progress) -> str:
    """Return in words that there were such calls; `forgotten` is that of the group's Calls, all of which are done.

    Empty if there were none, and while an exception is handled: with that, the rank ends anyway.
    """
    if not in_progress_thread():
        spin_for(lambda: all(queue.completing is None for queue in progress._active) or None, _LET_GO_S)
    count, first = forgotten
    if not count or exc_info()[1] is not None:
        return ""
    facts, place = facts_in(first), PurePath(site_in(first)[0]).name
    call = f"{facts.text}, {'message' if facts.is_message else 'call'} {first[SEQUENCE]}, at {place}"
    if count == 1:
        return (
            f"1 async call was never waited for: {call}; its arrays may have been used before it was done: call wait()"
            " of what it returns"
        )
    return (
        f"{count} async calls were never waited for, the first of them {call}; their arrays may have been used before"
        " they were done: call wait() of what they return"
    )
