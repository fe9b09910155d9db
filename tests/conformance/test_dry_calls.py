"""Every call in a dry run, on every rank in turn: the results of a world in which all ranks give the same arrays."""

import calls
import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
SIZES = (1, 2, 3, 5)
DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float64", "complex64", "bfloat16", "float8_e4m3fn"]
OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
SHAPES = [(), (0,), (3,), (2, 3), (25,)]


@pytest.fixture
def of_one_rank(monkeypatch):
    """Every rank gives what rank 0 gives."""
    content, item = calls.content, calls._object
    monkeypatch.setattr(calls, "content", lambda case, rank, *rest: content(case, 0, *rest))
    monkeypatch.setattr(calls, "_object", lambda case, rank: item(case, 0))


def only_others_know(case, rank):
    return rank != case.root and case.collective in ("scatter", "message", "scatter_object_list")


def wide(array):
    return array.astype(np.float64) if "float8" in str(array.dtype) else array


def check(case, rank, size):
    made = calls.make(case, rank, size)
    give, take = [array.copy() for array in made.give], [array.copy() for array in made.take]
    with dist.dry_run(size, rank):
        result = made.call(give, take, **made.how, group=dist.new_group())
        if case.async_op and isinstance(result, dist.Work):
            assert result.is_completed()
            assert result.wait()
    for array, want in zip(take, made.want, strict=True):
        want = np.zeros_like(want) if only_others_know(case, rank) else want
        assert (array.shape, array.dtype) == (want.shape, want.dtype)
        # NumPy does not find the NaN of float8 equal to itself.
        np.testing.assert_array_equal(wide(array), wide(want), err_msg=str(case))
    for array, before in zip(give, made.give, strict=True):
        np.testing.assert_array_equal(array, before)
    if made.result is not None:
        assert result == ([None] if only_others_know(case, rank) else made.result)


def cases_of(collective, size):
    dtypes = ["float64"] if collective not in calls.OF_ARRAYS else DTYPES if size == 3 else ["float64", "int8"]
    if collective == "message" and size == 1:
        return
    for number, dtype in enumerate(dtypes):
        if dtype in ("bfloat16", "float8_e4m3fn"):
            pytest.importorskip("ml_dtypes", reason="bfloat16 and float8 need ml_dtypes")
        for op in OPS if collective in calls.REDUCING else ["sum"]:
            if not calls.is_defined(op, calls.dtype_of(dtype)):
                continue
            for place, shape in enumerate(SHAPES):
                if collective == "all_to_all_single" and not shape:
                    continue
                yield calls.Case(
                    collective,
                    dtype,
                    shape,
                    op,
                    root=(number + place) % size,
                    stacked=bool(place % 2),
                    async_op=bool((number + place) % 3),
                    salt=place,
                )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collective", calls.COLLECTIVES)
def test_results_are_those_of_equal_ranks(of_one_rank, collective, size):
    for case in cases_of(collective, size):
        for rank in range(size):
            check(case, rank, size)


@pytest.mark.parametrize("num", range(1, 18))
@pytest.mark.parametrize("op", OPS)
def test_reductions_of_any_number_of_ranks(op, num):
    dtype = np.float64 if op == "avg" else np.int8  # which wraps
    x = np.array([3, -2, 0, 1, 7]).astype(dtype)
    want = calls.reduced([x] * num, op)
    with dist.dry_run(num):
        np.testing.assert_array_equal(dist.all_reduce(x, op), want)


def test_uneven_blocks_are_filled_as_they_are_expected():
    with dist.dry_run(3, rank=1):
        out = [np.zeros(1), np.zeros(2), np.zeros(5)]
        dist.all_gather(out, np.array([1.0, 2.0]))
        assert [block.tolist() for block in out] == [[1], [1, 2], [1, 2, 1, 2, 1]]
        take = np.zeros(6, np.int64)
        dist.all_to_all_single(take, np.arange(4), output_split_sizes=[1, 2, 3], input_split_sizes=[1, 2, 1])
        assert take.tolist() == [1, 1, 2, 1, 2, 1]
        nothing = np.ones(2)
        dist.all_to_all([np.zeros(0), np.zeros(0), nothing], [np.zeros(0)] * 3)
        assert nothing.tolist() == [0, 0]


def test_premul_sum_multiplies_first():
    with dist.dry_run(4):
        assert dist.all_reduce(np.array([1.0, 2.0]), dist.premul_sum(0.5)).tolist() == [2, 4]


def test_messages_of_all_kinds():
    with dist.dry_run(4, rank=2):
        x, y = np.ones(3), np.ones(3, np.int32)
        dist.send(x, 3)
        dist.isend(x, 0).wait()
        assert dist.recv(y, 1) == 1
        assert y.tolist() == [0, 0, 0]
        assert dist.recv(x) == 3
        work = dist.irecv(np.ones(2), 0)
        assert work.wait()
        assert work.source_rank() == 0
        ops = [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, x, 3)]
        assert all(work.wait() for work in dist.batch_isend_irecv(ops))
        dist.send_object_list(["a", 2], 0)
        objects = ["mine", 1]
        assert dist.recv_object_list(objects, 0) == 0
        assert objects == [None, None]
        dist.send_object("a", 0)
        assert dist.recv_object(0) is None
        assert dist.sendrecv_object("a", 0, 0) is None
        dist.isend_object_list(["a", 2], 0, tag=4).wait()
        work = dist.irecv_object_list(0, tag=4)
        assert (work.result(), work.source_rank()) == ([None], 0)


def test_strided_and_swapped_arrays():
    with dist.dry_run(4):
        whole = np.zeros((3, 4), ">f8")
        dist.all_reduce(whole[:, ::2].fill(1) or whole[:, ::2])
        assert whole.tolist() == [[4, 0, 4, 0]] * 3


def test_coalesced_calls_are_made_at_the_end():
    with dist.dry_run(8):
        x, y = np.ones(2), np.ones(3)
        with dist.coalescing_manager(async_ops=True) as works:
            dist.all_reduce(x)
            dist.all_reduce(y)
        assert works.wait()
        assert [*x, *y] == [8] * 5


def test_all_gather_of_a_part_of_the_output():
    with dist.dry_run(3, rank=1):
        out = np.arange(6.0)
        dist.all_gather_into_tensor(out, out[2:4])
        assert out.tolist() == [2, 3, 2, 3, 2, 3]


def test_functional_forms_leave_the_input_alone():
    with dist.dry_run(5):
        x = np.ones(2)
        assert dist.functional.all_reduce(x).tolist() == [5, 5]
        assert x.tolist() == [1, 1]
