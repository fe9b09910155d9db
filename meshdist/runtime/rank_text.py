"""The names of ranks in messages, with their global ranks if these differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# Patterns, which are compiled at their first use.
# What `Membership.error_prefix`, the errors of a mesh, and those of messages to oneself say of the rank.
_OWN_RANK = r"\(rank -?\d+ of \d+(, global rank \d+)?"
_OWN_RANK_IN_MESH = r"( on mesh [^\n]*\)) \(rank -?\d+\)(?=: )"
_THIS_RANK = r"(is this rank), \d+\b"
# The ranks of a deadlock may be in different calls on different groups.
_OWN_CALL = r"\w+ on group [^\n]* \(\): (?=deadlock: )"
# More ranks than these are written as runs: ranks 0, 2-7.
_MOST_LISTED = 4
_MOST_WITHOUT_NUMPY = 64


def ranks_text(numbers: Sequence[int] | NDArray[np.int64], noun: str = "rank", most: int = 8) -> str:
    """Return ranks in words, in the given order; more than a few are written as runs, of which `most` are named."""
    if len(numbers) <= min(most, _MOST_LISTED):
        parts = list(map(str, numbers))
    else:
        runs = [(numbers[begin], numbers[end - 1]) for begin, end in pairwise([0, *_ends_of_runs(numbers, most)])]
        parts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]
        if len(parts) > most:
            parts = [*parts[:most], f"and so on, {len(numbers)} in all"]
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(parts)}"


def _ends_of_runs(numbers: Sequence[int] | NDArray[np.int64], most: int) -> list[int]:
    """Return where the first runs of consecutive numbers end, `most` + 1 at least if there are more; and the end."""
    if len(numbers) <= _MOST_WITHOUT_NUMPY:
        return [place for place in range(1, len(numbers)) if numbers[place] - numbers[place - 1] != 1] + [len(numbers)]
    import numpy as np  # launchers, which name few ranks, do without

    return [*(np.flatnonzero(np.diff(numbers) != 1) + 1)[: most + 1].tolist(), len(numbers)]


def without_own_rank(message: str) -> str:
    """Return a message without the rank that made it, to compare it with those of other ranks."""
    message = re.sub(_OWN_CALL, "", re.sub(_OWN_RANK, "(", message))
    return re.sub(_THIS_RANK, r"\1", re.sub(_OWN_RANK_IN_MESH, r"\1", message))


def same_but_for_rank(message: str, rank: int, other_message: str, other_rank: int) -> bool:
    """Return whether the messages of two ranks differ only in the number of the rank that made them."""
    one, other = (re.split(r"(\d+)", without_own_rank(text)) for text in (message, other_message))
    return len(one) == len(other) and all(
        mine == theirs or (mine == str(rank) and theirs == str(other_rank))
        for mine, theirs in zip(one, other, strict=True)
    )


def numbers_differ(ranks: Sequence[int]) -> bool:
    """Return whether the global ranks of a group, in group order, differ from the ranks in the group."""
    return any(place != rank for place, rank in enumerate(ranks))


def call_rank(place: int, ranks: Sequence[int]) -> str:
    """Return the name of rank `place` of a group of the global ranks `ranks`."""
    return call_ranks([place], ranks)


def call_process(place: int, ranks: Sequence[int], process: str) -> str:
    """Return the name of rank `place` of a group of the global ranks `ranks`, with its process."""
    also = f"global rank {ranks[place]}, " if numbers_differ(ranks) else ""
    return f"rank {place} ({also}{process})"


def call_ranks(places: Sequence[int], ranks: Sequence[int]) -> str:
    """Return the names of the ranks `places`, at least one, of a group of the global ranks `ranks`."""
    words = ranks_text(places)
    if not numbers_differ(ranks):
        return words
    return f"{words} ({ranks_text([ranks[place] for place in places], 'global rank')})"
