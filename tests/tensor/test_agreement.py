"""Ranks that build different layouts are told, on all ranks alike, also where the arrays are only reduced."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from placed_arrays import mesh_2x2
from worlds import needs_linux

import meshdist
from meshdist.autograd import grad
from meshdist.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, local_map, summa
from meshdist.tensor.agreement import merged, origin_of, with_origin
from meshdist.tensor.array_layout import ArrayLayout

MATRIX = np.arange(1.0, 17.0).reshape(4, 4)
VECTOR = np.array([3.0, 1.0, 2.0, 4.0])
TALL = np.arange(12.0).reshape(6, 2) ** 2
# Two placements of each, which the same messages fit.
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "matrix": (MATRIX, Shard(0), Shard(1)),
    "vector": (VECTOR, Shard(0), Shard(0, (1, 3))),
    "tall": (TALL, Shard(0), Shard(0, (4, 2))),
}


def _in_place(x: Any) -> Any:
    total = x.sum()
    total += x.max() * 0.0
    total *= 2
    return total


def _into(x: Any) -> Any:
    out = distribute_tensor(np.zeros(()), x.mesh, x.sum().placements, None)
    np.add(x.sum(), x.sum(), out=out)
    return out


CASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "sum": ("matrix", lambda x: x.sum()),
    "sum, where=": ("matrix", lambda x: np.sum(x, where=np.ones((4, 4), bool))),
    "sum, out=": ("matrix", lambda x: np.sum(x, out=distribute_tensor(np.zeros(()), x.mesh, None, None))),
    "sum of sums": ("matrix", lambda x: x.sum(axis=0).sum()),
    "prod": ("vector", np.prod),
    "mean": ("matrix", np.mean),
    "max": ("matrix", np.max),
    "ptp": ("matrix", np.ptp),
    "var": ("matrix", np.var),
    "std": ("matrix", np.std),
    "average": ("matrix", lambda x: np.average(x, weights=MATRIX)),
    "cov": ("vector", np.cov),
    "norm": ("matrix", np.linalg.norm),
    "norm, ord=inf": ("vector", lambda x: np.linalg.norm(x, np.inf)),
    "any": ("matrix", lambda x: (x > 3).any()),
    "all": ("matrix", lambda x: (x > 3).all()),
    "count_nonzero": ("matrix", np.count_nonzero),
    "array_equal": ("matrix", lambda x: np.array_equal(x, x)),
    "nansum": ("matrix", np.nansum),
    "nanmean": ("matrix", np.nanmean),
    "nanmax": ("matrix", np.nanmax),
    "einsum": ("matrix", lambda x: np.einsum("ij,ij->", x, x)),
    "vdot": ("matrix", lambda x: np.vdot(x, x)),
    "tensordot": ("matrix", lambda x: np.tensordot(x, x)),
    "matmul": ("tall", lambda x: x.T @ x),
    "np.matmul": ("tall", lambda x: np.matmul(x.T, x)),
    "dot": ("vector", lambda x: np.dot(x, x)),
    "a multiple of a sum": ("matrix", lambda x: 2.0 * x.sum() / 4.0),
    "the first of two sums": ("matrix", lambda x: x.sum() - distribute_tensor(MATRIX, x.mesh, [Shard(0)], None).sum()),
    "the second of two sums": ("matrix", lambda x: distribute_tensor(MATRIX, x.mesh, [Shard(0)], None).sum() + x.sum()),
    "a sum that is not linear": ("matrix", lambda x: np.sqrt(x.sum())),
    "a sum, changed in place": ("matrix", _in_place),
    "a sum of sums, out=": ("matrix", _into),
    "a sum in a different shape": ("matrix", lambda x: np.expand_dims(x.sum(), 0).reshape(1, 1).T.copy()),
    "a part of stacked sums": ("matrix", lambda x: np.stack([x.sum(), x.sum()])[1:]),
    "a sum of a different dtype": ("matrix", lambda x: x.sum().astype(np.complex128)),
    "the transform of a sum": ("tall", lambda x: np.fft.fft(x.sum(axis=0))),
    "an element": ("matrix", lambda x: x[1, 2]),
    "elements": ("matrix", lambda x: x[[1, 2], [0, 3]]),
    "argmax": ("matrix", np.argmax),
    "nanargmin": ("matrix", np.nanargmin),
    "cumsum": ("vector", lambda x: np.cumsum(x)[-1]),
    "cumprod of complex numbers": ("vector", lambda x: np.cumprod(x.astype(complex))[-1]),
    "median": ("matrix", np.median),
    "percentile": ("matrix", lambda x: np.percentile(x, [10, 60])),
    "sort": ("vector", np.sort),
    "argsort": ("vector", np.argsort),
    "unique": ("matrix", np.unique),
    "unique, counted": ("vector", lambda x: np.unique(x, return_inverse=True, return_counts=True)),
    "union1d": ("vector", lambda x: np.union1d(x, x + 1)),
    "isin": ("matrix", lambda x: np.isin(np.arange(3), x)),
    "searchsorted": ("vector", lambda x: np.searchsorted(x * 0 + 1, [0.0, 2.0])),
    "bincount": ("vector", lambda x: np.bincount(x.astype(int))),
    "histogram": ("matrix", lambda x: np.histogram(x, 4)),
    "histogram between limits": ("matrix", lambda x: np.histogram(x, 4, (0, 16))),
    "bitwise_or": ("matrix", lambda x: np.bitwise_or.reduce(x.astype(int), axis=None)),
    "fmax": ("matrix", lambda x: np.fmax.reduce(x, axis=None)),
    "a mask": ("vector", lambda x: x[x > 1]),
    "qr": ("tall", lambda x: np.linalg.qr(x, mode="r")),
    "svd": ("tall", lambda x: np.linalg.svd(x, compute_uv=False)),
    "full": ("matrix", lambda x: x),
}
# These compute sums of arrays that they make of theirs.
OF_OTHERS = ("sum of sums", "cov", "union1d")
BACKENDS = ["threads", pytest.param("gloo", marks=needs_linux)]


def _mesh() -> Any:
    """Return a mesh of all ranks over a group of its own, which may break."""
    return meshdist.DeviceMesh.from_group(meshdist.new_group(), "cpu", mesh_dim_names=("x",))


def _values(result: Any) -> list[Any]:
    """Return an operation's results as whole arrays."""
    if isinstance(result, (tuple, list)):
        return [value for each in result for value in _values(each)]
    return [result.full() if isinstance(result, DTensor) else result]


