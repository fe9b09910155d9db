"""RankOutput: what the workers print, in the order of ranks, and equal output once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from time import monotonic

# How long lines wait for those of other ranks.
_HOLD_S = 0.5


class RankOutput:
    """Collects lines of all ranks and writes them sorted by rank, lines that ranks have in common once.

    A cell that runs longer than half a second shows what it has printed every half a second.

    Args:
        write: Called with each line to show.
        clock: Returns the time in seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._write = write
        self._clock = clock
        self._lines: dict[int, list[str]] = {}
        self._since_s = 0.0  # when the first of these lines came

    def add(self, rank: int, line: str) -> None:
        if not self._lines:
            self._since_s = self._clock()
        self._lines.setdefault(rank, []).append(line)

    def flush_if_due(self) -> None:
        if self._lines and self._clock() - self._since_s >= _HOLD_S:
            self.flush()

    def flush(self) -> None:
        """Write what has come."""
        lines, self._lines = self._lines, {}
        for line in merged(lines):
            self._write(line)


def merged(lines_by_rank: Mapping[int, Sequence[str]]) -> list[str]:
    """Return the lines of all ranks, each with its ranks: what all have at the beginning first, then rank by rank.

    Ranks whose remaining lines are equal share them. Empty lines have no ranks before them.
    """
    if not lines_by_rank:
        return []
    ranks = sorted(lines_by_rank)
    rows = list(zip(*(lines_by_rank[rank] for rank in ranks), strict=False))  # to the end of the shortest
    common = [row[0] for row in takewhile(lambda row: len(set(row)) == 1, rows)]
    ranks_by_rest: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        ranks_by_rest.setdefault(tuple(lines_by_rank[rank][len(common) :]), []).append(rank)
    shown = [f"{rank_label(ranks)} {line}" if line else "" for line in common]
    for rest, these in ranks_by_rest.items():
        shown += [f"{rank_label(these)} {line}" if line else "" for line in rest]
    return shown


def rank_label(ranks: Sequence[int]) -> str:
    """Return the sorted ranks in brackets, as in `[0]`, `[0,2]` or `[0-3]`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return f"[{','.join(parts)}]"
