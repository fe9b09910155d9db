"""A stand-in for NCCL, next to the one for CuPy: `meshdist.backends.nccl.library.Library`, without a GPU.

It asserts what NCCL's documentation asks of a caller: that counts, dtypes, ops and peers are of those there are, that
memory is there until an operation on it is done, that the calls of all ranks agree, that groups are begun and ended in
pairs, that a communicator is used on its device, ended or aborted once, and not used after that. What an operation
does to memory is done once all ranks that it needs have come to it, so calls that could never be carried out never end.

It is a stand-in. Its arithmetic is NumPy's and not NCCL's, and nothing that passes with it says that NCCL computes it.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any

import ml_dtypes
import numpy as np
from standin_gpu import MACHINE, WAIT_S, Op

import meshdist as dist
from meshdist.backends.nccl import library as nccl

DTYPES = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64]
DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
UFUNCS = [np.add, np.multiply, np.maximum, np.minimum, np.add]


class StandInError(RuntimeError):
    """What the stand-in's calls raise, as CuPy's raise NcclError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Part:
    """One rank's part of an operation; an operation of a group has several."""

    def __init__(self, kind: str, comm: StandInCommunicator, send: tuple, recv: tuple, agreed: tuple, **rest) -> None:
        self.kind, self.comm, self.agreed, self.rest = kind, comm, agreed, rest
        # Address, count, dtype.
        self.send, self.recv = send, recv
        self.number = -1

    def spans(self, which: tuple) -> list[tuple[int, int]]:
        if not which or which[0] == 0:
            return []
        return [(which[0], which[1] * np.dtype(DTYPES[which[2]]).itemsize)]


class Fused(Op):
    """What one rank has enqueued as one operation."""

    def __init__(self, parts: list[Part]) -> None:
        super().__init__(ready=lambda: all(part.comm.is_aborted for part in parts))
        self.parts = parts


