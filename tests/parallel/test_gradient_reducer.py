"""GradientReducer: averages in flat buckets, accumulation, unused parameters, and what it refuses, on all ranks."""

from __future__ import annotations

import logging
import re

import ml_dtypes
import numpy as np
import pytest

import meshdist as dist
from meshdist.parallel import GradientReducer, ShardedOptimizer

SHAPES = {"a": (3, 4), "b": (4,), "scalar": (), "nothing": (0, 2), "c": (5, 2)}


HOOKS = pytest.mark.parametrize("hook", [None, lambda bucket: bucket.buffer()], ids=["no hook", "hook"])


def arrays_of(dtype="float64"):
    return {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}


def gradient_of(name, step, rank, dtype="float64"):
    """Small integers, whose sums are exact."""
    return np.random.default_rng([len(name), ord(name[0]), step, rank]).integers(-8, 8, SHAPES[name]).astype(dtype)


def mean_of(name, step, size):
    return sum(gradient_of(name, step, rank) for rank in range(size)) / size


def refused(size, program):
    """Run the program, which fails in the same words on all ranks; return these, and what it returned after it."""

    def one():
        with pytest.raises(dist.DistBackendError) as caught:
            program()
        return str(caught.value).partition("): ")[2]

    told = dist.run(one, size, timeout=30)
    assert len(set(told)) == 1
    return told[0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [0, 50, 25 << 20])
def test_every_gradient_becomes_the_mean_over_the_ranks(size, bucket_bytes):
    def program():
        rank = dist.get_rank()
        reducer = GradientReducer(arrays_of(), bucket_bytes=bucket_bytes, first_bucket_bytes=8)
        names = list(SHAPES)
        for step in range(3):
            np.random.default_rng([step, rank]).shuffle(names)  # every rank in a different order
            for name in names:
                if rank % 2:
                    reducer.gradients[name][...] = gradient_of(name, step, rank)
                    reducer.ready(name)
                else:
                    reducer.ready(name, gradient_of(name, step, rank))
            reducer.wait()
            for name in SHAPES:
                np.testing.assert_array_equal(reducer.gradients[name], mean_of(name, step, size))

    dist.run(program, size, timeout=30)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float16", "bfloat16"])
def test_dtypes(dtype):
    kind = getattr(ml_dtypes, dtype, dtype)

    def program():
        reducer = GradientReducer({"x": np.zeros(3, kind), "y": np.zeros(2, kind)})
        for name in ("y", "x"):
            reducer.ready(name, np.full(reducer.gradients[name].shape, 2 * dist.get_rank(), kind))
        reducer.wait()
        assert reducer.gradients["x"].dtype == kind
        return reducer.gradients["x"].astype(complex).real.tolist()

    assert dist.run(program, 3) == 3 * [[2.0, 2.0, 2.0]]


def test_gradients_are_views_of_buckets_of_one_dtype_each_in_reverse_order():
    def program():
        arrays = {"a": np.zeros(4), "x": np.zeros(4, "f4"), "b": np.zeros(2), "c": np.zeros(1), "d": np.zeros(1)}
        reducer = GradientReducer(arrays, bucket_bytes=24, first_bucket_bytes=8)
        for bucket in reducer.buckets:
            for name, gradient, array in zip(bucket.names(), bucket.gradients(), bucket.parameters(), strict=True):
                assert np.shares_memory(reducer.gradients[name], bucket.buffer())
                assert reducer.gradients[name].ctypes.data == gradient.ctypes.data
                assert array is arrays[name]
        assert [bucket.is_last() for bucket in reducer.buckets] == [False, False, False, True]
        reducer.gradients["a"] = np.arange(4)
        reducer.gradients["a"] += 1
        assert reducer.buckets[-1].buffer().tolist() == [1, 2, 3, 4]
        with pytest.raises(ValueError, match=r"'a' has shape \(4,\), and cannot take one of \(2,\)"):
            reducer.gradients["a"] = np.zeros(2)
        with pytest.raises(KeyError, match="no array 'w'; there are 'a', 'x'"):
            reducer.gradients["w"] = np.zeros(2)
        with pytest.raises(KeyError, match="no array 'w'; there are 'a', 'x'"):
            reducer.gradients["w"] += 1
        with pytest.raises(TypeError, match="the value for 'a' is complex, and float64 has no imaginary part"):
            reducer.gradients["a"] = np.ones(4, complex)
        return [bucket.names() for bucket in reducer.buckets]

    assert dist.run(program, 1) == [[["d"], ["c", "b"], ["x"], ["a"]]]


