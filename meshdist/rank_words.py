"""How messages call ranks of a group: by their number there, and by that in the world where it is another."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_NAMED = 16


def numbers_differ(ranks: Sequence[int]) -> bool:
    """Return whether the ranks of a group have other numbers in the world.

    Args:
        ranks: The global ranks, in group order.

    Example:
        >>> numbers_differ([0, 1, 2]), numbers_differ([0, 2])
        (False, True)
    """
    return any(place != rank for place, rank in enumerate(ranks))


def call_rank(place: int, ranks: Sequence[int]) -> str:
    """Return what messages call a rank.

    Args:
        place: Its number in the group.
        ranks: The global ranks of the group, in group order.

    Example:
        >>> call_rank(1, [0, 1, 2]), call_rank(1, [0, 2])
        ('rank 1', 'rank 1 (global rank 2)')
    """
    return call_ranks([place], ranks)


def call_process(place: int, ranks: Sequence[int], process: str) -> str:
    """Return what messages call a rank whose process is known.

    Args:
        place: Its number in the group.
        ranks: The global ranks of the group, in group order.
        process: Which process it is, and where.

    Example:
        >>> call_process(1, [0, 2], "pid 4711 on node1")
        'rank 1 (global rank 2, pid 4711 on node1)'
    """
    also = f"global rank {ranks[place]}, " if numbers_differ(ranks) else ""
    return f"rank {place} ({also}{process})"


def call_ranks(places: Sequence[int], ranks: Sequence[int]) -> str:
    """Return what messages call some ranks.

    Args:
        places: Their numbers in the group, one at least.
        ranks: The global ranks of the group, in group order.

    Example:
        >>> call_ranks([0, 1], [0, 2, 4])
        'ranks 0, 1 (global ranks 0, 2)'
    """
    words = _listed("rank", places)
    if not numbers_differ(ranks):
        return words
    return f"{words} ({_listed('global rank', [ranks[place] for place in places])})"


def _listed(noun: str, numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:_MOST_NAMED]))
    if len(numbers) > _MOST_NAMED:
        return f"{len(numbers)} {noun}s {named}, ..."
    return f"{noun}{'s' if len(numbers) > 1 else ''} {named}"
