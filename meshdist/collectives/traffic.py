"""The bytes that a collective moves: standard costs, and the bytes sent by one rank.

The costs are those of algorithms that are optimal in bytes:

- R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH, Int. J. High
  Performance Computing Applications 19 (2005): the terms in beta of the algorithms for long messages, sections 3 and 4.
- NVIDIA nccl-tests, doc/PERFORMANCE.md: the factors from the bandwidth of a call to that of the links.

S is the size of a call: the bytes of the larger side on a rank; for gather and scatter, of the array or list on the
    root. n is the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshdist.arrays.host import as_array

if TYPE_CHECKING:
    from fractions import Fraction


def nbytes_of(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, (list, tuple)):
        return sum(map(nbytes_of, value))
    return int(value.nbytes if hasattr(value, "nbytes") else as_array(value, "tensor").nbytes)


class Sent(NamedTuple):
    """Bytes that one rank sends to ranks of its own host (`inside`) and of other hosts (`between`)."""

    inside: int
    between: int


class Seat:
    """The place of a rank in its group, and of the group on hosts: `hosts` has, for each rank, a key of its host."""

    def __init__(self, rank: int, hosts: Sequence[str]) -> None:
        self.rank = rank
        self.size = len(hosts)
        # The ranks of the group on this rank's host.
        self.here = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
        self._hosts = hosts
        self._order = tuple(dict.fromkeys(hosts))

    def is_here(self, rank: int) -> bool:
        return self._hosts[rank] == self._hosts[self.rank]

    def sends(self, to_each: Sequence[int]) -> Sent:
        """Return the bytes that this rank sends, from the bytes to each rank."""
        inside = sum(to_each[rank] for rank in self.here if rank != self.rank)
        return Sent(inside, sum(to_each) - inside - to_each[self.rank])

    def comes_first_here(self, root: int) -> bool:
        """Return whether this rank is the first of its host in the chain that starts at `root`.

        The chain visits the root's host, then the others in the order of the group.
        """
        return self.rank == (root if self.is_here(root) else self.here[0])

    def comes_last_here(self, root: int) -> bool:
        """Return whether this rank is the last of its host in the chain that starts at `root`."""
        others = [rank for rank in self.here[-2:] if rank != root]
        return self.rank == (others[-1] if others else root)

    def is_on_last_host(self, root: int) -> bool:
        """Return whether the chain that starts at `root` ends on this rank's host."""
        last_two = [host for host in self._order[-2:] if host != self._hosts[root]]
        return self._hosts[self.rank] == (last_two[-1] if last_two else self._hosts[root])


class Traffic(NamedTuple):
    """The least traffic of a collective when as few bytes as possible cross hosts."""

    # From n, the share of S that the busiest rank sends; for gather, that the root receives.
    share: Callable[[int], Fraction]
    # From rank, S and root, the bytes that one rank sends. For a message, the root is the receiver.
    sent: Callable[[Seat, int, int | None], Sent]
    is_rooted_gather: bool = False  # the size S is that of this rank's input
    is_exchange: bool = False  # each rank gets its own block; blocks may differ in size

    def of_call(self, call: Any, nbytes: int, seat: Seat) -> Sent:
        """Return the bytes that a rank sends in a call of S = `nbytes` bytes with `send`, `root` and `splits`."""
        if seat.size == 1:
            return Sent(0, 0)
        if self.is_rooted_gather:
            nbytes = nbytes_of(call.send)
        elif self.is_exchange and call.root in (None, seat.rank):
            if call.splits is not None:
                row_bytes = nbytes_of(call.send) // max(1, sum(call.splits[0]))
                return seat.sends([rows * row_bytes for rows in call.splits[0]])
            if isinstance(call.send, (list, tuple)):
                return seat.sends([nbytes_of(part) for part in call.send])
        return self.sent(seat, nbytes, call.root)


def _fraction(numerator: int, denominator: int = 1) -> Fraction:
    from fractions import Fraction  # accounts and the cost model alone need them

    return Fraction(numerator, denominator)


def _none(size: int) -> Fraction:
    return _fraction(0)


def _all(size: int) -> Fraction:
    return _fraction(min(size - 1, 1))


def _but_own(size: int) -> Fraction:
    return _fraction(size - 1, size)


def _sends_nothing(seat: Seat, nbytes: int, root: int | None) -> Sent:
    return Sent(0, 0)


def _regrouped(seat: Seat, nbytes: int, root: int | None) -> Sent:
    here, size = len(seat.here), seat.size
    return Sent(round(_fraction(nbytes * (here - 1), here)), round(_fraction(nbytes * (size - here), here * size)))


def _regrouped_twice(seat: Seat, nbytes: int, root: int | None) -> Sent:
    return _regrouped(seat, 2 * nbytes, root)


def _evenly(seat: Seat, nbytes: int, root: int | None) -> Sent:
    if root not in (None, seat.rank):
        return Sent(0, 0)  # scatter: only the source sends
    here, size = len(seat.here), seat.size
    return Sent(round(_fraction(nbytes * (here - 1), size)), round(_fraction(nbytes * (size - here), size)))


def _to_root(seat: Seat, nbytes: int, root: int | None) -> Sent:
    assert root is not None, "a gather and a message have another side"
    if root == seat.rank:
        return Sent(0, 0)
    return Sent(nbytes, 0) if seat.is_here(root) else Sent(0, nbytes)


def _down_the_chain(seat: Seat, nbytes: int, root: int | None) -> Sent:
    assert root is not None, "a broadcast has a source"
    if not seat.comes_last_here(root):
        return Sent(nbytes, 0)
    return Sent(0, 0) if seat.is_on_last_host(root) else Sent(0, nbytes)


def _up_the_chain(seat: Seat, nbytes: int, root: int | None) -> Sent:
    assert root is not None, "a reduce has a destination"
    if seat.rank == root:
        return Sent(0, 0)
    return Sent(0, nbytes) if seat.comes_first_here(root) else Sent(nbytes, 0)


# First inside the host, which leaves S / m on each of its m ranks, then the parts of other hosts:
# S (m - 1) / m inside, S (n - m) / (m n) between. An all_gather is the reverse.
REGROUPING = Traffic(_but_own, _regrouped)
# A reduce_scatter and an all_gather.
ALL_REDUCE = Traffic(lambda size: 2 * _but_own(size), _regrouped_twice)
# A block to each rank; for a scatter, from the source only.
EXCHANGE = Traffic(_but_own, _evenly, is_exchange=True)
GATHER = Traffic(_but_own, _to_root, is_rooted_gather=True)
# A chain from the source through its host and then from host to host; each rank sends S to the next.
BROADCAST = Traffic(_all, _down_the_chain)
# Along the same chain, backwards to the root.
REDUCE = Traffic(_all, _up_the_chain)
MESSAGE = Traffic(_all, _to_root)
NOTHING = Traffic(_none, _sends_nothing)
