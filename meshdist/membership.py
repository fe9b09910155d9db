"""Membership: the ranks of a group, in both ways to number them, and what messages call the group."""

from __future__ import annotations

from functools import cached_property
from operator import index

from meshdist.group_names import listed, place_of
from meshdist.rank_words import numbers_differ


class Membership:
    """Who is in a group, and where.

    Args:
        ranks: The global ranks, in group order.
        name: The group's name, the same on all its ranks.
        label: What messages call it.
        rank: The global rank of the caller.

    Example:
        >>> members = Membership((4, 1), "pair#1", "pair", rank=1)
        >>> members.rank(), members.size(), members.global_rank(0)
        (1, 2, 4)
    """

    def __init__(self, ranks: tuple[int, ...], name: str, label: str, rank: int) -> None:
        self.ranks = ranks
        self.name = self.group_name = name
        self.label = label
        self._rank = place_of(rank, ranks)
        self._wheres: dict[str, str] = {}

    @cached_property
    def _places(self) -> dict[int, int]:
        # Made when it is asked for: a mesh of 100,000 ranks has groups that nobody names a global rank of.
        return {rank: place for place, rank in enumerate(self.ranks)}

    @property
    def group_desc(self) -> str:
        """What messages call the group, by torch's name for it."""
        return self.label

    def rank(self) -> int:
        """Return this rank's place in the group, -1 where it is no member."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def root(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        """Return the root of a call as a rank of the group.

        Args:
            of: The function that is called, for messages.
            name: The parameter that `rank` is, `src` or `dst`; `group_rank` is `group_<name>`.
            rank: A global rank, or None.
            group_rank: A rank of the group, or None.

        Raises:
            TypeError: It is no integer.
            ValueError: Both or none are given, or it is no member.
        """
        if type(rank) is int and group_rank is None and rank in self._places:
            return self._places[rank]
        if (rank is None) == (group_rank is None):
            given = "neither" if rank is None else "both"
            raise ValueError(
                f"{self.where(of)}: give {name} (a global rank) or group_{name} (a rank in the group), got {given}"
            )
        try:
            place = self._places.get(index(rank)) if group_rank is None else index(group_rank)  # type: ignore[arg-type]
        except TypeError:
            given = repr(rank if group_rank is None else group_rank)
            raise TypeError(f"{self.where(of)}: {name} must be an integer, got {given}") from None
        if place is None:
            raise ValueError(f"{self.where(of)}: {name} must be a member, one of {listed(self.ranks)}, got {rank}")
        if not 0 <= place < len(self.ranks):
            raise ValueError(
                f"{self.where(of)}: {name} must be a rank in the group, 0 to {len(self.ranks) - 1}, got {place}"
            )
        return place

    def root_or_first(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        """Return `root(...)`, the first rank of the group where neither rank is given."""
        return 0 if rank is None and group_rank is None else self.root(of, name, rank, group_rank)

    def global_rank(self, place: int) -> int:
        """Return the global rank of a place in the group."""
        return self.ranks[place]

    def relabel(self, label: str) -> None:
        """Have messages call the group `label` from now on."""
        self.label, self._wheres = label, {}

    def where(self, name: str) -> str:
        """Return how messages about a call of `name` begin."""
        where = self._wheres.get(name)
        if where is None:
            where = self._wheres[name] = self._where(name)
        return where

    def _where(self, name: str) -> str:
        place = f"rank {self._rank} of {len(self.ranks)}"
        if self._rank >= 0 and numbers_differ(self.ranks):
            place += f", global rank {self.ranks[self._rank]}"
        return f"{name} on group {self.label!r} ({place})"
