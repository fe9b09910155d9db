"""The states of ranks, read back from their dumps or from the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar

from meshdist.debug.dump import BY_CALL, BY_SIGNAL, FORMAT, GAVE_UP, TIMED_OUT
from meshdist.runtime.departure import PeerExit, first_line

T = TypeVar("T")
# Reports go through all of them.
_MOST_RANKS = 1 << 24


class _OtherFormatError(ValueError):
    """Report states of a different version of the format."""


class PeerEnd(NamedTuple):
    """The end of another rank, as a rank saw it: its global rank, and how it ended, as the predicate of a sentence."""

    rank: int
    exit: PeerExit
    how: str


@dataclass(frozen=True)
class CallSeen:
    """One call in the records of a rank; `flight_recorder` describes the common attributes."""

    group: str
    label: str
    sequence: int
    text: str
    is_message: bool
    is_receipt: bool
    peer: int | None  # of a message, the other side as a rank of the group; None for any
    created_s: float
    completed_s: float | None
    state: str
    site: str
    function: str
    error: str | None
    peer_end: PeerEnd | None = None  # that made it fail

    @property
    def is_open(self) -> bool:
        """Whether it is not done."""
        return self.state in ("queued", "started")

    @property
    def has_timed_out(self) -> bool:
        """Whether it failed at its timeout."""
        return self.error is not None and self.error.startswith("DistTimeoutError")

    @property
    def was_refused(self) -> bool:
        """Whether it failed for what it was called with, and not while it waited for another rank."""
        if self.error is None or self.has_timed_out or self.peer_end is not None:
            return False
        return ": deadlock: " not in self.error.partition("\n")[0]

    @property
    def words(self) -> str:
        """The call as messages name it."""
        kind = "message" if self.is_message else "call"
        return f"{self.text}, {kind} {self.sequence} on {self.label!r}, at {PurePath(self.site).name}"


@dataclass(frozen=True)
class GroupSeen:
    """One group of a rank: its label, its global ranks, and how many collectives the rank has called."""

    label: str
    ranks: tuple[int, ...]
    calls: int


class Awaits(NamedTuple):
    """The async calls of which a rank waits for any, and since when."""

    calls: tuple[CallSeen, ...]
    since_s: float


class Raised(NamedTuple):
    """The exception with which a rank has ended, in words, and when it was raised."""

    error: str
    time_s: float


@dataclass(frozen=True)
class RankSnapshot:
    """The state of one rank; see `flight_recorder`."""

    rank: int
    world_size: int
    host: str
    pid: int
    time_s: float
    reason: str
    groups: dict[str, GroupSeen]  # its groups, by name
    calls: tuple[CallSeen, ...]  # its calls, oldest first
    place: str | None  # the innermost line of its user code; None if unknown
    in_call: bool  # whether that line waits for a call; async calls may be open otherwise
    stack: tuple[str, ...]
    num_shrunk: int = 0  # how often its world was shrunk
    began_s: float | None = None  # when it joined the world; None if unknown
    raised: Raised | None = None  # at `place`
    present: tuple[int, ...] = ()  # the ranks that it knows to have made the call in which it waits
    awaits: Awaits | None = None  # what it waits for at `place`, if that is async calls

    @property
    def who(self) -> str:
        """The rank as messages name it."""
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    @property
    def open_calls(self) -> list[CallSeen]:
        """The calls it waits for: unfinished ones, and failed ones since which it has called nothing."""
        last_s = self.calls[-1].created_s if self.calls else 0.0
        return [
            call
            for call in self.calls
            if call.is_open or (call.state == "failed" and last_s <= (call.completed_s or last_s))
        ]

    @property
    def is_last(self) -> bool:
        """Whether this is the rank's last state after a failed wait, kept in case it has ended since."""
        return self.reason in (GAVE_UP, TIMED_OUT)

    @property
    def went_on(self) -> bool:
        """Whether the rank has gone on after this state, as it was only asked for it."""
        return self.reason in (BY_SIGNAL, BY_CALL)

    @property
    def has_timed_out(self) -> bool:
        """Whether the timeout ended its last wait, as far as is known; a last state is that of a failed wait."""
        return self.reason == TIMED_OUT

    @property
    def gave_up_s(self) -> float | None:
        """When its last wait failed, if it has called nothing since; otherwise None."""
        if self.is_last:
            return self.time_s if self.in_call else None
        calls = self.open_calls
        return None if any(call.is_open for call in calls) or not calls else calls[-1].completed_s

    @property
    def outlasts(self) -> bool:
        """Whether the state is still of use once the rank is gone: it shows how its last wait ended."""
        return self.is_last or self.gave_up_s is not None

    def calls_on(self, group: str) -> int:
        """Return how many collectives it has called on a group; 0 for an unknown group."""
        return self.groups[group].calls if group in self.groups else 0


