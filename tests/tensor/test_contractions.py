"""Products of placed arrays: matmul, dot, tensordot, einsum, SUMMA; against NumPy's of the whole ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from array_layouts import random_layout, random_sizes, values
from placed_arrays import assert_same, cases, compare, layout_for, mesh_2x2, on_meshes, place

import meshdist
from meshdist.tensor import Partial, PlacementError, Replicate, Shard, distribute_tensor, implicit_redistribution, summa

DTYPES = (np.float64, np.int8, np.complex64, bool, np.float32, np.int64, np.float16)
TWO_BY_TWO = ((1,), (3,), (2, 2))

PRODUCTS: list[tuple[Any, tuple[int, ...], tuple[int, ...]]] = [
    (np.matmul, (4, 3), (3, 5)), (np.matmul, (3,), (3, 5)), (np.matmul, (4, 3), (3,)), (np.matmul, (3,), (3,)),
    (np.matmul, (2, 4, 3), (3, 2)), (np.matmul, (2, 1, 4, 3), (3, 3, 2)), (np.matmul, (0, 3), (3, 2)), (np.matmul,
    (2, 0), (0, 2)),
    (np.matmul, (4, 3), (4, 3)), (np.matmul, (1,), (3, 5)), (np.matmul, (), (3,)), (np.matmul, (2, 4, 3), (3, 3, 2)),
    (np.dot, (4, 3), (3, 5)), (np.dot, (2, 3), (4, 3, 2)), (np.dot, (3,), (3,)), (np.dot, (), (3,)), (np.dot,
    (3,), (2, 3)),
    (np.inner, (4, 3), (2, 3)), (np.inner, (3,), (3,)), (np.inner, (), (2, 2)), (np.inner, (4, 3), (3, 4)),
    (np.vdot, (4, 3), (4, 3)), (np.vdot, (5,), (5,)), (np.vdot, (5,), (4,)), (np.outer, (4,), (3,)),
    (np.tensordot, (2, 3, 4), (3, 4, 2)), (partial(np.tensordot, axes=1), (2, 3), (3, 2)),
    (partial(np.tensordot, axes=0), (2,), (3,)), (partial(np.tensordot, axes=([0, 2], [1, 0])), (2, 3, 4), (4, 2)),
    (partial(np.tensordot, axes=(1, -1)), (2, 3), (4, 3)), (partial(np.tensordot, axes=(1, 5)), (2, 3), (4, 3)),
    (partial(np.tensordot, axes=([0], [0, 1])), (2, 3), (2, 3)),
]  # fmt: skip
PRODUCTS += [
    (getattr(np, name), *shapes)
    for name, shapes in (
        ("vecdot", ((4, 3), (4, 3))), ("vecdot", ((2, 1, 3), (4, 3))), ("matvec", ((2, 4, 3), (3,))), ("vecmat",
        ((3,), (2, 3, 4))),
        ("matvec", ((4, 3), (4,))),
    )
    if hasattr(np, name)
]  # fmt: skip

EINSUMS: list[tuple[Any, ...]] = [
    ("ij,jk->ik", (4, 3), (3, 5)), ("ij,jk", (4, 3), (3, 5)), ("ji", (4, 3)), ("ij->", (4, 3)), ("ij->i", (4, 3)),
    ("ii", (4, 4)),
    ("ii->i", (4, 4)), ("iij->ji", (3, 3, 2)), ("iii->i", (3, 3, 3)), ("...ij,...jk->...ik", (2, 4, 3), (3, 2)),
    ("...ij,jk", (2, 4, 3), (3, 2)), ("i...,i...->...", (3, 2), (3, 2)), ("i,j->ij", (4,), (3,)), ("ij,ij->",
    (4, 3), (4, 3)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 2)), ("ij,ij->ij", (4, 3), (4, 3)), ("ij,jk->ik", (2, 1), (3, 4)),
    (" i j , j -> i ", (4, 3), (3,)),
    (",i->i", (), (3,)), ("b...->...", (2, 3)), ("...->", (2,)), ("ii->i", (3, 4)), ("ij,jk->ik", (2, 3), (4, 2)),
    ("ij->ijk", (2, 3)),
    ("ij->ii", (2, 3)), ("i->i", (2, 3)), ("i,j->ij", (2,)), ("i?->i", (2, 3)), ("Ab->bA", (2, 3)), ("aB", (2, 3)),
]  # fmt: skip


def draw(dtypes: Any, shapes: Any, mesh: Any, rng: np.random.Generator) -> tuple[list[Any], list[Any]]:
    wholes = [values(rng, shape, dtypes[int(rng.integers(len(dtypes)))], 2) for shape in shapes]
    return wholes, [layout_for(rng, whole, mesh) for whole in wholes]


@cases(1, slow=8)
def test_products_of_two(cases: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for function, *shapes in PRODUCTS:
            for _ in range(cases):
                wholes, layouts = draw(DTYPES, shapes, mesh, rng)
                if function is np.vdot and not all(x.ndim == 1 for x in wholes) and wholes[0].shape != wholes[1].shape:
                    continue
                if rng.random() < 0.5:
                    layouts[1] = None
                compare(function, wholes, layouts, mesh)

    on_meshes(program, meshes=TWO_BY_TWO)


@cases(1, slow=8)
def test_einsum(cases: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for text, *shapes in EINSUMS:
            for _ in range(cases):
                wholes, layouts = draw(DTYPES, shapes, mesh, rng)
                compare(partial(np.einsum, text, optimize=bool(rng.integers(2))), wholes, layouts, mesh)
        a, b = np.ones((2, 3)), np.ones((3, 4))
        layouts = [layout_for(rng, x, mesh) for x in (a, b)]
        compare(lambda a, b: np.einsum(a, [0, 11], b, [11, 2], [2, 0]), [a, b], layouts, mesh)
        compare(lambda a, b: np.einsum(a, [0, 11], b, [11, 2]), [a, b], layouts, mesh)
        compare(lambda a, b: np.einsum(a, [..., 1], b, [1, 2], [..., 2]), [a, b], layouts, mesh)
        compare(lambda a, b: np.einsum("ij,jk->ik", a, b, dtype=np.complex128), [a, b], layouts, mesh)

    on_meshes(program, meshes=TWO_BY_TWO)


def test_results_of_matmul_are_placed_by_the_labels() -> None:
    def program() -> Any:
        mesh = mesh_2x2()
        x = distribute_tensor(np.arange(12.0).reshape(4, 3), mesh, {"dp": Shard(0)})
        w1 = distribute_tensor(np.arange(6.0).reshape(3, 2), mesh, {"tp": Shard(1)})
        w2 = distribute_tensor(np.arange(8.0).reshape(2, 4), mesh, {"tp": Shard(0)})
        hidden = x @ w1
        y = hidden @ w2
        again = (x @ w1) @ w2  # by what the operator remembers
        assert_same(again, y.full())
        with pytest.raises(
            PlacementError, match=r"np.matmul: the placements do not match.*redistribute.* on operand \d"
        ):
            np.matmul(x, distribute_tensor(np.ones((3, 2)), mesh, {"dp": Shard(1)}))
        further, scaled = y @ np.ones((4, 1), int), 2.0 * y
        resolved = y @ np.ones((4, 1))  # floating factors may be infinite
        return [array.placements for array in (hidden, y, again, further, scaled, resolved)]

    hidden, y, again, further, scaled, resolved = meshdist.run(program, 4)[0]
    assert hidden == (Shard(0), Shard(1))
    assert y == again == further == scaled == (Shard(0), Partial())
    assert resolved == (Shard(0), Replicate())


def test_integers_that_wrap_are_computed_before() -> None:
    def program(mesh: Any, rng: Any) -> None:
        small, wide = values(rng, (2, 3), np.int8, 2) + np.int8(100), np.full((3, 2), 7)
        x = place(small, mesh, [Partial()])
        assert (x @ wide).placements == (Replicate(),)
        assert_same(x @ wide, small @ wide)
        assert (x @ wide.astype(np.int8)).placements == (Partial(),)
        assert_same(x @ wide.astype(np.int8), small @ wide.astype(np.int8))

    on_meshes(program, meshes=[(3,)])


def test_a_block_of_one_element_multiplies_as_the_whole_array() -> None:
    def program(mesh: Any, rng: np.random.Generator) -> None:
        first = np.array([[np.nan, 1.0], [2.0, 3.0]])
        for a, b in ((first, np.array([0.0, 1.0])), (np.array([0.0, 1.0]), first), (first[:, :1], np.zeros((1, 1)))):
            columns, rows = {"a": Shard(a.ndim - 1)}, {"a": Shard(0)}
            for function in (np.dot, partial(np.tensordot, axes=1)):
                for _ in range(2):
                    compare(function, [a, b], [columns, rows], mesh, (function, a, b))
        for _ in range(2):  # the second call is of what the first one remembered
            compare(np.dot, [first[:, :1], np.zeros((1, 3))], [{}, {"a": Shard(1)}], mesh)
        for b in (np.array([0.0, 1.0]), np.zeros((3, 2))):
            compare(np.inner, [first, b], [{"a": Shard(1)}, {"a": Shard(b.ndim - 1)}], mesh, b)

    on_meshes(program)


def test_out_and_in_place() -> None:
    def program(mesh: Any, rng: Any) -> None:
        for _ in range(3):
            (a, b), layouts = draw((np.float64,), ((3, 3), (3, 3)), mesh, rng)
            x, y = (place(whole, mesh, layout) for whole, layout in zip((a, b), layouts, strict=True))
            for function in (np.matmul, np.dot):
                out = place(np.zeros((3, 3)), mesh, random_layout(rng, (3, 3), mesh.shape))
                with implicit_redistribution():
                    assert function(x, y, out=out) is out
                assert_same(out, a @ b)
            out = place(np.zeros((3, 3)), mesh, random_layout(rng, (3, 3), mesh.shape))
            with implicit_redistribution():
                assert np.einsum("ij,jk", x, y, out=out) is out
                assert_same(out, a @ b)
                out @= place(b, mesh, out.layout)
            assert_same(out, a @ b @ b)
        with pytest.raises(ValueError, match="out= must have the shape"), implicit_redistribution():
            np.matmul(x, y, out=place(np.zeros((3, 2)), mesh, random_layout(rng, (3, 2), mesh.shape)))
        with pytest.raises(TypeError, match="must be a DTensor"):
            np.matmul(x, y, out=a)
        with pytest.raises(ValueError, match="dtype"), implicit_redistribution():
            np.dot(x, y, out=place(np.zeros((3, 3), "f4"), mesh, random_layout(rng, (3, 3), mesh.shape)))
        with pytest.raises(TypeError, match="axes= is not available"):
            np.matmul(x, y, axes=[(0, 1), (0, 1), (0, 1)])

    on_meshes(program, meshes=TWO_BY_TWO)


def cut_at_random(rng: np.random.Generator, shape: tuple[int, int], mesh: Any) -> list[Shard]:
    pairs = zip(shape, mesh.shape, strict=True)
    return [Shard(axis, random_sizes(rng, rows, parts)) for axis, (rows, parts) in enumerate(pairs)]


@cases(8, slow=32)
def test_summa(cases: int) -> None:
    def program(mesh: Any, rng: Any) -> None:
        for number in range(cases):
            m, k, n = (int(rows) for rows in rng.integers(0, 9, 3))
            a = values(rng, (m, k), DTYPES[number % 6], 2)
            b = values(rng, (k, n), DTYPES[int(rng.integers(6))], 2)
            x, y = (place(whole, mesh, cut_at_random(rng, whole.shape, mesh)) for whole in (a, b))
            product = summa(x, y, None if number % 2 else int(rng.integers(1, 4)))
            assert_same(product, a @ b)
            assert product.layout.cuts == (x.layout.cuts[0], y.layout.cuts[1])

    on_meshes(program, meshes=[(1, 1), (2, 1), (1, 3), (2, 2)])


def test_summa_refuses_other_arrays() -> None:
    def program() -> None:
        mesh = meshdist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(np.ones((4, 3)), mesh, [Shard(0), Shard(1)])
        with pytest.raises(
            ValueError, match=r"as many columns as b has rows, got \(4, 3\) and \(4, 3\); .*write x.T.redist"
        ):
            summa(x, x)
        with pytest.raises(ValueError, match="panel must be positive"):
            summa(x, distribute_tensor(np.ones((3, 4)), mesh, [Shard(0), Shard(1)]), 0)
        wanted = r"{'dp': Shard\(0\), 'tp': Shard\(1\)}"
        with pytest.raises(PlacementError, match=rf"b must be placed as {wanted}, got .* b.redistribute\({wanted}\)"):
            summa(x, distribute_tensor(np.ones((3, 4)), mesh, {"dp": Shard(0)}))
        rows = distribute_tensor(np.ones((4, 3)), meshdist.init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(PlacementError, match="a must be a matrix on a mesh of two axes, got .*; write a @ b"):
            summa(rows, rows)
        with pytest.raises(TypeError, match="expected two DTensors"):
            summa(x, np.ones((3, 4)))

    meshdist.run(program, 2)