def _words(placement: Any) -> str:
    return f"[{placement!r}]"


def _told(mesh: Any, whole: Any, mine: Any, use: Callable[[Any], Any]) -> str:
    with pytest.raises(meshdist.DistBackendError) as info:
        _values(use(distribute_tensor(whole, mesh, [mine], None)))
    return str(info.value)


def _used(case: str) -> tuple[str, Any]:
    """Return what ranks are told whose layouts differ, after all of them have used each of the two, in turns."""
    kind, use = CASES[case]
    whole, *placements = KINDS[kind]
    mesh = _mesh()
    replicated = _values(use(distribute_tensor(whole, mesh, None, None)))
    for placement in placements * 3:
        for wanted, got in zip(
            replicated, _values(use(distribute_tensor(whole, mesh, [placement], None))), strict=True
        ):
            np.testing.assert_allclose(got, wanted, atol=1e-9)
    return _told(mesh, whole, placements[meshdist.get_rank()], use)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_with_different_layouts_are_told(worlds: Any, backend: str, case: str) -> None:
    _, one, other = KINDS[CASES[case][0]]
    for said in worlds.world(backend, 2).run(_used, case):
        assert "the ranks disagree" in said
        first, second = (line for line in said.splitlines() if " calls " in line)
        if case in OF_OTHERS:
            assert "[Shard(" in first
            assert "[Shard(" in second
            continue
        assert _words(one) in first
        assert _words(other) in second


def _known_before(case: str) -> str:
    """Return what ranks are told of which one has compared its layout before, and the other has not."""
    kind, use = CASES[case]
    whole, one, other = KINDS[kind]
    mesh = _mesh()
    for _ in range(3):
        _values(use(distribute_tensor(whole, mesh, [one], None)))
    return _told(mesh, whole, other if meshdist.get_rank() else one, use)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["sum", "matmul", "argmax", "median", "sort"])
def test_one_of_the_layouts_was_compared_before(worlds: Any, backend: str, case: str) -> None:
    for said in worlds.world(backend, 2).run(_known_before, case):
        assert "the ranks disagree" in said
        assert _words(KINDS[CASES[case][0]][2]) in said


# ---- Two axes


def _on_two_axes(differing: int) -> str:
    mesh = mesh_2x2()
    swapped = meshdist.get_rank() == differing
    placements = [Shard(1), Shard(0)] if swapped else [Shard(0), Shard(1)]
    try:
        total = float(distribute_tensor(MATRIX, mesh, placements, None).sum())
    except meshdist.DistBackendError as error:
        return str(error)
    return f"it got {total}"


@pytest.mark.parametrize("differing", [0, 3])
def test_one_of_four_ranks_differs_on_two_axes(differing: int) -> None:
    for said in meshdist.run(_on_two_axes, 4, (differing,), timeout=30):
        assert "computed from [Shard(0), Shard(1)] of (4, 4)" in said
        assert "computed from [Shard(1), Shard(0)] of (4, 4)" in said


