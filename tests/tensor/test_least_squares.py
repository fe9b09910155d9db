"""lstsq of tall matrices cut along their rows, powers, and the array API's names in numpy.linalg, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from array_layouts import values
from placed_arrays import assert_same, compare, layout_for, on_meshes, place

import meshdist
from meshdist.tensor import Shard, distribute_tensor


def test_least_squares():
    def program(mesh, rng):
        for case in range(4):
            a = values(rng, (24, 3), [float, complex][case % 2])
            a[:, 2] = a[:, 1] if case == 3 else a[:, 2] + 1
            b = values(rng, [(24,), (24, 2)][case // 2], float)
            placements = {"a": Shard(0)}
            placed = [place(x, mesh, placements) for x in (a, b)]
            found, wanted = np.linalg.lstsq(*placed, rcond=None), np.linalg.lstsq(a, b, rcond=None)
            assert found[2] == wanted[2]
            for one, other in zip(found[:2] + found[3:], wanted[:2] + wanted[3:], strict=True):
                assert_same(one, other, 1e-9)

    on_meshes(program)


def test_powers_and_names():
    def program(mesh, rng):
        square = values(rng, (2, 3, 3), float)
        layout = layout_for(rng, square, mesh, [0], partial=False)
        for n in (0, 1, 2, 3, 5, 8):
            compare(lambda x: np.linalg.matrix_power(x, n), [square], [layout], mesh, n, 1e-9)  # noqa: B023
        matrices = [values(rng, shape, float) for shape in ((4, 3), (3, 5), (5, 2))]
        layouts = [layout_for(rng, x, mesh) for x in matrices]
        compare(lambda *x: np.linalg.multi_dot(x), matrices, layouts, mesh, "multi_dot", 1e-9)
        vector = values(rng, (3,), float)
        compare(
            lambda x: np.linalg.multi_dot([x, x, x]), [vector], [layout_for(rng, vector, mesh)], mesh, "of a vector"
        )
        if not hasattr(np.linalg, "vector_norm"):
            return
        for function in (
            lambda x: np.linalg.vector_norm(x),
            lambda x: np.linalg.vector_norm(x, axis=1, ord=1),
            lambda x: np.linalg.vector_norm(x, axis=(0, 2), keepdims=True),
            lambda x: np.linalg.matrix_norm(x),
            lambda x: np.linalg.matrix_norm(x, ord=1, keepdims=True),
            lambda x: np.linalg.trace(x),
            lambda x: np.linalg.diagonal(x, offset=1),
            lambda x: np.linalg.matmul(x, x),
            lambda x: np.linalg.svdvals(x),
            lambda x: np.linalg.cross(x, x[::1] * 2.0),
            lambda x: np.linalg.vecdot(x, x, axis=1),
        ):
            compare(function, [square], [layout], mesh, "", 1e-9)

    on_meshes(program, meshes=((1,), (2,), (2, 2)))


def test_bad_shapes():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.ones((6, 2)), mesh, {"a": Shard(0)})
        with pytest.raises(np.linalg.LinAlgError, match=r"\(6, 2\) and b \(5,\)"):
            np.linalg.lstsq(x, np.ones(5), rcond=None)
        with pytest.raises(np.linalg.LinAlgError):
            np.linalg.matrix_power(x, 2)

    meshdist.run(program, 2)
