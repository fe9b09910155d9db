"""The message of calls that disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshdist.arrays import Array
from meshdist.errors import DistBackendError
from meshdist.rank_words import call_rank, call_ranks


def disagreement(calls: Mapping[int, str], ranks: Sequence[int]) -> str:
    """Return a sentence that says which ranks made which call.

    Args:
        calls: What each rank of the group says of its call.
        ranks: The global ranks of the group, in group order.

    Example:
        >>> disagreement({0: "barrier() at a.py:3", 1: "barrier() at a.py:3", 2: "send() at a.py:7"}, range(3))
        'the ranks disagree: ranks 0, 1 call barrier() at a.py:3; rank 2 calls send() at a.py:7'
    """
    ranks_of: dict[str, list[int]] = {}
    for place, call in sorted(calls.items()):
        ranks_of.setdefault(call, []).append(place)
    parts = [
        f"{call_ranks(places, ranks)} {'calls' if len(places) == 1 else 'call'} {call}"
        for call, places in ranks_of.items()
    ]
    return f"the ranks disagree: {'; '.join(parts)}"


def compare_splits(given: Array, expected: Array, unit: str, ranks: Sequence[int]) -> None:
    """Check that every rank of an all_to_all gives what the other expects.

    All ranks look at all pairs, so all raise if one does.

    Args:
        given: Shape (ranks, ranks): what the rank of the row gives to the rank of the column.
        expected: Likewise, what the rank of the row expects from the rank of the column.
        unit: What is counted.
        ranks: The global ranks of the group, in group order.

    Raises:
        DistBackendError: They differ somewhere.
    """
    wrong = np.argwhere(given != expected.T)
    if len(wrong):
        giver, taker = wrong[0]
        raise DistBackendError(
            f"the sizes disagree: {call_rank(giver, ranks)} sends {given[giver, taker]} {unit} to"
            f" {call_rank(taker, ranks)}, which expects {expected[taker, giver]}"
        )