def test_a_full_bucket_is_reduced_while_others_are_still_filled():
    def program():
        reducer = GradientReducer({"early": np.zeros(1 << 10), "late": np.zeros(1 << 10)}, first_bucket_bytes=1)
        with dist.init_device_mesh("cpu", (2,)).account() as account:
            reducer.ready("late", np.ones(1 << 10))
            during = account.total().calls
            reducer.ready("early", np.ones(1 << 10))
            reducer.wait()
        return during, account.total().calls

    assert dist.run(program, 2) == [(1, 2), (1, 2)]


def test_no_sync_accumulates_and_sends_nothing():
    def program():
        rank = dist.get_rank()
        reducer = GradientReducer({"given": np.zeros(2), "written": np.zeros(2)})
        for _ in range(2):
            reducer.zero()
            with dist.init_device_mesh("cpu", (2,)).account() as account, reducer.no_sync():
                for _ in range(3):
                    reducer.ready("given", np.full(2, 1.0 + rank))
                    reducer.gradients["written"] += 1 + rank
                    reducer.ready("written")
                    reducer.wait()
            assert account.total().calls == 0
            reducer.ready("given", np.full(2, 1.0 + rank))
            reducer.gradients["written"] += 1 + rank
            reducer.ready("written")
            reducer.wait()
            assert [gradient.tolist() for gradient in reducer.gradients.values()] == [[6.0, 6.0], [6.0, 6.0]]
        reducer.ready("given", np.zeros(2))
        with pytest.raises(RuntimeError, match="no_sync begins in the middle of a step"), reducer.no_sync():
            pass
        with pytest.raises(RuntimeError, match="zero\\(\\) in the middle of a step"):
            reducer.zero()
        reducer.ready("written")
        reducer.wait()

    dist.run(program, 2)


@HOOKS
def test_a_step_without_wait_is_refused_at_once_and_leaves_the_step_intact(hook):
    def program():
        reducer = GradientReducer({"w": np.zeros(2)}, hook=hook)
        for _ in range(3):
            reducer.ready("w", np.ones(2))
            if dist.get_rank() == 1:
                with pytest.raises(RuntimeError, match=r"\(rank 1 of 2\): ready\('w'\): all gradients .* are ready"):
                    reducer.ready("w", np.zeros(2))
            reducer.wait()
            assert reducer.gradients["w"].tolist() == [1.0, 1.0]

    dist.run(program, 2)


def test_unused_parameters_take_part_with_zeros():
    def program():
        reducer = GradientReducer(arrays_of(), find_unused_parameters=True, first_bucket_bytes=0, bucket_bytes=0)
        for step in range(2):
            for name in SHAPES:
                if name != "b" and not (name == "a" and dist.get_rank() == 1):
                    reducer.ready(name, np.ones(SHAPES[name]))
            reducer.wait()
            assert reducer.gradients["a"].tolist() == np.full((3, 4), 0.5).tolist(), step
            assert reducer.gradients["b"].tolist() == [0.0] * 4
        return reducer.statistics().num_unused

    assert dist.run(program, 2) == [1, 2]


def all_ready(reducer, but=()):
    for name, gradient in reducer.gradients.items():
        if name not in but:
            reducer.ready(name, np.ones(gradient.shape))


