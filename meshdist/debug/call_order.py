"""Hooks that log and compare calls before they are made, at debug level DETAIL.

CallLog logs each call. CallOrder compares the order of the calls on overlapping groups: ranks that are in two groups
must call them in the same order, else one rank waits in the first group for another that waits in the second. The ranks
number the collectives on each such pair of groups, and record in the world's store which of the two groups each number
belongs to; a rank that finds the other group there raises at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from meshdist.arrays.host import describe_objects
from meshdist.errors import DistBackendError
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import resolve
from meshdist.runtime.call import num_bytes
from meshdist.runtime.call_site import call_site
from meshdist.runtime.hooks import CallInfo, HookedGroup
from meshdist.runtime.log import RankLog
from meshdist.runtime.object_messages import ObjectMessage
from meshdist.runtime.rank_text import numbers_differ
from meshdist.store import PrefixStore, Store


class CallLog:
    """Logs the calls of a group before they are made."""

    def __init__(self, log: RankLog) -> None:
        self._log = log

    def __call__(self, call: CallInfo) -> None:
        given, taken = num_bytes(call.send), num_bytes(call.recv)
        if isinstance(call.recv, ObjectMessage):
            volume = f"receives {describe_objects(call.recv.array.dtype)}"  # of unknown size
        elif call.send is call.recv and call.send is not None:
            volume = f"{given} B in place"
        else:
            volume = " and ".join(
                f"{verb} {size} B"
                for verb, size, buffers in (("sends", given, call.send), ("receives", taken, call.recv))
                if buffers is not None
            )
        group = call.group
        number = group.messages.num_messages if call.collective is None else group.num_calls
        extra = {"group": group.label, "sequence": number + 1}
        self._log.debug("%s: %s, at %s", call.error_prefix, volume or "no data", call_site(), extra=extra)


_FEWEST_SHARED = 2


class CallOrder:
    """Compares the order of this rank's calls on overlapping `groups` with the other ranks, before each call."""

    def __init__(self, store: Store, groups: Sequence[HookedGroup]) -> None:
        self._store = PrefixStore("order", store)
        self._groups = groups
        self._shared: dict[tuple[str, str], int] = {}

    def __call__(self, call: CallInfo) -> None:
        """Compare one call; raise DistBackendError where another rank calls the other group in its place."""
        if call.collective is None or call.is_size_exchange:
            return
        group = resolve(call.group)
        for other in map(resolve, list(self._groups)):
            if other is not group and self._num_shared(group, other) >= _FEWEST_SHARED:
                self._compare(call, group, other)

    def _num_shared(self, one: ProcessGroup, other: ProcessGroup) -> int:
        key = one.name, other.name
        if key not in self._shared:
            self._shared[key] = len({*one.ranks} & {*other.ranks})
        return self._shared[key]

    def _compare(self, call: CallInfo, group: ProcessGroup, other: ProcessGroup) -> None:
        number = group.num_calls + other.num_calls + 1
        pair = "|".join(sorted((group.name, other.name)))
        key = f"{pair}/{number}"
        rank = group.global_rank(group.rank())
        mine = f"{call.name} on {group.label!r} at {call_site()}"
        first = self._store.compare_set(key, "", json.dumps([group.name, mine, rank]))
        name, theirs, their_rank = json.loads(first)
        if name != group.name:
            differ = numbers_differ(group.ranks) or numbers_differ(other.ranks)
            kind = "global rank" if differ else "rank"
            error = DistBackendError(
                f"{call.error_prefix}: the ranks call overlapping groups in different orders: call {number} on groups"
                f" {group.label!r} and {other.label!r} is {theirs} on {kind} {their_rank}, and"
                f" {mine} on {kind} {rank}; make the calls in one order on all ranks"
            )
            for each in (group, other):
                each.abort(str(error))
            raise error
        if self._store.add(f"{key}/seen", 1) == self._num_shared(group, other):
            for done in (key, f"{key}/seen"):
                self._store.delete_key(done)
