"""Reductions, averages, norms and comparisons of placed arrays, against NumPy's of the whole ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from array_layouts import random_layout, values
from placed_arrays import assert_same, compare, layout_for, on_meshes, place

import meshdist
from meshdist.tensor import (
    DTensor,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_redistribution,
)
from meshdist.tensor.array_reductions import reduced_by_name

SHAPES = ((), (1,), (5,), (0,), (4, 3), (2, 0), (3, 1, 4))
DTYPES = (bool, np.int8, np.int64, np.uint8, np.float16, np.float32, np.float64, np.complex64, np.complex128)
NAN = (np.nan,)

UFUNCS = (
    np.add, np.multiply, np.maximum, np.minimum, np.logical_and, np.logical_or, np.bitwise_and, np.bitwise_or,
    np.bitwise_xor, np.fmax, np.logical_xor, np.gcd, np.hypot, np.subtract,
)  # fmt: skip


@pytest.fixture(params=[1, pytest.param(4, marks=pytest.mark.slow)])
def rounds(request: pytest.FixtureRequest) -> int:
    """Return how many times a test tries each function on random arrays."""
    return int(request.param)


def axis_of(shape: tuple[int, ...], rng: np.random.Generator, several: bool = True) -> Any:
    choices: list[Any] = [None, *range(-len(shape), len(shape))]
    if several and len(shape) > 1:
        choices += [(), (0, -1), tuple(range(len(shape)))]
    return choices[int(rng.integers(len(choices)))]


def sweep(mesh: Any, rng: Any, functions: Any, rounds: int, several: bool = True, special: Any = ()) -> None:
    """Compare every function with NumPy's on random arrays, for `rounds` random layouts and axes each."""
    for function in functions:
        for _ in range(rounds):
            shape = SHAPES[int(rng.integers(len(SHAPES)))]
            whole = values(rng, shape, DTYPES[int(rng.integers(len(DTYPES)))], 2, special)
            keywords = {"axis": axis_of(shape, rng, several), "keepdims": bool(rng.integers(2))}
            compare(partial(function, **keywords), [whole], [layout_for(rng, whole, mesh)], mesh, (function, keywords))


def test_reductions_by_name(rounds: int) -> None:
    functions = (np.sum, np.prod, np.max, np.min, np.any, np.all, np.mean, np.var, np.std, np.count_nonzero, np.ptp)
    on_meshes(sweep, functions, 3 * rounds)
    on_meshes(sweep, (np.max, np.min, np.mean, np.nansum, np.nanmax, np.nanmin, np.nanmean), 2 * rounds, special=NAN)


def test_reduce_of_ufuncs(rounds: int) -> None:
    functions = [ufunc.reduce for ufunc in UFUNCS]
    on_meshes(sweep, functions, 2 * rounds)


def test_indices_of_extrema(rounds: int) -> None:
    functions = (np.argmax, np.argmin)
    on_meshes(sweep, functions, 8 * rounds, False, NAN)


def test_running_reductions(rounds: int) -> None:
    named = [
        getattr(np, name) for name in ("cumprod", "cumsum", "cumulative_prod", "cumulative_sum") if hasattr(np, name)
    ]
    ufuncs = [ufunc.accumulate for ufunc in UFUNCS]

    def program(mesh: Any, rng: Any) -> None:
        for function in (*named, *ufuncs):
            for _ in range(2 * rounds):
                shape = SHAPES[int(rng.integers(1, len(SHAPES)))]
                axis = int(rng.integers(-len(shape), len(shape)))
                whole = values(rng, shape, DTYPES[int(rng.integers(len(DTYPES)))], 2)
                compare(partial(function, axis=axis), [whole], [layout_for(rng, whole, mesh)], mesh)

    on_meshes(program)


