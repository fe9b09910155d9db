"""apply_along_axis, cross, diag, copyto, putmask, weighted quantiles and linspace against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from array_layouts import values
from placed_arrays import assert_same, compare, layout_for, on_meshes, place

import meshdist
from meshdist.tensor import Partial, PlacementError, Shard, linspace, zeros

MESHES = ((3,), (2, 2))


def test_along_lines():
    def program(mesh, rng):
        for case in range(4):
            whole = values(rng, [(4, 3), (2, 3, 5)][case % 2], float)
            layout = layout_for(rng, whole, mesh)
            for function in (np.sum, np.sort, lambda line: line[:, None] * line[:2]):
                compare(lambda x: np.apply_along_axis(function, 1, x), [whole], [layout], mesh, case)  # noqa: B023
            other = values(rng, whole.shape, np.int64)
            layouts = [layout, layout_for(rng, other, mesh)]
            compare(lambda x, y: np.cross(x, y, axis=1), [whole, other], layouts, mesh, case)
        no_lines = {"a": Shard(0, sizes=(3,) + (0,) * (mesh.shape[0] - 1))}
        compare(lambda x: np.apply_along_axis(np.sort, 1, x), [np.zeros((3, 0))], [no_lines], mesh)

    on_meshes(program, meshes=MESHES)


def test_diagonal_matrices_and_assignment():
    def program(mesh, rng):
        for case in range(6):
            vector, matrix = values(rng, (5,), float), values(rng, (4, 3), float)
            compare(lambda x: np.diag(x, case % 3 - 1), [vector], [layout_for(rng, vector, mesh)], mesh, case)  # noqa: B023
            compare(lambda x: np.diag(x, case % 3 - 1), [matrix], [layout_for(rng, matrix, mesh, [0])], mesh, case)  # noqa: B023
            wholes = [matrix, values(rng, (4, 3), [float, np.int64][case % 2]), rng.random((4, 3)) < 0.5]
            layouts = [layout_for(rng, x, mesh, partial=False) for x in wholes]
            compare(_copied_to, wholes, layouts, mesh, case)
            compare(_masked, wholes, layouts, mesh, case)

    on_meshes(program, meshes=MESHES)


def _copied_to(x, y, mask):
    np.copyto(x, y, where=mask)
    return x


def _masked(x, y, mask):
    np.putmask(x, mask, y)
    return x


@pytest.mark.skipif(int(np.__version__.split(".")[0]) < 2, reason="quantile has weights from NumPy 2 on")
def test_weighted_quantiles():
    def program(mesh, rng):
        for case in range(5):
            whole, weights = values(rng, (5, 4), float), rng.integers(1, 4, (5, 4)).astype(float)
            axis, q = (0, 1, None, (0, 1), -1)[case], (0.5, [0.1, 0.9])[case % 2]
            layouts = [layout_for(rng, x, mesh) for x in (whole, weights)]
            compare(
                lambda x, w: np.quantile(x, q, axis, weights=w, method="inverted_cdf", keepdims=True),  # noqa: B023
                [whole, weights],
                layouts,
                mesh,
                case,
            )
        one = weights[:, 0].copy()
        compare(
            lambda x, w: np.percentile(x, 30, 0, weights=w, method="inverted_cdf"),
            [whole, one],
            [{"a": Shard(1)}, None],
            mesh,
        )
        for shape, axis in (((0, 3), None), ((0, 3), 0), ((3, 0), 0)):
            compare(
                lambda x: np.quantile(x, 0.5, axis, weights=np.ones(x.shape), method="inverted_cdf"),  # noqa: B023
                [np.zeros(shape)],
                [{"a": Shard(0)}],
                mesh,
                shape,
            )

    on_meshes(program, meshes=MESHES)


def test_linspace():
    def program(mesh, rng):
        for args in ((0, 1), (0, 1, 7), (2.5, -1, 10, False), (3, 3, 5), (0, 1j, 6), (1, 2, 1), (0, 9, 0)):
            for dtype in (None, np.float32, int) if 1j not in args else (None,):
                made = linspace(*args, dtype=dtype, mesh=mesh, placements={"a": Shard(0)})
                assert_same(made, np.linspace(*args, dtype=dtype), 0)
        with pytest.raises(PlacementError, match="must not be Partial"):
            linspace(0, 1, mesh=mesh, placements={"a": Partial()})
        with pytest.raises(ValueError, match="non-negative"):
            linspace(0, 1, -1, mesh=mesh)

    on_meshes(program, meshes=MESHES)


def test_bad_arguments():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = zeros((4, 2), mesh=mesh, placements={"a": Shard(0)})
        for call, error, said in (
            (lambda: np.cross(x, x), ValueError, "3 components, got 2 and 2"),
            (lambda: np.apply_along_axis(np.sum, 0, x), PlacementError, "whole lines"),
            (lambda: np.putmask(x, np.ones(2, bool), 1), ValueError, "a mask and values of its shape"),
            (lambda: np.copyto(np.zeros((4, 2)), x), TypeError, "destination must be a DTensor"),
            (lambda: np.copyto(x, 1j), TypeError, "Cannot cast"),
        ):
            with pytest.raises(error, match=said):
                call()
        assert place(np.ones(3), mesh, {}).shape == (3,)

    meshdist.run(program, 2)
