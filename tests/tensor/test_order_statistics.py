"""median, quantile and percentile, and those without NaN, against NumPy on the whole array."""

from __future__ import annotations

import numpy as np
import pytest
from array_layouts import values
from placed_arrays import cases, compare, layout_for, on_meshes, place

import meshdist
from meshdist.tensor import PlacementError, Shard, distribute_tensor

DTYPES = [float, np.float32, np.int64, np.uint8, bool, complex]
SHAPES = [(7,), (5, 4), (3, 1, 6), (40,), (0, 3), ()]
METHODS = [
    "linear",
    "lower",
    "higher",
    "nearest",
    "midpoint",
    "inverted_cdf",
    "averaged_inverted_cdf",
    "closest_observation",
    "interpolated_inverted_cdf",
    "hazen",
    "weibull",
    "median_unbiased",
    "normal_unbiased",
]
QUANTILES = [0.3, [0.1, 0.5, 1.0], [[0.0, 0.25], [0.5, 1.0]], 1, 0]


def axis_of(rng, ndim):
    choices = [None, *range(-ndim, ndim), *([(0, ndim - 1)] if ndim > 1 else [])]
    return choices[int(rng.integers(len(choices)))]


@cases(12, slow=60)
def test_medians(cases):
    def program(mesh, rng):
        for case in range(cases):
            special = (np.nan, np.inf) if case % 4 == 0 else ()
            whole = values(rng, SHAPES[case % 5], DTYPES[case % 6], special=special)
            layout = layout_for(rng, whole, mesh)
            options = {"axis": axis_of(rng, whole.ndim), "keepdims": bool(case % 2)}
            for function in (np.median, np.nanmedian):
                compare(lambda x: function(x, **options), [whole], [layout], mesh, (function, options))  # noqa: B023

    on_meshes(program)


@cases(13, slow=78)
def test_quantiles(cases):
    def program(mesh, rng):
        for case in range(cases):
            special = (np.nan, np.inf) if case % 4 == 0 else ()
            whole = values(rng, SHAPES[case % 6], DTYPES[case % 5], special=special)
            layout = layout_for(rng, whole, mesh)
            q = QUANTILES[case % 5]
            options = {"axis": axis_of(rng, whole.ndim), "keepdims": bool(case % 2), "method": METHODS[case % 13]}
            functions = [np.quantile, np.percentile]
            if np.ndim(q) < 2:  # of more, NumPy's result has its dimensions in a different order
                functions += [np.nanquantile, np.nanpercentile]
            for function in functions:
                scaled = np.multiply(q, 100) if "percentile" in function.__name__ and np.ndim(q) else q
                compare(
                    lambda x: function(x, scaled, **options),  # noqa: B023
                    [whole],
                    [layout],
                    mesh,
                    (function, q, options),
                )

    on_meshes(program)


def test_a_selection_sends_little():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        whole = np.random.default_rng(0).standard_normal(20_001)
        x = distribute_tensor(whole, mesh, {"a": Shard(0)}, src_data_rank=None)
        with mesh.account() as account:
            found = np.percentile(x, [1, 50, 99])
        np.testing.assert_array_equal(found.to_local(), np.percentile(whole, [1, 50, 99]))
        return account.total().nbytes

    sent = meshdist.run(program, 2)[0]
    assert sent < 20_000  # half of the array is 80,000 bytes


def test_long_lines():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        rng = np.random.default_rng(0)
        number = 140_001
        steps = np.arange(number)
        for whole in (
            rng.standard_normal(number),
            np.sort(rng.standard_normal(number)),
            np.where(steps % 18 == 0, 0.0, rng.random(number) + 1),  # a sample at regular distances misleads
            rng.integers(0, 5, number),
            np.where(steps % 3 == 0, np.nan, steps),
            np.where(steps > 100, np.inf, steps),
        ):
            for sizes, function in ((None, np.percentile), ((100, number - 100), np.nanpercentile)):
                x = distribute_tensor(whole, mesh, {"a": Shard(0, sizes)}, src_data_rank=None)
                q = [0, 3, 50, 99.9, 100]
                with np.errstate(all="ignore"):
                    np.testing.assert_array_equal(function(x, q).to_local(), function(whole, q))

    meshdist.run(program, 2)


def test_equal_elements_and_outputs():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (3,), mesh_dim_names=("a",))
        x = place(np.ones((9, 2), int), mesh, {"a": Shard(0)})
        out = place(np.zeros(2), mesh, {})
        assert np.median(x, axis=0, out=out) is out
        assert out.tolist() == [1, 1]
        assert np.quantile(x, 0.2, axis=0, out=out) is out

    meshdist.run(program, 3)


def test_ranks_that_hold_no_lines():
    def program(mesh, rng):
        layout = {"a": Shard(2, sizes=(1,) + (0,) * (mesh.shape[0] - 1))}
        for rows in (0, 3):
            whole = values(rng, (rows, 2, 1), float)
            for function in (np.median, np.nanmedian, lambda x, **options: np.quantile(x, [0.2, 0.7], **options)):
                for options in ({"axis": (0, 1)}, {"axis": (0, 1), "keepdims": True}, {"axis": 0}, {"axis": 1}):
                    compare(lambda x: function(x, **options), [whole], [layout], mesh, options)  # noqa: B023

    on_meshes(program)


def test_bad_arguments():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.ones((4, 3)), mesh, {"a": Shard(0)})
        for call, error in (
            (lambda: np.median(x, axis=2), IndexError),
            (lambda: np.quantile(x, 1.5), ValueError),
            (lambda: np.quantile(x, 0.5, method="none"), ValueError),
            (lambda: np.quantile(x * 1j, 0.5), TypeError),
            (lambda: np.quantile(x, 0.5, weights=np.ones((4, 3)), method="inverted_cdf"), (PlacementError, TypeError)),
        ):
            with pytest.raises(error):
                call()

    meshdist.run(program, 2)
