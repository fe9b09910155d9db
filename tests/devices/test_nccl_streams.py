"""Backend nccl on the stand-in: the order of streams, and the lifetime of arrays."""

import contextvars
import gc
import threading
import time
import weakref

import numpy as np
import pytest
import standin_cupy
from standin_cupy import MACHINE

import meshdist as dist
from meshdist.runtime.flight_recorder import facts_in

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def group(standin, cupy):
    """A group of this rank alone, on backend nccl, which has met."""
    dist.init_process_group("cpu:gloo,cuda:standin", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group(backend="standin")
    group.all_reduce(cupy.zeros(1))
    yield group
    dist.destroy_process_group()


def test_a_sync_call_waits_for_the_stream_and_the_host_does_not(group, cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, MACHINE.held(stream):
        x = cupy.zeros(3)
        x[...] = 5.0
        waited = MACHINE.host_waits
        assert group.all_reduce(x, op="avg") is x
        group.broadcast(x, group_src=0)
        group.all_gather_into_tensor(cupy.zeros(3), x)
        x[...] = 7.0
        assert MACHINE.host_waits == waited
        assert not stream.done
    with stream:
        assert x.tolist() == [7.0] * 3


def test_what_is_enqueued_behind_a_sync_call_finds_its_result(group, cupy):
    x, y = cupy.asarray(np.arange(3.0)), cupy.zeros(3)
    group.all_gather_into_tensor(y, x)
    y[...] = cupy.add(y, 1.0)
    assert y.tolist() == [1.0, 2.0, 3.0]


def test_wait_makes_the_current_stream_wait_and_not_the_host(group, cupy):
    x, stream = cupy.zeros(3), cupy.cuda.get_current_stream()
    with MACHINE.held(stream):
        work = group.all_reduce(x, async_op=True)
        waited = MACHINE.host_waits
        assert not work.is_completed()
        assert not work.is_success()
        assert work.wait() is True
        x[...] = 1.0
        assert MACHINE.host_waits == waited
        with pytest.raises(dist.DistTimeoutError, match=r"all_reduce on group .*0.01 s.*call wait\(\) again"):
            work.wait(0.01)
    assert work.wait(20.0) is True
    assert work.is_success()
    assert work.exception() is None
    assert work.result() is x


def test_who_does_not_wait_races(group, cupy):
    x = cupy.zeros(3)
    with MACHINE.held(cupy.cuda.get_current_stream()):
        work = group.all_reduce(x, async_op=True)
        with pytest.raises(standin_cupy.RaceError, match="an assignment and NCCL's all_reduce"):
            x[...] = 1.0
        work.wait()
        x[...] = 1.0


def test_waiting_on_another_stream(group, cupy):
    x, other = cupy.zeros(3), cupy.cuda.Stream(non_blocking=True)
    with MACHINE.held(cupy.cuda.get_current_stream()):
        work = group.all_reduce(x, async_op=True)
        with other:
            work.wait()
            x[...] = 3.0
        with pytest.raises(standin_cupy.RaceError):
            x[...] = 4.0  # on the first stream, which has waited for nothing
    with other:
        assert x.tolist() == [3.0] * 3
    other.synchronize()


def forgotten(group, cupy, async_op):
    """Make a call on arrays that nobody keeps, behind a kernel that runs long; return how to see them go."""
    x, y = cupy.zeros(5), cupy.zeros(5)
    seen = [weakref.ref(x), weakref.ref(y)]
    group.all_gather_into_tensor(y, x, async_op=async_op)
    return seen


@pytest.mark.parametrize("async_op", [False, True])
def test_arrays_live_until_the_call_is_done(group, cupy, async_op):
    with MACHINE.held(cupy.cuda.get_current_stream()):
        seen = forgotten(group, cupy, async_op)
        gc.collect()
        assert all(ref() is not None for ref in seen)
    deadline = time.monotonic() + 20.0
    while any(ref() is not None for ref in seen) and time.monotonic() < deadline:
        gc.collect()
    assert all(ref() is None for ref in seen)


def test_memory_of_another_stream_is_not_given_back_early(group, cupy):
    # Made on one stream, used by a call on another: the pool knows of the first alone.
    other = cupy.cuda.Stream(non_blocking=True)
    with other:
        x = cupy.zeros(4)
        made = other.record()
    cupy.cuda.get_current_stream().wait_event(made)
    with MACHINE.held(cupy.cuda.get_current_stream()):
        group.all_reduce(x)
        del x
        gc.collect()
        MACHINE.advance()
    group.barrier()
    group.all_reduce(cupy.zeros(1))
    assert MACHINE.races == []


def test_callbacks_come_when_the_device_is_done(group, cupy):
    x, called = cupy.ones(2), threading.Event()
    with MACHINE.held(cupy.cuda.get_current_stream()):
        future = group.all_reduce(x, async_op=True).get_future()
        future.add_done_callback(lambda done: called.set())
        assert not future.done()
        assert not called.is_set()
    assert future.wait()[0] is x
    assert called.wait(20.0)


def test_a_barrier_makes_the_host_wait(group, cupy):
    with MACHINE.held(cupy.cuda.get_current_stream()):
        work = group.barrier(async_op=True)
        assert not work.is_completed()
        with pytest.raises(dist.DistTimeoutError, match="barrier on group"):
            work.wait(0.01)
    assert work.wait()
    assert work.is_completed()
    assert group.barrier() is None
    dist.monitored_barrier(group)


@pytest.mark.parametrize("variable", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
@pytest.mark.parametrize("call", ["sync", "wait"])
def test_the_host_waits_where_the_environment_asks_for_it(standin, cupy, monkeypatch, variable, call):
    monkeypatch.setenv(variable, "1")
    dist.init_process_group("cpu:gloo,cuda:standin", store=dist.HashStore(), rank=0, world_size=1)
    group, x = dist.new_group(backend="standin"), cupy.ones(2)
    group.all_reduce(x)
    stream, called = cupy.cuda.get_current_stream(), contextvars.copy_context()

    def wait():
        with stream:
            group.all_reduce(x) if call == "sync" else group.all_reduce(x, async_op=True).wait()

    with MACHINE.held(stream):
        thread = threading.Thread(target=called.run, args=(wait,), daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(20.0)
    assert not thread.is_alive()
    dist.destroy_process_group()


def test_a_wrong_value_of_the_variable_is_refused(standin, cupy, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "perhaps")
    dist.init_process_group("cpu:gloo,cuda:standin", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(dist.DistBackendError, match="TORCH_NCCL_BLOCKING_WAIT must be 0 or 1, got 'perhaps'"):
            dist.new_group(backend="standin").all_reduce(cupy.ones(2))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("is_high", [False, True])
def test_options_choose_the_priority_of_the_stream(standin, cupy, monkeypatch, is_high):
    made, stream_class = [], cupy.cuda.Stream

    def recorded(*args, **kwargs):
        made.append(stream_class(*args, **kwargs))
        return made[-1]

    dist.init_process_group("cpu:gloo,cuda:standin", store=dist.HashStore(), rank=0, world_size=1)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_high)
    group, x = dist.new_group(backend="standin", pg_options=options), cupy.ones(2)
    monkeypatch.setattr(cupy.cuda, "Stream", recorded)
    group.all_reduce(x)
    assert [stream.priority for stream in made] == [-1 if is_high else None]
    monkeypatch.undo()
    dist.destroy_process_group()


def test_the_class_of_the_options_makes_no_group():
    with pytest.raises(TypeError, match="make a group with new_group"):
        dist.ProcessGroupNCCL()
    with pytest.raises(AttributeError):
        dist.ProcessGroupNCCL.Options().no_such_option = 1


def test_calls_from_another_current_device(group, cupy):
    x = cupy.zeros(2)
    with cupy.cuda.Device(1):
        assert group.all_reduce(x) is x
        assert cupy.cuda.runtime.getDevice() == 1
        work = group.all_reduce(x, async_op=True)
        work.wait()
    assert x.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("way", ["sync", "wait", "message"])
def test_the_default_stream_of_a_gpu_that_is_not_the_current_one(standin, cupy, way):
    # CuPy has one object for the default streams of all GPUs, and CUDA takes it as that of the current one.
    MACHINE.num_devices = 3

    def main():
        mine = dist.get_rank() + 1
        group = dist.new_group(backend="standin", device_id=mine)
        assert cupy.cuda.runtime.getDevice() == 0
        with cupy.cuda.Device(mine):
            x, y = cupy.ones(3), cupy.ones(3)
            default = MACHINE.null(mine)
        with MACHINE.held(default):
            if way == "sync":
                group.all_reduce(x)
                group.all_gather_into_tensor(y.reshape(3)[:2], y[1:2])  # which has to be copied first
            elif way == "wait":
                group.all_reduce(x, async_op=True).wait()
            else:
                works = [group.isend(y, 1 - group.rank()), group.irecv(x, 1 - group.rank())]
                for work in works:
                    work.wait()
            with cupy.cuda.Device(mine):
                x[...] = 2.0
        with cupy.cuda.Device(mine):
            return x.tolist()

    assert dist.run(main, 2, timeout=20) == [[2.0] * 3] * 2


def test_a_group_of_operations_is_ended_when_one_of_them_is_refused(group, cupy, standin, monkeypatch):
    import standin_nccl

    def refuse(*given):
        raise standin_nccl.StandInError(5)

    monkeypatch.setattr(standin_nccl.StandInCommunicator, "all_reduce", refuse)
    with pytest.raises(dist.DistBackendError, match=r"all_reduce_coalesced on group .*NCCL says: status 5"):
        group.all_reduce_coalesced([cupy.zeros(1), cupy.zeros(2)])
    assert standin.local.depth == 0
    assert standin.aborts == 1
    with pytest.raises(dist.DistBackendError, match="cannot be used after an earlier failure: all_reduce_coalesced"):
        group.all_reduce(cupy.zeros(1))


def test_messages_are_waited_for_after_their_batch(group, cupy):
    with pytest.raises(dist.DistError, match="begins with the other messages when the block ends"), _two() as pair:
        pair()


class _two:
    """Two ranks that wait for a message inside of the block that posts it."""

    def __enter__(self):
        return self._run

    def __exit__(self, *exc):
        return False

    def _run(self):
        dist.run(_wait_inside, 2, timeout=20)


def _wait_inside():
    import cupy

    cupy.cuda.Device(dist.get_rank()).use()
    group = dist.new_group(backend="standin")
    with dist.coalescing_manager(group):
        group.isend(cupy.zeros(1), 1 - dist.get_rank()).wait()


def test_a_sync_call_is_enqueued_on_the_current_stream(group, cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y = cupy.zeros(3), cupy.zeros(3)
        for _ in range(2):  # checked, and then planned
            group.all_gather_into_tensor(y, x)
        with MACHINE.held(stream):
            group.all_gather_into_tensor(y, x)
            assert len(stream.ops) == 3  # what holds it, the call, and the event after it
        assert y.tolist() == [0.0] * 3


def test_planned_calls_are_checked_again_where_the_arrays_are_others(group, cupy):
    whole, wide = cupy.asarray(np.arange(6.0)), cupy.asarray(np.arange(6.0).reshape(3, 2))
    group.all_gather_into_tensor(cupy.zeros(3), whole[:3])
    # The same signature: contiguous and apart, lying apart in memory, overlapping.
    taken = cupy.zeros(3)
    group.all_gather_into_tensor(taken, wide[:, 1])
    assert taken.tolist() == [1.0, 3.0, 5.0]
    group.all_gather_into_tensor(whole[1:4], whole[:3])
    assert whole.tolist() == [0.0, 0.0, 1.0, 2.0, 4.0, 5.0]


def test_a_call_in_a_captured_stream_is_a_part_of_the_graph(group, cupy):
    stream, x = cupy.cuda.Stream(non_blocking=True), cupy.ones(3)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        group.all_reduce(x)
        stream.synchronize()
        MACHINE.capturing.add(int(stream.ptr))
        try:
            with MACHINE.held(stream):
                assert group.all_reduce(x) is x
                work = group.all_reduce(x, async_op=True)
                assert work.wait()
                # Events of a capture cannot be queried: for the host, the call is complete.
                assert work.is_completed()
        finally:
            MACHINE.capturing.clear()
        assert x.tolist() == [1.0] * 3


def test_memory_that_a_call_in_a_graph_allocates_is_kept(group, cupy):
    stream, x = cupy.cuda.Stream(non_blocking=True), cupy.ones(3)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        outputs, whole = [cupy.zeros(3)], cupy.asarray(np.arange(6.0))
        group.all_gather(outputs, x)
        stream.synchronize()
        gc.collect()
        cupy.zeros(1)  # the memory of what is collected is given back
        before = set(MACHINE.live)
        MACHINE.capturing.add(int(stream.ptr))
        try:
            group.all_gather(outputs, x)  # through an array of its own
            group.all_gather_into_tensor(whole[1:4], whole[:3])  # of a copy
        finally:
            MACHINE.capturing.clear()
        stream.synchronize()
        gc.collect()
        y = cupy.zeros(1)
        assert len(set(MACHINE.live) - before - {y.data.ptr}) == 2


def test_an_empty_call_on_another_stream_completes_none_before_it(group, cupy):
    stream, other = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
    with other:
        nothing = cupy.zeros(0)
    x, y = cupy.zeros(5), cupy.zeros(5)
    stream.synchronize()  # what fills them is done, and keeps them no longer
    seen = [weakref.ref(x), weakref.ref(y)]
    with MACHINE.held(stream):
        group.all_gather_into_tensor(y, x, async_op=True)
        del x, y
        with other:
            for _ in range(8):  # after some, arrays of completed calls are released
                group.all_reduce(nothing)
        gc.collect()
        assert all(ref() is not None for ref in seen)


def test_the_first_message_is_not_captured(standin, cupy):
    MACHINE.num_devices = 2

    def main():
        cupy.cuda.Device(dist.get_rank()).use()
        group, stream = dist.new_group(backend="standin"), cupy.cuda.Stream(non_blocking=True)
        with stream:
            x = cupy.ones(2)
            MACHINE.capturing.add(int(stream.ptr))
            with pytest.raises(ValueError, match="isend on group .*cannot be captured into a graph"):
                group.isend(x, 1 - group.rank())
            MACHINE.capturing.discard(int(stream.ptr))
            group.all_reduce(x)
            return x.tolist()

    assert dist.run(main, 2, timeout=20) == [[2.0, 2.0]] * 2


def test_an_op_that_is_none_is_refused_after_planned_calls_too(group, cupy):
    x = cupy.zeros(2)
    group.all_reduce(x)
    with pytest.raises(TypeError, match="all_reduce on group"):
        group.all_reduce(x, op=["sum"])


def test_records_have_the_label_of_their_time(group, cupy):
    x = cupy.zeros(2)
    for label in ("first", "second"):
        group.relabel(label)
        for _ in range(2):
            group.all_reduce(x)
            assert facts_in(group.recorder.records()[-1]).label == label
