"""The plans of the `mpi` backend: the precheck, then the MPI call.

If all ranks may block inside MPI, they use the blocking call, which is fastest. Otherwise, and for async calls, it is a
nonblocking request that is polled.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import quietly
from meshdist.backends.base import Plan
from meshdist.backends.mpi.group import MpiGroup
from meshdist.backends.mpi.library import Polled, Requests
from meshdist.backends.mpi.precheck import word_of
from meshdist.collectives.algorithms.blocks import fill, joined
from meshdist.collectives.algorithms.pairwise import split_blocks
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.call_mismatch import compare_splits
from meshdist.runtime.waiting import Waitable
from meshdist.runtime.work import carried

# The name of a communicator's method, and its arguments.
Step = tuple[str, tuple[Any, ...]]


class MpiPlan(Plan):
    """A call that consists of one or more MPI calls."""

    backend: MpiGroup

    def __init__(self, backend: MpiGroup, call: Call) -> None:
        super().__init__(backend, call)
        self.session = backend.session
        self.rank, self.size, self.root, self.op = call.rank, call.size, call.root, call.op
        self._begin_word = word_of(self.signature, backend.session.may_block)
        self._request_word = word_of(self.signature, may_block=False)
        self._meet = backend.precheck.meet

    @abstractmethod
    def mpi_steps(self, send: Any, recv: Any) -> Iterator[Step]:
        """Yield the MPI calls."""

    def run(self, send: Buffers, recv: Buffers) -> None:
        if not self.session.may_block:
            super().run(send, recv)
            return
        try:
            if self._meet(self._begin_word, self.signature, self.error_prefix):
                self.carry_out(send, recv)
                return
            for name, arguments in self.mpi_steps(send, recv):
                self.wait(self._request(name, arguments))
        except self.session.mpi.Exception as error:
            raise self.session.error(error) from None

    def carry_out(self, send: Any, recv: Any) -> None:
        """Make the blocking MPI calls."""
        for name, arguments in self.mpi_steps(send, recv):
            getattr(self.backend.comm, name)(*arguments)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        try:
            # The progress thread runs several calls at once and must not block in one.
            waits = self.session.may_block and carried.place is None
            word = self._begin_word if waits else self._request_word
            may_block = yield from self.backend.precheck.steps(word, self.signature)
            if may_block:
                self.carry_out(send, recv)
                return
            for name, arguments in self.mpi_steps(send, recv):
                yield self._request(name, arguments)
        except self.session.mpi.Exception as error:
            raise self.session.error(error) from None

    def _request(self, name: str, arguments: tuple[Any, ...]) -> Waitable:
        with self.session.lock:
            request = getattr(self.backend.comm, f"I{name[0].lower()}{name[1:]}")(*arguments)
        return Pending(self.backend, Requests(self.session, [request], arguments), name)


class Pending(Polled):
    """A nonblocking MPI collective."""

    def __init__(self, backend: MpiGroup, requests: Requests, name: str) -> None:
        super().__init__()
        self._backend, self._requests, self._name = backend, requests, name
        self._is_done = False

    def ready(self) -> bool:
        self._is_done = self._is_done or self._requests.done()
        return self._is_done

    def check(self) -> None:
        self._backend.look()

    def missing(self) -> str:
        return f"the other ranks to carry out their part of {self._name}"


class Barrier(MpiPlan):
    """The precheck alone."""

    def mpi_steps(self, send: Any, recv: Any) -> Iterator[Step]:
        return iter(())


class Reduction(MpiPlan):
    """Base of reductions: the MPI datatype and operation."""

    def __init__(self, backend: MpiGroup, call: Call) -> None:
        super().__init__(backend, call)
        assert call.op is not None
        sample = _first(call.send)
        self.dtype, self.mpi_op = backend.arithmetic.of(sample.dtype, call.op)
        self.averages = call.op.value == "avg"

    def message(self, array: Array) -> list[Any]:
        """Return the buffer as MPI gets it; mpi4py finds the count, of all elements or of a block."""
        return [array, self.dtype]

    def finish(self, array: Array) -> None:
        """Divide the sum for AVG."""
        assert self.op is not None
        if self.averages:
            quietly(self.op.finish, array, self.size)


class AllReduce(Reduction):
    def __init__(self, backend: MpiGroup, call: Call) -> None:
        super().__init__(backend, call)
        self._all_reduce = backend.comm.Allreduce
        self._in_place = self.session.mpi.IN_PLACE

    def carry_out(self, send: Any, recv: Any) -> None:
        # The body of `mpi_steps` without the generator: this is the most frequent call, on the smallest arrays.
        self._all_reduce(self._in_place, [recv, self.dtype], self.mpi_op)
        if self.averages:
            self.finish(recv)

    def mpi_steps(self, send: Any, recv: Any) -> Iterator[Step]:
        yield "Allreduce", (self.session.mpi.IN_PLACE, [recv, self.dtype], self.mpi_op)
        self.finish(recv)


class Reduce(Reduction):
    """In place on the root; the arrays of the other ranks stay unchanged."""

    def mpi_steps(self, send: Any, recv: Any) -> Iterator[Step]:
        if self.rank != self.root:
            yield "Reduce", (self.message(send), None, self.mpi_op, self.root)
            return
        yield "Reduce", (self.session.mpi.IN_PLACE, self.message(recv), self.mpi_op, self.root)
        self.finish(recv)


class ReduceScatter(Reduction):
    """Blocks of one array, or the arrays of a list."""

    def mpi_steps(self, send: Any, recv: Any) -> Iterator[Step]:
        if isinstance(send, list):
            sizes = [block.size for block in send]
            send = joined(send)
            if len(set(sizes)) > 1:
                yield "Reduce_scatter", (self.message(send), self.message(recv), sizes, self.mpi_op)
                self.finish(recv)
                return
        # mpi4py takes the count of a block from the received array.
        yield "Reduce_scatter_block", (self.message(send), self.message(recv), self.mpi_op)
        self.finish(recv)


class Movement(MpiPlan):
    """Base of collectives that only move data, as any MPI datatype of the same length."""

    def __init__(self, backend: MpiGroup, call: Call) -> None:
        super().__init__(backend, call)
        dtype = _first(call.send if call.send is not None else call.recv).dtype
        self.dtype, self.per_element = backend.arithmetic.moved(dtype)

    def message(self, array: Array) -> list[Any]:
        return [array, self.dtype]

    def blocks(self, array: Array, sizes: list[int]) -> list[Any]:
        """Return the buffer, counts and displacements of an array of blocks with these element counts."""
        counts = [size * self.per_element for size in sizes]
        return [array, (counts, _begins(counts)), self.dtype]


class Broadcast(Movement):
    def mpi_steps(self, send: Any, recv: Any) -> Iterator[Step]:
        yield "Bcast", (self.message(recv), self.root)


class AllGather(Movement):
    def mpi_steps(self, send: Any, recv: Any) -> Iterator[Step]:
        if isinstance(send, np.ndarray) and np.may_share_memory(send, recv):
            send = send.copy()  # this rank's block, already in place; MPI wants all ranks to pass IN_PLACE, or none
        yield "Allgather", (self.message(send), self.message(recv))


class AllGatherList(Movement):
    """Into a list of arrays that may differ in size."""

    def mpi_steps(self, send: Any, recv: Any) -> Iterator[Step]:
        sizes = [array.size for array in recv]
        whole = np.empty(sum(sizes), send.dtype)
        if len(set(sizes)) == 1:
            yield "Allgather", (self.message(send), self.message(whole))
        else:
            yield "Allgatherv", (self.message(send), self.blocks(whole, sizes))
        fill(recv, whole)


class Gather(Movement):
    def mpi_steps(self, send: Any, recv: Any) -> Iterator[Step]:
        if self.rank != self.root:
            yield "Gather", (self.message(send), None, self.root)
            return
        whole = np.empty(self.size * send.size, send.dtype)
        yield "Gather", (self.message(send), self.message(whole), self.root)
        fill(recv, whole)


class Scatter(Movement):
    def __init__(self, backend: MpiGroup, call: Call) -> None:
        super().__init__(backend, call)
        self.dtype, self.per_element = backend.arithmetic.moved(_first(call.recv).dtype)

    def mpi_steps(self, send: Any, recv: Any) -> Iterator[Step]:
        whole = self.message(joined(send)) if self.rank == self.root else None
        yield "Scatter", (whole, self.message(recv), self.root)


class AllToAll(Movement):
    def mpi_steps(self, send: Any, recv: Any) -> Iterator[Step]:
        yield "Alltoall", (self.message(send), self.message(recv))


class AllToAllVarying(Movement):
    """Blocks of a list or of rows, whose sizes each pair of ranks must agree on."""

    def __init__(self, backend: MpiGroup, call: Call) -> None:
        super().__init__(backend, call)
        self._splits = call.splits
        self._unit = "element" if call.splits is None else "row"

    def mpi_steps(self, send: Any, recv: Any) -> Iterator[Step]:
        give, take = self._blocks(send, recv)
        whole = sum(block.nbytes for block in give), sum(block.nbytes for block in take)
        most = self.session.largest_count
        state = np.array([0, 1 if most is None else -(-max(whole) // most)], np.int64)
        yield from self._compare(give, take, state)
        num_rounds = max(1, int(state[1]))
        # With 32-bit counts: as many rounds as the rank with the most bytes needs, with a part of each block in each.
        for number in range(num_rounds):
            gives = [_share(block, number, num_rounds) for block in give]
            takes = [_share(block, number, num_rounds) for block in take]
            room = np.empty(sum(block.size for block in takes), takes[0].dtype)
            yield "Alltoallv", (self._varying(joined(gives), gives), self._varying(room, takes))
            fill(takes, room)

    def _blocks(self, send: Any, recv: Any) -> tuple[list[Array], list[Array]]:
        to, come = self._splits or (None, None)
        return split_blocks(send, to, self.size), split_blocks(recv, come, self.size)

    def _varying(self, whole: Array, blocks: list[Array]) -> list[Any]:
        return self.blocks(whole, [block.size for block in blocks])

    def _compare(self, give: list[Array], take: list[Array], state: Array) -> Iterator[Step]:
        mpi = self.session.mpi
        sizes = [[block.size for block in give], [block.size for block in take]]
        mine = np.array(sizes if self._splits is None else self._splits, np.int64)
        # Each pair of ranks compares its sizes; only if one pair disagrees does every rank gather the sizes of all.
        told = np.empty(self.size, np.int64)
        yield "Alltoall", ([mine[0], mpi.INT64_T], [told, mpi.INT64_T])
        state[0] = not np.array_equal(told, mine[1])
        yield "Allreduce", (mpi.IN_PLACE, [state, mpi.INT64_T], mpi.MAX)
        if state[0]:
            table = np.empty((self.size, 2, self.size), np.int64)
            yield "Allgather", ([mine, mpi.INT64_T], [table, mpi.INT64_T])
            compare_splits(table[:, 0], table[:, 1], self._unit, self.backend.options.ranks)


def _share(block: Array, number: int, num_shares: int) -> Array:
    return block[block.size * number // num_shares : block.size * (number + 1) // num_shares]


def _first(buffers: Any) -> Any:
    return buffers[0] if isinstance(buffers, list) else buffers


def _begins(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts[:-1])]
