"""At debug level DETAIL, ranks whose operations on arrays differ are told, also where nothing would be sent."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from placed_arrays import mesh_2x2
from worlds import needs_linux

import meshdist
from meshdist.autograd import grad
from meshdist.tensor import DTensor, Shard, distribute_tensor, halo, local_map, map_overlap, summa, zeros

DETAIL, OFF = meshdist.DebugLevel.DETAIL, meshdist.DebugLevel.OFF
WHOLE = np.arange(24.0).reshape(6, 4)


def set_level(level: meshdist.DebugLevel) -> None:
    """Set the level on all ranks; those that are threads have one level, so none may be elsewhere meanwhile."""
    meshdist.barrier()
    meshdist.set_debug_level(level)
    meshdist.barrier()


def rows(mesh: Any) -> DTensor:
    return distribute_tensor(WHOLE, mesh, [Shard(0)], None)


def assign(x: DTensor, key: Any, value: Any) -> None:
    x[key] = value


# What a rank calls, by its number, and a part of the texts of the ranks 0 and 1.
CASES: dict[str, tuple[Callable[[DTensor, int], Any], str, str]] = {
    "an index": (lambda x, rank: x[:, rank], "getitem({x}, (:, 0))", "getitem({x}, (:, 1))"),
    "indices": (lambda x, rank: x[[0, rank]], "getitem({x}, [0, 0])", "getitem({x}, [0, 1])"),
    "an assigned value": (lambda x, rank: assign(x, ..., rank), "({x}, Ellipsis, 0)", "({x}, Ellipsis, 1)"),
    "a number": (lambda x, rank: x * rank, "np.multiply({x}, 0)", "np.multiply({x}, 1)"),
    "a number, in place": (lambda x, rank: x.__iadd__(rank), "np.add({x}, 0, out=({x},))", "np.add({x}, 1, "),
    "a number of a different type": (lambda x, rank: x * (rank or 1.0), "np.multiply({x}, 1.0)", "np.multiply({x}, 1)"),
    "a small array": (lambda x, rank: x + np.full(4, rank), "int64 (4,) [0, 0, 0, 0]", "int64 (4,) [1, 1, 1, 1]"),
    "a large array": (lambda x, rank: x + np.full((6, 4), rank), "int64 (6, 4) with ch", "int64 (6, 4) with checksum"),
    "a large array of a different layout in memory": (
        lambda x, rank: x + np.full((4, 6), rank, "f4").T,
        "float32 (6, 4) with checksum",
        "float32 (6, 4) with checksum",
    ),
    "an operand": (lambda x, rank: x + (x.mT if rank else x), "np.add({x}, {x})", "np.swapaxes({x}, -1, -2)"),
    "functions": (lambda x, rank: (np.mean if rank else np.sum)(x, axis=1), "np.sum({x}, axis=1)", "np.mean({x}, axis"),
    "operators": (lambda x, rank: x - 1 if rank else x + 1, "np.add({x}, 1)", "np.subtract({x}, 1)"),
    "an operator and a function": (lambda x, rank: np.exp(x) if rank else -x, "np.negative({x})", "np.exp({x})"),
    "an axis": (lambda x, rank: x.sum(axis=rank), "np.sum({x}, 0)", "np.sum({x}, 1)"),
    "an axis of a ufunc": (lambda x, rank: np.add.reduce(x, axis=rank), "np.add.reduce({x}, axis=0)", "({x}, axis=1)"),
    "lists": (lambda x, rank: np.hstack([x] * (1 + rank)), "np.hstack([{x}])", "np.hstack([{x}, {x}])"),
    "dtypes": (lambda x, rank: x.astype("f4" if rank else int), "astype({x}, int)", "astype({x}, 'f4')"),
    "placements": (
        lambda x, rank: x.redistribute([Shard(rank)]),
        "redistribute({x}, [Shard(0)])",
        "redistribute({x}, [Shard(1)])",
    ),
    "a root": (lambda x, rank: x.full(root=rank), "full({x}, root=0)", "full({x}, root=1)"),
    "halos": (lambda x, rank: halo(x, (0, rank)), "halo({x}, (0, 0), False)", "halo({x}, (0, 1), False)"),
    "a method and a function": (lambda x, rank: halo(x, 1) if rank else x.copy(), "np.copy({x})", "halo({x}, 1, Fal"),
    "a stencil": (lambda x, rank: map_overlap(np.copy, x, (0, rank)), "(0, 0), False)", "(0, 1), False)"),
    "an argument of a function": (
        lambda x, rank: local_map(lambda block, _: block, x.placements)(x, str(rank)),
        "local_map({x}, '0')",
        "local_map({x}, '1')",
    ),
    "a pending sum": (
        lambda x, rank: x * 2,
        "np.multiply(float64 () as [Partial('sum')], computed from [Shard(0)] of (6, 4), 2)",
        "np.multiply(float64 () as [Partial('sum')], computed from [Shard(1)] of (6, 4), 2)",
    ),
    "a collective": (lambda x, rank: x + 1 if rank else x.mesh.barrier(), "barrier()", "np.add({x}, 1)"),
    "a new array": (lambda x, rank: x + 1 if rank else zeros(3, mesh=x.mesh), "zeros((3,) as [", "np.add({x}, 1)"),
}


@pytest.fixture(autouse=True)
def _level_as_before() -> Iterator[None]:
    logger = logging.getLogger("meshdist")
    level, handlers = logger.level, list(logger.handlers)
    logger.disabled = True
    yield
    logger.disabled = False
    logger.setLevel(level)
    logger.handlers[:] = handlers
    meshdist.run(lambda: None, 1)  # operations follow the level that a world finds when it begins


def _told(case: str) -> str:
    (call, *_), rank = CASES[case], meshdist.get_rank()
    mesh = meshdist.DeviceMesh.from_group(meshdist.new_group(), "cpu")
    x = rows(mesh)
    _ = x * 0, x * 1, x + 1, x - 1  # operators know these calls now, and compare them all the same
    sums = [distribute_tensor(WHOLE, mesh, [Shard(dim)], None).sum() for dim in (0, 1)]
    set_level(DETAIL)
    try:
        with pytest.raises(meshdist.DistBackendError) as info:
            call(x if case != "a pending sum" else sums[rank], rank)
    finally:
        set_level(OFF)
    return str(info.value)


@pytest.mark.parametrize("backend", ["threads", pytest.param("gloo", marks=needs_linux)])
@pytest.mark.parametrize("case", CASES)
def test_ranks_whose_calls_differ_are_told(worlds: Any, backend: str, case: str) -> None:
    for said in worlds.world(backend, 2).run(_told, case):
        assert "the ranks disagree" in said
        calls = [line for line in said.splitlines() if " calls " in line]
        for line, wanted in zip(calls, CASES[case][1:], strict=True):
            assert wanted.replace("{x}", "float64 (6, 4) as [Shard(0)]") in line
            assert "at test_compared_calls.py:" in line


def _uses(mesh: Any) -> list[Any]:
    """Return results of calls that all ranks make alike, some of which make others."""
    x = distribute_tensor(WHOLE, mesh, {"dp": Shard(0), "tp": Shard(1)}, None)
    x[1:3, 2] += 5
    x *= 2
    blocks = local_map(lambda block: block + meshdist.get_rank(), x.placements)(x)
    mask = x % 3 == 0
    used = [
        float(x.sum()),
        x.var(axis=0),
        np.linalg.norm(x),
        x.redistribute({"dp": Shard(0)})[mask.redistribute({"dp": Shard(0)})],
        np.sort(x, axis=0),
        np.median(x),
        blocks,
        np.where(mask, x, np.arange(4)),
        summa(x, x.T.redistribute({"dp": Shard(0), "tp": Shard(1)})),
        np.einsum("ij,ij->j", x, x),
        map_overlap(np.cumsum, x[:, 0], 6),
        np.unique(x.astype(int), return_counts=True)[1],
        grad(lambda w: anp.mean((anp.tanh(x @ w) - 1) ** 2))(distribute_tensor(np.ones((4, 2)), mesh, {}, None)),
        [float(row.sum()) for row in x],
    ]
    if meshdist.get_rank() == 1:  # what one rank may do alone
        assert str(x)
        assert repr(x)
        assert (x.shape, np.shape(x), np.ndim(x), np.size(x)) == ((6, 4), (6, 4), 2, 24)
        assert x.to_local().shape == (3, 2)
        x.show()
    return [each.full() if isinstance(each, DTensor) else each for each in used]


def _at_both_levels() -> None:
    found = []
    for level in (OFF, DETAIL, OFF):
        set_level(level)
        mesh = mesh_2x2()
        with mesh.account() as account:
            results = _uses(mesh)
        found.append((results, account.total().calls, account.total().nbytes))
    (wanted, *counts), *others = found
    for results, *other_counts in others:
        assert other_counts == counts  # an account is of the program
        for one, other in zip(wanted, results, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_equal_calls_have_the_same_results_and_accounts() -> None:
    meshdist.run(_at_both_levels, 4, timeout=60)


def _outside() -> list[float]:
    set_level(DETAIL)
    mesh = meshdist.DeviceMesh("cpu", [1, 3])
    if mesh.get_coordinate() is None:
        return []
    return [float((rows(mesh) * 2).sum())]


def test_ranks_outside_of_the_mesh_compare_nothing() -> None:
    assert meshdist.run(_outside, 4, timeout=30) == [[], [552.0], [], [552.0]]


def _compared_no_longer() -> list[float]:
    mesh, rank = meshdist.init_device_mesh("cpu", (2,)), meshdist.get_rank()
    x = rows(mesh)
    set_level(DETAIL)
    assert float((x * 2).sum()) == 552.0
    set_level(OFF)
    return [float((x * rank).to_local()[0, 1])]


def test_at_other_levels_nothing_is_compared() -> None:
    assert meshdist.run(_compared_no_longer, 2, timeout=30) == [[0.0], [13.0]]


def test_in_a_dry_run_there_is_nothing_to_compare() -> None:
    meshdist.set_debug_level(DETAIL)
    with meshdist.dry_run(world_size=4, rank=1) as dry:
        x = distribute_tensor(WHOLE, mesh_2x2(), {"dp": Shard(0)}, None)
        before = dry.account.total().calls
        y = np.tanh(x) * 2
        assert y.to_local().shape == (3, 4)
        assert dry.account.total().calls == before
