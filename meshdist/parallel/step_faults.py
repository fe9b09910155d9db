"""What is wrong in a step of a GradientReducer: collected on each rank, and raised on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.objects import all_gather_object
from meshdist.errors import DistBackendError
from meshdist.groups.process_group import ProcessGroup
from meshdist.runtime.call_site import call_site
from meshdist.runtime.rank_text import call_rank

_MOST_NAMED = 8


def names_text(names: Sequence[str]) -> str:
    """Return names in words; of many, the first ones.

    Example:
        >>> names_text(["w", "b"])
        "'w', 'b'"
    """
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(repr, names[:_MOST_NAMED])) + more


def _joined(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MOST_NAMED} more faults" if len(texts) > _MOST_NAMED else ""
    return "; ".join(texts[:_MOST_NAMED]) + more


class StepFaults:
    """The faults of one rank in the current step.

    Args:
        prefix: The beginning of the message.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._texts)

    def add(self, what: str) -> None:
        """Add a fault, with the line of the user's call."""
        self._texts.append(f"{what} (at {call_site()})")

    def add_missing(self, names: Sequence[str]) -> None:
        """Add that these parameters have no gradient."""
        self._texts.append(
            f"no gradient for {names_text(names)} before wait(): call ready() for every parameter, or make the reducer"
            " with find_unused_parameters=True"
        )

    def clear(self) -> None:
        """Begin another step."""
        self._texts = []

    def are_on_any_rank(self, group: ProcessGroup | None) -> bool:
        """Return whether a rank of the group has found a fault, by a small call; whether this one has if None."""
        count = np.array(len(self._texts))
        if group is not None:
            all_reduce(count, group=group)
        return bool(count != 0)

    def raise_on_all(self, group: ProcessGroup | None) -> None:
        """Raise DistBackendError with the faults of all ranks of the group; all of them call it."""
        if group is None:
            raise DistBackendError(f"{self._prefix}: {_joined(self._texts)}")
        found: list[Any] = [None] * group.size()
        all_gather_object(found, self._texts, group)
        parts = [f"{call_rank(place, group.ranks)}: {_joined(texts)}" for place, texts in enumerate(found) if texts]
        raise DistBackendError(f"{self._prefix}: {'. '.join(parts)}")
