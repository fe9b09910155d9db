"""Arguments and arrays at the edges of what NumPy takes, against NumPy."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from weakref import ref

import numpy as np
import pytest
from array_layouts import random_layout
from placed_arrays import assert_same, compare, on_meshes

import meshdist
from meshdist.tensor import (
    DTensor,
    PlacementError,
    Replicate,
    Shard,
    arange,
    distribute_tensor,
    full,
    local_map,
    map_overlap,
    random,
    zeros,
)
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.array_reductions import identity_of
from meshdist.tensor.redistribution_search import plan


def cut(array: Any, mesh: Any, dim: int = 0) -> DTensor:
    return distribute_tensor(array, mesh, [Shard(dim)], src_data_rank=None)


def raises(error: type[Exception], function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error):
        function(*args, **kwargs)


def on_ranks(program: Callable[[Any], Any], size: int = 2) -> Any:
    return meshdist.run(lambda: program(meshdist.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))), size)


# ---- Reductions


def test_reductions() -> None:
    def program(mesh: Any) -> None:
        x = cut(np.arange(6).reshape(3, 2), mesh)
        assert_same(np.max(x, initial=0), 5)
        # All ranks raise for an initial value that is no integer, the second time too.
        raises(OverflowError, np.max, x, initial=np.inf)
        raises(OverflowError, np.max, x, initial=np.inf)
        assert_same(np.max(x, initial=9), 9)

        for axis in (np.array(0), np.int8(1), (np.array(0),)):
            for function in (np.sum, np.mean, np.median):
                y = x if function is not np.median else x.redistribute()
                assert_same(function(y, axis=axis), function(np.arange(6).reshape(3, 2), axis=axis))
        assert_same(np.argmax(x, axis=np.array(0)), [2, 2])  # type: ignore[call-overload]
        raises(TypeError, np.sum, x, axis=[0])

        raises(TypeError, np.any, x, initial=True)
        raises(TypeError, np.all, x, initial=True)
        assert bool(np.any(x))
        assert not bool(np.all(x))

        assert_same(np.median(x, axis=()), np.median(np.arange(6).reshape(3, 2), axis=()))

    on_ranks(program)
    assert identity_of(np.bitwise_and, np.dtype(np.uint8)) == 255


def test_means_of_half_precision_are_cast_when_they_are_computed() -> None:
    def program(mesh: Any) -> None:
        whole = np.array([60000, 60000, 60000, -60000], np.float16)
        assert_same(np.mean(cut(whole, mesh)), np.mean(whole))
        whole = np.array([1, 1.001, 2049, 3, 0.33, 7], np.float16)
        assert np.mean(cut(whole, mesh)).full() == np.mean(whole)

    on_ranks(program)
    on_ranks(program, 3)


def test_accumulating_complex_infinities_over_an_empty_block() -> None:
    def program(mesh: Any) -> None:
        whole = np.array([complex(-np.inf, -np.inf)] * 2)
        x = distribute_tensor(whole, mesh, [Shard(0, sizes=(1, 0, 1))], src_data_rank=None)
        assert_same(np.maximum.accumulate(x), np.maximum.accumulate(whole))
        assert_same(np.minimum.accumulate(-x), np.minimum.accumulate(-whole))

    on_ranks(program, 3)


# ---- Making


def test_arange_has_the_dtype_of_numpy() -> None:
    def program(mesh: Any) -> None:
        for args in ((3.0,), (0.0,), (3,), (0, 3, 1.0), (0, 2.5), (np.float32(3),), (5, 1, -2), (2.0, 1), (True,)):
            assert_same(arange(*args, mesh=mesh, placements=[Shard(0)]), np.arange(*args))
        for args, dtype in (((2,), bool), ((1, 2), bool), ((0.5, 3), int), ((3,), np.float32)):
            assert_same(arange(*args, dtype=dtype, mesh=mesh, placements=[Shard(0)]), np.arange(*args, dtype=dtype))
        raises(TypeError, arange, 3, dtype=bool, mesh=mesh)

    on_ranks(program)


def test_shapes_are_integers_that_are_not_negative() -> None:
    def program(mesh: Any) -> None:
        for shape in ((2.9,), 1.5, True, "3"):
            raises(TypeError, zeros, shape, mesh=mesh)
        for shape in (-1, (2, -1)):
            raises(ValueError, zeros, shape, mesh=mesh)
        assert zeros(np.array([2, 3]), mesh=mesh).shape == (2, 3)
        assert zeros(np.array(2), mesh=mesh).shape == (2,)

    on_ranks(program, 1)


def test_likes() -> None:
    def program(mesh: Any) -> None:
        x = cut(np.arange(3.0), mesh)
        likes: Any = (np.zeros_like, np.ones_like, partial(np.full_like, fill_value=7))
        for like in likes:
            assert_same(like(a=x, dtype=int, device="cpu"), like(a=np.arange(3.0), dtype=int))
            raises(ValueError, like, x, device="tpu")
        assert np.empty_like(x, device=None).layout is x.layout  # type: ignore[attr-defined]
        assert_same(np.full_like(x, [1, 2, 3][0], shape=(2, 2)), np.full((2, 2), 1.0))

    on_ranks(program)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_blocks_are_plain_arrays() -> None:
    def program(mesh: Any) -> None:
        x = DTensor.from_local(np.matrix([[1, 2]]), mesh, [Shard(0)])
        assert type(x.to_local()) is np.ndarray
        y = DTensor.from_callback((2, 2), int, mesh, [Shard(0)], lambda index: np.matrix(np.ones((2, 2), int))[index])
        assert_same(y * y, np.ones((2, 2), int))
        masked = np.ma.masked_array([1, 2], [True, False])
        raises(TypeError, DTensor.from_local, masked, mesh, [Shard(0)])
        raises(TypeError, distribute_tensor, masked, mesh, [Shard(0)], None)
        raises(TypeError, DTensor.from_callback, (2,), int, mesh, [Replicate()], lambda index: masked)

    on_ranks(program)


def test_distributing_bfloat16() -> None:
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)

    def program(mesh: Any) -> Any:
        x = distribute_tensor(np.arange(3).astype(bfloat16), mesh, [Shard(0)])
        y = DTensor.from_local(np.ones(2, bfloat16), mesh, [Shard(0)])
        return x.dtype, y.dtype, x.full().astype(float).tolist()

    assert on_ranks(program) == [(bfloat16, bfloat16, [0, 1, 2])] * 2


def test_comparing_replicas() -> None:
    def program(mesh: Any) -> None:
        block = np.arange(6.0).reshape(2, 3)
        given = block.T.copy().T if mesh.get_rank() else block  # of other strides on one rank
        DTensor.from_local(given, mesh, [Replicate()], run_check=True)
        DTensor.from_local(np.array(np.nan), mesh, [Replicate()], run_check=True)
        raises(ValueError, DTensor.from_local, given + mesh.get_rank(), mesh, [Replicate()], None, True)

    on_ranks(program)


def test_placements_given_twice() -> None:
    def program(mesh: Any) -> None:
        twice: Any = {"dp": Shard(0), 0: Shard(1)}
        raises(PlacementError, zeros, (2, 2), mesh=mesh, placements=twice)
        raises(PlacementError, zeros, (2, 2), mesh=mesh, placements={0: Shard(0), -1: Replicate()})

    on_ranks(program)


def test_bounds_of_random_integers() -> None:
    def program(mesh: Any) -> None:
        generator = random(0)
        raises(ValueError, generator.integers, 5, 5, (1,), mesh=mesh, placements=[Shard(0)])
        assert generator.integers(5, 5, (0,), mesh=mesh).shape == (0,)
        assert generator.integers(5, 6, (1,), mesh=mesh, placements=[Shard(0)]).full().tolist() == [5]

    on_ranks(program)


# ---- Copies and memory


def test_copies() -> None:
    def program(mesh: Any) -> None:
        x = cut(np.arange(3.0), mesh)
        for made in (copy.copy(x), copy.deepcopy(x), copy.deepcopy([x])[0]):
            assert (type(made), made.mesh, made.layout) == (DTensor, mesh, x.layout)
            made += 1
            assert_same(x, np.arange(3.0))

    on_ranks(program)


def test_stencils_get_memory_of_their_own() -> None:
    def add(block: Any) -> Any:
        block += 1
        return block

    def program(mesh: Any) -> None:
        x = cut(np.arange(4.0), mesh)
        for width, array in ((0, x), (1, zeros((2,), mesh=mesh)), (0, distribute_tensor(np.array(0.0), mesh))):
            before = array.full()
            made = map_overlap(add, array, width)
            assert_same(made, before + 1)
            assert_same(array, before)
            assert not np.shares_memory(made.to_local(), array.to_local())

    on_ranks(program)


def test_numbers_do_not_make_local_map_send() -> None:
    def program(mesh: Any) -> None:
        x = cut(np.arange(4.0), mesh)
        scaled = local_map(lambda block, by, plus: block * by + plus, [Shard(0)])
        assert_same(scaled(x, 0.0, plus=0), np.zeros(4))
        if mesh.get_rank() == 0:  # alone: a message to the other rank would never be answered
            for by in range(5):
                assert scaled(x, float(by), plus=by).to_local().tolist() == [by, 2 * by]

    on_ranks(program)


def test_twins_of_meshes_are_freed_with_them() -> None:
    from meshdist.mesh.device_mesh import DeviceMesh
    from meshdist.tensor.distribution import on_device
    from meshdist.tensor.dtensor import wrap

    class OnDevice(np.ndarray[Any, Any]):
        def get(self) -> Any:
            return np.asarray(self)

    def program() -> Any:
        mesh = DeviceMesh("cpu", [0])
        vars(mesh)["_device_type"] = "cuda"  # as on a GPU
        x = zeros((2,), mesh=DeviceMesh("cpu", [0]))
        on_gpu = wrap(np.zeros(2).view(OnDevice), x.layout, mesh)
        made = on_device(on_gpu, "cpu")
        assert on_device(on_gpu, "cpu").mesh is made.mesh is not mesh
        return ref(mesh), ref(made.mesh)

    def freed() -> bool:
        refs = program()
        gc.collect()
        return all(each() is None for each in refs)

    assert meshdist.run(freed, 1) == [True]


# ---- Sorting, repeating, methods


def test_sorting_all_elements() -> None:
    def program(mesh: Any) -> None:
        whole = np.array([[5, 2], [9, 1], [3, 7], [4, 0]])
        x = cut(whole, mesh)
        assert_same(np.sort(x, axis=None), np.sort(whole, axis=None))
        assert_same(np.argsort(x, axis=None), np.argsort(whole, axis=None))

    on_ranks(program)


def test_repeating_nothing() -> None:
    def program(mesh: Any) -> None:
        assert_same(np.repeat(cut(np.zeros(0), mesh), []), np.zeros(0))
        raises(ValueError, np.repeat, cut(np.zeros(3), mesh), [])
        raises(TypeError, np.repeat, cut(np.zeros(0), mesh), np.zeros(0))

    on_ranks(program)


def test_methods() -> None:
    functions: list[Callable[[Any], Any]] = [
        lambda x: x.repeat(2, 0),
        lambda x: x.trace(),
        lambda x: x.diagonal(1),
        lambda x: x.cumprod(0),
        lambda x: x.reshape(2, 2, 3, order="C"),
        lambda x: x.mean(0, "f4"),
        lambda x: x.sum(0, "f4"),
        lambda x: x.round(1, out=x.copy()),
        lambda x: x.var(0, "f4"),
        lambda x: x.max(1, x[:, 0] * 1.0),
        lambda x: x.take([1], 1),
    ]

    def program(mesh: Any, rng: Any) -> None:
        whole = np.linspace(1, 2, 12).reshape(4, 3)
        layout = ArrayLayout.of((4, 3), mesh.shape, [Shard(0), *[Replicate()] * (mesh.ndim - 1)])
        for function in functions:
            compare(function, [whole], [layout], mesh)

    on_meshes(program, meshes=((2,),))


# ---- What redistributions send


def test_what_exchanges_send_is_what_their_parts_hold() -> None:
    rng = np.random.default_rng(3)
    counted = 0
    for _ in range(300):
        mesh_shape = [(4,), (2, 3), (2, 2, 2)][int(rng.integers(3))]
        source, target = (random_layout(rng, (7, 5), mesh_shape) for _ in range(2))
        for step in plan(source, target).steps:
            if step.collective == "all_to_all":
                sent = np.broadcast_to(step.sent(step.elements()), mesh_shape)
                for coordinate in product(*map(range, mesh_shape)):
                    parts: Any = step.parts_to(coordinate)  # type: ignore[attr-defined]
                    wanted = sum(math.prod(part.stop - part.start for part in block) for _, block in parts)
                    assert sent[coordinate] == wanted, (source, target, step)
                counted += 1
    assert counted > 20


@pytest.mark.parametrize("mesh_shape", [(512,), (64, 64)])
def test_what_a_large_mesh_sends_takes_few_looks_at_blocks(
    mesh_shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [ArrayLayout.of((8192, 8192), mesh_shape, [Shard(dim)] * len(mesh_shape)) for dim in (0, 1)]
    found = plan(*layouts)
    looks = []
    index = ArrayLayout.index
    monkeypatch.setattr(ArrayLayout, "index", lambda self, at: looks.append(at) or index(self, at))  # type: ignore[func-returns-value]
    assert sum(found.most_sent) >= 8192**2 // math.prod(mesh_shape) // 2
    assert len(looks) < 5_000


@pytest.mark.parametrize("source", [Shard(0), Shard(0, sizes=(0, 8192) + (0, 0) * 2047)])
def test_the_parts_of_an_exchange_on_a_large_mesh_take_few_looks_at_blocks(
    source: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [ArrayLayout.of((8192,), (4096,), [placement]) for placement in (source, Shard(0, (1, 3) * 2048))]
    (step,) = plan(*layouts).steps
    looks = []
    index = ArrayLayout.index
    monkeypatch.setattr(ArrayLayout, "index", lambda self, at: looks.append(at) or index(self, at))  # type: ignore[func-returns-value]
    assert step.parts_from((2001,))  # type: ignore[attr-defined]
    assert len(step.parts_to((2,))) <= 3  # type: ignore[attr-defined]
    assert len(looks) < 20


def test_the_parts_of_an_exchange_over_two_axes_take_few_looks_at_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    placements = [Shard(0), Shard(1)]
    layouts = [ArrayLayout.of((8192, 8192), (256, 256), each) for each in (placements, placements[::-1])]
    (step,) = plan(*layouts).steps
    looks = []
    index = ArrayLayout.index
    monkeypatch.setattr(ArrayLayout, "index", lambda self, at: looks.append(at) or index(self, at))  # type: ignore[func-returns-value]
    assert step.parts_to((3, 7)) == [(7 * 256 + 3, (slice(96, 128), slice(224, 256)))]  # type: ignore[attr-defined]
    assert len(looks) < 20


POWERS: dict[str, Callable[[Any], Any]] = {
    "x ** -1": lambda x: x**-1,
    "x ** -2": lambda x: x**-2,
    "x **= -3": lambda x: x.__ipow__(-3),
    "np.power(x, -1)": lambda x: np.power(x, -1),
    "a scalar": lambda x: x ** np.int64(-1),
    "an array": lambda x: x ** np.array([1, -1]),
    "an array of them": lambda x: np.power(x, [-1]),
}


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.bool_])
@pytest.mark.parametrize("case", POWERS)
def test_negative_powers_of_integers_raise_on_all_ranks(case: str, dtype: Any) -> None:
    def program() -> None:
        mesh = meshdist.init_device_mesh("cpu", (3,), mesh_dim_names=("a",))
        for whole in (np.array([2, 1]), np.array([2.0, 1.0])):  # operators know other powers of either, and of floats
            x = distribute_tensor(whole, mesh, {"a": Shard(0)}, None)
            _ = np.power(x, 3), x**3, x**-3.0
        x = distribute_tensor(np.array([2, 1], dtype), mesh, {"a": Shard(0)}, None)
        with pytest.raises(ValueError, match="Integers to negative integer powers are not allowed"):
            POWERS[case](x)
        assert (x**3).full().tolist() == [(dtype(2) ** 3).item(), 1]

    meshdist.run(program, 3, timeout=30)


def test_powers_that_do_not_raise() -> None:
    def program() -> None:
        mesh = meshdist.init_device_mesh("cpu", (3,), mesh_dim_names=("a",))
        for whole, power, options in (
            (np.array([2, 4]), -1.0, {}),
            (np.array([2.0, 4.0]), -3, {}),
            (np.array([2, 4]), -1, {"dtype": float}),
            (np.array([2, 4]), -1, {"where": np.array([False, False]), "out": np.array([7, 8])}),
            (np.zeros(0, int), -1, {}),
        ):
            x = distribute_tensor(whole, mesh, {"a": Shard(0)}, None)
            placed = {
                name: distribute_tensor(value, mesh, {"a": Shard(0)}, None) if name == "out" else value
                for name, value in options.items()
            }
            result, wanted = np.power(x, power, **placed), np.power(whole, power, **options)
            assert result.dtype == wanted.dtype
            np.testing.assert_allclose(result.full(), wanted)
        x = distribute_tensor(np.array([2, 4], np.uint8), mesh, {"a": Shard(0)}, None)
        with pytest.raises(OverflowError):  # as NumPy on any array
            x**-1

    meshdist.run(program, 3, timeout=30)


JOINED: dict[str, Callable[[Any], Any]] = {
    "concatenate": np.concatenate,
    "concatenate, axis=None": lambda x: np.concatenate(x, axis=None),
    "stack": np.stack,
    "vstack": np.vstack,
    "hstack": np.hstack,
    "dstack": np.dstack,
    "column_stack": np.column_stack,
}


@pytest.mark.parametrize("case", JOINED)
def test_the_rows_of_one_array_are_joined_each_time(case: str) -> None:
    def program() -> None:
        mesh = meshdist.init_device_mesh("cpu", (3,), mesh_dim_names=("a",))
        whole = np.arange(6.0).reshape(2, 3)
        x = distribute_tensor(whole, mesh, {"a": Shard(0)}, None)
        for _ in range(3):  # from the second time on, the call is known
            np.testing.assert_array_equal(JOINED[case](x).full(), JOINED[case](list(whole)))

    meshdist.run(program, 3, timeout=30)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    "function",
    [
        *(np.sort, np.argsort, np.unique, np.median, partial(np.quantile, q=[0.1, 0.9]), np.union1d),
        *(np.nanargmax, np.nanargmin),
    ],
)
def test_what_depends_on_the_elements_ends_in_dry_runs(function: Any, rank: int) -> None:
    with meshdist.dry_run(world_size=4, rank=rank):
        mesh = meshdist.init_device_mesh("cpu", (4,))
        for rows in (9, 40):  # of nine, the last rank has none
            x = cut(np.arange(float(rows))[::-1], mesh)
            found = function(x, x) if function is np.union1d else function(x)
            if function in (np.sort, np.argsort):
                assert found.to_local().shape == x.to_local().shape


STACKS = {
    "some complex": [np.eye(2), [[0.0, 1], [-1, 0]], np.eye(2), np.eye(2)],
    "all complex, and a rank without a matrix": [[[0.0, 1], [-1, 0]]] * 2,
    "none complex": [np.eye(2)] * 5,
}


@pytest.mark.parametrize("case", STACKS)
def test_eigenvalues_are_complex_on_all_ranks_or_on_none(case: str) -> None:
    def program() -> None:
        mesh = meshdist.init_device_mesh("cpu", (3,), mesh_dim_names=("a",))
        whole = np.array(STACKS[case])
        for _ in range(2):
            assert_same(np.linalg.eigvals(cut(whole, mesh)), np.linalg.eigvals(whole))
            for found, wanted in zip(np.linalg.eig(cut(whole, mesh)), np.linalg.eig(whole), strict=True):
                assert_same(found, wanted)

    meshdist.run(program, 3, timeout=30)


def test_the_dtype_of_quantiles_does_not_depend_on_a_ranks_values() -> None:
    def program() -> Any:
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        whole = np.ones((4, 6), np.float32)
        whole[0] = np.nan
        return np.nanquantile(cut(whole, mesh), np.float64(0.5), axis=1).full().tolist()

    with pytest.warns(RuntimeWarning, match="All-NaN slice"):
        found = meshdist.run(program, 2, timeout=30)
    np.testing.assert_array_equal(found, [[np.nan, 1, 1, 1]] * 2)


def test_blocks_are_taken_with_the_sizes_of_an_even_cut() -> None:
    def program() -> None:
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = DTensor.from_local(np.ones((2, 3)), mesh, {"a": Shard(0, sizes=(2, 2))})
        assert (x.shape, x.placements) == ((4, 3), (Shard(0),))
        with pytest.raises(PlacementError, match=r"the blocks make .* and the placements are \[Shard\(0, sizes=\(1, 3"):
            DTensor.from_local(np.ones((2, 3)), mesh, {"a": Shard(0, sizes=(1, 3))})

    meshdist.run(program, 2, timeout=30)


@pytest.mark.parametrize("function", [np.tril, np.triu])
def test_an_unsigned_diagonal_is_that_of_an_integer(function: Any) -> None:
    def program() -> None:
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        whole = np.ones((4, 4))
        for _ in range(2):
            assert_same(function(cut(whole, mesh), np.uint8(1)), function(whole, 1))

    meshdist.run(program, 2, timeout=30)


def test_what_is_advised_for_stacks_can_be_written() -> None:
    def program() -> None:
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x, other = cut(np.ones((6, 8)), mesh), cut(np.ones((6, 8)), mesh, 1)
        with pytest.raises(PlacementError, match=r"Call redistribute\(\{'a': Shard\(0\)\}\) on operand 1"):
            np.stack([x, other])
        assert np.stack([x, other.redistribute({"a": Shard(0)})]).shape == (2, 6, 8)
        line = distribute_tensor(np.ones(6), mesh, {"a": Shard(0, sizes=(1, 5))}, None)
        with pytest.raises(PlacementError, match=r"Call redistribute\(\{'a': Shard\(0\)\}\) on operand 1"):
            np.vstack([cut(np.ones(6), mesh), line])

    meshdist.run(program, 2, timeout=30)


def test_arrays_are_filled_with_values_of_the_whole() -> None:
    def program() -> None:
        mesh = meshdist.init_device_mesh("cpu", (3,), mesh_dim_names=("a",))
        placements = {"a": Shard(0)}
        x = distribute_tensor(np.zeros(4), mesh, placements, None)
        for values in ([1, 2, 3, 4], np.arange(4), x + 1):
            assert (
                np.full_like(x, values).full().tolist()
                == np.full_like(np.zeros(4), np.asarray(_whole(values))).tolist()
            )
            made = full((4,), values, mesh=mesh, placements=placements)
            assert made.dtype == np.asarray(_whole(values)).dtype
            assert made.full().tolist() == list(_whole(values))
        for fill in (lambda: np.full_like(x, [1, 2]), lambda: full((4,), [1, 2], mesh=mesh, placements=placements)):
            with pytest.raises(ValueError, match=r"from shape \(2,\) into shape \(4,\)"):
                fill()

    meshdist.run(program, 3, timeout=30)


def _whole(values: Any) -> Any:
    return values.full() if hasattr(values, "full") else values


@pytest.mark.parametrize("function", [np.convolve, np.correlate])
@pytest.mark.parametrize("mode", ["full", "same", "valid"])
def test_an_infinity_in_a_filter_reaches_the_rows_under_it_alone(function: Any, mode: str) -> None:
    def program() -> None:
        mesh = meshdist.init_device_mesh("cpu", (3,), mesh_dim_names=("a",))
        for rows, taps in ((9, [0.0, 1, np.inf]), (5, [np.nan, 2]), (2, [1.0, 2, -1, np.inf]), (7, [1.0])):
            whole, filter_ = np.arange(1.0, rows + 1), np.array(taps)
            wanted = function(whole, filter_, mode)
            with np.errstate(invalid="ignore"):
                if len(taps) <= rows:
                    assert_same(function(cut(whole, mesh), filter_, mode), wanted)
                elif function is np.convolve:  # a correlation would reverse a sharded vector
                    assert_same(function(whole, cut(filter_, mesh), mode), wanted)

    meshdist.run(program, 3, timeout=30)
