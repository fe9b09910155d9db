"""FlightRecorder: the last calls of one rank, in a ring that is always on.

What a record costs is paid by every call, so it holds what is at hand and nothing that has to be worked out: the facts
that all calls of one plan share, times of one clock, and of the caller's line its code and the instruction in it. Words
are made of it when somebody reads it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from types import CodeType, FrameType
from typing import Any, TypeAlias

import numpy as np

from meshdist.call import Call, is_ours, line_of
from meshdist.plan_key import each

NUM_RECORDS = 2000
DIRECTORY_VARIABLE = "MESHDIST_FLIGHT_RECORDER_DIR"
"""Names the directory that a rank leaves its records in when a call fails."""

clock = time.monotonic_ns

# A record: its facts, the number of the call in its group, when it was made, when it began to be carried out and when
# it was done (by `clock`; 0 for not yet), and where the user's code made it: a function's code and the instruction.
# What it failed with is appended. A list, because making one costs least of all that can be changed later.
Record: TypeAlias = "list[Any]"
FACTS, SEQUENCE, CREATED, STARTED, COMPLETED, CODE, INSTRUCTION, ERROR = range(8)


class CallFacts:
    """What all calls of one signature on one group have in common, as words and numbers.

    It outlives the group, so it must not hold it, nor any array.

    Attributes:
        name: What is called.
        group: The group's name, the same on all its ranks.
        label: What messages call it.
        text: The call as all ranks must make it.
        sent, received: dtype and shape of each array.
        root: The rank of the group that the call has as source or destination; of a message, the other side.
        tag: Of a message; None for a collective.
        timeout_s: How long it may take.
    """

    __slots__ = ("group", "label", "name", "received", "root", "sent", "tag", "text", "timeout_s")

    def __init__(
        self,
        name: str,
        group: str,
        label: str,
        text: str,
        sent: list[tuple[str, tuple[int, ...]]],
        received: list[tuple[str, tuple[int, ...]]],
        root: int | None,
        timeout_s: float,
        tag: int | None = None,
    ) -> None:
        self.name = name
        self.group = group
        self.label = label
        self.text = text
        self.sent = sent
        self.received = received
        self.root = root
        self.timeout_s = timeout_s
        self.tag = tag

    @property
    def is_message(self) -> bool:
        """Whether it is a message, no collective."""
        return self.tag is not None


def facts_of(call: Call, group: str, label: str, timeout_s: float) -> CallFacts:
    """Return the facts of a collective.

    Args:
        call: The call, checked.
        group: The group's name.
        label: What messages call it.
        timeout_s: How long the call may take.
    """
    text = call.signature().text
    return CallFacts(
        call.collective.name, group, label, text, _kinds(call.send), _kinds(call.recv), call.root, timeout_s
    )


def _kinds(buffers: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(array.dtype.name, array.shape) for array in each(buffers)]


class FlightRecorder:
    """The last calls of one rank.

    Attributes:
        began: When it was made, by `clock`.
        keep: Takes a record in, for which the oldest goes; in one step, for any number of threads.

    Example:
        >>> recorder = FlightRecorder()
        >>> facts = CallFacts("barrier", "world", "world", "barrier()", [], [], None, 60.0)
        >>> record = recorder.begin(facts, 1)
        >>> recorder.end(record)
        >>> [record[SEQUENCE] for record in recorder.records()]
        [1]
    """

    def __init__(self, num_records: int = NUM_RECORDS) -> None:
        self._ring: deque[Record] = deque(maxlen=num_records)
        self.keep = self._ring.append
        self.began = clock()

    def begin(self, facts: Any, sequence: int, *, started: bool = True) -> Record:
        """Return a new record of a call that this package's code is about to make; a queued one has not started."""
        code, instruction = place_of(users(sys._getframe(1)))
        now = clock()
        record = [facts, sequence, now, now if started else 0, 0, code, instruction]
        self.keep(record)
        return record

    def end(self, record: Record, error: BaseException | None = None) -> None:
        """Say that the call of `record` is done, and with what error."""
        if error is not None:
            record.append(f"{type(error).__name__}: {error}")
        record[COMPLETED] = clock()

    def records(self) -> list[Record]:
        """Return what is in the ring, the oldest first."""
        return list(self._ring)


def users(frame: FrameType) -> FrameType:
    """Return the innermost frame from `frame` on that is not this package's; the outermost where all are."""
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def place_of(frame: FrameType) -> tuple[CodeType, int]:
    """Return what is kept of a frame: it may not be kept itself, as it keeps all its variables alive."""
    return frame.f_code, frame.f_lasti


def facts_in(record: Record) -> CallFacts:
    """Return the facts of a record; those of a message are put together only now."""
    facts = record[FACTS]
    if isinstance(facts, CallFacts):
        return facts
    name, group, label, dtype, shape, peer, tag, timeout_s = facts
    arrays, none = [(np.dtype(dtype).name, shape)], []  # type: ignore[var-annotated]
    sends = "send" in name
    other = "any rank" if peer is None else f"rank {peer}"
    text = f"{name}({arrays[0][0]}{list(shape)} {'to' if sends else 'from'} {other}, tag={tag})"
    sent, received = (arrays, none) if sends else (none, arrays)
    return CallFacts(name, group, label, text, sent, received, peer, timeout_s, tag)


def site_in(record: Record) -> tuple[str, str]:
    """Return `file:line` and the function of the user's call."""
    code = record[CODE]
    return f"{code.co_filename}:{line_of(code, record[INSTRUCTION])}", code.co_name
