"""BlockedRank: a rank whose wait only other ranks can end, as it publishes that; and the circles of such ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

_MOST_NAMED = 8
# In the words of a call that waits for another message than that which has come.
_THERE = " (there "


@dataclass(frozen=True)
class BlockedRank:
    """A rank whose wait only other ranks can end.

    Attributes:
        rank: Its global rank.
        number: The number of the wait among those of the rank.
        awaits: The global ranks that all have to do something, or the first of them.
        call: The call in which it waits, as messages name it.
        confirmed: The numbers of their waits after which this rank has found its own to go on, by rank.
        members: The ranks of the group of the call, in its order.
        phase: The number of its phase.
        has_ended: It is in no call: it has ended the phase.
        num_counts: How often it has published its traffic in this wait; see `runtime.message_counts`.
        sends_in: The group in which the awaited rank has to read its messages; see `runtime.waiting`.
        reads_in: The group in which it reads all messages of the awaited rank.
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
    sends_in: str = ""
    reads_in: str = ""

    def may_end(self, other: BlockedRank) -> bool:
        """Return whether the wait of `other` may end by what this rank does while it waits."""
        return bool(other.sends_in) and self.reads_in == other.sends_in and other.rank in self.awaits

    def encode(self) -> str:
        return json.dumps({**asdict(self), "confirmed": sorted(self.confirmed.items())})

    @classmethod
    def decode(cls, text: bytes) -> BlockedRank:
        fields = json.loads(text)
        fields["awaits"], fields["members"] = tuple(fields["awaits"]), tuple(fields["members"])
        return cls(**{**fields, "confirmed": dict(map(tuple, fields["confirmed"]))})


def endless_wait(rank: int, blocked: Mapping[int, BlockedRank]) -> list[BlockedRank]:
    """Return blocked ranks of which each has confirmed the wait of the next; none if the wait of `rank` may end.

    Either they are a circle with `rank`, from its lowest rank on; or they are `rank` and others, and the last has ended
    its phase.
    """
    paths = {rank: [blocked[rank]]}
    front = [rank]
    while front:
        path = paths[front.pop(0)]
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


def describe(path: list[BlockedRank]) -> str:
    """Return the sentence that says why the ranks of an `endless_wait` wait."""
    if not path[-1].has_ended:
        return _describe_circle(path)
    mine, *_, last, ended = path if len(path) > 2 else (path[0], *path)
    words = f"rank {ended.rank} has finished the {ended.call}"
    if last is mine:
        return f"{words}, but this rank is still waiting for it in {mine.call}"
    waits = f"rank {last.rank} is still waiting for it in {last.call}, and this rank for rank {path[1].rank}"
    return f"{words}, but {waits} in {mine.call}"


def _describe_circle(circle: list[BlockedRank]) -> str:
    steps = [
        f"rank {one.rank} waits for rank {other.rank} in {one.call}"
        for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]
    if len(steps) > _MOST_NAMED:
        steps[_MOST_NAMED - 1 : -1] = [f"and so on, {len(circle)} ranks in all"]
    orders = {one.members for one in circle}
    are_reordered = len({tuple(sorted(members)) for members in orders}) < len(orders)
    advice = "; groups whose ranks are in a different order are different groups" if are_reordered else ""
    if all(one.call.startswith("send(") for one in circle):
        advice = "; post an irecv before the send, or call sendrecv, which does both at once"
    if all(one.call.startswith("recv(") and _THERE not in one.call for one in circle):
        advice = "; let one of them send before it receives, or call sendrecv, which does both at once"
    return f"the ranks wait for each other, and none can go on: {'; '.join(steps)}{advice}"
