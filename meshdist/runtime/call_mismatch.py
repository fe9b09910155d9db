"""CallCheck: the error of ranks whose calls disagree.

The Signatures of the calls must be equal; each backend exchanges their fingerprints in its own way. A rank that finds
another fingerprint publishes its own call, reads those of the others, and raises an error that lists all of them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from meshdist.arrays.host import Array
from meshdist.errors import DistBackendError
from meshdist.runtime.call import Signature
from meshdist.runtime.call_site import call_chain
from meshdist.runtime.log import shows_calls
from meshdist.runtime.rank_text import call_rank, call_ranks
from meshdist.system.deadline import Deadline
from meshdist.system.plurals import counted

# How long a rank waits for the other ranks to publish their calls. They find the mismatch in the same call.
_EXPLAIN_S = 0.8


# At debug level DETAIL; with the line of the call itself, five lines.
_MOST_CALLERS = 4


def call_lines() -> str:
    """Return the line of the user's call, and at debug level DETAIL its callers, as it may be in a shared helper."""
    return call_chain(_MOST_CALLERS if shows_calls() else 0)


SET_UP = Signature("the set-up of the group")
"""The first steps of a rank's first call on a group. All ranks take them before any rank goes on, so other calls meet
them only if several threads of a rank make its first call."""

# What to do with arrays whose sizes alone differ, by the name of the call.
_OF_SIZES = {
    **dict.fromkeys(
        ("all_gather", "all_gather_into_tensor"),
        "to gather arrays of different lengths, call meshdist.functional.all_gather(x, axis=0, uneven=True)",
    ),
    "gather": "to gather arrays of different lengths, call meshdist.functional.gather(x, dst, axis=0, uneven=True)",
    "scatter": "to scatter arrays of different lengths, call meshdist.functional.scatter(blocks, src=src) with a list"
    " of them on the source, and None on the other ranks",
}
# Patterns, compiled when an error needs them; in the other modules too.
_CALL, _SHAPE = r"(\w+)\([^()]*\)", r"\[[\d, ]*\]"


# The words of a call from which a rank may have returned begin with this; those of its current call with the call.
_EARLIER = "called "


def _advice(calls: Iterable[str]) -> str:
    """Return what to do where the calls of the ranks differ in the sizes of their arrays alone; else nothing."""
    found = [re.match(_CALL, call.removeprefix(_EARLIER)) for call in calls]
    texts = {None if one is None else re.sub(_SHAPE, "[]", one[0]) for one in found}
    first = found[0]
    return _OF_SIZES.get(first[1], "") if len(texts) == 1 and first is not None else ""


_SEVERAL_THREADS = "several threads of a rank made the group's first call at the same time"
_ONE_THREAD = "make all calls on a group from one thread, or create a group for each thread"


def _makes(call: str, *, is_one: bool) -> str:
    """Say that ranks make a call."""
    if call.startswith(SET_UP.text):
        where = call.removeprefix(SET_UP.text).replace(" at an async call", " in an async call")
        return f"{'sets' if is_one else 'set'} up the group{where}"
    if call.startswith(_EARLIER):
        return call
    return f"{'calls' if is_one else 'call'} {call}"


class CallCheck:
    """Makes the error of calls that disagree, for rank `rank` of a group of the global ranks `ranks`."""

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self._rank, self._ranks = rank, ranks

    @staticmethod
    def words(signature: Signature) -> str:
        """Return the call that this rank makes now, with its line, and at debug level DETAIL those of its callers."""
        return f"{signature.text} at {call_lines()}"

    @staticmethod
    def words_of_earlier(call: str, line: str = "", *, went_on: bool = False) -> str:
        """Return a call from which a rank may have returned, with its line where that is known.

        With `went_on`, it is a call of this rank, and the line of the rank's call now is added.
        """
        at = f" at {line}" if line else ""
        return f"{_EARLIER}{call}{at}" + (f", then went on to {call_lines()}" if went_on else "")

    def error(self, calls: Mapping[int, str]) -> DistBackendError:
        """Return the error that lists the ranks of each call; `calls` has the `words` of each rank."""
        ranks_of: dict[str, list[int]] = {}
        for place, call in sorted(calls.items()):
            ranks_of.setdefault(call, []).append(place)
        parts = [
            f"  {call_ranks(places, self._ranks)} {_makes(call, is_one=len(places) == 1)}"
            for call, places in ranks_of.items()
        ]
        if any(call.startswith(SET_UP.text) for call in ranks_of):
            parts.append(f"  {_ONE_THREAD}")
            return DistBackendError(_SEVERAL_THREADS, hang_report="\n".join(parts))
        if advice := _advice(ranks_of):
            parts.append(f"  {advice}")
        return DistBackendError("the ranks disagree", hang_report="\n".join(parts))

    def explain(
        self,
        mine: str,
        num_others: int,
        publish: Callable[[str], None],
        read: Callable[[], Mapping[int, str]],
        recorded: Callable[[], Mapping[int, str]] = dict,
        pause_s: float = 0.001,
    ) -> DistBackendError:
        """Return the error once all ranks have published their calls, or have had the time to.

        `publish` publishes the words `mine` of this rank's call; `read` returns those of the `num_others` other ranks
        so far, by rank, and `recorded` what is known of the calls of ranks that have not published them.
        """
        publish(mine)
        deadline, pause = Deadline(_EXPLAIN_S), threading.Event()
        while len(calls := read()) < num_others and not deadline.expired():
            pause.wait(deadline.slice_s(pause_s))
        return self.error({**recorded(), **calls, self._rank: mine})


def compare_splits(given: Array, expected: Array, unit: str, ranks: Sequence[int]) -> None:
    """Raise DistBackendError unless every rank of an all_to_all sends as much as its peers expect.

    All ranks check all pairs, so all raise if one does. Both arrays have shape (ranks, ranks): in `given`, the rank of
    the row sends to that of the column; in `expected`, it expects from that. `unit` is what they count, in the
    singular; `ranks` are global.
    """
    wrong = np.argwhere(given != expected.T)
    if len(wrong):
        src, dst = wrong[0]
        raise DistBackendError(
            f"the sizes disagree: {call_rank(src, ranks)} sends"
            f" {counted(int(given[src, dst]), unit)} to {call_rank(dst, ranks)}, which expects {expected[dst, src]}"
        )
