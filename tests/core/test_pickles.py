"""Pickles of objects that are sent: what long ones cost, that they are the objects, and whose error an error is."""

import pickle
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import meshdist as dist
from meshdist.collectives import objects
from meshdist.runtime.object_messages import pickle_of

pytestmark = pytest.mark.timeout(60)
LONG = 300_000  # elements


def values():
    grid = np.arange(LONG, dtype=np.float64).reshape(500, -1)
    return {
        "rows": grid,
        "columns": np.asfortranarray(grid),
        "strided": grid[::2, ::3],
        "read-only": np.frombuffer(grid.tobytes()),
        "bfloat16": np.ones(LONG, ml_dtypes.bfloat16),
        "empty": np.empty((0, LONG)),
        "of objects": np.array([None, "x" * LONG, (1, 2)], object),
        "structured": np.zeros(LONG, [("a", "i4"), ("b", "f8")]),
        "bytes": b"\0" * LONG,
        "bytearray": bytearray(LONG),
        "text": "é" * LONG,
        "numbers": list(range(LONG)),
        "short": {"one": [1, 2.0, None]},
    }


@pytest.mark.parametrize("name", values())
def test_what_is_unpickled_is_what_was_pickled(name):
    value = values()[name]
    shared = pickle.loads(pickle_of([value, value]))
    assert shared[0] is shared[1]
    assert type(shared[0]) is type(value)
    np.testing.assert_array_equal(shared[0], value)
    if isinstance(value, np.ndarray):
        assert (shared[0].dtype, shared[0].flags.writeable) == (value.dtype, value.flags.writeable)


class InColumns:
    def __reduce_ex__(self, protocol):
        return bytes, (pickle.PickleBuffer(np.asfortranarray(np.arange(LONG).reshape(2, -1))),)


def test_buffers_in_fortran_order_are_pickled():
    numbers = np.frombuffer(pickle.loads(pickle_of(InColumns())), np.int64)
    np.testing.assert_array_equal(numbers.reshape(-1, 2).T, np.arange(LONG).reshape(2, -1))


def test_a_long_array_is_copied_once():
    value = {"array": np.ones(1 << 20)}
    tracemalloc.start()
    try:
        num_bytes = len(pickle_of(value))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * num_bytes


class Unpicklable:
    def __reduce__(self):
        raise KeyError("not this one")


@pytest.mark.parametrize(("value", "cause"), [(Unpicklable(), KeyError), (threading.Lock(), None)])
def test_the_cause_is_an_error_of_the_object_alone(value, cause):
    with pytest.raises(TypeError, match="cannot be pickled") as raised:
        objects.pickled("gather_object", [value])
    assert type(raised.value.__cause__) is (cause or type(None))


def short_and_long_in_turns():
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn, num_elements in enumerate((3, LONG, LONG, 3, LONG, 0, 40_000, LONG)):
        value = {"turn": turn, "array": np.full(num_elements, rank + turn)}
        if rank == 0:
            dist.send_object(value, size - 1)
            work = dist.isend_object_list([value, "same"], size - 1)
            value["array"][:] = -1  # it was pickled before
            work.wait()
        elif rank == size - 1:
            received = [dist.recv_object(0), *dist.irecv_object_list(0).result()]
            assert received[2] == "same"
            for one in received[:2]:
                assert one["turn"] == turn
                assert one["array"].tolist() == [turn] * num_elements
                one["array"][:] = 0  # it can be written
        gathered = [None] * size
        dist.all_gather_object(gathered, np.full(num_elements, rank))
        for peer, array in enumerate(gathered):
            assert array.tolist() == [peer] * num_elements


@pytest.mark.parametrize("size", [2, 3])
def test_short_and_long_objects_in_turns(worlds, size):
    worlds.world("gloo", size).run(short_and_long_in_turns)
