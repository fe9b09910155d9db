"""The message of calls that disagree."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdist.arrays import Array
from meshdist.errors import DistBackendError


def disagreement(calls: Mapping[int, str]) -> str:
    """Return a sentence that says which ranks made which call.

    Args:
        calls: What each rank of the group says of its call.

    Example:
        >>> disagreement({0: "barrier() at a.py:3", 1: "barrier() at a.py:3", 2: "send() at a.py:7"})
        'the ranks disagree: ranks 0, 1 call barrier() at a.py:3; rank 2 calls send() at a.py:7'
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        ranks_of.setdefault(call, []).append(rank)
    parts = [
        f"rank {ranks[0]} calls {call}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} call {call}"
        for call, ranks in ranks_of.items()
    ]
    return f"the ranks disagree: {'; '.join(parts)}"


def compare_splits(given: Array, expected: Array, unit: str) -> None:
    """Check that every rank of an all_to_all gives what the other expects.

    All ranks look at all pairs, so all raise if one does.

    Args:
        given: Shape (ranks, ranks): what the rank of the row gives to the rank of the column.
        expected: Likewise, what the rank of the row expects from the rank of the column.
        unit: What is counted.

    Raises:
        DistBackendError: They differ somewhere.
    """
    wrong = np.argwhere(given != expected.T)
    if len(wrong):
        giver, taker = wrong[0]
        raise DistBackendError(
            f"the sizes disagree: rank {giver} sends {given[giver, taker]} {unit} to rank {taker},"
            f" which expects {expected[taker, giver]}"
        )
