"""bincount, histogram, unique with its inverse, isin, nonzero and its relatives against NumPy on the whole array."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from array_layouts import values
from placed_arrays import cases, compare, layout_for, on_meshes

import meshdist
from meshdist.tensor import Partial, PlacementError, Shard, distribute_tensor

DTYPES = [float, np.float32, np.int64, np.uint8, bool, complex]
SHAPES = [(7,), (5, 4), (3, 1, 6), (40,), (0, 3), (), (0,)]


def random_case(rng, mesh, case):
    """Return a function that compares a function of one array, and the array."""
    special = (np.nan, np.inf) if case % 4 == 0 else ()
    whole = values(rng, SHAPES[case % 7], DTYPES[case % 6], special=special)
    layout = layout_for(rng, whole, mesh)
    return lambda function, *described: compare(function, [whole], [layout], mesh, described), whole, layout


@cases(14, slow=42)
def test_distinct_values(cases):
    def program(mesh, rng):
        for case in range(cases):
            compared, whole, layout = random_case(rng, mesh, case)
            compared(lambda x: np.unique(x, return_inverse=True), "inverse")
            compared(lambda x: np.unique(x, return_counts=True, return_inverse=True), "both")
            if not np.isnan(whole).any() and hasattr(np, "unique_inverse"):
                compared(lambda x: np.unique_inverse(x), "unique_inverse")
                compared(lambda x: np.unique_counts(x), "unique_counts")
                compared(lambda x: np.unique_all(x), "unique_all")
            tested = values(rng, (6,), whole.dtype)
            placed = layout_for(rng, tested, mesh) if case % 2 else None
            invert = bool(case % 3)
            compare(lambda x, y: np.isin(x, y, invert=invert), [whole, tested], [layout, placed], mesh)  # noqa: B023

    on_meshes(program)


@cases(12, slow=36)
def test_histograms(cases):
    def program(mesh, rng):
        for case in range(cases):
            compared, whole, layout = random_case(rng, mesh, case)
            if whole.dtype.kind == "c":
                continue
            limits, bins = [None, (-2, 3)][case % 2], [4, [-3, 0.0, 1, 5], 1][case % 3]
            weights = values(rng, whole.shape, [float, np.float32, np.int64, complex][case % 4])
            layouts = [layout, layout_for(rng, weights, mesh)]
            compared(lambda x: np.histogram(x, bins, limits), bins, limits)  # noqa: B023
            compared(lambda x: np.histogram(x, bins, limits, density=True), bins, limits)  # noqa: B023
            compare(lambda x, w: np.histogram(x, bins, limits, weights=w), [whole, weights], layouts, mesh)  # noqa: B023
            compared(lambda x: np.histogram_bin_edges(x, bins, limits), bins, limits)  # noqa: B023

    on_meshes(program)


@cases(15, slow=45)
def test_bincount(cases):
    def program(mesh, rng):
        for case in range(cases):
            rows = int(rng.integers(0, 12))
            whole = rng.integers(0 if case % 5 else -1, 9, rows).astype([np.int64, np.uint8, bool][case % 3])
            weights = values(rng, whole.shape, float)
            layouts = [layout_for(rng, x, mesh) for x in (whole, weights)]
            compare(lambda x: np.bincount(x, minlength=case % 7), [whole], layouts[:1], mesh)  # noqa: B023
            compare(np.bincount, [whole, weights], layouts, mesh)

    on_meshes(program)


@cases(14, slow=42)
def test_places_of_elements(cases):
    def program(mesh, rng):
        for case in range(cases):
            compared, whole, _ = random_case(rng, mesh, case)
            if whole.ndim:
                compared(lambda x: np.nonzero(x), "nonzero")
                compared(lambda x: np.compress([True, False, True], x, axis=-1), "compress")
            compared(lambda x: np.argwhere(x), "argwhere")
            compared(lambda x: np.flatnonzero(x), "flatnonzero")
            compared(lambda x: np.extract(x == x, x), "extract")
            compared(lambda x: np.polyval([1.0, 2, 3], x), "polyval")
            if whole.dtype.kind != "c":
                compared(lambda x: np.digitize(x, np.array([-2, 0, 3])), "digitize")
                if not np.isnan(whole).any():
                    compared(lambda x: np.interp(x, [-2.0, 0, 3], [1.0, 5, 2]), "interp")

    on_meshes(program)


@cases(14, slow=42)
def test_deviations_and_areas(cases):
    def program(mesh, rng):
        for case in range(cases):
            compared, whole, _ = random_case(rng, mesh, case)
            axis = None if case % 3 == 0 or not whole.ndim else case % whole.ndim
            keepdims = bool(case % 2)
            compared(lambda x: np.nanvar(x, axis=axis, keepdims=keepdims), "nanvar", axis)  # noqa: B023
            compared(lambda x: np.nanstd(x, axis=axis, ddof=1), "nanstd", axis)  # noqa: B023
            compared(lambda x: np.nanargmax(x, axis=axis), "nanargmax", axis)  # noqa: B023
            compared(lambda x: np.nanargmin(x, axis=axis), "nanargmin", axis)  # noqa: B023
            if whole.dtype.kind not in "bu" and not np.isnan(whole).any():
                compared(lambda x: np.cov(x), "cov")
                compared(lambda x: np.cov(x, rowvar=False, bias=True), "cov of columns")
                compared(lambda x: np.corrcoef(x), "corrcoef")
            if whole.ndim and whole.dtype.kind not in "bu" and hasattr(np, "trapezoid"):
                compared(lambda x: np.trapezoid(x, dx=2.0, axis=0), "trapezoid")
        row = values(rng, (1, 4), float)
        compare(lambda x: np.cov(x, rowvar=False, ddof=0), [row], [layout_for(rng, row, mesh)], mesh, "cov of a row")

    on_meshes(program)


def test_counts_of_a_cut_array_are_a_pending_sum():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.arange(6.0), mesh, {"a": Shard(0)})
        with mesh.account() as account:
            counts, edges = np.histogram(x, 3, (0, 6))
        assert account.total().calls == 0
        assert counts.placements == (Partial("sum"),)
        assert counts.full().tolist() == [2, 2, 2]
        assert edges.tolist() == [0, 2, 4, 6]

    meshdist.run(program, 2)


def test_edges_of_complex_numbers_count_nothing():
    def program(mesh, rng):
        whole = np.array([-3 - 2j, -4 - 1j, -4 + 2j])  # one cannot be counted, and one rank has it
        compare(lambda x: np.histogram_bin_edges(x, 1), [whole], [{"a": Shard(0)}], mesh)

    on_meshes(program, meshes=((2,), (2, 2)))


def test_numbers_that_some_ranks_cannot_count():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))

        def placed(whole):
            return distribute_tensor(np.array(whole), mesh, {"a": Shard(0)}, src_data_rank=None)

        x, one = placed([-3 - 2j, -4 - 1j, -4 + 2j]), placed([1])  # of `one`, the last rank has nothing
        with mesh.account() as account:
            for call in (
                lambda: np.histogram(x, 1),
                lambda: np.histogram(x.real, 1, (0j, 1j)),
                lambda: np.histogram(one, 2, weights=placed(["a"])),
                lambda: np.histogram(placed(["a"]), 2),
                lambda: np.bincount(one, placed([1j])),
            ):
                with pytest.raises(TypeError):
                    call()
        assert account.total().calls == 0
        compare(lambda x: np.histogram(x, [-4, -3, 0]), [x.full()], [{"a": Shard(0)}], mesh)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meshdist.run(program, 2)


def test_bad_arguments():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.arange(6.0), mesh, {"a": Shard(0)})
        y = distribute_tensor(np.array([1, 2, -1]), mesh, {"a": Shard(0)})
        for call, error in (
            (lambda: np.bincount(x), TypeError),
            (lambda: np.bincount(y), ValueError),
            (lambda: np.bincount(abs(y), np.ones(2)), ValueError),
            (lambda: np.histogram(x, "auto"), TypeError),
            (lambda: np.histogram(x, 0), ValueError),
            (lambda: np.histogram(x, weights=np.ones(2)), ValueError),
            (lambda: np.unique(x.reshape(6, 1), axis=0), PlacementError),
            (lambda: np.interp(x, x, [1.0] * 6), TypeError),
            (lambda: np.cov(x, aweights=np.ones(6)), TypeError),
            (lambda: np.nanargmax(x * np.nan), ValueError),
        ):
            with pytest.raises(error):
                call()

    meshdist.run(program, 2)
