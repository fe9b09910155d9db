"""Gradients of operations on DTensors, placed at random, against those of the same operations on the whole arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tensor"))
from placed_arrays import on_meshes, place, placed

import meshdist.autograd as ag
from meshdist.tensor import DTensor, PlacementError, Shard, implicit_redistribution

MESHES = ((1,), (2,), (3,), (2, 2))
IDS = np.array([0, 3, 3, 1])
MASK = np.array([True, False, True, True])


def select(module: Any, conditions: list[Any], choices: list[Any], default: Any) -> Any:
    """Return `numpy.select` of DTensors, and what autograd has a gradient of for arrays."""
    if any(hasattr(choice, "placements") for choice in choices):
        return np.select(conditions, choices, default)
    first, second = zip(conditions, choices, strict=True)
    return module.where(*first, module.where(*second, default))


# A name, a function of arrays by the functions of a module (autograd.numpy), and the shapes of the arrays.
OPERATIONS: list[tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
    ("add", lambda np, x, y: x + y, ((4, 6), (6,))),
    ("subtract", lambda np, x, y: x - y, ((4, 1), (4, 6))),
    ("multiply", lambda np, x, y: x * y, ((4, 6), (4, 6))),
    ("divide", lambda np, x, y: x / (y + 3), ((4, 6), (1, 6))),
    ("scalar", lambda np, x: 2 * x - x / 3 + 1, ((5,),)),
    ("power", lambda np, x: x**3 + (x * x + 1) ** 0.5 + x**0, ((4, 6),)),
    ("power of arrays", lambda np, x, y: (x * x + 1) ** y + 2.0**y, ((4, 6), (6,))),
    ("maximum", lambda np, x, y: np.maximum(x, y) + np.minimum(x, 0), ((4, 6), (4, 6))),
    ("ufuncs", lambda np, x: np.exp(x) + np.sin(x) * np.cos(x) + np.tanh(x) + np.arctan(x), ((4, 6),)),
    ("more ufuncs", lambda np, x: np.sqrt(x * x + 1) + np.square(x) + np.abs(x) + np.expm1(x) + np.sinh(x), ((4, 6),)),
    ("logarithms", lambda np, x: np.log(x * x + 1) + np.log1p(x * x) + np.log2(x * x + 1), ((4, 6),)),
    ("two of them", lambda np, x, y: np.arctan2(x, y) + np.hypot(x, y) + np.logaddexp(x, y), ((4, 6), (4, 6))),
    ("negative", lambda np, x: -x + np.negative(x), ((4, 6),)),
    ("matmul", lambda np, x, y: x @ y, ((4, 6), (6, 3))),
    ("matmul of stacks", lambda np, x, y: np.matmul(x, y), ((2, 4, 3), (3, 2))),
    ("matmul with vectors", lambda np, x, y, z: x @ (y @ z), ((4,), (4, 6), (6,))),
    ("dot", lambda np, x, y: np.dot(x, y), ((4, 6), (6, 3))),
    ("dot of vectors", lambda np, x, y: np.dot(x, y), ((6,), (6,))),
    ("dot of three dims", lambda np, x, y: np.dot(x, y), ((2, 3), (4, 3, 2))),
    ("inner", lambda np, x, y: np.inner(x, y), ((4, 3), (2, 3))),
    ("outer", lambda np, x, y: np.outer(x, y), ((4,), (3,))),
    ("vdot", lambda np, x, y: np.sum(x * y), ((4, 3), (4, 3))),
    ("tensordot", lambda np, x, y: np.tensordot(x, y, axes=([0, 2], [1, 0])), ((2, 3, 4), (4, 2))),
    ("einsum", lambda np, x, y: np.einsum("bij,jk->bik", x, y), ((2, 4, 3), (3, 2))),
    ("einsum of one", lambda np, x: np.einsum("ij->j", x), ((4, 6),)),
    ("sum", lambda np, x: np.sum(x), ((4, 6),)),
    ("sum of rows", lambda np, x: np.sum(x, axis=0) + np.sum(x, axis=(0,), keepdims=True)[0], ((4, 6),)),
    ("sum method", lambda np, x: x.sum(axis=(0, -1)), ((2, 4, 3),)),
    ("mean", lambda np, x: np.mean(x, axis=1) + np.mean(x), ((4, 6),)),
    ("var", lambda np, x: np.var(x, axis=0) + np.std(x, axis=0, ddof=1), ((4, 6),)),
    ("std", lambda np, x: np.std(x), ((4, 6),)),
    ("prod", lambda np, x: np.prod(x, axis=1), ((4, 6),)),
    ("max", lambda np, x: np.max(x, axis=1) - np.min(x, axis=1), ((4, 6),)),
    ("max of all", lambda np, x: np.max(x) + np.amin(x, axis=0, keepdims=True), ((4, 6),)),
    ("cumsum", lambda np, x: np.cumsum(x, axis=1) + np.cumsum(x, axis=1), ((4, 6),)),
    ("norm", lambda np, x: np.linalg.norm(x), ((4, 6),)),
    ("transpose", lambda np, x: x.T + np.transpose(x, (1, 0)) * 2, ((4, 6),)),
    ("swapaxes", lambda np, x: np.swapaxes(x, 0, 2) + np.moveaxis(x, (0, 2), (2, 0)), ((2, 4, 3),)),
    ("reshape", lambda np, x: np.reshape(x, (2, 2, 6)), ((4, 6),)),
    ("ravel", lambda np, x: np.ravel(x) * x.reshape(-1), ((4, 6),)),
    ("expand_dims", lambda np, x: np.expand_dims(x, 1) * x[:, None], ((4, 6),)),
    ("squeeze", lambda np, x: np.squeeze(x), ((4, 1, 6),)),
    ("slices", lambda np, x: x[1:3, ::2] + x[:2, :3], ((4, 6),)),
    ("a row", lambda np, x: x[2] * x[-1, :], ((4, 6),)),
    ("rows by integers", lambda np, x: x[IDS] * 2, ((4, 6),)),
    ("columns by integers", lambda np, x: x[:, IDS], ((4, 6),)),
    ("elements by integers", lambda np, x: x[np.arange(4), IDS], ((4, 6),)),
    ("rows by a mask", lambda np, x: x[MASK], ((4, 6),)),
    ("elements by a condition", lambda np, x: x[x > 0] ** 2, ((4, 6),)),
    ("concatenate", lambda np, x, y: np.concatenate([x, y, x], axis=1), ((4, 6), (4, 2))),
    ("concatenate rows", lambda np, x, y: np.concatenate([x, y]), ((4, 6), (2, 6))),
    ("stack", lambda np, x, y: np.stack([x, y], axis=1), ((4, 6), (4, 6))),
    ("vstack", lambda np, x, y: np.vstack([x, y]), ((4, 6), (2, 6))),
    ("hstack", lambda np, x, y: np.hstack([x, y]), ((4, 6), (4, 2))),
    ("split", lambda np, x: np.split(x, 2, axis=1)[1], ((4, 6),)),
    ("where", lambda np, x, y: np.where(x > 0, x, y) + np.where(x > 0, 1.0, x), ((4, 6), (4, 6))),
    ("select", lambda np, x, y: select(np, [x > 1, x > 0], [x * y, y], 2.0), ((4, 6), (4, 6))),
    ("clip", lambda np, x: np.clip(x, -0.5, 0.5), ((4, 6),)),
    ("broadcast_to", lambda np, x: np.broadcast_to(x, (4, 6)), ((1, 6),)),
    ("tril", lambda np, x: np.tril(x) + np.triu(x, 1) * 2, ((4, 6),)),
    ("roll", lambda np, x: np.roll(x, 1, axis=0), ((4, 6),)),
    ("flip", lambda np, x: np.fliplr(x), ((4, 6),)),
    ("diff", lambda np, x: np.diff(x, axis=1), ((4, 6),)),
    ("pad", lambda np, x: np.pad(x, 1, mode="constant"), ((4, 6),)),
    ("repeat", lambda np, x: np.repeat(x, 2, axis=0), ((4, 6),)),
    ("tile", lambda np, x: np.tile(x, (1, 2)), ((4, 6),)),
    ("sort", lambda np, x: np.sort(x), ((7,),)),
    ("diagonal", lambda np, x: np.trace(x), ((4, 6),)),
    ("fft", lambda np, x: np.abs(np.fft.fft(x)), ((4, 6),)),
    ("solve", lambda np, x, y: np.linalg.solve(x @ x.T + 4 * np.eye(4), y), ((4, 4), (4, 2))),
    ("det", lambda np, x: np.linalg.det(x @ x.T + 4 * np.eye(4)), ((4, 4),)),
    ("inv", lambda np, x: np.linalg.inv(x @ x.T + 4 * np.eye(4)), ((4, 4),)),
]  # fmt: skip


def whole(x: Any) -> Any:
    return x.full() if isinstance(x, DTensor) else x


def check(mesh: Any, name: str, loss: Callable[..., Any], arrays: list[Any], tensors: list[Any]) -> None:
    """Compare gradients by all arrays, and their placements."""
    argnums = tuple(range(len(arrays)))
    wanted = autograd.value_and_grad(loss, argnums)(*arrays)
    try:
        found = ag.value_and_grad(loss, argnums)(*tensors)
    except PlacementError:
        with implicit_redistribution():
            found = ag.value_and_grad(loss, argnums)(*tensors)
    described = (name, mesh.shape, [x.placements if isinstance(x, DTensor) else "plain" for x in tensors])
    assert np.allclose(float(whole(found[0])), wanted[0]), described
    for tensor, gradient, right in zip(tensors, found[1], wanted[1], strict=True):
        assert gradient.shape == right.shape, described
        assert np.allclose(whole(gradient), right), (described, whole(gradient), right)
        assert type(gradient) is type(tensor), described
        if isinstance(tensor, DTensor):
            assert gradient.layout is tensor.layout.resolved(), (described, gradient)


def operation(mesh: Any, rng: Any, name: str, function: Any, shapes: Any, number: int) -> None:
    for _ in range(number):
        arrays = [rng.standard_normal(shape) for shape in shapes]
        weights = rng.standard_normal(np.shape(function(anp, *arrays)))
        tensors = [x if rng.random() < 0.2 else placed(rng, x, mesh) for x in arrays]
        if not any(isinstance(x, DTensor) for x in tensors):
            tensors[0] = placed(rng, arrays[0], mesh)
        tensors = [x if not isinstance(x, DTensor) or not has_other_pending(x) else resolved(x) for x in tensors]
        check(mesh, name, lambda *xs, w=weights: anp.sum(w * function(anp, *xs)), arrays, tensors)


def has_other_pending(x: DTensor) -> bool:
    return not set(x.layout.pending.values()) <= {"sum"}


def resolved(x: DTensor) -> DTensor:
    return x.redistribute(x.layout.resolved().placements)


@pytest.mark.parametrize("cases", [1, pytest.param(12, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
@pytest.mark.parametrize(("name", "function", "shapes"), OPERATIONS, ids=[name for name, *_ in OPERATIONS])
def test_gradient_of_an_operation_is_that_of_the_whole_arrays(
    name: str, function: Any, shapes: Any, cases: int
) -> None:
    on_meshes(operation, name, function, shapes, cases, meshes=MESHES, seed=len(name))


# Gradients that autograd does not have for arrays.
FURTHER: list[tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
    ("take", lambda x: np.take(x, IDS, axis=1), ((4, 6),)),
    ("take of all", lambda x: np.take(x, np.array([[3, 3], [0, 7]])), ((4, 6),)),
    ("take_along_axis", lambda x: np.take_along_axis(x, np.array([[1, 1, 0, 5]]), axis=1), ((4, 6),)),
    ("rows by integers of two dims", lambda x: x[np.array([[0, 1, 1], [3, 1, -1]])] ** 2, ((4, 6),)),
    ("vdot", lambda x, y: np.vdot(x, y), ((4, 6), (4, 6))),
    ("diagonal", lambda x: np.diagonal(x, 1), ((4, 6),)),
    ("sort of rows", lambda x: np.sort(x, axis=0), ((4, 6),)),
    ("sort of columns", lambda x: np.sort(x, axis=1), ((4, 6),)),
    ("where that broadcasts", lambda x, y: np.where(np.arange(6) % 2 == 0, x, y), ((4, 6), (6,))),
    ("clip from below", lambda x: np.clip(x, 0.1, None), ((4, 6),)),
    ("stack of integers", lambda x: x[:, np.array([[0, 1], [1, 5]])], ((4, 6),)),
    ("einsum that broadcasts", lambda x, y: np.einsum("...ij,...jk->...ik", x, y), ((2, 4, 3), (3, 2))),
    ("mean of two dims", lambda x: np.mean(x, axis=(0, 2), keepdims=True), ((2, 4, 3),)),
    ("rank-one product", lambda x, y: np.outer(x, y) @ y, ((4,), (3,))),
]


def differences(mesh: Any, rng: Any, name: str, function: Any, shapes: Any) -> None:
    arrays = [rng.standard_normal(shape) for shape in shapes]
    directions = [rng.standard_normal(shape) for shape in shapes]
    tensors = [resolved(placed(rng, x, mesh, partial=False)) for x in arrays]
    weights = rng.standard_normal(np.shape(function(*arrays)))

    def loss(*xs: Any) -> Any:
        return np.sum(weights * function(*xs))

    with implicit_redistribution():
        found = ag.grad(loss, tuple(range(len(arrays))))(*tensors)
    step = 1e-6
    high = loss(*[x + step * d for x, d in zip(arrays, directions, strict=True)])
    low = loss(*[x - step * d for x, d in zip(arrays, directions, strict=True)])
    # The dot product of the gradient and a direction, computed on the blocks.
    slope = sum(float(np.sum(g * d)) for g, d in zip(found, directions, strict=True))
    assert slope == pytest.approx((high - low) / (2 * step), rel=1e-6, abs=1e-7), (name, mesh.shape)


@pytest.mark.parametrize(("name", "function", "shapes"), FURTHER, ids=[name for name, *_ in FURTHER])
def test_gradient_is_that_of_finite_differences(name: str, function: Any, shapes: Any) -> None:
    on_meshes(differences, name, function, shapes, meshes=MESHES, seed=len(name))


# ---- Between DTensors and plain arrays


def moved(mesh: Any, rng: Any) -> None:
    size = mesh.size()
    x = rng.standard_normal((6, 4))
    w = rng.standard_normal((6, 4))
    for _ in range(3):
        tensor = resolved(placed(rng, x, mesh, partial=False))
        other = placed(rng, x, mesh, partial=False).placements

        def check_same(name: str, loss: Any, whole_loss: Any, tensor: Any = tensor) -> None:
            gradient = ag.grad(loss)(tensor)
            wanted = autograd.grad(whole_loss)(x)
            assert np.allclose(gradient.full(), wanted), (name, mesh.shape, tensor.placements, gradient.full(), wanted)
            assert gradient.layout is tensor.layout

        check_same(
            "redistribute",
            lambda x, other=other: np.sum(x.redistribute(other) ** 2 * w) + np.sum(x**3),
            lambda x: anp.sum(x**2 * w) + anp.sum(x**3),
        )
        check_same("full", lambda x: anp.sum(x.full() ** 2 * w), lambda x: anp.sum(x**2 * w))
        own = 1.0 + mesh.get_rank()
        check_same(
            "full, for its own part",
            lambda x, own=own: own * anp.sum(x.full(grad="reduce") ** 2 * w),
            lambda x: size * (size + 1) / 2 * anp.sum(x**2 * w),
        )
        copies = size // len({str(index) for index in indices(tensor)})
        check_same(
            "to_local",
            lambda x: ag.all_reduce(anp.sum(x.to_local(grad="reduce") ** 3), group=mesh),
            lambda x, copies=copies: copies * anp.sum(x**3),
        )
        check_same(
            "from_local",
            lambda x: np.sum(ag.from_local(x.to_local() * 2, mesh, x.placements, x.shape) ** 3 * w),
            lambda x: anp.sum((2 * x) ** 3 * w),
        )


def indices(x: DTensor) -> list[Any]:
    return [x.layout.index(coordinate) for coordinate in x.layout.coordinates()]


def test_gradients_pass_through_redistribute_full_and_blocks() -> None:
    on_meshes(moved)


def mapped(mesh: Any, rng: Any) -> None:
    x, w = rng.standard_normal((6, 4)), rng.standard_normal((4, 3))
    rows = {"a": Shard(0)}
    tensor = place(x, mesh, rows)
    weight = place(w, mesh, {"b": Shard(1)} if mesh.ndim > 1 else {})
    out = {"a": Shard(0), "b": Shard(1)} if mesh.ndim > 1 else rows

    def layer(x: Any, w: Any) -> Any:
        return anp.tanh(x @ w)

    def by_hand(g: Any, y: Any, x: Any, w: Any) -> Any:
        g = g * (1 - y * y)
        return g @ w.T, x.T @ g

    wanted = autograd.grad(lambda x, w: anp.sum(layer(x, w) ** 2), (0, 1))(x, w)
    for vjp in (None, by_hand):
        for operands in ((tensor, weight), (tensor, w) if mesh.ndim == 1 else (tensor, weight)):
            run = ag.local_map(layer, out, vjp=vjp)
            found = ag.grad(lambda x, w, f=run: np.sum(f(x, w) ** 2), (0, 1))(*operands)
            for gradient, right in zip(found, wanted, strict=True):
                assert np.allclose(whole(gradient), right), (mesh.shape, vjp)
    # Two results, of which one is the same on all ranks, and a collective inside.
    both = ag.local_map(lambda x, w: (x @ w, ag.all_reduce(anp.sum(x**2), group=mesh["a"]) * w), (rows, {}))
    found = ag.grad(lambda x, w: np.sum(both(x, w)[0] ** 2) + np.sum(both(x, w)[1]), 1)(tensor, place(w, mesh, {}))
    right = autograd.grad(lambda w: anp.sum((x @ w) ** 2) + anp.sum(anp.sum(x**2) * w))(w)
    assert np.allclose(found.full(), right), mesh.shape


def embedded(mesh: Any, rng: Any) -> None:
    """Rows of a table that is cut either way, by integers that are cut along the batch."""
    table, ids = rng.standard_normal((5, 4)), rng.integers(-5, 5, (6, 3))
    wanted = autograd.grad(lambda table: anp.sum(table[ids] ** 3))(table)
    last = mesh.mesh_dim_names[-1]
    for placements in ({}, {last: Shard(0)}, {last: Shard(1)}):
        for cut in ({}, {"a": Shard(0)}):
            batch, weights = place(ids, mesh, cut), place(table, mesh, placements)
            if mesh.ndim == 1 and placements and cut:
                continue  # one axis cannot cut both
            for loss in (
                lambda w, batch=batch: np.sum(w[batch] ** 3),
                lambda w, b=batch: np.sum(np.take(w, b, 0) ** 3),
            ):
                found = ag.grad(loss)(weights)
                assert np.allclose(found.full(), wanted), (mesh.shape, placements, cut)
                assert found.layout is weights.layout


def test_rows_of_an_embedding() -> None:
    on_meshes(embedded)


def test_local_map_is_differentiated_on_the_blocks_or_by_a_given_vjp() -> None:
    on_meshes(mapped)


def stencil(u: Any) -> Any:
    inner = (u[:-2] + u[1:-1] * u[1:-1] + u[2:]) / 3
    return anp.concatenate([u[:1], inner, u[-1:]])


def overlapping(mesh: Any, rng: Any) -> None:
    x, w = rng.standard_normal((7, 3)), rng.standard_normal((7, 3))
    tensor = place(x, mesh, {"a": Shard(0)})
    found = ag.grad(lambda x: np.sum(w * ag.map_overlap(stencil, x, 1)))(tensor)
    assert np.allclose(found.full(), autograd.grad(lambda x: anp.sum(w * stencil(x)))(x))
    ring = ag.grad(lambda x: np.sum(w * ag.map_overlap(stencil, x, (1, 0), periodic=True)))(tensor)
    whole_ring = autograd.grad(lambda x: anp.sum(w * stencil(anp.concatenate([x[-1:], x, x[:1]]))[1:-1]))(x)
    assert np.allclose(ring.full(), whole_ring)


def test_halos_return_the_gradients_of_ghost_rows_to_their_ranks() -> None:
    on_meshes(overlapping)


@pytest.mark.parametrize("convert", [float, int, complex, lambda total: total.item()])
def test_a_number_of_python_has_no_gradient(convert: Callable[[Any], Any]) -> None:
    def program(mesh: Any, rng: Any) -> None:
        x = place(rng.standard_normal(4), mesh, {"a": Shard(0)})
        with pytest.raises(
            TypeError, match="a number of Python has no gradient; return and use the array itself, with"
        ):
            ag.grad(lambda x: convert(x.sum()))(x)

    on_meshes(program)
