"""FlightRecorder: the last calls of one rank, in a ring buffer that is always on, and what a record adds to an error.

Every call pays for its record, so a record holds only values that are at hand: the facts shared by all calls of a plan,
clock readings, and the caller's code object with the current instruction. Text is made when a record is read.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import numpy as np

from meshdist import core
from meshdist.arrays.host import describe_objects, is_of_objects
from meshdist.core import Record
from meshdist.errors import CallMade, DistBackendError, DistError
from meshdist.runtime.call import Call, each
from meshdist.runtime.call_site import is_ours, line_of, place_in
from meshdist.runtime.departure import LeftOut, failure_of, in_words, name_call_once
from meshdist.system.platform import at_limit

NUM_RECORDS = 2000
DIRECTORY_VARIABLE = "MESHDIST_FLIGHT_RECORDER_DIR"
"""The directory that a rank writes its records to when a call fails."""

# The exchanges that the user gives no tag, such as those of halos, have tags from here on.
FIRST_OWN_TAG = 1 << 62

clock = time.monotonic_ns


class CallFacts:
    """What all calls of one signature on one group have in common.

    It outlives the group, so it must hold neither the group nor any array.
    """

    __slots__ = ("group", "label", "name", "received", "root", "sent", "tag", "text", "timeout_s", "words")

    def __init__(
        self,
        name: str,  # the function that is called
        group: str,  # the group's name, the same on all its ranks
        label: str,  # the group's name in errors and logs
        text: str,  # the call as all ranks must make it
        sent: list[tuple[str, tuple[int, ...]]],  # dtype and shape of each array, here and in `received`
        received: list[tuple[str, tuple[int, ...]]],
        root: int | None,  # the source or destination, as a rank of the group; for a message, the peer
        timeout_s: float,
        tag: int | None = None,  # of a message; None for a collective
        words: str = "",  # what the ranks compare besides, which says what operation the call is part of
    ) -> None:
        self.name, self.group, self.label, self.text = name, group, label, text
        self.sent, self.received, self.root = sent, received, root
        self.timeout_s, self.tag, self.words = timeout_s, tag, words

    def relabelled(self, label: str) -> CallFacts:
        """Return the facts of a group that has got another label."""
        fields = (self.text, self.sent, self.received, self.root, self.timeout_s, self.tag, self.words)
        return CallFacts(self.name, self.group, label, *fields)

    @property
    def is_message(self) -> bool:
        return self.tag is not None


def facts_of(call: Call, group: str, label: str, timeout_s: float) -> CallFacts:
    text = call.signature().text
    return CallFacts(
        call.collective.name,
        group,
        label,
        text,
        _kinds(call.send),
        _kinds(call.recv),
        call.root,
        timeout_s,
        words=call.words,
    )


def _kinds(buffers: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(_name(array.dtype), array.shape) for array in each(buffers)]


@lru_cache(1000)  # NumPy makes the name anew each time, in a microsecond: a call may have an array for each rank
def _name(dtype: Any) -> str:
    return str(dtype.name)


class FlightRecorder:
    def __init__(self, num_records: int = NUM_RECORDS) -> None:
        self._ring: deque[Record] = deque(maxlen=num_records)
        self.keep = self._ring.append  # append a record and drop the oldest; atomic, so threads need no lock
        self.began = clock()  # the time when it was made, by `clock`

    def begin(self, facts: Any, sequence: int, *, started: bool = True) -> Record:
        """Return a new record of a call that is about to be made; a queued call has not started."""
        code, instruction = place_of(users(sys._getframe(1)))
        now = clock()
        record = Record(facts, sequence, now, now if started else 0, code, instruction)
        self.keep(record)
        return record

    def end(self, record: Record, error: BaseException | None = None) -> None:
        if error is not None:
            note_error(record, error)
        record.completed = clock()

    def records(self) -> list[Record]:
        """Return the records, the oldest first."""
        return list(self._ring)

    def line_of(self, group: str, text: str, num_later: int) -> str:
        """Return `file:line` of a completed collective of a group, after which `num_later` others were completed.

        `text` is how the text of that call must begin. If it does not, or the record is no longer kept: "".
        """
        for record in reversed(self._ring.copy()):
            facts = record.facts
            if not isinstance(facts, CallFacts) or facts.group != group or not record.completed:
                continue
            if num_later == 0:
                return os.path.basename(site_in(record)[0]) if facts.text.startswith(text) else ""
            num_later -= 1
        return ""


def note_error(record: Record, error: BaseException) -> None:
    """Add the error of a failed call to its record."""
    record.error, record.peer = f"{type(error).__name__}: {error}", failure_of(error)


def users(frame: FrameType) -> FrameType:
    """Return the innermost frame from `frame` outwards that is not this package's; the outermost if there is none."""
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