def _panels() -> str:
    mesh = meshdist.init_device_mesh("cpu", (1, 2))
    a = distribute_tensor(MATRIX, mesh, [Shard(0), Shard(1)], None)
    for _ in range(2):
        np.testing.assert_allclose(summa(a, a).full(), MATRIX @ MATRIX)
    sizes = (1, 3) if mesh.get_rank() else (2, 2)
    b = distribute_tensor(MATRIX, mesh, [Shard(0), Shard(1, sizes)], None)
    with pytest.raises(meshdist.DistBackendError) as info:
        summa(a, b)
    return str(info.value)


def test_panels_of_matrices() -> None:
    for said in meshdist.run(_panels, 2):
        assert "in summa of [Shard(0), Shard(1)] of (4, 4) and [Shard(0), Shard(1, sizes=(1, 3))] of (4, 4)" in said


def _part_of_two_axes() -> str:
    mesh = mesh_2x2()
    rows = distribute_tensor(MATRIX, mesh, [Shard(0), Shard(1)], None)
    for _ in range(2):  # what is left pending still has its origin
        assert float(rows.sum().redistribute([Replicate(), Partial()])) == MATRIX.sum()
    return with_origin("", rows.sum().redistribute([Replicate(), Partial()])._origin)


def test_a_sum_that_is_computed_along_one_axis_keeps_its_origin() -> None:
    assert set(meshdist.run(_part_of_two_axes, 4)) == {", computed from [Shard(0), Shard(1)] of (4, 4)"}


# ---- Functions of blocks, and gradients


def _mapped() -> str:
    mesh = _mesh()
    total = local_map(lambda block: block.sum(), {"x": Partial()})
    for placement in [Shard(0), Shard(1)] * 2:
        assert float(total(distribute_tensor(MATRIX, mesh, [placement], None))) == MATRIX.sum()
    return _told(mesh, MATRIX, Shard(meshdist.get_rank()), total)


def test_sums_of_blocks() -> None:
    for said in meshdist.run(_mapped, 2):
        assert "computed from [Shard(0)] of (4, 4)" in said
        assert "computed from [Shard(1)] of (4, 4)" in said


def _gradient(x: Any) -> Any:
    return grad(lambda w: ((w * x) ** 2).mean())(distribute_tensor(np.ones(()), x.mesh, None, None))


def _of_gradients() -> str:
    mesh = _mesh()
    for placement in [Shard(0), Shard(1)] * 2:
        assert _values(_gradient(distribute_tensor(MATRIX, mesh, [placement], None))) == [2 * (MATRIX**2).mean()]
    return _told(mesh, MATRIX, Shard(meshdist.get_rank()), _gradient)


def test_gradients() -> None:
    for said in meshdist.run(_of_gradients, 2):
        assert "[Shard(0)] of (4, 4)" in said
        assert "[Shard(1)] of (4, 4)" in said


# ---- Without messages


def test_dry_run() -> None:
    with meshdist.dry_run(world_size=4, rank=1):
        x = distribute_tensor(MATRIX, mesh_2x2(), [Shard(0), Shard(1)], None)
        for _ in range(2):
            assert x.sum().full().shape == np.median(x).full().shape == ()
        assert x.sum().redistribute([Replicate(), Replicate()])._origin is None


def _ever_new_blocks() -> int:
    mesh = _mesh()
    x = distribute_tensor(np.arange(64.0), mesh, [Shard(0)], None)
    for limit in (3, 5, 7, 40):
        chosen = x[x > limit]
        assert float(chosen.sum()) == np.arange(limit + 1, 64).sum()
        assert float(np.median(chosen)) == (limit + 64) / 2
    return len([words for words in mesh.get_group().hooks.compared if "sizes=..." in words])


def test_blocks_of_ever_new_sizes_are_compared_once() -> None:
    assert meshdist.run(_ever_new_blocks, 2) == [2, 2]


def test_origins() -> None:
    rows, columns, whole = (ArrayLayout.of((4, 4), (2,), [p]) for p in (Shard(0), Shard(1), Replicate()))
    assert origin_of(rows, whole, rows, columns) == ("[Shard(0)] of (4, 4)", "[Shard(1)] of (4, 4)")
    assert origin_of(whole) is None
    assert merged(None, None) is None
    assert merged(None, origin_of(columns), origin_of(rows), origin_of(columns)) == origin_of(columns, rows)
    many = merged(*[(str(number),) for number in range(1000)])
    assert many is not None
    assert merged(many, ("one more",)) == many  # of a sum that goes on without end
    assert with_origin("of it", origin_of(rows)) == "of it, computed from [Shard(0)] of (4, 4)"
