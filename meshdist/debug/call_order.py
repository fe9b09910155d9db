"""CallOrder: whether the ranks of overlapping groups make their calls in one order, at debug level DETAIL.

Two groups that share ranks are called by each of these in some order, and it must be the same: else one waits in the
first group for the other, which waits in the second. The ranks number the collectives on each such pair of groups, and
leave word in the world's store which of the two groups a number is of; who finds another one there raises at once.
"""

from __future__ import annotations

from meshdist.call import call_site
from meshdist.detour import Announcement
from meshdist.errors import DistBackendError
from meshdist.process_group import ProcessGroup
from meshdist.rank_words import numbers_differ
from meshdist.store import PrefixStore, Store

_FEWEST_SHARED = 2


class CallOrder:
    """Compares the order of calls on overlapping groups, before each.

    Args:
        store: The world's.
        groups: Returns the groups of this rank.
    """

    def __init__(self, store: Store, groups: list[ProcessGroup]) -> None:
        self._store = PrefixStore("order", store)
        self._groups = groups
        self._shared: dict[tuple[str, str], int] = {}

    def __call__(self, call: Announcement) -> None:
        """Compare one call; raise DistBackendError where another rank makes one on another group in its place."""
        if call.collective is None or call.is_prelude:
            return
        for other in list(self._groups):
            if other is not call.group and self._num_shared(call.group, other) >= _FEWEST_SHARED:
                self._compare(call, other)

    def _num_shared(self, one: ProcessGroup, other: ProcessGroup) -> int:
        key = one.name, other.name
        if key not in self._shared:
            self._shared[key] = len({*one.ranks} & {*other.ranks})
        return self._shared[key]

    def _compare(self, call: Announcement, other: ProcessGroup) -> None:
        group = call.group
        number = group.num_calls + other.num_calls + 1
        pair = "|".join(sorted((group.name, other.name)))
        key = f"{pair}/{number}"
        rank = group.global_rank(group.rank())
        mine = f"{group.name}\n{call.name} on {group.label!r} at {call_site()}"
        name, _, words = self._store.compare_set(key, "", f"{mine}\n{rank}").decode().partition("\n")
        if name != group.name:
            theirs, _, their_rank = words.rpartition("\n")
            differ = numbers_differ(group.ranks) or numbers_differ(other.ranks)
            kind = "global rank" if differ else "rank"
            error = DistBackendError(
                f"{call.where}: the ranks call overlapping groups in different orders: call {number} on groups"
                f" {group.label!r} and {other.label!r} is {theirs} on {kind} {their_rank}, and"
                f" {mine.partition(chr(10))[2]} on {kind} {rank}; make the calls in one order on all ranks"
            )
            for each in (group, other):
                each.abort(str(error))
            raise error
        if self._store.add(f"{key}/seen", 1) == self._num_shared(group, other):
            for done in (key, f"{key}/seen"):
                self._store.delete_key(done)
