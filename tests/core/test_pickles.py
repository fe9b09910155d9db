"""Pickles of objects that are sent: what long ones cost, that they are the objects, and whose error an error is."""

import copyreg
import pickle
import threading
import tracemalloc
import weakref

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
        "numbers of NumPy": [np.float32(0.1), np.float64(0.1), np.int8(-1), np.uint64(2**64 - 1), np.bool_(True), 1j],
        "long double": np.longdouble(1) / 3,
        "time": np.array(["2026-01-01"], "M8[s]"),
        "big-endian": np.arange(3, dtype=">i4"),
        "0-d": np.array(2.5),
        "metadata": np.zeros(2, np.dtype("f4", metadata={"unit": "m"})),
        "masked": np.ma.masked_array([1, 2], [True, False]),
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
        assert shared[0].dtype.metadata == value.dtype.metadata


def test_numbers_of_numpy_keep_their_types():
    numbers = [
        np.dtype(name).type(1) for name in ("?", "i1", "i2", "i4", "i8", "u8", "e", "f", "d", "g", "F", "D", "G")
    ]
    assert [type(number) for number in pickle.loads(pickle_of(numbers))] == [type(number) for number in numbers]


def test_what_a_program_registers_is_used(monkeypatch):
    monkeypatch.setitem(copyreg.dispatch_table, np.ndarray, lambda array: (list, (["registered", array.size],)))
    assert pickle.loads(pickle_of(np.zeros(3))) == ["registered", 3]
    monkeypatch.undo()
    assert pickle.loads(pickle_of(np.zeros(3))).tolist() == [0, 0, 0]


class Nested:
    def __reduce__(self):
        return pickle.loads, (pickle_of([np.ones(2), "within"]),)


def test_objects_that_pickle_others_and_objects_after_an_error():
    loaded = pickle.loads(pickle_of(["around", Nested(), np.zeros(2)]))
    assert (loaded[0], loaded[1][1], loaded[2].tolist()) == ("around", "within", [0, 0])
    with pytest.raises(KeyError):
        pickle_of(["lost", Unpicklable()])
    assert pickle.loads(pickle_of("kept")) == "kept"


def test_nothing_keeps_what_was_pickled():
    held = {"array": np.ones(4), "text": "x" * 10}
    array = weakref.ref(held["array"])
    pickle_of(held)
    del held
    assert array() is None


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
