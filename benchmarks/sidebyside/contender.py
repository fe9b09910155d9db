"""The interface that a library's rank implements, so that all libraries are measured by the same loop."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray
# From the first on, arrays have pages of their own; from the second on, NumPy asks for large ones.
_OWN_PAGES_BYTES, _LARGE_PAGES_BYTES = 1 << 20, 4 << 20
Call = Callable[[], object]

OUTSTANDING = 1000
"""How many async calls are on their way at once, and how many arrays a coalesced call has."""
COALESCED = 32


class Contender(ABC):
    """One rank of a library under test, among its peers.

    A method named like a collective returns that call on the given arrays, prepared as far as a user of the library
    would prepare it outside a loop. Only the returned call is timed.

    Attributes:
        rank: This rank.
        size: The number of ranks.
    """

    rank: int
    size: int

    def array(self, count: int, dtype: np.dtype) -> Array:
        """Return a new array, as a user of the library would make one for it.

        A large one has pages of its own, as an array has that a program makes once. glibc would give it those of
        earlier arrays, on which it may take up to twice as long, in all rounds; or a place a few bytes further in its
        page than that of another array, where the copies of a library take five times as long.
        """
        num_bytes = count * dtype.itemsize
        if num_bytes < _OWN_PAGES_BYTES:
            return np.empty(count, dtype)
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if num_bytes >= _LARGE_PAGES_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, dtype)

    @abstractmethod
    def barrier(self) -> Call:
        """Wait for all ranks."""

    @abstractmethod
    def all_reduce(self, array: Array) -> Call:
        """Sum `array` over the ranks, in place."""

    @abstractmethod
    def all_reduce_outstanding(self, array: Array) -> Call:
        """Begin to sum each of OUTSTANDING parts of `array` over the ranks, in place; then wait for all."""

    @abstractmethod
    def all_reduce_coalesced(self, array: Array) -> Call:
        """Sum COALESCED parts of `array` over the ranks, in place, in one call."""

    @abstractmethod
    def broadcast(self, array: Array) -> Call:
        """Copy rank 0's `array` to all ranks, in place."""

    @abstractmethod
    def reduce(self, array: Array) -> Call:
        """Sum `array` over the ranks into that of rank 0."""

    @abstractmethod
    def all_gather(self, give: Array, take: Array) -> Call:
        """Like all_gather_into_tensor, into a list of arrays: the blocks of `take`."""

    @abstractmethod
    def gather(self, give: Array, take: Array) -> Call:
        """Gather every rank's `give` into the blocks of `take` on rank 0."""

    @abstractmethod
    def scatter(self, give: Array, take: Array) -> Call:
        """Each rank takes its block of rank 0's `give`."""

    @abstractmethod
    def reduce_scatter(self, give: Array, take: Array) -> Call:
        """Like reduce_scatter_tensor, from a list of arrays: the blocks of `give`."""

    @abstractmethod
    def all_to_all(self, give: Array, take: Array) -> Call:
        """Like all_to_all_single, between lists of arrays: the blocks of both."""

    @abstractmethod
    def all_gather_into_tensor(self, give: Array, take: Array) -> Call:
        """Gather every rank's `give` into `take`, one after the other."""

    @abstractmethod
    def reduce_scatter_tensor(self, give: Array, take: Array) -> Call:
        """Sum `give` over the ranks; each rank takes its block of the sum."""

    @abstractmethod
    def all_to_all_single(self, give: Array, take: Array) -> Call:
        """Send block i of `give` to rank i, and take block i from rank i."""

    @abstractmethod
    def scan(self, array: Array) -> Call:
        """Sum `array` over the ranks up to each one, in place."""

    @abstractmethod
    def send_recv(self, give: Array, take: Array) -> Call:
        """There and back: rank 0 sends `give` to the last rank, which sends back what it took; others do nothing."""

    @abstractmethod
    def recv_from_any(self, give: Array, take: Array) -> Call:
        """Like send_recv, but received from any rank."""

    @abstractmethod
    def probe_and_recv(self, give: Array, take: Array) -> Call:
        """Like send_recv, but a probe for any rank and tag tells from whom to receive."""

    @abstractmethod
    def send_object(self, give: Array, take: Array) -> Call:
        """Like send_recv, but a dict that has the array is sent; what comes is copied into `take`."""

    @abstractmethod
    def exchange(self, give: Array, take: Array) -> Call:
        """Rank 0 and the last rank send each other `give`, at once, without blocking; others do nothing."""

    @abstractmethod
    def sendrecv(self, give: Array, take: Array) -> Call:
        """Send `give` to the next rank and take what the one before sends, around the ring."""

    @abstractmethod
    def irecv_and_send(self, give: Array, take: Array) -> Call:
        """Like sendrecv, but with a receive that does not block, a send that does, and the wait for the receive."""

    @abstractmethod
    def leave(self) -> None:
        """End the library's part of this process in good order."""


def parts(array: Array, number: int) -> list[Array]:
    """Return `array` in `number` parts, or in as many as it has elements."""
    return np.array_split(array, min(number, array.size))


def begin_and_wait(begin: Callable[[Any], Any], arrays: list[Any]) -> Call:
    """Return the call of `Contender.all_reduce_outstanding` for a library whose `begin(array)` returns a Work."""

    def call() -> None:
        for work in [begin(array) for array in arrays]:
            work.wait()

    return call


def nothing() -> None:
    """Do nothing, as the ranks do that a call does not concern."""


def both_ways(rank: int, size: int, isend: Callable[..., Any], irecv: Callable[..., Any], give: Any, take: Any) -> Call:
    """Return the call of `Contender.exchange` for a library whose `isend` and `irecv` return what has a `wait`."""
    peer = size - 1 - rank
    return at_once(isend, irecv, give, take, peer, peer) if rank in (0, size - 1) else nothing


def at_once(
    isend: Callable[..., Any], irecv: Callable[..., Any], give: Any, take: Any, receiver: int, sender: int
) -> Call:
    """Return a call that sends `give` and receives `take` by such functions."""

    def swap() -> None:
        receiving, sending = irecv(take, sender), isend(give, receiver)
        receiving.wait()
        sending.wait()

    return swap


def send_meanwhile(
    send: Callable[..., object], irecv: Callable[..., Any], give: Any, take: Any, rank: int, size: int
) -> Call:
    """Return the call of `Contender.irecv_and_send` for a library whose `irecv` returns what has a `wait`."""
    receiver, sender = (rank + 1) % size, (rank - 1) % size

    def swap() -> None:
        receiving = irecv(take, sender)
        send(give, receiver)
        receiving.wait()

    return swap


def objects_there_and_back(
    rank: int, size: int, send: Callable[[Any, int], object], recv: Callable[[int], Any], give: Array, take: Array
) -> Call:
    """Return the call of `Contender.send_object` for a library with `send(object, to)` and `recv(from)`."""

    def taken(_: Array, sender: int) -> None:
        take[:] = recv(sender)["array"]

    return there_and_back(rank, size, lambda array, to: send({"array": array}, to), taken, give, take)


def there_and_back(
    rank: int, size: int, send: Callable[..., object], recv: Callable[..., object], give: Any, take: Any
) -> Call:
    """Return the call of `Contender.send_recv` for a library with `send(array, to)` and `recv(array, from)`."""
    last = size - 1

    def ping() -> None:
        send(give, last)
        recv(take, last)

    def pong() -> None:
        recv(take, 0)
        send(take, 0)

    return {0: ping, last: pong}.get(rank, nothing)
