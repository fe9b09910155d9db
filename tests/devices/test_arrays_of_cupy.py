"""Arrays over a mesh with blocks of the stand-in for CuPy, which takes no NumPy arrays beside its own."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from array_programs import check_stencils, on_gpu_mesh

import meshdist as dist

pytestmark = pytest.mark.timeout(100)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_random_programs_are_those_of_numpy(cupy, monkeypatch, num_ranks):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tensor"))
    import random_programs

    refusals = Counter()
    seeds = range(100 * num_ranks, 100 * num_ranks + 100)
    assert dist.run(random_programs.run_programs, num_ranks, (seeds, "cuda", refusals), timeout=60)[0] == {}
    assert not refusals


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_stencils_and_layouts_are_those_on_the_cpu(cupy, shape):
    check_stencils(shape)


@pytest.mark.parametrize("function", [np.quantile, np.nanquantile, np.median, np.histogram_bin_edges])
def test_what_cupy_lacks_is_computed_nevertheless(cupy, function):
    from meshdist.tensor import Shard, distribute_tensor

    whole = np.arange(20.0).reshape(10, 2) ** 2
    further = ([0.2, 0.7],) if "quantile" in function.__name__ else ()

    def main(mesh):
        x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        return [function(x, *further).full().get() for _ in range(2)]

    for found in on_gpu_mesh((2,), ("dp",), main):
        for values in found:
            np.testing.assert_allclose(values, function(whole, *further))


def test_tables_of_the_host_are_taken_in_every_call(cupy):
    from meshdist.tensor import Shard, distribute_tensor

    def main(mesh):
        x = distribute_tensor(np.arange(6.0), mesh, [Shard(0)], src_data_rank=None)
        calls = [
            lambda: np.interp(x, [0.0, 5.0], [0.0, 10.0]),
            lambda: np.digitize(x, np.array([1.5, 3.5])),
            lambda: np.clip(x, np.full(6, 1.0), 4.0),
            lambda: np.arange(6) * x + np.ones(1),
        ]
        return [[call().full().tolist() for _ in range(2)] for call in calls]

    for interpolated, digits, clipped, sums in on_gpu_mesh((2,), ("dp",), main):
        assert interpolated == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]] * 2
        assert digits == [[0, 0, 1, 1, 2, 2]] * 2
        assert clipped == [[1.0, 1.0, 2.0, 3.0, 4.0, 4.0]] * 2
        assert sums == [[1.0, 2.0, 5.0, 10.0, 17.0, 26.0]] * 2
