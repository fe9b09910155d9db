"""Connections of pairs of ranks, and what waits for them: the gate opens whatever fails, and no rank waits in vain."""

import threading
import types

import pytest
from standin_cupy import MACHINE
from until import until

import meshdist as dist
from meshdist.backends.nccl import p2p
from meshdist.backends.nccl.launch_gate import Arrivals, LaunchGate, PairAgreement
from meshdist.errors import DistError, DistTimeoutError
from meshdist.store import HashStore

pytestmark = pytest.mark.timeout(60)


class Lost(HashStore):
    """A store that is gone when one of these methods is called."""

    def __init__(self, *lost):
        super().__init__()
        self._lost = lost

    def set(self, *given):
        if "set" in self._lost:
            raise DistError("the store is gone")
        super().set(*given)

    def compare_set(self, *given):
        if "compare_set" in self._lost:
            raise DistError("the store is gone")
        return super().compare_set(*given)


def options(rank, store):
    return types.SimpleNamespace(name="g", rank=rank, ranks=(0, 1), world_store=store, store=store)


def agreement(gate, rank, store):
    return PairAgreement(gate, options(rank, store), 1 - rank, lambda: None)


def test_two_ranks_agree_and_both_gates_are_closed_until_they_leave():
    store, gates = HashStore(), [LaunchGate(), LaunchGate()]
    low, high = (agreement(gate, rank, store) for rank, gate in enumerate(gates))
    assert not high.ready()
    assert low.ready()
    assert high.ready()
    assert [gate.is_closed for gate in gates] == [True, True]
    low.leave()
    high.leave()
    assert [gate.is_closed for gate in gates] == [False, False]


@pytest.mark.parametrize(("rank", "lost"), [(1, "set"), (1, "compare_set"), (0, "compare_set")])
def test_a_store_that_is_gone_leaves_no_gate_closed(rank, lost):
    gate, store = LaunchGate(), Lost(lost)
    one = agreement(gate, rank, store)
    if rank == 0:
        store.set("nccl/offers/1", "g:0-1")
    if (rank, lost) == (1, "compare_set"):
        assert not one.ready()  # the offer stands, and cannot be withdrawn
        assert gate.is_closed
    else:
        with pytest.raises(DistError, match="the store is gone"):
            one.ready()
    one.leave()
    assert not gate.is_closed


def test_a_launch_waits_for_the_gate_no_longer_than_its_timeout():
    gate = LaunchGate()
    assert gate.try_close()
    with pytest.raises(DistTimeoutError, match=r"timed out after 0.05 s: this rank and another are connecting"):
        gate.pass_through(lambda: None, 0.05)
    gate.open()
    gate.pass_through(lambda: None, 0.05)


def test_how_far_a_rank_has_come_never_falls():
    store = HashStore()
    mine, theirs = (Arrivals(options(rank, store)) for rank in range(2))
    assert not theirs.have_told(0, 1)
    mine.tell(3, holds=True)
    mine.tell(2)  # by another thread, which has looked before
    assert theirs.have_told(0, 3)
    assert not theirs.have_told(0, 4)


def test_a_thread_that_does_not_start_is_not_waited_for(cupy, monkeypatch):
    def refuse(thread):
        raise DistError("no thread is left")

    monkeypatch.setattr(p2p, "start_thread", refuse)
    backend = types.SimpleNamespace(rank=0, gate=LaunchGate(), cuda=cupy.cuda, check=lambda: None)
    with pytest.raises(DistError, match="no thread is left"):
        p2p.Pair(backend, 1, 0).post(p2p.Batch(), "isend", 1.0, (), is_send=True)
    assert backend.gate.num_connecting == 0


def on_own_gpu(cupy, **how):
    cupy.cuda.Device(dist.get_rank()).use()
    return dist.new_group(backend="standin", **how)


def complete_alone(cupy):
    """Rank 1 is done with a collective at once, as the root of a broadcast may be, and rank 0 holds it back."""
    group, x, message = on_own_gpu(cupy, timeout=10), cupy.ones(2), cupy.ones(3)
    nothing = cupy.zeros(0)
    group.all_reduce(x)
    work = group.irecv(message, 1) if group.rank() == 0 else None
    group.all_reduce(nothing)
    dist.barrier()  # on the CPU
    if work is None:
        group.send(message, 0)
    else:
        work.wait()
    return x.tolist()


def test_a_rank_that_completes_its_part_alone_tells_those_that_hold_the_call_back(standin, cupy):
    MACHINE.num_devices = 2
    assert dist.run(complete_alone, 2, (cupy,), timeout=20) == [[2.0, 2.0]] * 2
    assert standin.aborts == 0


def leave_after_its_part(cupy):
    group, nothing = on_own_gpu(cupy, timeout=20), cupy.zeros(0)
    group.all_reduce(cupy.ones(2))
    group.barrier()
    if group.rank() == 1:
        group.all_reduce(nothing)
        dist.destroy_process_group(group)
        return True
    with MACHINE.held(cupy.cuda.get_current_stream()):
        work = group.all_reduce(nothing, async_op=True)
        with pytest.raises(DistTimeoutError, match="not done after 1 s"):
            work.wait(1.0)
    return work.wait(20.0)


def test_a_rank_that_left_after_its_part_of_a_call_is_not_missed(standin, cupy, monkeypatch):
    MACHINE.num_devices = 2
    monkeypatch.setattr("meshdist.backends.nccl.backend._PATIENCE_S", 0.05)
    monkeypatch.setattr("meshdist.backends.nccl.backend._LEFT_S", 0.05)
    assert dist.run(leave_after_its_part, 2, (cupy,), timeout=20) == [True, True]


def connect_behind_a_call(cupy):
    group, x, message = on_own_gpu(cupy, timeout=10), cupy.ones(2), cupy.ones(3)
    group.all_reduce(x)
    rank = group.rank()
    asked, query = set(), cupy.cuda.runtime.eventQuery

    def seen(event):
        if threading.current_thread().name.startswith("meshdist-nccl-pair"):
            asked.add(cupy.cuda.runtime.getDevice())
        return query(event)

    dist.barrier()
    if rank == 1:
        cupy.cuda.runtime.eventQuery = seen
        try:
            with MACHINE.held(cupy.cuda.get_current_stream()):
                work = group.all_reduce(x, async_op=True)
                sent = group.isend(message, 0)
                until(lambda: asked, "the thread has looked whether an operation is in flight")
        finally:
            cupy.cuda.runtime.eventQuery = query
        sent.wait()
        work.wait()
    else:
        group.all_reduce(x)
        group.recv(message, 1)
    return asked


def test_the_thread_that_connects_asks_cuda_on_the_gpu_of_its_rank(standin, cupy):
    MACHINE.num_devices = 2
    assert dist.run(connect_behind_a_call, 2, (cupy,), timeout=20) == [set(), {1}]
