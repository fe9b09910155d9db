"""What is easily passed wrong at the start: to run, and to a store's add."""

import functools

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(60)


def test_run_names_its_argument():
    with pytest.raises(TypeError, match=r"run: fn must be callable, as in run\(main, 4\), got int"):
        dist.run(3, 2)
    with pytest.raises(TypeError, match="run: world_size must be an integer, got '2'"):
        dist.run(dist.get_rank, "2")
    with pytest.raises(ValueError, match="run: world_size must be at least 1, got 0"):
        dist.run(dist.get_rank, 0)
    with pytest.raises(TypeError, match=r"run: args must be a tuple, such as \(3,\), got int"):
        dist.run(dist.get_rank, 2, 3)
    assert dist.run(dist.get_rank, np.int64(2)) == [0, 1]


def test_run_says_that_it_passes_no_rank():
    begun = []
    with pytest.raises(
        TypeError,
        match=r"^run: <lambda> cannot be called with 0 arguments: missing a required argument: 'rank'; run, unlike"
        r" spawn, does not pass the rank: call get_rank\(\) instead$",
    ):
        dist.run(lambda rank: begun.append(rank), 2)
    with pytest.raises(
        TypeError, match=r"with 1 argument: missing a required argument: 'x'; run, unlike spawn, does not"
    ):
        dist.run(lambda rank, x: begun.append(x), 2, (3,))
    assert begun == []


def test_spawn_says_that_it_passes_the_rank():
    with pytest.raises(
        TypeError,
        match=r"^spawn: <lambda> cannot be called with the rank: too many positional arguments; spawn, unlike run,"
        r" passes the rank as the first argument$",
    ):
        dist.spawn(lambda: None)
    with pytest.raises(
        TypeError, match=r"with the rank and 1 argument: too many positional arguments; spawn, unlike run, passes the"
    ):
        dist.spawn(lambda x: None, (3,))
    with pytest.raises(
        TypeError, match="^spawn: <lambda> cannot be called with the rank: missing a required argument: 'x'$"
    ):
        dist.spawn(lambda rank, x: None)


def test_run_says_which_arguments_do_not_fit():
    with pytest.raises(
        TypeError, match="^run: <lambda> cannot be called with 1 argument: too many positional arguments$"
    ):
        dist.run(lambda: 1, 2, (3,))
    with pytest.raises(
        TypeError, match="^run: <lambda> cannot be called with 0 arguments: missing a required argument: 'x'$"
    ):
        dist.run(lambda x, y: 1, 2)


def test_run_takes_functions_whose_arguments_are_not_known():
    def given(x):
        return x

    @functools.wraps(given)
    def with_one(*args):
        return given(1, *args)

    assert dist.run(with_one, 2) == [1, 1]
    assert dist.run(dict, 2) == [{}, {}]
    assert dist.run(functools.partial(given, 4), 1) == [4]


def test_add_names_its_argument():
    store = dist.PrefixStore("part", dist.HashStore())
    with pytest.raises(TypeError, match="add to key 'part/k': amount must be an integer, got 'x'"):
        store.add("k", "x")
    assert store.add("k", np.int32(2)) == 2
