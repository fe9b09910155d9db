"""BlockedRank: a rank whose wait only other ranks can end, as it publishes that; and how such ranks wait for ever."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field

from meshdist.runtime.rank_text import ranks_text
from meshdist.system.plurals import counted

_MOST_NAMED = 8
# Fields that older versions do not know; left out where they are empty.
_NEW = ("from_any", "full_buffer", "instead", "num_others", "posted", "sends_to")
# The source of a receive that any rank may match.
ANY = -1
_OBJECT_RECEIPTS = frozenset({"recv_object", "recv_object_list", "irecv_object_list"})
_RECEIPTS = ("recv", "irecv", "probe", *sorted(_OBJECT_RECEIPTS))
_OBJECT_SENDS = frozenset({"send_object", "send_object_list", "isend_object_list"})
_SENDS = frozenset({"send", "isend"}) | _OBJECT_SENDS
# What the text of a message has, and that of a collective does not.
_OF_MESSAGE = re.compile(r"(?:from|to) (?:any rank|rank \d+)\b")
# What the ranks must do in calls that send and receive, by name.
_EXCHANGES = {
    "sendrecv_object": "in sendrecv_object, the dst of each rank must receive from it, with the same tag",
    "sendrecv": "in sendrecv, the dst of each rank must receive from it, with the same tag",
    "shift": "all ranks along the axis must call shift, with equal by, periodic and tag",
    "halo_exchange": "all ranks along the axis must call halo_exchange, with equal width, periodic, dims and tag",
}


@dataclass(frozen=True)
class BlockedRank:
    """A rank whose wait only other ranks can end.

    Attributes:
        rank: Its global rank.
        number: The number of the wait among those of the rank.
        awaits: The global ranks that all have to do something, or the first of them; with `from_any`, all
            ranks of which one has to.
        call: The call in which it waits, as messages name it; in a `wait_any`, the first one.
        confirmed: The numbers of their waits after which this rank has found its own to go on, by rank.
        members: The ranks of the group of the call, in its order.
        phase: The number of its phase.
        has_ended: It is in no call: it has ended the phase.
        num_counts: How often it has published its traffic in this wait; see `runtime.message_counts`.
        sends_in: Who has to read its messages, each a group and a global rank; see `runtime.waiting`.
        reads_in: Of whom it reads all messages, each a group and a global rank.
        sends_to: The global ranks to which it has other messages in progress.
        posted: The group and the global source, or ANY, of its other receives in progress.
        from_any: Any of `awaits` ends its wait, and nothing else does.
        num_others: The number of the other calls, if it waits for any of several.
        instead: The messages that have come, of which it awaits none; empty if none has.
        full_buffer: Which buffer has no room for its message; empty if it does not wait for room.
    """

    rank: int
    number: int
    awaits: tuple[int, ...]
    call: str
    confirmed: dict[int, int] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    phase: int = 0
    has_ended: bool = False
    num_counts: int = 0
    sends_in: tuple[tuple[str, int], ...] = ()
    reads_in: tuple[tuple[str, int], ...] = ()
    sends_to: tuple[int, ...] = ()
    posted: tuple[tuple[str, int], ...] = ()
    from_any: bool = False
    num_others: int = 0
    instead: str = ""
    full_buffer: str = ""

    def may_end(self, other: BlockedRank) -> bool:
        """Return whether the wait of `other` may end by what this rank does while it waits."""
        sent = {group for group, dst in other.sends_in if dst == self.rank}
        reads = any(group in sent and src in (ANY, other.rank) for group, src in (*self.reads_in, *self.posted))
        writes = other.rank in self.sends_to and any(src == self.rank for _, src in other.reads_in)
        return reads or writes

    def encode(self) -> str:
        fields = {**asdict(self), "confirmed": sorted(self.confirmed.items())}
        fields = {name: value for name, value in fields.items() if value or name not in _NEW}
        # An older version, to which all of `awaits` have to do something, and which knows of no other sends, must not
        # read such records. It reads none with a field that it does not know, and finds no circle then.
        return json.dumps(fields)

    @classmethod
    def decode(cls, text: bytes) -> BlockedRank:
        fields = json.loads(text)
        for name in {"awaits", "members", "sends_to"} & fields.keys():
            fields[name] = tuple(fields[name])
        for name in {"sends_in", "reads_in", "posted"} & fields.keys():
            fields[name] = tuple(map(tuple, fields[name]))
        return cls(**{**fields, "confirmed": dict(map(tuple, fields["confirmed"]))})


def endless_wait(rank: int, blocked: Mapping[int, BlockedRank]) -> list[BlockedRank]:
    """Return blocked ranks that wait for each other, or for one that has ended its phase; none if `rank` may go on.

    They are one of three, of which the first two have no rank that waits for a message from any of several:

    - a circle with `rank`, from its lowest rank on, where each has confirmed the wait of the next;
    - a path that begins with `rank`, and the last has ended its phase;
    - a closed set, by rank, with all that `rank` waits for, directly or not.
    """
    return _path(rank, blocked) or _closed_set(rank, blocked)


def _path(rank: int, blocked: Mapping[int, BlockedRank]) -> list[BlockedRank]:
    """Return a circle with `rank`, or a path to a rank that has ended its phase; see `endless_wait`."""
    paths = {rank: [blocked[rank]]}
    front = [rank]
    while front:
        path = paths[front.pop(0)]
        if path[-1].from_any:  # none of those that it waits for is indispensable
            continue
        for following, number in sorted(path[-1].confirmed.items()):
            other = blocked.get(following)
            if other is None or other.number != number:
                continue
            if other.has_ended:
                if other.phase == blocked[rank].phase:
                    return [*path, other]
                continue
            if following == rank:
                lowest = min(range(len(path)), key=lambda place: path[place].rank)
                return path[lowest:] + path[:lowest]
            if following not in paths:
                paths[following] = [*path, other]
                front.append(following)
    return []


def _closed_set(rank: int, blocked: Mapping[int, BlockedRank]) -> list[BlockedRank]:
    """Return the ranks that `rank` waits for in a closed set, which only its own members could end; see `endless_wait`.

    A rank that waits for a message from any of several is in such a set with all of them, another one with one rank
    that it waits for. The largest of these sets is a greatest fixed point: what is left of all blocked ranks as those
    are removed that a rank outside could set free.
    """
    confirmed = {
        one.rank: {
            other
            for other, number in one.confirmed.items()
            if other in blocked and blocked[other].number == number and not blocked[other].has_ended
        }
        for one in blocked.values()
        if not one.has_ended
    }
    members = set(confirmed)
    while free := {one for one in members if not _is_held(blocked[one], confirmed[one] & members)}:
        members -= free
    if rank not in members:
        return []
    reached, front = {rank}, {rank}
    while front:
        front = {other for one in front for other in confirmed[one] & members} - reached
        reached |= front
    # A rank that waits for others which wait for each other learns from them that they fail.
    is_of_them = blocked[rank].from_any or any(rank in confirmed[one] for one in reached)
    if not is_of_them or not any(blocked[one].from_any for one in reached):
        return []
    return [blocked[one] for one in sorted(reached)]


def _is_held(blocked: BlockedRank, by: set[int]) -> bool:
    """Return whether a rank waits for ever if the ranks `by` do, whose waits it has confirmed."""
    return bool(by) and (not blocked.from_any or by.issuperset(blocked.awaits))


def advice_on_sends(names: Collection[str]) -> str:
    """Return how to change the calls of ranks that all send, by the names of the calls; empty if not all of them do."""
    if not _SENDS.issuperset(names):
        return ""
    if _OBJECT_SENDS.isdisjoint(names):
        return "post an irecv before the send, or call sendrecv, which does both at once"
    return "send with isend_object_list, and wait for it after the receive, or call sendrecv_object"


def describe(path: list[BlockedRank]) -> str:
    """Return why the ranks of an `endless_wait` wait: the cause, and a line for each rank where there are several."""
    if any(one.from_any for one in path):
        ranks = {one.rank for one in path}
        return _describe_waits(path, [_awaited(one, ranks) for one in path])
    if not path[-1].has_ended:
        return _describe_waits(path, [f"rank {other.rank}" for other in [*path[1:], path[0]]])
    mine, *_, last, ended = path if len(path) > 2 else (path[0], *path)
    words = f"rank {ended.rank} has finished the {ended.call}"
    if last is mine:
        return f"{words}, but this rank is still waiting for it in {mine.call}"
    waits = f"rank {last.rank} is still waiting for it in {last.call}, and this rank for rank {path[1].rank}"
    return f"{words}, but {waits} in {mine.call}"


def _awaited(blocked: BlockedRank, ranks: set[int]) -> str:
    if blocked.from_any:
        return f"any of {ranks_text(blocked.awaits)}" if blocked.num_others else "a message from any rank"
    return f"rank {min(ranks.intersection(blocked.confirmed))}"


def _describe_waits(blocked: list[BlockedRank], awaited: list[str]) -> str:
    steps = [
        f"rank {one.rank} waits for {whom} in {one.call}"
        + (f", in a wait_any with {counted(one.num_others, 'other call')}" if one.num_others else "")
        + "".join(f" ({fact})" for fact in (one.instead, one.full_buffer) if fact)
        for one, whom in zip(blocked, awaited, strict=True)
    ]
    if len(steps) > _MOST_NAMED:
        steps[_MOST_NAMED - 1 : -1] = [f"and so on, {len(blocked)} ranks in all"]
    advice = _advice(blocked)
    lines = [*steps, advice] if advice else steps
    return "\n  ".join(["deadlock: the ranks wait for each other, and none can proceed", *lines])


def _advice(blocked: list[BlockedRank]) -> str:
    """Return how to change the calls, as far as these tell it; else an empty string."""
    names = [one.call.partition("(")[0] for one in blocked]
    exchange = next((name for name in names if name in _EXCHANGES), None)
    if exchange is not None:
        return _EXCHANGES[exchange]
    halo = next((one.call for one in blocked if _is_of_halos(one.call)), None)
    if halo is not None:
        return (
            f"all ranks of the mesh must call {halo.partition('(')[0]}, with equal arguments and with arrays of one"
            " layout"
        )
    if not {*names} & {*_SENDS, *_RECEIPTS}:
        orders = {one.members for one in blocked}
        if len({tuple(sorted(members)) for members in orders}) < len(orders):
            return "groups whose ranks are in a different order are different groups"
        return "make the same calls on these groups on all ranks, the same number of times and in the same order"
    if advice := advice_on_sends(names):
        return advice
    advice = _advice_on_messages(blocked, names)
    if others := [one.rank for one in blocked if one.instead]:
        which = (
            "message that is waiting, with its tag and source",
            "messages that are waiting, with their tags and sources",
        )
        received = f"let {ranks_text(others)} receive the {which[len(others) > 1]}"
        if any(one.instead and name == "probe" for one, name in zip(blocked, names, strict=True)):
            received += ", which probe(tag=None) finds"
        return f"{received}; or {advice}" if advice else received
    return advice


def _is_of_halos(call: str) -> bool:
    """Return whether a call is a message of another function than those of messages: one of arrays over a mesh."""
    name, _, rest = call.partition("(")
    return _OF_MESSAGE.search(rest) is not None and name not in (*_SENDS, *_RECEIPTS, *_EXCHANGES)


def _advice_on_messages(blocked: list[BlockedRank], names: list[str]) -> str:
    """Return the advice for ranks some of which wait in calls that receive, or one in one that sends."""
    if {*names} == {"probe"}:
        return "let one of them send before it probes"
    if {*names} <= {*_RECEIPTS}:
        advice = "let one of them send before it receives"
        both = "sendrecv" if _OBJECT_RECEIPTS.isdisjoint(names) else "sendrecv_object"
        return f"{advice}, or call {both}, which does both at once"
    if len(blocked) != 2:
        return ""
    message, other = sorted(blocked, key=lambda one: one.call.partition("(")[0] not in (*_SENDS, *_RECEIPTS))
    first, second = (one.call.partition("(")[0] for one in (message, other))
    if second in (*_SENDS, *_RECEIPTS):
        return ""
    counterpart = "receive" if first in _SENDS else "send"
    return (
        f"let rank {other.rank} {counterpart} before its {second}, or rank {message.rank} call {second} before its"
        f" {first}"
    )
