"""The flight recorder: what it knows of calls, and the files that it leaves."""

import _thread
import json
import threading
from contextvars import copy_context

import numpy as np
import pytest
from until import until

import meshdist as dist
from meshdist.runtime.flight_recorder import NUM_RECORDS, CallFacts, FlightRecorder
from meshdist.runtime.log import RankLog

pytestmark = pytest.mark.timeout(60)
RECORDED = {
    "all_reduce": lambda: dist.all_reduce(np.ones((2, 3), np.float32), op="max"),
    "barrier": lambda: dist.barrier(),
    "broadcast": lambda: dist.broadcast(np.ones(3), 0),
    "all_gather": lambda: dist.all_gather([np.ones(2) for _ in range(dist.get_world_size())], np.ones(2)),
    "all_reduce of a strided array": lambda: dist.all_reduce(np.ones((4, 4))[:, 1]),
    "method": lambda: dist.group.WORLD.all_reduce(np.ones(2)),
    "rooted method": lambda: dist.group.WORLD.broadcast(np.ones(2), 0),
    "async": lambda: dist.all_reduce(np.ones(2), async_op=True).wait(),
    "functional": lambda: dist.functional.all_reduce(np.ones(2)),
    "object": lambda: dist.broadcast_object_list([1], 0),
}


def calls_twice(name):
    for _ in range(2):
        RECORDED[name]()
    return dist.flight_recorder()


@pytest.mark.parametrize("name", RECORDED)
def test_every_call_is_recorded_with_its_line(world_of_3, name):
    for state in world_of_3.run(calls_twice, name):
        records = state["records"][-2:]
        line = RECORDED[name].__code__.co_firstlineno
        assert [record["site"] for record in records] == [f"{__file__}:{line}"] * 2
        assert [record["state"] for record in records] == ["completed"] * 2
        assert records[0]["sequence"] + 1 == records[1]["sequence"] == state["groups"]["world"]["calls"]
        for record in records:
            assert record["created_s"] <= record["started_s"] <= record["completed_s"] <= state["time_s"] + 1


def some_calls():
    rank = dist.get_rank()
    pair = dist.new_group([0, 2], group_desc="pair")
    dist.all_reduce(np.ones((2, 3), np.float32), op="max")
    if rank == 0:
        dist.send(np.ones(4), 2, tag=5)
    if rank == 2:
        dist.recv(np.ones(4), 0, tag=5)
    if rank in (0, 2):
        pair.broadcast(np.ones(3), 1)
    return dist.flight_recorder()


def test_what_a_record_says(world_of_3):
    states = world_of_3.run(some_calls)
    assert [state["rank"] for state in states] == [0, 1, 2]
    assert {state["world_size"] for state in states} == {3}
    reduced, sent, broadcast = states[0]["records"][-3:]
    assert reduced["text"] == "all_reduce(float32[2, 3], op=max)"
    assert reduced["sent"] == reduced["received"] == [["float32", [2, 3]]]
    assert (reduced["group"], reduced["kind"], reduced["tag"]) == ("world", "collective", None)
    assert (sent["call"], sent["kind"], sent["root"], sent["tag"]) == ("send", "message", 2, 5)
    assert (sent["sent"], sent["received"]) == ([["float64", [4]]], [])
    assert (broadcast["label"], broadcast["root"], broadcast["sequence"]) == ("pair", 1, 1)
    received = states[2]["records"][-2]
    assert (received["text"], received["state"]) == ("recv(float64[4] from rank 0, tag=5)", "completed")
    assert "pair" not in [group["label"] for group in states[1]["groups"].values()]


def many_calls():
    x = np.ones(1)
    for _ in range(NUM_RECORDS + 10):
        dist.all_reduce(x)
    return [record["sequence"] for record in dist.flight_recorder()["records"]]


def test_the_ring_keeps_the_last_records():
    (sequences,) = dist.run(many_calls, 1)
    assert sequences == list(range(11, NUM_RECORDS + 11))


def test_a_failed_call_says_with_what():
    def main():
        group = dist.new_group(timeout=0.3)
        group.barrier()
        if dist.get_rank() == 0:
            with pytest.raises(dist.DistTimeoutError):
                group.barrier()
            record = dist.flight_recorder()["records"][-1]
            dist.barrier()
            return record
        dist.barrier()
        return None

    record = dist.run(main, 2)[0]
    assert record["state"] == "failed"
    assert record["error"].startswith("DistTimeoutError: barrier on group")
    assert record["completed_s"] is not None


