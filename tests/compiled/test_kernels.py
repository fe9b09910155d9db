"""The reductions of the compiled core are NumPy's, to the last bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshdist.runtime.flight_recorder  # noqa: F401 - it tells the core what NumPy's arrays are
from meshdist import ReduceOp, core
from meshdist.backends.gloo.shm.flag_barrier import ALL
from meshdist.backends.gloo.shm.shared_region import NUM_PHASES, SIGNAL_WORDS, WORD

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float32", "float64")
COMPLEX = ("complex64", "complex128")
IN_C = {
    "sum": (*INTEGERS, *FLOATS, *COMPLEX, "bool"),
    "avg": (*FLOATS, *COMPLEX),
    "product": (*INTEGERS, *FLOATS, "bool"),
    "min": (*INTEGERS, *FLOATS, "bool"),
    "max": (*INTEGERS, *FLOATS, "bool"),
    "band": (*INTEGERS, "bool"),
    "bor": (*INTEGERS, "bool"),
    "bxor": (*INTEGERS, "bool"),
}
IN_NUMPY = [("sum", "float16"), ("sum", "longdouble"), ("avg", "float16"), ("max", "float16"), ("min", "complex64")]


class Alone:
    """What a Step needs of a group of one rank, which waits for nobody."""

    def __init__(self):
        self.barrier = core.Barrier()
        self.words = memoryview(bytearray(SIGNAL_WORDS * NUM_PHASES * WORD)).cast("Q")
        self.barrier.attach(self.words, 0, (), (), 0)

    def step(self, op, rows, count):
        dtype = rows[0].dtype
        addresses = [[row.ctypes.data for row in rows]] * 2
        return core.Step(
            self.barrier, 1 << 32, None, (ALL, 0, b""), rows, 0, 1, [(), ()], [(), ()], (),
            op, dtype.kind, dtype.itemsize, len(rows), addresses, count,
        )  # fmt: skip


def expected(op, rows):
    op = ReduceOp(op)
    with np.errstate(all="ignore"):
        total = rows[0]
        for row in rows[1:]:
            total = op.ufunc(total, row)
        total = np.array(total)
        op.finish(total, len(rows))
    return total


@pytest.mark.parametrize(("op", "dtype"), [(op, dtype) for op, dtypes in IN_C.items() for dtype in dtypes])
@settings(max_examples=25)
@given(num_rows=st.integers(2, 5), count=st.integers(0, 70), seed=st.integers(0, 2**32 - 1))
def test_every_bit_is_numpys(op, dtype, num_rows, count, seed):
    random = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    rows = [np.frombuffer(random.bytes(count * dtype.itemsize), dtype).copy() for _ in range(num_rows)]
    if dtype.kind == "b":
        rows = [random.integers(0, 2, count).astype(bool) for _ in range(num_rows)]
    result = np.full(count, 7, dtype)
    assert Alone().step(op, rows, count)(None, result)
    wanted = expected(op, rows)
    if dtype.kind in "fc":  # which NaN comes out of several is up to the processor
        parts = [array.view(f"f{dtype.itemsize // (2 if dtype.kind == 'c' else 1)}") for array in (result, wanted)]
        assert (np.isnan(parts[0]) == np.isnan(parts[1])).all()
        for part in parts:
            part[np.isnan(part)] = 0
    assert result.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("num_rows", [2, 3, 4, 5, 6, 7, 8, 11])
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_the_result_may_take_the_place_of_any_row(op, num_rows):
    """Also in rows that are longer than the blocks in which many rows are added."""
    random = np.random.default_rng(num_rows)
    for count in (1, 5_000):
        for place in range(num_rows):
            rows = [random.random(count, np.float32) for _ in range(num_rows)]
            wanted = expected(op, rows)
            assert Alone().step(op, rows, count)(None, rows[place])
            assert rows[place].tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("op", "dtype"), IN_NUMPY)
def test_other_reductions_are_left_to_numpy(op, dtype):
    assert Alone().step(op, [np.zeros(3, dtype)] * 2, 3) is None


class Own(np.ndarray):
    pass


def test_calls_are_left_to_python_unless_their_arrays_are_plain():
    step = Alone().step("sum", [np.ones(3)] * 2, 3)
    result = np.zeros((3, 2))[:, 0]
    assert step(None, np.zeros(3)) is True
    for other in (result, [1.0], result.tolist(), np.zeros(3).view(Own)):
        assert step(None, other) is False
    assert result.tolist() == [0, 0, 0]
