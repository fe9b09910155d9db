"""Set operations, convolution and correlation, and rows that are distinct, against NumPy on the whole arrays."""

from __future__ import annotations

import numpy as np
import pytest
from array_layouts import values
from placed_arrays import MESHES, cases, compare, layout_for, on_meshes

import meshdist
from meshdist.tensor import PlacementError, Shard, distribute_tensor

DTYPES = [float, np.int64, np.float32, bool, complex]
SETS = (np.union1d, np.intersect1d, np.setxor1d, np.setdiff1d)


@cases(2, slow=60)
def test_sets(cases):
    def program(mesh, rng):
        for case in range(cases):
            special = (np.nan, np.inf) if case % 3 == 0 else ()
            shapes = [(9,), (0,), (4, 3), (), (30,)][case % 5], [(7,), (3, 2), (0,)][case % 3]
            dtypes = DTYPES[case % 5], DTYPES[case // 2 % 5]
            arrays = [values(rng, shape, dtype, special=special) for shape, dtype in zip(shapes, dtypes, strict=True)]
            layouts = [
                layout_for(rng, x, mesh) if place else None for x, place in zip(arrays, (1, case % 4), strict=True)
            ]
            for function in SETS:
                compare(function, arrays, layouts, mesh, function.__name__)
            alone = [np.unique(x) for x in arrays]
            layouts = [layout_for(rng, x, mesh) for x in alone]
            for function in SETS[1:]:
                compare(lambda x, y: function(x, y, assume_unique=True), alone, layouts, mesh, function.__name__)  # noqa: B023

    on_meshes(program, meshes=((3,), (2, 2)) if cases < 5 else MESHES)


@cases(3, slow=80)
def test_filters(cases):
    def program(mesh, rng):
        for case in range(cases):
            rows = (5, 12, 1, 3)[case % 4], (2, 3, 1, 6)[case // 2 % 4]
            arrays = [values(rng, (n,), DTYPES[(case + at) % 5]) for at, n in enumerate(rows)]
            layouts = [layout_for(rng, arrays[0], mesh), layout_for(rng, arrays[1], mesh) if case % 2 else None]
            for function in (np.convolve, np.correlate):
                for mode in ("full", "same", "valid"):
                    compare(lambda x, y: function(x, y, mode), arrays, layouts, mesh, (function, mode))  # noqa: B023

    on_meshes(program)


@cases(2, slow=20)
def test_distinct_rows(cases):
    def program(mesh, rng):
        for case in range(cases):
            whole = rng.integers(0, 2, [(6, 2), (3, 5), (4, 2, 2)][case % 3])
            layout = layout_for(rng, whole, mesh)
            compare(lambda x: np.unique(x, axis=case % 2), [whole], [layout], mesh)  # noqa: B023
            compare(lambda x: np.unique(x, return_index=True, return_counts=True), [whole], [layout], mesh)

    on_meshes(program)


def test_a_filter_sends_the_rows_at_the_edges():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.arange(1000.0), mesh, {"a": Shard(0)})
        with mesh.account() as account:
            smooth = np.convolve(x, np.ones(3) / 3, "same")
        assert account.total().nbytes <= 64
        assert smooth.placements == (Shard(0),)

    meshdist.run(program, 2)


def test_what_does_not_fit_says_what_to_write():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = distribute_tensor(np.arange(6), mesh, {"a": Shard(0)})
        y = distribute_tensor(np.arange(4), mesh, {"b": Shard(0)})
        with pytest.raises(PlacementError, match="sharded along the same axes"):
            np.union1d(x, y)
        with pytest.raises(PlacementError, match=r"shorter vector; v is .*v\.redistribute"):
            np.convolve(x, y)
        with pytest.raises(PlacementError, match=r"unique\(axis=\)"):
            np.unique(x.reshape(6, 1), axis=0)

    meshdist.run(program, 4)