def test_a_call_is_recorded_as_it_begins():
    begun, looked = threading.Event(), threading.Event()
    found = []

    def main():
        if dist.get_rank() == 1:
            begun.wait(20)
            looked.wait(20)
        work = dist.all_reduce(np.ones(2), async_op=True)
        if dist.get_rank() == 0:
            found.append(dist.flight_recorder()["records"][-1])
            looked.set()
        work.wait()
        return dist.flight_recorder()["records"][-1]["state"]

    begun.set()
    assert dist.run(main, 2) == ["completed", "completed"]
    assert found[0]["state"] in ("queued", "started")
    assert found[0]["completed_s"] is None


def test_the_file_is_what_the_function_returns(tmp_path):
    def main():
        dist.barrier()
        return dist.flight_recorder(tmp_path / "made")

    states = dist.run(main, 2)
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["rank_0.json", "rank_1.json"]
    assert json.loads((tmp_path / "made" / "rank_1.json").read_text()) == states[1]


def test_a_fault_leaves_a_file_where_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHDIST_FLIGHT_RECORDER_DIR", str(tmp_path))

    def main():
        dist.barrier()
        if dist.get_rank() == 0:
            dist.all_reduce(np.ones(3))
        else:
            dist.all_reduce(np.ones(4))

    with pytest.raises(dist.DistBackendError, match="the ranks disagree"):
        dist.run(main, 2)
    for rank in (0, 1):
        state = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert state["records"][-1]["state"] == "failed"
        assert state["records"][-1]["site"].startswith(__file__)
        assert "disagree" in state["reason"]


def test_a_rank_that_raises_leaves_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHDIST_FLIGHT_RECORDER_DIR", str(tmp_path))

    def main():
        dist.barrier()
        if dist.get_rank() == 0:
            raise RuntimeError("bad batch")
        dist.barrier()

    with pytest.raises(RuntimeError, match="bad batch"):
        dist.run(main, 2)
    raised, waited = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert raised["raised"]["error"] == "RuntimeError: bad batch"
    assert raised["place"].startswith(f"{__file__}:")
    assert raised["stack"][-1] == raised["place"]
    assert raised["raised"]["time_s"] <= waited["records"][-1]["completed_s"]
    assert "raised" not in waited


def test_a_directory_that_cannot_be_made_does_not_hide_the_fault(tmp_path, monkeypatch, caplog):
    taken = tmp_path / "a file"
    taken.write_text("")
    monkeypatch.setenv("MESHDIST_FLIGHT_RECORDER_DIR", str(taken))

    def main():
        dist.all_reduce(np.ones(3 + dist.get_rank()))

    with pytest.raises(dist.DistBackendError, match="the ranks disagree"):
        dist.run(main, 2)
    assert "cannot write the flight recorder's file to" in caplog.text


def test_without_a_world_it_says_so():
    with pytest.raises(ValueError, match="init_process_group"):
        dist.flight_recorder()


def test_records_keep_no_arrays_alive():
    import weakref

    def main():
        x = np.ones(3)
        dist.all_reduce(x)
        return weakref.ref(x)

    def kept():
        reference = main()
        return reference() is None

    assert dist.run(kept, 1) == [True]


def test_a_thread_may_begin_with_a_collective():
    def main():
        x = np.ones(2)
        dist.all_reduce(x)
        _thread.start_new_thread(copy_context().run, (dist.all_reduce, x))
        until(lambda: len(dist.flight_recorder()["records"]) == 2, "the other thread's call is recorded")
        return dist.flight_recorder()["records"][1]["text"]

    assert dist.run(main, 1) == ["all_reduce(float64[2], op=sum)"]


def test_a_recorder_keeps_the_number_of_a_call():
    recorder = FlightRecorder()
    recorder.end(recorder.begin(CallFacts("barrier", "world", "world", "barrier()", [], [], None, 60.0), 1))
    assert [record.sequence for record in recorder.records()] == [1]


def test_log_records_know_the_rank():
    assert RankLog(3).process("ready", {}) == ("ready", {"extra": {"rank": 3, "group": None, "sequence": None}})
