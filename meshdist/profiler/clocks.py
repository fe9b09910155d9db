"""How far the clocks of the ranks are apart, found out through the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns

from meshdist.store import Store

# Of so many exchanges the quickest counts.
_EXCHANGES = 8


def clock_offset_ns(store: Store, rank: int, hosts: Sequence[str], clock: Callable[[], int] = perf_counter_ns) -> int:
    """Return what to add to this rank's clock to get that of rank 0, in nanoseconds; all ranks call it together.

    The processes of a host have one clock, so the first rank of each host asks rank 0 what time it is, and the others
    of its host take its answer. Who asks assumes that rank 0 looked at its clock half way between question and answer;
    the quickest of several exchanges is off by half its duration at most (Cristian, "Probabilistic clock
    synchronization", 1989).

    Args:
        store: Of these ranks, and for this alone.
        rank: This rank.
        hosts: What tells the hosts of the ranks apart, in rank order.
        clock: The clock of this rank.

    Raises:
        DistStoreError: A rank did not come in time.

    Example:
        >>> from threading import Thread
        >>> from meshdist.store import HashStore
        >>> store, hosts = HashStore(), ["here", "there"]
        >>> other = Thread(target=clock_offset_ns, args=(store, 0, hosts))
        >>> other.start()
        >>> late_ns = clock_offset_ns(store, 1, hosts, lambda: perf_counter_ns() - 60 * 10**9)
        >>> other.join()
        >>> round(late_ns / 10**9)
        60
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