@HOOKS
@pytest.mark.parametrize("size", [1, 3])
def test_a_missing_gradient_is_named_on_all_ranks_and_the_reducer_goes_on(hook, size):
    def program():
        reducer = GradientReducer(arrays_of(), first_bucket_bytes=0, bucket_bytes=0, hook=hook)
        all_ready(reducer)
        reducer.wait()
        all_ready(reducer, ("b", "c") if dist.get_rank() == size - 1 else ())
        with pytest.raises(dist.DistBackendError) as caught:
            reducer.wait()
        all_ready(reducer)
        reducer.wait()
        assert reducer.gradients["b"].tolist() == [1.0] * 4
        raise caught.value

    told = refused(size, program)
    assert told.startswith(f"rank {size - 1}: no gradient for 'b', 'c' before wait(): call ready() for every parameter")


def twice(reducer):
    reducer.ready("b")


def misspelt(reducer):
    reducer.ready("weight")


def another_shape(reducer):
    reducer.ready("c", np.zeros((2, 5)))


def another_dtype(reducer):
    reducer.ready("c", np.zeros((5, 2), "f4"))


def no_array(reducer):
    reducer.ready("c", [1.0])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (twice, r"rank 1: ready\('b'\) was called twice; call wait\(\) .* \(at .*test_gradient_reducer.py:\d+\)"),
        (misspelt, r"rank 1: ready\('weight'\): there is no such parameter; there are 'a', 'b', .*"),
        (another_shape, r"rank 1: the gradient of 'c' must be float64\[5, 2\], got float64\[2, 5\] \(at .*"),
        (another_dtype, r"rank 1: the gradient of 'c' must be float64\[5, 2\], got float32\[5, 2\] \(at .*"),
        (no_array, r"rank 1: the gradient of 'c': gradient must be an array, got list; .*"),
    ],
)
@HOOKS
def test_what_is_wrong_on_one_rank_is_raised_on_all(wrong, told, hook):
    def program():
        reducer = GradientReducer(arrays_of(), bucket_bytes=0, first_bucket_bytes=0, hook=hook)
        reducer.ready("b", np.zeros(4))
        if dist.get_rank() == 1:
            wrong(reducer)
        else:
            reducer.ready("c", np.zeros((5, 2)))
        all_ready(reducer, ("b", "c"))
        if dist.get_rank() == 1 and wrong in (twice, misspelt):
            reducer.ready("c", np.zeros((5, 2)))
        reducer.wait()

    text = refused(2, program)
    assert re.fullmatch(told, text), text


def test_of_many_faults_the_first_are_told():
    def program():
        reducer = GradientReducer({f"w{number}": np.zeros(1) for number in range(20)})
        reducer.average({f"w{number}": np.zeros(2) for number in range(20)})

    text = refused(2, program)
    assert text.count("must be float64[1]") == 2 * 8
    assert text.count("; and 12 more faults") == 2


def test_nans_are_named_at_debug_level_detail():
    def program():
        reducer = GradientReducer(arrays_of())
        if dist.get_rank() == 1:
            reducer.gradients["c"][1:3, 0] = np.nan
        for name in SHAPES:
            reducer.ready(name)
        reducer.wait()

    dist.run(program, 2)
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        assert refused(2, program).startswith("rank 1: the gradient of 'c' has 2 NaNs (at ")
    finally:
        dist.set_debug_level(before)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            {"a": np.zeros(2), "c": np.zeros(3)},
            "1 where rank 0 has 'b', float64[3] and rank 1 has 'c', float64[3]",
        ),
        (
            {"a": np.zeros(2), "b": np.zeros(4)},
            "1 where rank 0 has 'b', float64[3] and rank 1 has 'b', float64[4]",
        ),
        (
            {"a": np.zeros(2, "f4"), "b": np.zeros(3)},
            "0 where rank 0 has 'a', float64[2] and rank 1 has 'a', float32[2]",
        ),
        ({"a": np.zeros(2)}, "1 where rank 0 has 'b', float64[3] and rank 1 has no more; pass the same"),
    ],
)
def test_ranks_with_other_parameters_are_refused_when_the_reducer_is_made(other, told):
    mine = {"a": np.zeros(2), "b": np.zeros(3)}
    text = refused(3, lambda: GradientReducer(other if dist.get_rank() == 1 else mine))
    assert text.startswith(f"the ranks' parameters differ, first number {told}")


