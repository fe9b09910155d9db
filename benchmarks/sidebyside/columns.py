"""The columns of the table of collectives: a time for each library, and ratios."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from sidebyside import report
from sidebyside.cases import KIB
from sidebyside.libraries import OVER_MPI, SHARED, Library
from sidebyside.rounds import ratio

# They are no collective of the other libraries, which do something else in their place.
_NOT_IN_MEANS = ("all_reduce_outstanding", "all_reduce_coalesced")
# Less than what two runs of one program differ by.
_AS_FAST = 0.97
_LARGE_BYTES = 64 * KIB


class Columns:
    """The columns for some libraries.

    Attributes:
        own: The library that the others are compared with; None where there is none.
    """

    def __init__(self, libraries: Sequence[Library]) -> None:
        self._libraries = libraries
        named = {library.name: library for library in libraries}
        self.own = named.get("meshdist") or named.get(OVER_MPI.name)
        self._others = [library for library in libraries if library not in (self.own, SHARED)]
        # Each ratio: title, whose times are divided, and by whose.
        self._ratios: list[tuple[str, list[str], str]] = []
        if self.own is not None and self._others:
            everyone = [library.name for library in self._others]
            each = [(library.title, [library.name]) for library in self._others]
            for title, names in [*each, *[("the fastest other", everyone)] * (len(everyone) > 1)]:
                self._ratios.append((f"{title} / {self.own.title}", names, self.own.name))
                # They are for what is to be fastest of all: one library to compare with is enough, and the fastest.
                if SHARED in libraries and (names == ["openmpi"] or names == everyone):
                    self._ratios.append((f"{title} / shared arrays", names, SHARED.name))

    def head(self, ranks: int) -> list[str]:
        """Return the heads of the columns."""
        return [
            f"{ranks} ranks",
            "size",
            *(each.title for each in self._libraries),
            *(each[0] for each in self._ratios),
        ]

    def row(self, result: dict[str, Any]) -> list[str]:
        """Return the cells of a measured case."""
        times = result["times"]
        cells = [
            report.median_and_least(times[library.name]) if library.name in times else "" for library in self._libraries
        ]
        ratios = [_shown(found) for found in self._ratios_of(result)]
        return [result["collective"], report.size(result["nbytes"]), *cells, *ratios]

    def means(self, results: Sequence[dict[str, Any]]) -> list[list[str]]:
        """Return the rows of the geometric means of the ratios: over all cases, and over those of many bytes."""
        counted = [result for result in results if result["collective"] not in _NOT_IN_MEANS]
        large = [result for result in counted if result["nbytes"] >= _LARGE_BYTES]
        rows = []
        for title, some in (("from 64 KiB on", large), ("all sizes", counted)):
            if some and self._ratios:
                columns = zip(*(self._ratios_of(result) for result in some), strict=True)
                means = [_mean([found for found in column if found is not None]) for column in columns]
                rows.append(["geometric mean", title, *[""] * len(self._libraries), *map(_shown, means)])
        return rows

    def summary(self, results: Sequence[dict[str, Any]]) -> str:
        """Return in how many cases this library is the fastest, and where it is behind; empty without others."""
        if self.own is None or not self._others:
            return ""
        names = [library.name for library in self._others]
        behind = []
        for result in results:
            times = result["times"]
            rivals = [name for name in names if name in times]
            found = ratio(times, rivals, self.own.name) if rivals and self.own.name in times else None
            if found is not None and found < _AS_FAST:
                behind.append(
                    f"{' '.join([result['collective'], report.size(result['nbytes'])]).strip()} ({found:.2f})"
                )
        words = f"{self.own.title} is ahead, or at most {1 - _AS_FAST:.0%} behind, in {len(results) - len(behind)} of"
        return f"{words} {len(results)} rows{'; behind in ' if behind else ''}{', '.join(behind)}."

    def _ratios_of(self, result: dict[str, Any]) -> list[float | None]:
        times = result["times"]
        return [
            ratio(times, names, own) if own in times and all(name in times for name in names) else None
            for _, names, own in self._ratios
        ]


def _mean(ratios: Sequence[float]) -> float | None:
    return geometric_mean(ratios) if ratios else None


def _shown(found: float | None) -> str:
    return "" if found is None else f"{found:.2f}"