class Shared:
    """What the ranks of a communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Who has come to its first collective, or its first message to or from another rank.
        self.come: set[tuple] = set()
        self.ends: dict[int, StandInCommunicator] = {}
        self.all_there = threading.Event()
        self.lock = threading.Lock()


class StandIn:
    """All communicators of this process, whose ranks are threads.

    Attributes:
        log: The operations enqueued: kind, rank, what the ranks must agree on.
        problems: What was found where no exception would be seen.
        aborts, ends: How many communicators were aborted, and ended in order.
    """

    def __init__(self) -> None:
        self.shared: dict[bytes, Shared] = {}
        self.lock = threading.RLock()
        self.log: list[tuple] = []
        self.problems: list[str] = []
        self.aborts = self.ends = 0
        self.numbers = itertools.count(1)
        self.local = threading.local()
        self.version = 22703
        self.came = threading.Condition()
        # Raised by the next check of an asynchronous error, once it is set.
        self.async_status = 0
        MACHINE.together.append(self.choose)

    def clear(self) -> None:
        with self.lock:
            self.shared.clear()
            self.log.clear()
            self.problems.clear()
            self.aborts = self.ends = self.async_status = 0
            self.version = 22703

    def pending(self) -> list[tuple]:
        if not hasattr(self.local, "pending"):
            self.local.pending, self.local.depth = [], 0
        return self.local.pending

    def enqueue(self, part: Part, stream: int) -> None:
        with self.lock:
            self.log.append((part.kind, part.comm.rank, *part.agreed))
        pending = self.pending()
        pending.append((part, stream))
        if self.local.depth == 0:
            self.flush()

    def flush(self) -> None:
        pending = self.pending()
        by_lane: dict[tuple, list[Part]] = {}
        for part, stream in pending:
            by_lane.setdefault((id(part.comm), stream), []).append(part)
        pending.clear()
        self.connect([part for parts in by_lane.values() for part in parts])
        assert len({comm for comm, _ in by_lane}) == len(by_lane), "a group uses one communicator on two streams"
        for (_, stream), parts in by_lane.items():
            comm = parts[0].comm
            where = MACHINE.stream_at(stream)
            assert where.device_id == comm.device == MACHINE.device(), "the current device, and that of the stream"
            for part in parts:
                part.number = comm.next_number(part)
            reads = [span for part in parts for span in part.spans(part.send)]
            writes = [span for part in parts for span in part.spans(part.recv)]
            for address, nbytes in (*reads, *writes):
                assert MACHINE.is_live(address, nbytes), "memory that is not there"
            # An array that is reduced in place is written.
            reads = [span for span in reads if span not in writes]
            fused = Fused(parts)
            fused.run = lambda parts=parts: carry_out(parts)
            MACHINE.enqueue(where, fused, reads, writes, f"NCCL's {', '.join(part.kind for part in parts)}")

    def connect(self, parts: list[Part]) -> None:
        """Block the host until the ranks that these are the first calls with have come to theirs, without a deadline.

        So NCCL does, in the call or at the end of its group: connections are made when they are first used. All that
        ends it early is that the communicator is aborted.
        """
        wanted = []
        with self.came:
            for part in parts:
                shared, rank = part.comm.shared, part.comm.rank
                if part.kind in ("send", "recv"):
                    peer, other = part.rest["peer"], "recv" if part.kind == "send" else "send"
                    shared.come.add((part.kind, rank, peer))
                    wanted.append((shared.come, (other, peer, rank)))
                else:
                    shared.come.add(("collective", rank))
                    wanted += [(shared.come, ("collective", other)) for other in range(shared.size)]
            self.came.notify_all()

            def is_over() -> bool:
                return all(one in come for come, one in wanted) or any(part.comm.is_aborted for part in parts)

            assert self.came.wait_for(is_over, WAIT_S), "NCCL waits for ranks that do not come"
        if any(part.comm.is_aborted for part in parts):
            raise StandInError(3)

    def choose(self, heads: list[Op]) -> list[Op]:
        """Return the operations that can be carried out: all those they need are the first of their streams."""
        able = [op for op in heads if isinstance(op, Fused) and not any(part.comm.is_aborted for part in op.parts)]
        while True:
            there = {id(part): part for op in able for part in op.parts}
            complete = [op for op in able if all(counterparts_in(part, there.values()) for part in op.parts)]
            if len(complete) == len(able):
                break
            able = complete
        for op in able:
            for part in op.parts:
                part.rest["others"] = counterparts_in(part, there.values())
        for op in able:
            for part in op.parts:
                part.rest["inputs"] = [read(other) for other in part.rest["others"]]
        return able


def counterparts_in(part: Part, parts: Any) -> list[Part]:
    same = [other for other in parts if other.comm.shared is part.comm.shared and other.number == part.number]
    if part.kind in ("send", "recv"):
        wanted = "recv" if part.kind == "send" else "send"
        return [
            other
            for other in same
            if other.kind == wanted and other.comm.rank == part.rest["peer"] and other.rest["peer"] == part.comm.rank
        ]
    ours = sorted((other for other in same if other.kind not in ("send", "recv")), key=lambda other: other.comm.rank)
    return ours if len(ours) == part.comm.shared.size else []


def at(which: tuple) -> np.ndarray:
    address, count, dtype = which
    dtype = np.dtype(DTYPES[dtype])
    room = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(room, dtype, count)


def read(part: Part) -> np.ndarray | None:
    # Before anything is written.
    found = at(part.send).copy() if part.send and part.send[0] else None
    factor = part.rest.get("factor")
    return found if found is None or factor is None else found * factor.astype(found.dtype)


def carry_out(parts: list[Part]) -> None:
    for part in parts:
        if part.comm.is_aborted:
            continue
        others, inputs = part.rest["others"], part.rest["inputs"]
        kinds = {(other.kind, *other.agreed) for other in others} if part.kind not in ("send", "recv") else set()
        assert len(kinds) < 2, f"the calls of the ranks disagree: {kinds}"
        result = outcome(part, inputs)
        if result is not None and part.recv and part.recv[0]:
            assert at(part.recv).size == result.size, "a message of a different size"
            at(part.recv)[...] = result


def outcome(part: Part, inputs: list) -> np.ndarray | None:
    if part.kind == "send":
        return None
    if part.kind == "recv":
        return inputs[0]
    if part.kind == "broadcast":
        return inputs[part.rest["root"]]
    if part.kind == "all_gather":
        return np.concatenate(inputs)
    total, op = inputs[0], part.rest["op"]
    for other in inputs[1:]:
        with np.errstate(all="ignore"):
            total = UFUNCS[op](total, other)
    if op == nccl.AVG:
        total = (total / total.dtype.type(len(inputs))).astype(total.dtype)
    if part.kind == "reduce_scatter":
        return np.split(total, len(inputs))[part.comm.rank]
    return total if part.kind != "reduce" or part.rest["root"] == part.comm.rank else None


class StandInLibrary:
    """See `meshdist.backends.nccl.library.Library`."""

    def __init__(self, standin: StandIn) -> None:
        self._standin = standin

    def version(self) -> int:
        return self._standin.version

    def unique_id(self) -> bytes:
        return next(self._standin.numbers).to_bytes(nccl.ID_BYTES, "little")

    def communicator(self, size: int, unique_id: bytes, rank: int) -> StandInCommunicator:
        assert len(unique_id) == nccl.ID_BYTES
        assert 0 <= rank < size
        with MACHINE.changed:  # ncclCommInitRank calls cudaFree, which waits for what runs on the device
            device = MACHINE.device()
            assert MACHINE.changed.wait_for(lambda: not kernels_run_on(device), WAIT_S), "cudaFree waits for a kernel"
        with self._standin.lock:
            shared = self._standin.shared.setdefault(unique_id, Shared(size))
        comm = StandInCommunicator(self._standin, shared, rank)
        with shared.lock:
            assert rank not in shared.ends
            assert shared.size == size
            shared.ends[rank] = comm
            if len(shared.ends) == size:
                shared.all_there.set()
        assert shared.all_there.wait(WAIT_S), "NCCL waits for ranks that do not come"
        return comm

    def group_start(self) -> None:
        self._standin.pending()
        self._standin.local.depth += 1

    def group_end(self) -> None:
        assert self._standin.local.depth > 0, "a group that was not begun"
        self._standin.local.depth -= 1
        if self._standin.local.depth == 0:
            self._standin.flush()

    def failure(self, error: BaseException, communicator: Any = None) -> BaseException:
        return dist.DistBackendError(f"NCCL says: {error}") if isinstance(error, StandInError) else error


class StandInCommunicator:
    """See `meshdist.backends.nccl.library.Communicator`."""

    def __init__(self, standin: StandIn, shared: Shared, rank: int) -> None:
        self._standin, self.shared, self.rank = standin, shared, rank
        self.device = MACHINE.device()
        self.is_aborted = self.is_over = False
        self._counts: dict[Any, int] = {}
        self._ops: dict[int, tuple[np.ndarray, int]] = {}

    def next_number(self, part: Part) -> int:
        # Messages between two ranks are counted by themselves, and so are collectives.
        key = (part.kind, part.rest["peer"]) if part.kind in ("send", "recv") else "all"
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]

    def _check(self, count: int, dtype: int, op: int = 0, root: int = 0) -> None:
        if self.is_aborted:
            raise StandInError(4)
        assert not self.is_over, "a communicator that has ended"
        well = count > 0 and 0 <= dtype < len(DTYPES) and 0 <= root < self.shared.size
        assert well
        assert 0 <= op < len(UFUNCS) or op in self._ops
        assert op not in self._ops or self._ops[op][1] == dtype

    def _reduction(self, op: int) -> dict:
        factor = self._ops[op][0] if op in self._ops else None
        return {"op": 0 if factor is not None else op, "factor": factor}

    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._check(count, dtype, op)
        rest = self._reduction(op)
        part = Part("all_reduce", self, (send, count, dtype), (recv, count, dtype), (count, dtype, rest["op"]), **rest)
        self._standin.enqueue(part, stream)

    def reduce(self, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        self._check(count, dtype, op, root)
        assert (recv != 0) or self.rank != root
        rest = self._reduction(op)
        agreed = (count, dtype, rest["op"], root)
        part = Part("reduce", self, (send, count, dtype), (recv, count, dtype), agreed, root=root, **rest)
        self._standin.enqueue(part, stream)

    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> None:
        self._check(count, dtype, 0, root)
        given = (send, count, dtype) if self.rank == root else ()
        part = Part("broadcast", self, given, (recv, count, dtype), (count, dtype, root), root=root)
        self._standin.enqueue(part, stream)

    def reduce_scatter(self, send: int, recv: int, recv_count: int, dtype: int, op: int, stream: int) -> None:
        self._check(recv_count, dtype, op)
        rest = self._reduction(op)
        given, agreed = (send, recv_count * self.shared.size, dtype), (recv_count, dtype, rest["op"])
        self._standin.enqueue(Part("reduce_scatter", self, given, (recv, recv_count, dtype), agreed, **rest), stream)

    def all_gather(self, send: int, recv: int, send_count: int, dtype: int, stream: int) -> None:
        self._check(send_count, dtype)
        taken = (recv, send_count * self.shared.size, dtype)
        part = Part("all_gather", self, (send, send_count, dtype), taken, (send_count, dtype))
        # A block may lie where it belongs, and nowhere else in what is received.
        width = np.dtype(DTYPES[dtype]).itemsize * send_count
        overlaps = send < recv + width * self.shared.size and recv < send + width
        assert not overlaps or send == recv + self.rank * width
        if overlaps:
            part.spans = lambda which: Part.spans(part, which) if which is part.recv else []
        self._standin.enqueue(part, stream)

    def send(self, array: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._check(count, dtype, 0, peer)
        self._standin.enqueue(Part("send", self, (array, count, dtype), (), (count, dtype), peer=peer), stream)

    def recv(self, array: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._check(count, dtype, 0, peer)
        self._standin.enqueue(Part("recv", self, (), (array, count, dtype), (count, dtype), peer=peer), stream)

    def premul_sum(self, factor: bytes, dtype: int) -> int:
        op = 100 + len(self._ops)
        self._ops[op] = (np.frombuffer(factor, DTYPES[dtype]), dtype)
        assert self._ops[op][0].size == 1
        return op

    def drop_op(self, op: int) -> None:
        del self._ops[op]

    def check_async_error(self) -> None:
        if self._standin.async_status:
            raise StandInError(self._standin.async_status)

    def finalize(self) -> None:
        assert not self.is_over, "ended twice"

    def destroy(self) -> None:
        assert not self.is_over, "ended twice"
        if self._ops:
            self._standin.problems.append("ops that were not given back")
        self.is_over = True
        self._standin.ends += 1

    def abort(self) -> None:
        """End the communicator, and wait for the kernels that run on its device: those of others as well."""
        assert not self.is_over, "aborted twice, or after its end"
        assert MACHINE.device() == self.device
        self.is_aborted = self.is_over = True
        self._standin.aborts += 1
        with self._standin.came:
            self._standin.came.notify_all()
        MACHINE.advance()
        with MACHINE.changed:
            if not MACHINE.changed.wait_for(lambda: not kernels_run_on(self.device), WAIT_S):
                self._standin.problems.append("an abort waits for the kernel of a communicator that nobody aborts")


def kernels_run_on(device: int) -> bool:
    mine = [stream for stream in MACHINE.busy.values() if stream.device_id == device]
    return any(isinstance(stream.ops[0], Fused) for stream in mine)


STANDIN = StandIn()


def engine(options: Any, pg_options: Any) -> Any:
    """Make the engine of backend nccl on the stand-in; for `register_backend` with `extended_api`."""
    from meshdist.backends.nccl.backend import NcclBackend

    return NcclBackend(options, StandInLibrary(STANDIN))
