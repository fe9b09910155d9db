"""How many bytes a collective moves: the standard cost of each, and the share of one rank.

The costs are those of algorithms that no other can undercut in bytes:

- R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH, Int. J. High
  Performance Computing Applications 19 (2005): the terms in beta of the algorithms for long messages, sections 3 and 4.
- NVIDIA nccl-tests, doc/PERFORMANCE.md: the factors that lead from the bandwidth of a call to that of the links.

S is the size of a call: the bytes of the longer of what a rank sends and what it receives; of a gather or scatter, of
the array or list on the root. n is the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias


def _all(size: int) -> Fraction:
    return Fraction(min(size - 1, 1))


def _but_own(size: int) -> Fraction:
    return Fraction(size - 1, size)


def _there_and_back(size: int) -> Fraction:
    return 2 * _but_own(size)


def _none(size: int) -> Fraction:
    return Fraction(0)


# By S: what the busiest rank of a group sends; of a gather, what the root receives.
_SHARES: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": _there_and_back,
    "reduce_scatter": _but_own,
    "reduce_scatter_tensor": _but_own,
    "all_gather": _but_own,
    "all_gather_into_tensor": _but_own,
    "all_to_all": _but_own,
    "all_to_all_single": _but_own,
    "gather": _but_own,
    "scatter": _but_own,
    "broadcast": _all,
    "reduce": _all,
    "send": _all,
    "isend": _all,
    "recv": _none,
    "irecv": _none,
    "barrier": _none,
}


def sent_bytes(collective: str, nbytes: int, size: int) -> float:
    """Return the bytes that the busiest rank of a group must send, or, as the root of a gather, receive.

    All-reduce 2 S (n - 1) / n; reduce-scatter, all-gather, all-to-all, gather and scatter S (n - 1) / n; broadcast and
    reduce S; a barrier none.

    Args:
        collective: The name of a collective, or of a message: send, isend, recv or irecv.
        nbytes: S, the size of the call in bytes.
        size: n, the number of ranks.

    Raises:
        ValueError: The collective is unknown; the message lists the known ones.

    Example:
        >>> sent_bytes("all_reduce", 1000, 4)
        1500.0
    """
    return float(nbytes * _share(collective)(size))


def _share(collective: str) -> Callable[[int], Fraction]:
    share = _SHARES.get(collective)
    if share is None:
        raise ValueError(f"unknown collective {collective!r}; known are {', '.join(sorted(_SHARES))}")
    return share


class Sent(NamedTuple):
    """Bytes that one rank sends.

    Attributes:
        inside: To ranks of its own host.
        between: To ranks of other hosts.
    """

    inside: int
    between: int


class Seat:
    """Where a rank sits in its group, and the group on its hosts.

    Args:
        rank: The rank in the group.
        hosts: For each rank of the group, what tells its host from others.

    Attributes:
        rank: The rank in the group.
        size: The number of ranks.
        here: The ranks of the group on this rank's host.
    """

    def __init__(self, rank: int, hosts: Sequence[str]) -> None:
        self.rank = rank
        self.size = len(hosts)
        self.here = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
        self._hosts = hosts
        self._order = tuple(dict.fromkeys(hosts))

    def is_here(self, rank: int) -> bool:
        """Return whether a rank of the group is on this rank's host."""
        return self._hosts[rank] == self._hosts[self.rank]

    def comes_first_here(self, root: int) -> bool:
        """Return whether this rank is the first of its host in the chain that begins at `root`.

        The chain goes through the root's host, then through the others in the order of the group.
        """
        return self.rank == (root if self.is_here(root) else self.here[0])

    def comes_last_here(self, root: int) -> bool:
        """Return whether this rank is the last of its host in the chain that begins at `root`."""
        others = [rank for rank in self.here[-2:] if rank != root]
        return self.rank == (others[-1] if others else root)

    def is_on_last_host(self, root: int) -> bool:
        """Return whether the chain that begins at `root` ends on this rank's host."""
        last_two = [host for host in self._order[-2:] if host != self._hosts[root]]
        return self._hosts[self.rank] == (last_two[-1] if last_two else self._hosts[root])


_Sender: TypeAlias = "Callable[[Seat, int, int | None], Sent]"


def sent_by(
    collective: str, nbytes: int, seat: Seat, root: int | None = None, to_each: Sequence[int] | None = None
) -> Sent:
    """Return the bytes that one rank sends when as few as possible go between hosts.

    - Reduce-scatter: first inside the host, where each of its m ranks is left with S / m, then of that what belongs to
      other hosts: S (m - 1) / m inside, S (n - m) / (m n) between. All-gather: the same backwards. All-reduce: both.
      The sums are those of `sent_bytes`, and no algorithm needs less between hosts.
    - All-to-all, and scatter on its source: to each rank what is for it. Gather: S / n, to the root.
    - Broadcast: along a chain from the source through the ranks of its host and then from host to host; each rank sends
      S to the next. Reduce: along the same chain, backwards to the root.
    - A message: its bytes to the receiver.

    Args:
        collective: As for `sent_bytes`.
        nbytes: S; of a gather, the bytes that this rank gives.
        seat: The rank, its group and their hosts.
        root: The source or destination, as a rank of the group; of a message the receiver.
        to_each: For an all-to-all or a scatter of unequal parts, the bytes for each rank.

    Raises:
        ValueError: The collective is unknown.

    Example:
        >>> sent_by("all_reduce", 1200, Seat(0, ["a", "a", "b", "b"]))
        Sent(inside=1200, between=600)
        >>> sent_by("broadcast", 1200, Seat(1, ["a", "a", "b", "b"]), root=0)
        Sent(inside=0, between=1200)
    """
    share = _share(collective)
    if seat.size == 1 or share is _none:
        return Sent(0, 0)
    if to_each is not None:
        return _to_each(seat, to_each)
    return _SENDERS[collective](seat, nbytes, root)


def _to_each(seat: Seat, to_each: Sequence[int]) -> Sent:
    inside = sum(to_each[rank] for rank in seat.here if rank != seat.rank)
    return Sent(inside, sum(to_each) - inside - to_each[seat.rank])


def _regrouped(seat: Seat, nbytes: int, root: int | None) -> Sent:
    here, size = len(seat.here), seat.size
    return Sent(round(Fraction(nbytes * (here - 1), here)), round(Fraction(nbytes * (size - here), here * size)))


def _regrouped_twice(seat: Seat, nbytes: int, root: int | None) -> Sent:
    return _regrouped(seat, 2 * nbytes, root)


def _evenly(seat: Seat, nbytes: int, root: int | None) -> Sent:
    if root not in (None, seat.rank):
        return Sent(0, 0)  # of a scatter, somewhere else than on its source
    here, size = len(seat.here), seat.size
    return Sent(round(Fraction(nbytes * (here - 1), size)), round(Fraction(nbytes * (size - here), size)))


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


_SENDERS: dict[str, _Sender] = {
    "all_reduce": _regrouped_twice,
    "reduce_scatter": _regrouped,
    "reduce_scatter_tensor": _regrouped,
    "all_gather": _regrouped,
    "all_gather_into_tensor": _regrouped,
    "all_to_all": _evenly,
    "all_to_all_single": _evenly,
    "scatter": _evenly,
    "gather": _to_root,
    "send": _to_root,
    "isend": _to_root,
    "broadcast": _down_the_chain,
    "reduce": _up_the_chain,
}
