"""How a rank ended: the record that its peers get, and the words for error messages.

A rank that leaves writes a `Departure` to the shared memory of its groups, to its connections and to the store. Code
decides by its `PeerExit`; `describe` makes the sentence where it is shown. A process that ended without a record was
killed or ended outside the interpreter: its peers see that it is gone, and perhaps its exit status.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from meshdist.errors import CallMade, DistBackendError, DistError, PeerConnectionError
from meshdist.system.processes import describe_status

FORMAT = 1
"""The version of the encoding. A reader ignores unknown fields, and reads an unknown PeerExit as UNKNOWN."""

MOST_BYTES = 4096
"""The greatest length of an encoded departure."""

_MOST_NAMED = 8
_MOST_NAME_CHARACTERS = 200


class PeerExit(Enum):
    """How a rank ended; the values are part of the encoding."""

    DESTROYED_GROUP = "destroyed-group"
    LEFT_WORLD = "left-world"
    ENDED = "ended"  # its interpreter ended normally, but without destroy_process_group()
    FINISHED = "finished"  # a thread of `meshdist.run` returned from its function
    GAVE_UP = "gave-up"  # a call failed, or the rank called abort
    RAISED = "raised"  # a thread of `meshdist.run` raised
    INTERRUPTED = "interrupted"  # the caller of `meshdist.run` was interrupted
    NOT_BEGUN = "not-begun"  # the world could not begin
    EXITED = "exited"  # its process exited with a status
    SIGNALLED = "signalled"  # its process was killed by a signal
    DIED = "died"  # its process is gone; the status is unknown
    CUT_OFF = "cut-off"  # its connection to the store ended
    ENDED_WITH_STORE = "ended-with-store"  # its process is gone, and so is the store that had its record
    UNREACHABLE = "unreachable"  # no connection could be made
    SILENT = "silent"  # its host does not answer any more; its process may run
    LOST = "lost"  # the connection broke
    RESET = "reset"  # the connection was reset: its process is gone, or something between the hosts has ended it
    UNKNOWN = "unknown"  # defined by a later version

    @property
    def is_orderly(self) -> bool:
        """Whether the other ranks can continue without this one."""
        return self in _ORDERLY


_ORDERLY = frozenset({PeerExit.DESTROYED_GROUP, PeerExit.LEFT_WORLD, PeerExit.ENDED, PeerExit.FINISHED})

_WITHOUT = "without destroy_process_group()"
# `%s` is the detail.
_WORDS = {
    PeerExit.DESTROYED_GROUP: "has destroyed the group",
    PeerExit.LEFT_WORLD: "called destroy_process_group()",
    PeerExit.ENDED: f"has ended {_WITHOUT}",
    PeerExit.FINISHED: "has finished",
    PeerExit.RAISED: "raised %s",
    PeerExit.INTERRUPTED: "was interrupted by %s",
    PeerExit.NOT_BEGUN: "did not begin: %s",
    PeerExit.DIED: "has died",
    PeerExit.CUT_OFF: "has died, or was cut off from the store",
    PeerExit.ENDED_WITH_STORE: "has ended, and the store is gone as well",
    PeerExit.UNREACHABLE: "cannot be reached: %s",
    PeerExit.SILENT: "does not answer: nothing has come from its host for %s; is it down, or the network to it cut?",
    PeerExit.LOST: "cannot be reached any more: %s",
    PeerExit.RESET: "has died, or its connection was reset",
    PeerExit.UNKNOWN: "has ended in a way that only a later meshdist knows: %s",
}


class LeftOut(Enum):
    NOTHING = ""
    CALL = "making this call"
    SEND = "sending the awaited message"
    RECEIVE = "receiving the message"
    MEETING = "meeting the others"
    COMMUNICATOR = "making the communicator"


class Departure(NamedTuple):
    """The end of a rank."""

    exit: PeerExit
    number: int | None = None  # the exit status of its process, or the number of the signal that killed it
    detail: str = ""  # why it gave up, or cannot be reached; shown to people, one line if it comes from an error
    # If this rank gave up because of another: the first that did, as messages name it; `detail` is that one's.
    first: str = ""
    call: CallMade | None = None  # the call that failed, if that is the cause
    hang_report: str = ""  # which rank waited for which when it gave up; some lines, shown to people

    @classmethod
    def of_status(cls, status: int | None) -> Departure:
        """Return the end of a process from its exit status: minus the number of a signal, None if unknown."""
        if status is None:
            return cls(PeerExit.DIED)
        return cls(PeerExit.SIGNALLED, -status) if status < 0 else cls(PeerExit.EXITED, status)

    def encode(self, most_bytes: int = MOST_BYTES) -> bytes:
        """Return the record as bytes; texts are cut to keep it within `most_bytes`."""
        fields: dict[str, Any] = {"v": FORMAT, "exit": self.exit.value}
        for name, value in (("number", self.number), ("call", self.call and [*self.call])):
            if value is not None:
                fields[name] = value
        texts = {"detail": self.detail, "hang_report": self.hang_report, "first": self.first[:_MOST_NAME_CHARACTERS]}
        fields.update((name, text) for name, text in texts.items() if text)
        for name in ("hang_report", "detail", "call", "first"):
            excess = len(_as_json(fields)) - most_bytes
            if excess <= 0:
                break
            kept = _cut(fields.get(name), excess)
            fields.pop(name, None)
            if kept:
                fields[name] = kept
        return _as_json(fields)

    @classmethod
    def decode(cls, data: bytes) -> Departure:
        """Return the record that `encode` made; UNKNOWN if it cannot be read."""
        import json  # loaded since this rank has joined

        try:
            fields = json.loads(data)
            texts = {name: str(fields.get(name, "")) for name in ("detail", "first", "hang_report")}
            number, call = fields.get("number"), fields.get("call")
            made = None if call is None else _parse_call(call)
            try:
                how = PeerExit(fields["exit"])
            except ValueError:
                how, texts["detail"] = PeerExit.UNKNOWN, " ".join(filter(None, (str(fields["exit"]), texts["detail"])))
            return cls(how, None if number is None else int(number), call=made, **texts)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls(PeerExit.UNKNOWN, detail=repr(data[:_MOST_NAME_CHARACTERS]))


def _as_json(fields: Mapping[str, Any]) -> bytes:
    import json  # loaded since this rank has joined

    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")  # JSON writes a lone surrogate in the same way


def _cut(text: Any, excess: int) -> str:
    if not isinstance(text, str):
        return ""
    data = text.encode(errors="replace")
    return data[: max(0, len(data) - excess)].decode(errors="ignore")


def _parse_call(call: Any) -> CallMade:
    kind, number, site, peers_last, *rest = call
    words = str(rest[0]) if rest else ""
    return CallMade(str(kind), int(number), str(site), None if peers_last is None else int(peers_last), words)


def describe(departure: Departure) -> str:
    """Return how a rank ended, as the predicate of a sentence about it."""
    how, number = departure.exit, departure.number
    if how is PeerExit.EXITED or how is PeerExit.SIGNALLED:
        number = number or 0
        # A normal exit leaves a record; this was os._exit(0), or the end of a forked process.
        without = f", {_WITHOUT}" if how is PeerExit.EXITED and not number else ""
        return describe_status(-number if how is PeerExit.SIGNALLED else number) + without
    if how is PeerExit.GAVE_UP:
        first = f" because {departure.first} failed" if departure.first else ""
        call = f"; {departure.call}" if departure.call is not None else ""
        return f"failed{first}: {departure.detail}{call}"
    return _WORDS[how].replace("%s", departure.detail)


class PeerFailure(NamedTuple):
    """The end of the peer `who`, as messages name it, which made a call fail."""

    who: str
    departure: Departure
    left_out: LeftOut = LeftOut.NOTHING
    rank: int | None = None  # its global rank

    def in_words(self) -> str:
        """Return the end of the peer, and what it has left out, as an error says it."""
        words = f"{self.who} {describe(self.departure)}"
        if self.departure.exit.is_orderly and self.left_out is not LeftOut.NOTHING:
            words += f" {'and ' if self.departure.exit is PeerExit.ENDED else ''}without {self.left_out.value}"
        return words


_RANK = " (rank "


def failure_of(error: BaseException) -> PeerFailure | None:
    """Return the peer's end that caused `error`; None if no peer's end did, or none is known."""
    peer = getattr(error, "peer", None)
    return peer if isinstance(peer, PeerFailure) else None


def name_call_instead(error: DistError) -> None:
    """Let an error of a message that a peer has not sent, or received, say that it did not make the whole call."""
    failure = failure_of(error)
    if failure is not None and failure.left_out in (LeftOut.SEND, LeftOut.RECEIVE):
        error.peer = failure._replace(left_out=LeftOut.CALL)
        error.what = error.what.replace(failure.in_words(), error.peer.in_words())


def gave_up(error: DistError) -> Departure:
    """Return the record that a rank leaves when it gives up because of `error`.

    If `error` comes from another rank that gave up, that rank's record is passed on, so that the first cause is
    reported once, however many ranks pass it on.
    """
    failure = failure_of(error)
    if failure is None or failure.departure.exit is not PeerExit.GAVE_UP:
        return Departure(PeerExit.GAVE_UP, detail=error.headline, call=error.call, hang_report=error.hang_report)
    departure = failure.departure
    return departure._replace(
        first=departure.first or failure.who,
        call=None,
        hang_report=departure.hang_report or error.hang_report,
    )


def name_call_once(error: DistError, error_prefix: str) -> None:
    """Leave the call out of what a peer says of its failure where it failed in the same call as this rank."""
    failure, call = failure_of(error), error_prefix.rpartition(_RANK)[0]
    detail = "" if failure is None else failure.departure.detail
    if call and detail.startswith(call + _RANK):
        error.what = error.what.replace(detail, detail.partition("): ")[2], 1)


def earlier_failure(broken: DistError, error_prefix: str, *, with_report: bool) -> DistBackendError:
    """Return the error of a call on a group that `broken` has ended: one sentence, and the lines of its report."""
    first = broken.what if broken.error_prefix == error_prefix else broken.headline
    made, call = broken.call or broken.made, ""
    if made is not None:
        here = "here, " if broken.is_numbered and broken.call is None else ""  # beside the line of a peer's call
        call = f"; {here}that was {made.kind} {made.number}, at {made.site}"
    error = DistBackendError(
        f"the group cannot be used after an earlier failure: {first}{call}",
        peer_failed=broken.peer_failed,
        error_prefix=error_prefix,
        hang_report=broken.hang_report if with_report else "",
    )
    error.is_earlier = error.is_numbered = True  # the sentence has the number of the call that broke the group
    return error


def giving_up(reason: str, cause: BaseException | None = None) -> DistBackendError:
    """Return the error of a rank that gives up for `reason`, followed by its cause."""
    if cause is None:
        return DistBackendError(reason)
    error = DistBackendError(f"{reason} {in_words(cause)}")
    if isinstance(cause, DistError):
        error.peer = cause.peer
        error.locate("", cause.call)
    return error


def in_words(error: BaseException) -> str:
    """Return an exception in one line; for an error of this package, without the call that failed."""
    line = first_line(error.headline if isinstance(error, DistError) else error)
    return f"{type(error).__name__}{': ' if line else ''}{line}"


def first_line(text: object) -> str:
    """Return the first line of an exception or another text; empty if it has none."""
    return next(iter(str(text).strip().splitlines()), "")


def peer_gone(
    who: str, departure: Departure, left_out: LeftOut = LeftOut.NOTHING, *, rank: int | None = None
) -> DistBackendError:
    """Return the error of a call that waits for `who`, the global `rank`, which is gone before doing `left_out`."""
    failure = PeerFailure(who, departure, left_out, rank)
    is_cut_off = departure.exit in (PeerExit.LOST, PeerExit.RESET, PeerExit.SILENT, PeerExit.UNREACHABLE)
    kind = PeerConnectionError if is_cut_off else DistBackendError
    error = kind(failure.in_words(), peer_failed=True, hang_report=departure.hang_report)
    error.peer = failure
    error.is_numbered = departure.call is not None
    return error


def nobody_left(gone: Mapping[str, Departure]) -> DistBackendError:
    """Return the error of a receive from any rank when all other ranks, `gone`, have ended."""
    named = [f"{who} {describe(departure)}" for who, departure in list(gone.items())[:_MOST_NAMED]]
    if len(gone) > _MOST_NAMED:
        named.append(f"and so on, {len(gone)} ranks in all")
    return DistBackendError(f"all others are gone: {'; '.join(named)}", peer_failed=True)


def any_of(others: Sequence[int], describe: Callable[[int], str]) -> str:
    """Return the name, in messages, of the source of a receive from any of the other ranks."""
    return f"{describe(others[0])}, the only other rank," if len(others) == 1 else "any rank"
