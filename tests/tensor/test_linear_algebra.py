"""numpy.linalg on DTensors against NumPy on the whole array."""

from __future__ import annotations

import numpy as np
import pytest
from placed_arrays import assert_same, cases, mesh_2x2, on_meshes, place, placed

import meshdist
from meshdist.errors import DistBackendError
from meshdist.tensor import PlacementError, Replicate, Shard, distribute_tensor, implicit_redistribution

# NumPy 1 takes one vector with one matrix alone.
VECTORS = ((3,),) if int(np.__version__.split(".")[0]) >= 2 else ()
DTYPES = [float, np.float32, complex]


def drawn(rng, shape, dtype):
    found = rng.standard_normal(shape)
    return (found + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else found).astype(dtype)


@cases(3, slow=12)
def test_stacks_of_matrices(cases):
    def program(mesh, rng):
        for case in range(cases):
            dtype = DTYPES[case % 3]
            a = drawn(rng, (5, 2, 3, 3), dtype) + 4 * np.eye(3, dtype=dtype)
            definite = a @ np.swapaxes(a.conj(), -1, -2) + 10 * np.eye(3, dtype=dtype)
            x, b = placed(rng, a, mesh, dims=(0, 1)), placed(rng, definite, mesh, dims=(0, 1), partial=False)
            for name in ("inv", "det", "slogdet"):
                pairs = getattr(np.linalg, name)(x), getattr(np.linalg, name)(a)
                for found, wanted in zip(*pairs, strict=True) if name == "slogdet" else [pairs]:
                    assert_same(found, wanted, 1e-9)
            assert_same(np.linalg.cholesky(b), np.linalg.cholesky(definite), 1e-9)
            found = np.linalg.eigh(b)
            assert type(found) is type(np.linalg.eigh(definite))
            assert_same(found[0], np.linalg.eigvalsh(definite), 1e-9)
            with meshdist.tensor.implicit_redistribution():
                for shape in (*VECTORS, (1, 2, 3, 4), (5, 2, 3, 1)):
                    right = drawn(rng, shape, dtype)
                    y = placed(rng, right, mesh, dims=range(right.ndim - 2) if right.ndim > 2 else ())
                    assert_same(np.linalg.solve(x, y), np.linalg.solve(a, right), 1e-9)
                    assert_same(np.linalg.solve(a, y), np.linalg.solve(a, right), 1e-9)

    on_meshes(program)


@cases(6, slow=12)
def test_tall_matrices(cases):
    def program(mesh, rng):
        for case in range(cases):
            rows, columns = [(12, 3), (7, 7), (5, 1), (9, 4)][case % 4]
            a = drawn(rng, (rows, columns), DTYPES[case % 3])
            if case == 3:
                a = np.triu(a)
            x = placed(rng, a, mesh, dims=(0,))
            rtol = 1e-4 if a.dtype == np.float32 else 1e-10
            found, wanted = np.linalg.qr(x), np.linalg.qr(a)
            assert type(found) is type(wanted)
            assert_same(found[0], wanted[0], rtol)
            assert_same(found[1], wanted[1], rtol)
            assert_same(np.linalg.qr(x, "r"), wanted[1], rtol)
            u, s, vh = np.linalg.svd(x, full_matrices=False)
            assert_same(s, np.linalg.svd(a, compute_uv=False), rtol)
            assert_same(np.linalg.svd(x, compute_uv=False), s.full(), rtol)
            np.testing.assert_allclose((u.full() * s.full()) @ vh.full(), a, rtol=0, atol=10 * rtol)
            np.testing.assert_allclose(u.full().conj().T @ u.full(), np.eye(columns), rtol=0, atol=10 * rtol)
            if columns < rows and mesh.size() > 1 and isinstance(x.placements[0], Shard):
                assert found[0].layout is x.layout.resolved()

    on_meshes(program)


def test_what_is_cut_is_refused():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.eye(4) * 2, mesh, {"a": Shard(0)})
        for call in (
            lambda: np.linalg.inv(x),
            lambda: np.linalg.solve(np.eye(4), x),
            lambda: np.linalg.svd(x),
            lambda: np.linalg.qr(x, "complete"),
        ):
            with pytest.raises(PlacementError, match=r"[xab].redistribute\({'a': Replicate\(\)}\)"):
                call()
        assert np.linalg.inv(x.redistribute()).placements == (Replicate(),)
        whole = x.redistribute()
        for call, error in (
            (lambda: np.linalg.inv(distribute_tensor(np.ones(3), mesh)), np.linalg.LinAlgError),
            (lambda: np.linalg.inv(distribute_tensor(np.ones((3, 2)), mesh)), np.linalg.LinAlgError),
            (lambda: np.linalg.solve(whole, np.ones(3)), ValueError),
            (lambda: np.linalg.qr(whole, "none"), ValueError),
        ):
            with pytest.raises(error):
                call()

    meshdist.run(program, 2)


def test_columns_of_tall_matrices_that_are_cut():
    def program():
        mesh = mesh_2x2()
        whole = np.random.default_rng(0).standard_normal((8, 3))
        for placements in ({"dp": Shard(0), "tp": Shard(1)}, {"dp": Shard(1)}):
            x = place(whole, mesh, placements)
            for name, call in (
                ("qr", lambda: np.linalg.qr(x, "r")),  # noqa: B023
                ("svd", lambda: np.linalg.svd(x, compute_uv=False)),  # noqa: B023
                ("lstsq", lambda: np.linalg.lstsq(x, np.ones(8))[0]),  # noqa: B023
            ):
                pattern = rf"^np.linalg.{name}: .*Call a.redistribute\({{'dp': Shard\(0\), 'tp': Replicate\(\)}}\)"
                with pytest.raises(PlacementError, match=pattern) as refused:
                    call()
                assert "svd" not in str(refused.value).replace(f"np.linalg.{name}", "")
                with implicit_redistribution():
                    found = call()
                wanted = {
                    "qr": lambda: np.linalg.qr(whole, "r"),
                    "svd": lambda: np.linalg.svd(whole, compute_uv=False),
                    "lstsq": lambda: np.linalg.lstsq(whole, np.ones(8), rcond=None)[0],
                }[name]()
                assert_same(found, wanted, 1e-9)
        with pytest.raises(PlacementError, match="with full_matrices=False or compute_uv=False"):
            np.linalg.svd(place(whole, mesh, {"dp": Shard(0)}))
        with pytest.raises(PlacementError, match=r"^np.linalg.lstsq: .*redistribute.* on operand 1"):
            np.linalg.lstsq(place(whole, mesh, {"dp": Shard(0)}), place(np.ones(8), mesh, {"tp": Shard(0)}))

    meshdist.run(program, 4)


def test_memory_of_gpus():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (1,))
        x = distribute_tensor(np.ones(2), mesh)
        assert x.cpu() is x
        with pytest.raises(DistBackendError, match="CuPy"):
            x.cuda()

    meshdist.run(program, 1)


def test_an_order_of_norms_that_is_no_number() -> None:
    def program() -> None:
        x = distribute_tensor(np.ones(3), meshdist.init_device_mesh("cpu", (2,)), [Shard(0)], None)
        for axis in (None, 0):
            with pytest.raises(TypeError, match=r"ord must be None, a number or the name of a norm, got \[3\]"):
                np.linalg.norm(x, [3], axis)

    meshdist.run(program, 2, timeout=30)