def parse_state(data: Any, source: str) -> RankSnapshot:
    """Return the state of a rank from JSON data that `rank_state` made; `source` names it in messages.

    Raises:
        ValueError: The data has another format.
    """
    try:
        if data["format"] != FORMAT:
            raise _OtherFormatError(
                f"{source}: expected format {FORMAT}, got {data['format']!r:.80}; read it with the meshdist that wrote"
                " it"
            )
        if not 0 <= int(data["rank"]) < int(data["world_size"]) <= _MOST_RANKS:
            raise ValueError(f"rank {data['rank']!r:.80} of {data['world_size']!r:.80}")
        groups = {
            name: GroupSeen(group["label"], tuple(map(int, group["ranks"])), int(group["calls"]))
            for name, group in data["groups"].items()
        }
        calls = tuple(_parse_call(record) for record in data["records"])
        return RankSnapshot(
            rank=int(data["rank"]),
            world_size=int(data["world_size"]),
            host=_text(data["host"]),
            pid=int(data["pid"]),
            time_s=float(data["time_s"]),
            reason=_text(data["reason"]),
            groups=groups,
            calls=calls,
            place=_optional(data["place"], _text),
            in_call=bool(data["in_call"]),
            stack=tuple(map(str, data["stack"])),
            num_shrunk=int(data.get("shrunk", 0)),
            began_s=_optional(data.get("began_s"), float),
            raised=_optional(data.get("raised"), _parse_raised),
            present=tuple(map(int, data.get("present", ()))),
            awaits=_optional(data.get("awaits"), lambda awaits: _parse_awaits(awaits, calls)),
        )
    except _OtherFormatError as error:
        raise ValueError(str(error)) from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{source} is not a file of the flight recorder: {type(error).__name__} {error!s:.200}; expected the"
            " output of meshdist.flight_recorder()"
        ) from None


def _parse_raised(raised: dict[str, Any]) -> Raised:
    return Raised(_text(raised["error"]), float(raised["time_s"]))


def _parse_awaits(awaits: dict[str, Any], calls: Sequence[CallSeen]) -> Awaits:
    places = [int(place) for place in awaits["calls"]]
    if any(not 0 <= place < len(calls) for place in places):
        raise ValueError(f"expected indices of {len(calls)} calls")
    return Awaits(tuple(calls[place] for place in places), float(awaits["since_s"]))


def _parse_call(record: dict[str, Any]) -> CallSeen:
    is_message = record["kind"] == "message"
    return CallSeen(
        group=_text(record["group"]),
        label=_text(record["label"]),
        sequence=int(record["sequence"]),
        text=_text(record["text"]),
        is_message=is_message,
        is_receipt=is_message and bool(record["received"]),
        peer=_optional(record["root"], int) if is_message else None,
        created_s=float(record["created_s"]),
        completed_s=_optional(record["completed_s"], float),
        state=_text(record["state"]),
        site=_text(record["site"]),
        function=_text(record["function"]),
        error=_optional(record.get("error"), _text),
        peer_end=_optional(record.get("peer"), _parse_peer_end),
    )


def _parse_peer_end(end: dict[str, Any]) -> PeerEnd:
    try:
        how = PeerExit(end["exit"])
    except ValueError:
        how = PeerExit.UNKNOWN
    return PeerEnd(int(end["rank"]), how, first_line(_text(end["how"])))


def _text(x: Any) -> str:
    if not isinstance(x, str):
        raise TypeError(f"expected text, got {type(x).__name__}")
    return x


def _optional(x: Any, kind: Callable[[Any], T]) -> T | None:
    return None if x is None else kind(x)


def read_states(paths: Iterable[Path]) -> dict[int, RankSnapshot]:
    """Return the states in some files, by rank; the latest for each rank.

    If a world was shrunk, only its last states count, as the ranks have other numbers there.

    Raises:
        ValueError: A file has another format, or the files are of different worlds.
        OSError: A file cannot be read.
    """
    found = []
    for path in paths:
        try:
            data = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        found.append(parse_state(data, str(path)))
    latest = max((state.num_shrunk for state in found), default=0)
    states: dict[int, RankSnapshot] = {}
    for state in found:
        is_newer = state.rank not in states or states[state.rank].time_s < state.time_s
        if state.num_shrunk == latest and is_newer:
            states[state.rank] = state
    sizes = {state.world_size for state in states.values()}
    if len(sizes) > 1:
        raise ValueError(f"the files are of worlds of different sizes, {sorted(sizes)}: pass the files of one job")
    return states
