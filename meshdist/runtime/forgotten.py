"""Async calls that nothing has asked whether they are done, until their group ends."""

from __future__ import annotations

import gc
import os
import sys

from meshdist.core import Calls
from meshdist.runtime.flight_recorder import facts_in, site_in
from meshdist.runtime.progress import Progress
from meshdist.runtime.waiting import spin_for
from meshdist.runtime.work import Work, in_progress_thread

# How long to wait for the progress thread, which may still run the callbacks of a call that is done.
_LET_GO_S = 0.01
# The references to `Calls.forgotten` while `sys.getrefcount` looks at it: that of the Calls, and the argument.
_OWN_REFERENCES = 2


def never_waited_for(calls: Calls, progress: Progress) -> str:
    """Return in words that there were such calls; `calls` are those of the group, all of which are done.

    Empty if there were none, and while an exception is handled: with that, the rank ends anyway.
    """
    if not in_progress_thread():
        spin_for(lambda: all(queue.completing is None for queue in progress._active) or None, _LET_GO_S)
    if sys.exc_info()[1] is not None:
        return ""
    kept = _kept_works(calls)  # none of which is dropped from now on, and counted twice
    num_dropped, first_dropped = calls.forgotten
    count = num_dropped + len(kept)
    if not count:
        return ""
    first = min(filter(None, [*(work.record for work in kept), first_dropped]), key=lambda record: record.created)
    facts, place = facts_in(first), os.path.basename(site_in(first)[0])
    call = f"{facts.text}, {'message' if facts.is_message else 'call'} {first.sequence}, at {place}"
    if count == 1:
        return (
            f"1 async call was never waited for: {call}; its arrays may have been used before it was done: call wait()"
            " on the Work that it returns"
        )
    return (
        f"{count} async calls were never waited for, the first of them {call}; their arrays may have been used before"
        " they were done: call wait() on the Works that they return"
    )


def _kept_works(calls: Calls) -> list[Work]:
    """Return the Works of the calls that the program still has.

    Such a Work refers to `forgotten`. So no list of them has to be kept for each call, and the search, which goes
    through all objects of the process, is made only where there is one.
    """
    if sys.getrefcount(calls.forgotten) <= _OWN_REFERENCES:
        return []
    return [work for work in gc.get_referrers(calls.forgotten) if isinstance(work, Work)]