def test_ranks_with_other_settings_are_refused():
    text = refused(2, lambda: GradientReducer({"a": np.zeros(2)}, bucket_bytes=dist.get_rank()))
    assert text.startswith(
        "the ranks' settings differ, first where rank 0 has bucket_bytes=0 and rank 1 has bucket_bytes=1; pass the same"
    )
    assert text.endswith("on all ranks")


@pytest.mark.parametrize(
    ("arrays", "options", "told"),
    [
        ({}, {}, "named_arrays is empty"),
        ({"a": np.zeros(2, int)}, {}, r"named_arrays\['a'\] has dtype int64, and only floating-point and complex"),
        ({"a": [1.0]}, {}, r"named_arrays\['a'\] must be an array, got list; use np.array\(named_arrays\['a'\]\)"),
        ([np.zeros(2)], {}, r"must be a dict, or pairs \(name, array\)"),
        (np.zeros(2), {}, r"got one array; give it a name, as in \{\"weights\": array\}"),
        ({0: np.zeros(2)}, {}, "the names of parameters must be strings, got 0"),
        ([("a", np.zeros(2)), ("a", np.zeros(2))], {}, "two parameters have the name 'a'"),
        ({"a": np.zeros(2)}, {"bucket_bytes": -1}, "bucket_bytes must be at least 0, got -1"),
        ({"a": np.zeros(2)}, {"bucket_bytes": "25"}, "bucket_bytes must be an integer, got '25'"),
        ({"a": np.zeros(2)}, {"hook": 3}, "hook must be callable, got 3"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(arrays, options, told):
    def program():
        with pytest.raises((TypeError, ValueError), match=told):
            GradientReducer(arrays, **options)

    dist.run(program, 2)


def test_a_rank_outside_the_group_makes_no_reducer():
    def program():
        group = dist.new_group([0])
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="this rank is not in the group"):
                GradientReducer({"a": np.zeros(1)}, group)

    dist.run(program, 2)


def test_a_whole_step_at_once():
    def program():
        reducer = GradientReducer(arrays_of(), bucket_bytes=0, first_bucket_bytes=0)
        for step in range(2):
            gradients = {name: gradient_of(name, step, dist.get_rank()) for name in SHAPES}
            averages = reducer.average(gradients)
            assert averages is reducer.gradients
            for name in SHAPES:
                np.testing.assert_array_equal(averages[name], mean_of(name, step, 2))
        with pytest.raises(TypeError, match="gradients must be a dict by name, got list"):
            reducer.average(list(gradients.values()))
        del gradients["c"]
        reducer.average(gradients)

    assert refused(2, program).startswith("rank 0: no gradient for 'c' before wait()")


def test_on_a_mesh_axis_and_by_pairs():
    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        reducer = GradientReducer(iter([("w", np.zeros(1))]), mesh["dp"])
        reducer.ready("w", np.array([float(dist.get_rank())]))
        reducer.wait()
        return reducer.gradients["w"].tolist()

    assert dist.run(program, 4) == [[1.0], [2.0], [1.0], [2.0]]


def test_a_rank_that_fails_ends_the_step_of_the_others():
    def program():
        reducer = GradientReducer({"w": np.zeros(1)})
        if dist.get_rank() == 1:
            raise KeyError("data")
        reducer.ready("w")
        reducer.wait()

    with pytest.raises(KeyError, match="data"):
        dist.run(program, 2)


def test_statistics_and_logs(caplog):
    def program():
        reducer = GradientReducer({"w": np.zeros((4, 4), "f4"), "b": np.zeros(2, "f4")}, first_bucket_bytes=1)
        assert reducer.statistics().last is reducer.statistics().mean is None
        for _ in range(2):
            reducer.zero()
            all_ready_f4(reducer)
            reducer.wait()
        return reducer.statistics()

    def all_ready_f4(reducer):
        for name in reversed(list(reducer.gradients)):
            reducer.ready(name)

    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with caplog.at_level(logging.DEBUG, "meshdist"):
            found = dist.run(program, 2)[1]
    finally:
        dist.set_debug_level(before)
    assert (found.num_parameters, found.parameter_bytes, found.bucket_bytes) == (2, 72, (8, 64))
    assert (found.world_size, found.hook, found.steps, found.num_unused) == (2, "none", 2, 0)
    assert min(found.last.forward_s, found.last.backward_s, found.last.overlap_s) > 0
    assert found.last.overlap_s <= found.last.communication_s
    assert found.last.overlap_s <= found.last.backward_s
    texts = [record.getMessage() for record in caplog.records if "GradientReducer" in record.getMessage()]
    assert sum("2 parameters, 72 bytes, in 2 buckets of 8, 64 bytes; bucket_bytes=" in text for text in texts) == 2
    assert sum("step 1: forward " in text for text in texts) == 2
    assert not any("step 2:" in text for text in texts)


def test_logs_tell_of_unused_parameters(caplog):
    def program():
        reducer = GradientReducer({"w": np.zeros(4), "b": np.zeros(2)}, find_unused_parameters=True)
        reducer.ready("w")
        reducer.wait()

    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with caplog.at_level(logging.DEBUG, "meshdist"):
            dist.run(program, 2)
    finally:
        dist.set_debug_level(before)
    texts = [record.getMessage() for record in caplog.records if "step 1: forward" in record.getMessage()]
    assert [text.rpartition("; ")[2] for text in texts] == 2 * ["no gradient for 1 of the parameters"]


def test_in_a_dry_run():
    with dist.dry_run(world_size=1024, rank=5) as dry:
        dist.init_process_group()
        reducer = GradientReducer({"w": np.zeros(1000), "b": np.zeros(3)}, first_bucket_bytes=1)
        reducer.ready("b", np.ones(3))
        reducer.ready("w", np.ones(1000))
        reducer.wait()
        assert reducer.gradients["b"].tolist() == [1.0, 1.0, 1.0]
        dist.destroy_process_group()
    assert dry.account.total().calls == 3  # one of them when the reducer is made


@pytest.mark.parametrize("world", [("gloo", 2)], indirect=True)
def test_ranks_that_are_processes(world):
    assert world.run(long_gradients) == [3.0, 3.0]


def long_gradients():
    reducer = GradientReducer({name: np.zeros(300_000, np.float32) for name in "abcdefgh"})
    names = list("abcdefgh")
    for step in range(3):
        np.random.default_rng([step, dist.get_rank()]).shuffle(names)
        for name in names:
            reducer.ready(name, np.full(300_000, 2.0 + 2 * dist.get_rank(), np.float32))
        reducer.wait()
        assert all(gradient.min() == gradient.max() == 3 for gradient in reducer.gradients.values())
        if step == 1:
            for name in names[dist.get_rank() :]:
                reducer.ready(name)
            with pytest.raises(dist.DistBackendError, match="rank 1: no gradient for"):
                reducer.wait()
    optimizer = ShardedOptimizer({"w": np.zeros(300_001, np.float32)}, lambda w, gradients, state: w - gradients)
    optimizer.step({"w": np.full(300_001, 2.0 * dist.get_rank(), np.float32)})
    assert optimizer.parameters["w"].min() == optimizer.parameters["w"].max() == -1
    return float(reducer.gradients["a"][0])