if core.module is not None:
    core.module.configure(np.empty((2, 3)), is_ours, np.integer, np.empty)
    core.compare_by_identity(np.bool_)  # of which there are two objects


def place_of(frame: FrameType) -> tuple[CodeType, int]:
    """Return the code and instruction of a frame; the frame itself would keep its variables alive."""
    return frame.f_code, frame.f_lasti


def tag_text(words: str, tag: int) -> str:
    """Return a tag after some words; an empty string for one that the user has not passed."""
    return "" if tag >= FIRST_OWN_TAG else f"{words}{tag}"


def facts_in(record: Record) -> CallFacts:
    """Return the facts of a record; a message has a plain tuple, which is converted here."""
    facts = record.facts
    if isinstance(facts, CallFacts):
        return facts
    name, group, label, dtype, shape, peer, tag, timeout_s, sends = facts
    none: list[tuple[str, tuple[int, ...]]] = []
    arrays = [(np.dtype(dtype).name, shape)]
    what = f"{arrays[0][0]}{list(shape)} "
    if name == "probe":
        what = ""
    elif is_of_objects(dtype):
        arrays, what = [("uint8", shape)], f"{describe_objects(dtype)} "
    other = "any rank" if peer is None else f"rank {peer}"
    tagged = ", any tag" if tag < 0 else tag_text(", tag=", tag)  # a probe may have any
    text = f"{name}({what}{'to' if sends else 'from'} {other}{tagged})"
    sent, received = (arrays, none) if sends else (none, arrays)
    return CallFacts(name, group, label, text, sent, received, peer, timeout_s, tag)


def site_in(record: Record) -> tuple[str, str]:
    """Return `file:line` and the function of the user's call; for the place, see `place_in`."""
    code = record.code
    return place_in(code.co_filename, line_of(code, record.instruction)), code.co_name


def located(error: BaseException, error_prefix: str, record: Record | None) -> tuple[BaseException, DistError]:
    """Return the error that a failed call raises, and the error that its group is broken with.

    A DistError gets the call's error prefix. If a peer caused it, or sent what does not fit, it also gets the number
    and the line of the call, unless it has those of another rank's call, or of an earlier one, already.
    """
    error = at_limit(error)
    if not isinstance(error, DistError):
        cause = DistBackendError(in_words(error), error_prefix=error_prefix)
        cause.made = None if record is None else _call_of(cause, record)
        return error, cause
    name_call_once(error, error_prefix)
    if error.needs_probe and record is not None and facts_in(record).name in ("recv", "irecv"):
        error.needs_probe = False
        error.advice = (
            "for a message of unknown size or dtype, call probe first, and allocate an array of the size and dtype that"
            " it returns"
        )
    if record is not None and not error.is_earlier:
        error.made = _call_of(error, record)
    needs_no_call = error.is_numbered or not (error.peer_failed or error.is_misfit)
    error.locate(error_prefix, None if needs_no_call else error.made)
    error.__traceback__ = None  # the user needs the frames of the call, not those of the check that failed
    return error, error


def _call_of(error: DistError, record: Record) -> CallMade:
    facts, number = facts_in(record), record.sequence
    kind = "message" if facts.is_message else "call"
    failure, peers_last = failure_of(error), None
    # Ranks make the calls of a group in one order, so a peer that left before this call has made all earlier ones.
    if failure is not None and failure.left_out is LeftOut.CALL and failure.departure.exit.is_orderly and number > 1:
        peers_last = number - 1
    return CallMade(kind, number, os.path.basename(site_in(record)[0]), peers_last, facts.words)
