"""The flight recorder on arrays of a GPU: calls are recorded with their line, and done when the device is."""

import os

import pytest
from standin_cupy import MACHINE
from until import until

import meshdist as dist

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _two_gpus(standin):
    MACHINE.num_devices = 2


def some_calls(cupy):
    cupy.cuda.Device(dist.get_rank()).use()
    group = dist.new_group(backend="standin", group_desc="gpus")
    x = cupy.zeros(4)
    for _ in range(2):
        group.all_reduce(x)
    group.all_reduce(x, async_op=True).wait(20.0)
    group.barrier()
    if group.rank() == 0:
        group.isend(x, 1).wait(20.0)
    else:
        group.irecv(x, 0).wait(20.0)
    until(lambda: not any(map(is_under_way, dist.flight_recorder()["records"])), "the watchdog has seen them land")
    state = dist.flight_recorder()
    dist.barrier()
    return state


def is_under_way(record):
    return record["state"] == "started"


def test_calls_are_recorded_with_their_line_and_end(standin, cupy):
    for rank, state in enumerate(dist.run(some_calls, 2, (cupy,), timeout=20)):
        records = [record for record in state["records"] if record["label"] == "gpus"]
        collectives, messages = records[:4], records[4:]
        assert [record["call"] for record in collectives] == ["all_reduce"] * 3 + ["barrier"]
        assert [record["sequence"] for record in collectives] == [1, 2, 3, 4]
        assert [record["call"] for record in messages] == [("isend", "irecv")[rank]]
        assert all(record["state"] == "completed" for record in records), records
        assert all(os.path.basename(record["site"]).startswith("test_nccl_flight_records.py:") for record in records)
        assert collectives[0]["sent"] == [["float64", [4]]]
        assert collectives[0]["text"] == "all_reduce(float64[4], op=sum)"


def come_late(cupy):
    cupy.cuda.Device(dist.get_rank()).use()
    group = dist.new_group(backend="standin", timeout=2.0, group_desc="gpus")
    group.all_reduce(cupy.zeros(1))
    record = None
    if group.rank() == 0:
        work = group.all_reduce(cupy.zeros(3), async_op=True)
        begun = dist.flight_recorder()["records"][-1]["state"]
        with pytest.raises(dist.DistError, match="timed out"):
            work.wait(20.0)
        record = begun, dist.flight_recorder()["records"][-1]
    dist.barrier()  # of the world, which has another backend
    return record


def test_a_call_that_does_not_end_is_recorded_as_failed(standin, cupy):
    begun, record = dist.run(come_late, 2, (cupy,), timeout=20)[0]
    assert begun in ("started", "failed")
    assert record["state"] == "failed"
    assert "timed out after 2 s" in record["error"]
