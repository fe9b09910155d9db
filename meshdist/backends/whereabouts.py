"""Whereabouts: where a rank waits that others wait for in vain.

The ranks of two groups may wait for each other without end: those of a slice of a mesh for those of its transpose, say,
which has the same ranks in another order and is another group. So a rank that has waited for a second in the set-up of
a group leaves word in the world's store, and a rank whose time is over looks what the others have left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from meshdist.errors import DistError
from meshdist.group_names import few
from meshdist.rank_words import call_rank
from meshdist.waiting import Waitable, Wrapped

if TYPE_CHECKING:
    from meshdist.backends.base import BackendOptions

_PATIENCE_S = 1.0
_MOST_ASKED = 16


class SetUpWait(Wrapped):
    """What a rank waits for in the set-up of a group, and the word that it leaves meanwhile.

    Args:
        waitable: What it waits for.
        options: The group's.
    """

    def __init__(self, waitable: Waitable, options: BackendOptions) -> None:
        super().__init__(waitable)
        self._options = options
        self._since_s = time.monotonic()
        self._said = False

    def ready(self) -> bool:
        if not super().ready():
            return False
        if self._said:
            self._said = False
            with suppress(DistError):  # what has come is what counts
                self._options.world_store.delete_key(_key(self._options.ranks[self._options.rank]))
        return True

    def check(self) -> None:
        super().check()
        if not self._said and time.monotonic() - self._since_s > _PATIENCE_S:
            self._said = True
            options = self._options
            text = f"group {options.label!r} ({few(options.ranks)})"
            with suppress(DistError):  # a favour to others: what becomes of this wait does not hang on it
                options.world_store.set(
                    _key(options.ranks[options.rank]), f"{options.name}\n{text}\n{json.dumps(options.ranks)}"
                )

    def missing(self) -> str:
        # Where the store is gone, who is missing is still to be said.
        with suppress(DistError):
            return f"{super().missing()}{self._elsewhere()}"
        return super().missing()

    def _elsewhere(self) -> str:
        options, found, are_reordered = self._options, [], False
        for place, rank in enumerate(options.ranks[:_MOST_ASKED]):
            if options.world_store.check([_key(rank)]):
                name, _, rest = options.world_store.get(_key(rank)).decode().partition("\n")
                text, _, ranks = rest.rpartition("\n")
                if name != options.name:
                    found.append(f"; {call_rank(place, options.ranks)} waited meanwhile in the first call on {text}")
                    are_reordered |= _are_reordered(json.loads(ranks), options.ranks)
        advice = ", and groups whose ranks are in another order are others" if are_reordered else ""
        return f"{''.join(found)}{advice}"


def _are_reordered(ranks: Sequence[int], others: Sequence[int]) -> bool:
    return tuple(ranks) != tuple(others) and sorted(ranks) == sorted(others)


def _key(rank: int) -> str:
    return f"meeting/{rank}"
