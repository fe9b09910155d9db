"""The names of groups: what their ranks find each other by."""

from __future__ import annotations

import hashlib
from collections import Counter

_NAMED_MEMBERS = 8
_LISTED_MEMBERS = 64


class GroupNames:
    """Gives every group of a world a name that its ranks agree on without a word.

    A name says who the members are and how many groups the same members have had before. So it does not matter what
    other groups a rank has made in between, or in which order.

    Example:
        >>> names = GroupNames()
        >>> names.next((0, 2), "#"), names.next((1, 2), "#"), names.next((0, 2), "#")
        ('ranks 0,2#1', 'ranks 1,2#1', 'ranks 0,2#2')
    """

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()

    def next(self, ranks: tuple[int, ...], kind: str) -> str:
        """Return the name of the next group of these global ranks, in this order; each kind is counted by itself."""
        name = f"{_members(ranks)}{kind}"
        self._made[name] += 1
        return f"{name}{self._made[name]}"


def _members(ranks: tuple[int, ...]) -> str:
    members = ",".join(map(str, ranks))
    if len(ranks) <= _NAMED_MEMBERS:
        return f"ranks {members}"
    return f"{len(ranks)} ranks {hashlib.sha256(members.encode()).hexdigest()[:16]}"


def few(ranks: tuple[int, ...]) -> str:
    """Return the ranks in words, the first of them where there are many."""
    if len(ranks) <= _NAMED_MEMBERS:
        return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks {', '.join(map(str, ranks[:_NAMED_MEMBERS]))}, ..."


def listed(ranks: tuple[int, ...]) -> str:
    """Return the ranks as a list is written, the middle left out where there are very many.

    Example:
        >>> listed((0, 2))
        '[0, 2]'
        >>> listed(tuple(range(100)))
        '[0, 1, 2, ..., 99] (100 ranks)'
    """
    if len(ranks) <= _LISTED_MEMBERS:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]}] ({len(ranks)} ranks)"


def place_of(rank: int, ranks: tuple[int, ...]) -> int:
    """Return where a global rank stands among the ranks of a group, -1 where it does not."""
    if rank < len(ranks) and ranks[rank] == rank:  # as in the group of all ranks
        return rank
    try:
        return ranks.index(rank)
    except ValueError:
        return -1
