"""The message of calls that disagree."""

from __future__ import annotations

from collections.abc import Mapping


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
