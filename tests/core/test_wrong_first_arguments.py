"""What is easily passed wrong at the start: to run, and to a store's add."""

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
    assert dist.run(dist.get_rank, np.int64(2)) == [0, 1]


def test_add_names_its_argument():
    store = dist.PrefixStore("part", dist.HashStore())
    with pytest.raises(TypeError, match="add to key 'part/k': amount must be an integer, got 'x'"):
        store.add("k", "x")
    assert store.add("k", np.int32(2)) == 2
