"""sort, argsort, unique and searchsorted against NumPy on the whole array."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from array_layouts import values
from placed_arrays import assert_same, cases, compare, layout_for, on_meshes, placed

import meshdist
from meshdist.tensor import Partial, PlacementError, Shard, distribute_tensor, sorting

DTYPES = [float, np.int64, bool, np.float32, complex, np.uint8]


def with_gaps(rng, shape, dtype):
    """Random values with many that are equal, and NaN among them where there are."""
    return values(rng, shape, dtype, special=(np.nan, np.nan, -np.inf))


@cases(10, slow=60)
def test_sorting_one_dimension(cases):
    def program(mesh, rng):
        for case in range(cases):
            rows = [0, 1, 3, 17, 50][case % 5]
            whole = with_gaps(rng, (rows,), DTYPES[case % 6])
            if case % 7 == 0:
                whole[:] = whole[:1]
            x = placed(rng, whole, mesh)
            assert_same(np.sort(x), np.sort(whole))
            assert np.sort(x).layout is x.layout.resolved()
            assert_same(np.argsort(x), np.argsort(whole, kind="stable"))

    on_meshes(program)


@cases(6, slow=24)
def test_sorting_several_dimensions(cases):
    def program(mesh, rng):
        for case in range(cases):
            whole = with_gaps(rng, ((5, 4), (3, 1, 6), (0, 2))[case % 3], DTYPES[case % 6])
            x = placed(rng, whole, mesh)
            axis = int(rng.integers(-whole.ndim, whole.ndim))
            assert_same(np.sort(x, axis), np.sort(whole, axis))
            assert_same(np.argsort(x, axis), np.argsort(whole, axis, kind="stable"))

    on_meshes(program)


@cases(9, slow=36)
def test_distinct_values(cases):
    def program(mesh, rng):
        for case in range(cases):
            whole = with_gaps(rng, ((0,), (1,), (40,), (5, 4))[case % 4], DTYPES[case % 6])
            x = placed(rng, whole, mesh)
            equal_nan = bool(case % 5)
            assert_same(np.unique(x, equal_nan=equal_nan), np.unique(whole, equal_nan=equal_nan))
            options = {"return_counts": True, "return_index": whole.ndim == 1}
            found, wanted = np.unique(x, **options), np.unique(whole, **options)
            for one, other in zip(found, wanted, strict=True):
                assert_same(one, other)

    on_meshes(program)


@cases(9, slow=36)
def test_searching(cases):
    def program(mesh, rng):
        for case in range(cases):
            dtype = DTYPES[case % 6]
            whole = np.sort(with_gaps(rng, ([0, 1, 9, 30][case % 4],), dtype))
            keys = with_gaps(rng, ((7,), (2, 3), ())[case % 3], [dtype, float][case % 2])
            side = ["left", "right"][case % 2]
            a, v = placed(rng, whole, mesh), placed(rng, keys, mesh)
            wanted = np.searchsorted(whole, keys, side)
            assert_same(np.searchsorted(whole, v, side), wanted)
            assert_same(np.searchsorted(a, keys.tolist() if keys.dtype == dtype else keys, side), wanted)
            with meshdist.tensor.implicit_redistribution():
                assert_same(np.searchsorted(a, v, side), wanted)

    on_meshes(program)


def test_what_a_cut_array_counts_is_a_pending_sum():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        a = distribute_tensor(np.arange(5.0), mesh, {"a": Shard(0)})
        with mesh.account() as account:
            found = a.searchsorted(2.5)
        assert account.total().calls == 0
        assert found.placements == (Partial("sum"),)
        assert int(found) == 3

    meshdist.run(program, 2)


def test_bad_arguments():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.ones((4, 3)), mesh, {"a": Shard(0)})
        for call, error in (
            (lambda: np.sort(x, 2), IndexError),
            (lambda: np.sort(x, kind="none"), ValueError),
            (lambda: np.sort(x, order="f"), ValueError),
            (lambda: np.searchsorted(x, 1.0), ValueError),
            (lambda: np.searchsorted(np.ones(3), x, "middle"), ValueError),
            (lambda: np.unique(x, axis=0), PlacementError),
        ):
            with pytest.raises(error):
                call()

    meshdist.run(program, 2)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_few_samples_of_many_ranks(most, monkeypatch):
    monkeypatch.setattr(sorting, "MOST_SAMPLES", most)
    sorting.samples_of_blocks.cache_clear()

    def program(mesh, rng):
        for rows in (0, 3, 40, 97):
            for whole in (rng.integers(-5, 5, rows), rng.random(rows), np.zeros(rows), np.arange(float(rows))[::-1]):
                layout = layout_for(rng, whole, mesh, partial=False)
                compare(np.sort, [whole], [layout], mesh)
                compare(partial(np.argsort, kind="stable"), [whole], [layout], mesh)

    try:
        on_meshes(program, meshes=((2,), (5,), (2, 3)))
    finally:
        sorting.samples_of_blocks.cache_clear()


def test_the_samples_of_a_large_mesh_do_not_grow_with_its_square():
    blocks, positions, weights, counts = sorting.samples_of_blocks((3_000,) * 2_000)
    assert len(blocks) == len(positions) == 2_000 * 512 == counts.sum()
    assert weights.sum() == pytest.approx(6_000_000)
    assert ((positions >= 0) & (positions < 3_000)).all()
    assert (np.diff(positions)[np.diff(blocks) == 0] > 0).all()
    few = sorting.samples_of_blocks((4, 0, 2) * 10_000)[3]
    assert few.max() == 4
