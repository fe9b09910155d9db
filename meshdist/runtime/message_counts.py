"""Counts of what a rank has sent to each other rank and received from it, to prove that nothing is under way.

In shared memory, a rank sees at once what another has written. Over a network it may be under way for any time. Two
ranks compare their counts instead, as algorithms that detect the termination of a distributed computation do
(F. Mattern: Algorithms for distributed termination detection, Distributed Computing 2 (1987), section 4).

A rank that waits makes no calls, but its transport goes on: it writes what the rank has sent before, and may answer
what it reads, as the receiver of a long message asks for its bytes. Such an answer goes back to the rank whose message
it answers, and comes only after that message has been read. So if nothing is under way between two ranks in either
direction, neither transport sends anything until one of the ranks goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, TypeAlias


class Carried(NamedTuple):
    """What one transport has carried between this rank and another."""

    sent: int = 0  # counts all that has been handed to the transport, also what it has not written yet
    received: int = 0  # counts, in the same unit, what has been read and handled to the end
    is_held: bool = False  # what arrives from the other is not answered until this rank makes a call that needs it


# By name of the transport, see `Peers.carriers`, and global rank. A rank is left out if nothing was carried.
Traffic: TypeAlias = "Mapping[str, Mapping[int, Carried]]"

_NOTHING = Carried()
_GROUP = "group "


def name_of_group(group: str) -> str:
    """Return the name of a transport whose messages end no waits but those in calls of one group.

    `group` is the name of the group, or begins with it.
    """
    return f"{_GROUP}{group}"


class Carrier(Protocol):
    """A transport whose messages may be under way; `Peers.carriers` holds those of a world."""

    def carried(self) -> Mapping[int, Carried]:
        """Read what has arrived, and return what has been carried, by global rank.

        Called by a thread of this rank that waits.
        """


def is_quiet(mine: Carried, theirs: Carried) -> bool:
    """Return whether nothing was under way between two ranks, of which this one counted after the other.

    All that the other had sent has been handled here; and the other had handled all that this rank has sent, or does
    not answer it while it waits.
    """
    return mine.received == theirs.sent and (theirs.is_held or mine.sent == theirs.received)


def between(traffic: Traffic, rank: int, groups: Iterable[str]) -> dict[str, Carried]:
    """Return the part of `traffic` with one rank, by transport, that may end a wait in calls of some groups."""
    names = tuple(map(name_of_group, groups))
    return {
        name: carried[rank]
        for name, carried in traffic.items()
        if rank in carried and (not name.startswith(_GROUP) or name.startswith(names))
    }


def all_quiet(mine: Mapping[str, Carried], theirs: Mapping[str, Carried]) -> bool:
    """Return whether `is_quiet` holds for all transports between two ranks."""
    return all(is_quiet(mine.get(name, _NOTHING), theirs.get(name, _NOTHING)) for name in {*mine, *theirs})


def encode(traffic: Traffic) -> dict[str, list[list[int]]]:
    """Return `traffic` as JSON data."""
    return {name: [[rank, *map(int, one)] for rank, one in carried.items()] for name, carried in traffic.items()}


def decode(data: Mapping[str, list[list[int]]]) -> Traffic:
    """Return the traffic that `encode` made `data` of."""
    return {
        name: {rank: Carried(sent, received, bool(is_held)) for rank, sent, received, is_held in carried}
        for name, carried in data.items()
    }