def test_masks_and_initial_values(rounds: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for function in (np.sum, np.prod, np.max, np.min, np.any, np.all, np.mean, np.var, np.std, np.nanmean):
            for number in range(3 * rounds):
                shape = ((4, 3), (5,), (3, 1, 4))[number % 3]
                whole = values(rng, shape, (np.int8, np.float32, np.complex128)[int(rng.integers(3))], 2)
                kind = int(rng.integers(2))
                mask = values(rng, shape[kind:] if kind < len(shape) else shape, bool, 2)
                keywords: dict[str, Any] = {"axis": axis_of(shape, rng)}
                if function in (np.max, np.min):
                    keywords["initial"] = 1
                elif function in (np.sum, np.prod) and number % 4:
                    keywords["initial"] = 3
                layouts: Any = [layout_for(rng, whole, mesh), random_layout(rng, mask.shape, mesh.shape)]
                if number % 2:
                    layouts[1] = None
                compare(lambda x, m: function(x, where=m, **keywords), [whole, mask], layouts, mesh)  # noqa: B023

    on_meshes(program)


def test_initial_counts_once(rounds: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for number in range(8 * rounds):
            ufunc = (np.add, np.multiply, np.maximum, np.hypot)[number % 4]
            whole = values(rng, (4, 3), (np.float64, np.int8)[number % 2], 2)
            layout = layout_for(rng, whole, mesh)
            compare(partial(ufunc.reduce, axis=axis_of((4, 3), rng), initial=2), [whole], [layout], mesh)
        empty = np.zeros((0, 3))
        compare(partial(np.max, initial=1), [empty], [layout_for(rng, empty, mesh)], mesh)

    on_meshes(program)


def test_dtypes_and_out(rounds: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for number in range(4 * rounds):
            whole = values(rng, (4, 3), (np.int8, np.float32, bool, np.float64)[number % 4], 2)
            layout = layout_for(rng, whole, mesh)
            axis = (None, 0, 1, -1)[number % 3]
            dtype = (np.float64, np.int16, "f4", np.complex128)[int(rng.integers(4))]
            for function in (np.sum, np.prod, np.mean, np.var, np.cumsum):
                if function is np.cumsum and axis is None:
                    continue
                if np.dtype(dtype).kind in "i" and function in (np.mean, np.var):
                    continue
                compare(partial(function, axis=axis, dtype=dtype), [whole], [layout], mesh)
            for function in (np.sum, np.max, np.mean, np.std, np.any, np.ptp, np.argmax, np.cumprod):
                if (function is np.argmax and axis is None) or function is np.cumprod:
                    axis = 1
                try:
                    made = np.asarray(function(whole, axis=axis))
                except TypeError:  # the bool that ptp does not take
                    continue
                out = place(np.zeros_like(made), mesh, random_layout(rng, made.shape, mesh.shape))
                with implicit_redistribution():
                    assert function(place(whole, mesh, layout), axis=axis, out=out) is out
                assert_same(out, made)

    on_meshes(program)


def test_averages_with_weights(rounds: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for number in range(5 * rounds):
            whole = values(rng, (4, 3), (np.int8, np.float32, np.complex128)[number % 3], 2)
            axis = (None, 0, 1, (0, 1), (1, 0))[number % 5]
            shape = {0: (4,), 1: (3,), (1, 0): (3, 4)}.get(axis, (4, 3))
            weights = values(rng, shape, np.float64, 2) + 4
            layouts = [layout_for(rng, whole, mesh), layout_for(rng, weights, mesh)]
            compare(lambda x, w: np.average(x, axis, w, returned=True), [whole, weights], layouts, mesh)  # noqa: B023
        layout = layout_for(rng, whole, mesh)
        compare(lambda x: np.average(x, 0, returned=True), [whole], [layout], mesh)
        compare(lambda x: np.average(x, weights=np.ones(3)), [whole], [layout], mesh)
        compare(lambda x: np.average(x, 1, weights=np.ones(4)), [whole], [layout], mesh)
        compare(lambda x: np.average(x, weights=np.zeros((4, 3))), [whole], [layout], mesh)

    on_meshes(program)


def test_deviations_take_ddof_and_correction(rounds: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for number in range(3 * rounds):
            whole = values(rng, (4, 3), (np.int8, np.float32, np.complex128)[number % 3], 2)
            layout = layout_for(rng, whole, mesh)
            for function in (np.var, np.std):
                axis = axis_of((4, 3), rng)
                compare(partial(function, axis=axis, ddof=1.5), [whole], [layout], mesh)
                if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
                    compare(partial(function, axis=axis, correction=1), [whole], [layout], mesh)
                    compare(partial(function, axis=axis, correction=1, ddof=1), [whole], [layout], mesh)
                    compare(lambda x: np.var(x, 0, mean=np.mean(x, 0, keepdims=True)), [whole], [layout], mesh)

    on_meshes(program)


def test_a_large_mean_loses_no_digits() -> None:
    def program(mesh: Any, rng: Any) -> None:
        whole = np.arange(6.0) + 1e9
        assert_same(np.var(place(whole, mesh, [Shard(0)])), np.var(whole))

    on_meshes(program, meshes=[(3,)])


def test_medians(rounds: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for number in range(5 * rounds):
            whole = values(rng, (4, 3), (np.int8, np.float32)[number % 2], 2, NAN)
            layout = layout_for(rng, whole, mesh)
            keywords = {"axis": axis_of((4, 3), rng), "keepdims": bool(rng.integers(2))}
            if keywords["axis"] == ():
                continue
            assert not compare(partial(np.median, **keywords), [whole], [layout], mesh)
            compare(partial(np.nanmedian, **keywords), [whole], [layout], mesh)

    on_meshes(program)


def test_norms(rounds: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        dtypes = (np.int64, np.float32, np.complex128, np.float16)
        for _ in range(rounds):
            for ord in (None, 2, 1, 0, np.inf, -np.inf, 3, "fro", "bad"):
                for shape, axis in (((5,), None), ((4, 3), 0), ((2, 3, 2), (1,)), ((2, 3), None), ((2, 3, 2), None)):
                    keywords = {"ord": ord, "axis": axis, "keepdims": bool(rng.integers(2))}
                    whole = values(rng, shape, dtypes[int(rng.integers(4))], 2)
                    compare(partial(np.linalg.norm, **keywords), [whole], [layout_for(rng, whole, mesh)], mesh)
        for ord in (None, "fro", 1, -1, np.inf, -np.inf, 2, -2, "nuc", 3):
            for axis in ((0, 1), (2, 0), (1, 1), (0, 5), (0, 1, 2), 1.5):
                whole = values(rng, (2, 3, 2), np.float64, 2)
                function = partial(np.linalg.norm, ord=ord, axis=axis)
                compare(function, [whole], [layout_for(rng, whole, mesh)], mesh, (ord, axis))

    on_meshes(program, meshes=[(1,), (3,), (2, 2)])


def test_diagonals_and_traces(rounds: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for number in range(8 * rounds):
            shape = ((4, 3), (3, 5), (2, 4, 3), (0, 3))[number % 4]
            axes = (0, 1) if number % 2 else (-1, 0)
            whole = values(rng, shape, (np.int8, np.float32, bool)[number % 3], 2)
            layout = layout_for(rng, whole, mesh)
            offset = int(rng.integers(-4, 5))
            for function in (np.diagonal, np.trace):
                compare(lambda x: function(x, offset, *axes), [whole], [layout], mesh)  # noqa: B023
        compare(lambda x: np.diagonal(x, 0, 0, 0), [whole], [layout], mesh)
        compare(lambda x: np.diagonal(x, 0, 0, 7), [whole], [layout], mesh)
        compare(np.trace, [np.ones(4)], [layout_for(rng, np.ones(4), mesh)], mesh)

    on_meshes(program)


def test_comparisons_of_whole_arrays(rounds: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for number in range(3 * rounds):
            a = values(rng, (4, 3), np.float64, 2, NAN if number % 3 == 0 else ())
            b = a + (0, 1e-9, 1.0)[number % 3] * values(rng, (4, 3), np.float64, 2)
            layouts = [layout_for(rng, x, mesh) for x in (a, b)]
            for function in (np.allclose, np.array_equal, np.array_equiv, np.isclose):
                compare(function, [a, b], layouts, mesh)
                if function is not np.array_equiv:
                    compare(partial(function, equal_nan=True), [a, b], layouts, mesh)
            compare(np.allclose, [a, b], [layouts[0], None], mesh)
            compare(np.array_equal, [a, b[:1]], [layouts[0], None], mesh)
            compare(np.array_equiv, [a, a[:3]], [layouts[0], None], mesh)
            compare(partial(np.isclose, rtol=0.5, atol=1), [a, b], layouts, mesh)

    on_meshes(program)


def test_what_is_pending_afterwards() -> None:
    def program() -> Any:
        mesh = meshdist.init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(np.arange(12.0).reshape(4, 3), mesh, [Shard(0), Shard(1)])
        part = distribute_tensor(np.arange(12.0).reshape(4, 3), mesh, [Partial(), Shard(1)])
        small = distribute_tensor(np.arange(12, dtype=np.int8).reshape(4, 3), mesh, [Partial(), Shard(1)])
        return [
            y.placements
            for y in (
                np.sum(x), np.sum(x, 0), np.max(x, 1), np.any(x), np.all(x, 0), np.prod(x), np.mean(x, 0),
                np.var(x, 1),
                np.sum(part), np.sum(part, 0), np.max(part), np.sum(small), np.argmax(x), np.cumsum(x, 0),
                np.cumsum(part, 1),
            )
        ]  # fmt: skip

    cut, sum_, max_, min_, product, same = (
        Shard(1),
        Partial(),
        Partial("max"),
        Partial("min"),
        Partial("product"),
        Replicate(),
    )
    assert meshdist.run(program, 4)[3] == [
        (sum_, sum_), (sum_, Shard(0)), (Shard(0), max_), (max_, max_), (min_, Shard(0)), (product, product),
        (sum_, Shard(0)), (Shard(0), sum_), (sum_, sum_), (sum_, Shard(0)), (same, max_), (same, sum_), (same, same),
        (Shard(0), cut), (sum_, cut),
    ]  # fmt: skip


def test_what_is_free_sends_nothing() -> None:
    def program() -> Any:
        mesh = meshdist.init_device_mesh("cpu", (2,))
        x = distribute_tensor(np.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
        if mesh.get_rank():  # nobody else calls
            return None
        free = (
            np.sum(x), np.max(x, 0), np.mean(x), np.any(x, 1), np.var(x, 1), np.argmax(x, 1), np.cumsum(x, 1),
            np.median(x, 1), np.linalg.norm(x, axis=1), np.diagonal(x), np.trace(x), x @ np.ones((3, 2)),
            np.einsum("ij,ik->jk", x, x), np.sum(x, where=np.ones((1, 3), bool)),
        )  # fmt: skip
        return len(free)

    assert meshdist.run(program, 2) == [14, None]


def test_bad_arguments_raise_what_numpy_raises() -> None:
    def program(mesh: Any, rng: Any) -> None:
        whole = np.ones((4, 3))
        bad: list[Any] = [
            lambda x: np.sum(x, 2), lambda x: np.sum(x, (0, 0)), lambda x: np.sum(x, 1.5), lambda x: np.sum(x, "a"),
            lambda x: np.max(x, -3), lambda x: np.argmax(x, 2), lambda x: np.cumsum(x, 2), lambda x: np.mean(x, 5),
            lambda x: np.sum(x, where=np.ones(4, bool)), lambda x: np.sum(x, where=np.ones((4, 3))),
            lambda x: np.median(x, 4),
            lambda x: np.max(x, where=np.ones((4, 3), bool)), lambda x: np.add.accumulate(x, None),
            lambda x: np.ptp(x > 0),
            lambda x: np.subtract.reduce(x, None), lambda x: np.bitwise_and.reduce(x), lambda x: np.sum(x, foo=1),
            lambda x: np.linalg.norm(x, axis=3),
        ]  # fmt: skip
        for function in bad:
            compare(function, [whole], [layout_for(rng, whole, mesh)], mesh)
        empty = np.ones((0, 3))
        for ufunc in (np.max, np.argmin, lambda x: np.max(x, 0), lambda x: np.argmax(x, 1), np.ptp, np.nanmax):
            compare(ufunc, [empty], [layout_for(rng, empty, mesh)], mesh)
        x = place(whole, mesh, layout_for(rng, whole, mesh))
        with pytest.raises(TypeError, match="must be a DTensor"):
            np.sum(x, out=np.zeros(()))
        for function in (np.sum, np.mean, np.std, np.argmax, np.any, np.median):
            with (
                pytest.raises(ValueError, match=r"out= must have the shape \(\) of the result"),
                implicit_redistribution(),
            ):
                function(x, out=x)
        with pytest.raises(ValueError, match="where= must broadcast"):
            np.mean(x, where=np.ones((2, 4, 3), bool))

    on_meshes(program)


def test_a_cut_dimension_needs_an_associative_ufunc() -> None:
    def program(mesh: Any, rng: Any) -> None:
        x = DTensor.from_local(np.ones((1, 2)), mesh, [Shard(0)])
        with pytest.raises(
            PlacementError, match=r"only unsharded dimensions can be reduced by np.subtract.*redistribute"
        ):
            np.subtract.reduce(x)
        with pytest.raises(PlacementError, match="only an unsharded dimension can be accumulated"):
            np.subtract.accumulate(x)
        assert_same(np.subtract.reduce(x, 1), np.zeros(3))

    on_meshes(program, meshes=[(3,)])


def test_warnings_are_numpys() -> None:
    def program() -> list[str]:
        import warnings

        mesh = meshdist.init_device_mesh("cpu", (1,))
        nothing = distribute_tensor(np.full((2, 2), np.nan), mesh)
        with warnings.catch_warnings(record=True) as caught, np.errstate(all="ignore"):
            warnings.simplefilter("always")
            np.nanmax(nothing)
            np.nanmean(nothing)
            np.mean(distribute_tensor(np.empty((0, 2)), mesh))
            np.var(nothing, ddof=4)
        return [str(warning.message) for warning in caught]

    assert meshdist.run(program, 1)[0] == [
        "All-NaN slice encountered", "Mean of empty slice", "Mean of empty slice", "Degrees of freedom <= 0 for slice",
    ]  # fmt: skip


def test_reductions_by_functions_that_cupy_has() -> None:
    rng = np.random.default_rng(16)
    for ufunc in (np.add, np.multiply, np.maximum, np.minimum, np.logical_or, np.logical_and):
        for shape, dims in (((4, 3), (0,)), ((4, 3), (0, 1)), ((0, 3), (1,)), ((0, 3), (0,))):
            for dtype in (np.int8, np.float32, np.complex64):
                whole, mask = values(rng, shape, dtype, 2), values(rng, shape, bool, 2)
                wanted = np.asarray(ufunc.reduce(whole, dims, where=mask, initial=1))
                made = reduced_by_name(np, ufunc, whole, dims, wanted.dtype, False, initial=1, where=mask)
                assert made.dtype == wanted.dtype
                np.testing.assert_array_equal(made, wanted)


def test_equal_elements_do_not_vary() -> None:
    def program() -> None:
        mesh = meshdist.init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
        x = distribute_tensor(np.full((7, 2), 2.0), mesh, {"a": Shard(0)}, None)
        for function in (np.var, np.std, np.nanvar, np.nanstd):
            assert function(x, axis=0).full().tolist() == [0.0, 0.0]
        assert np.cov(x[:, 0]).full() == 0
        with np.errstate(invalid="ignore"):
            assert np.isnan(np.corrcoef(x[:, 0]).full())

    meshdist.run(program, 4, timeout=30)
