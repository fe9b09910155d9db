"""The offset between the clocks of the hosts, so that the calls of all ranks fit on one time axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns

from meshdist.store import Store

# The quickest of these exchanges counts.
_EXCHANGES = 8


def clock_offset_ns(store: Store, rank: int, hosts: Sequence[str], clock: Callable[[], int] = perf_counter_ns) -> int:
    """Return the offset from this rank's clock to that of rank 0, in nanoseconds; all ranks call it together.

    The processes of a host share a clock, so the first rank of each host asks rank 0 for its time, and the other ranks
    of the host use its result. The asking rank assumes that rank 0 read its clock half way between question and answer;
    the quickest of several exchanges is off by at most half its duration (Cristian, "Probabilistic clock
    synchronization", 1989). `hosts` has a key of the host of each rank; the store is used for this exchange only.
    """
    leaders = [first for first in (hosts.index(host) for host in dict.fromkeys(hosts)) if first != 0]
    leader = hosts.index(hosts[rank])
    if rank == 0:
        for asking in leaders:
            _answer(store, asking, clock)
        return 0
    if leader == 0:
        return 0
    if leader == rank:
        offset = _ask(store, rank, clock)
        store.set(f"offset/{rank}", str(offset))
        return offset
    return int(store.get(f"offset/{leader}"))


def _answer(store: Store, asking: int, clock: Callable[[], int]) -> None:
    for number in range(_EXCHANGES):
        store.get(f"asked/{asking}/{number}")
        store.set(f"answered/{asking}/{number}", str(clock()))


def _ask(store: Store, rank: int, clock: Callable[[], int]) -> int:
    found: list[tuple[int, int]] = []
    for number in range(_EXCHANGES):
        began = clock()
        store.set(f"asked/{rank}/{number}", "")
        answer = int(store.get(f"answered/{rank}/{number}"))
        ended = clock()
        found.append((ended - began, answer - (began + ended) // 2))
    return min(found)[1]
