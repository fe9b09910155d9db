"""Operands of unlike dtypes, meshes and memory, and `out=`: as NumPy has them, and alike on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from placed_arrays import assert_same, on_meshes

import meshdist
from meshdist.tensor import DTensor, Partial, PlacementError, Replicate, Shard, distribute_tensor
from meshdist.tensor.operands import may_pass

CHANGED = r"operand 0, which y [+]= x changes in place \(y = y [+] x makes a new array\)"


def placed(array: Any, mesh: Any, placement: Any) -> DTensor:
    return distribute_tensor(np.asarray(array), mesh, [placement] * len(mesh.shape), src_data_rank=None)


def parts(part: Any, mesh: Any, op: str = "sum") -> DTensor:
    """Return an array of which every rank has `part` as its part."""
    return DTensor.from_local(np.array(part), mesh, [Partial(op)], shape=np.shape(part))


def is_view(function: Callable[[Any], Any], x: DTensor) -> bool:
    return bool(np.shares_memory(function(x).to_local(), x.to_local()))


def test_reductions_are_computed_before_the_dtype_changes() -> None:
    def program(mesh: Any, _: Any) -> None:
        ranks = mesh.shape[0]
        true, small = parts([True], mesh), parts([100 // ranks], mesh)
        total = np.array([100 // ranks * ranks])
        # The sum of bools is whether any of them is true.
        for function in (
            lambda b: b + 1,
            lambda b: b * 2,
            lambda b: b - 0,
            lambda b: 1 - b,
            np.conjugate,
            np.deg2rad,
            lambda b: b / 2,
            lambda b: b + True,
            lambda b: b * np.array([3]),
            lambda b: np.where(b, 1, b),
            lambda b: np.where(np.array([True]), b, 2),
        ):
            assert_same(function(true), function(np.array([True])))
        for dtype in (np.int8, np.uint8, np.int32):
            parts_of_angle = DTensor.from_local(np.array([100], dtype), mesh, [Partial()], shape=(1,))
            sum_of_angle = np.add.reduce(np.full(ranks, 100, dtype), dtype=dtype, keepdims=True)
            for angle in (np.deg2rad, np.rad2deg, np.radians, np.degrees):
                assert_same(angle(parts_of_angle), angle(sum_of_angle))
        for function in (lambda x: x + 1, lambda x: 2 - x, lambda x: x * np.array([3], np.int8), lambda x: x * -7):
            assert_same(function(small), function(total))
            assert function(small).layout.pending  # which stays where the dtype stays

    on_meshes(program, meshes=[(2,), (3,)])


def _powers() -> None:
    mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    for dtype in (bool, np.int8, np.uint8, np.int64, np.float32, np.float64, np.complex128):
        whole = (np.arange(1, 6) * (1 if dtype in (bool, np.int8, np.uint8, np.int64) else 1.1)).astype(dtype)
        x = distribute_tensor(whole, mesh, [Shard(0)])
        for exponent in (2, 2.0, 0.5, 1, 0, 3, -1.0, True):
            wanted, found = whole**exponent, x**exponent
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found.full(), wanted)


def test_powers_are_those_of_the_operator_of_numpy() -> None:
    meshdist.run(_powers, 2)


def test_numbers_that_do_not_fit_raise_on_every_rank() -> None:
    def program(mesh: Any, _: Any) -> None:
        x, whole = parts(np.array([1], np.int8), mesh), np.array([2], np.int8)
        for function in (lambda a: a + 1000, lambda a: a * 1000, lambda a: 1000 - a):
            try:
                wanted = function(whole)
            except OverflowError:  # of NumPy 2
                with pytest.raises(OverflowError):
                    function(x)
            else:
                assert_same(function(x), wanted)

    on_meshes(program, meshes=[(2,)])


def test_factors_of_many_digits() -> None:
    def program(mesh: Any, _: Any) -> None:
        x, whole = placed(np.arange(4.0), mesh, Shard(0)), np.arange(4.0)
        assert_same(np.sum(x) * 10**20, np.sum(whole) * 10**20)
        assert_same(np.sum(x) / 10**20, np.sum(whole) / 10**20)
        with pytest.raises(OverflowError):
            np.sum(x) * 10**400
        # Beyond float16 the factor is infinite, and 0 in one of the parts would become NaN.
        halves = parts(np.array([mesh.get_rank()], np.float16), mesh)
        assert_same(halves * 10**6, np.array([np.inf], np.float16))

    on_meshes(program, meshes=[(2,)])


def test_arrays_of_other_meshes_are_refused_where_one_is_written() -> None:
    def program() -> None:
        mesh, other = (meshdist.DeviceMesh("cpu", np.array(ranks)) for ranks in ([0, 1], [1, 0]))
        x, y = placed(np.zeros(4), mesh, Shard(0)), placed(np.arange(4.0), other, Shard(0))
        calls: list[Callable[[], Any]] = [
            lambda: x.__setitem__(..., y),
            lambda: x.__setitem__(y > 1, 9.0),
            lambda: x.__setitem__(y > 1, y),
            lambda: x.__setitem__((slice(0, 2),), y[:2]),
            lambda: np.add(y, 0, out=x),
            lambda: np.add(y, 0, out=x, where=y > 1),
            lambda: np.clip(y, 0, 9, out=x),
            lambda: np.clip(y, None, None, out=x),
            lambda: np.round(y, out=x),
            lambda: np.concatenate([placed([1.0, 2.0, 3.0, 4.0], other, Replicate())], out=x),
            lambda: np.take(y, [0, 1, 2, 3], out=x),
            lambda: x.__iadd__(y),
        ]
        for number, call in enumerate(calls):
            with pytest.raises(ValueError, match="must be on one mesh"):
                call()
            assert not x.to_local().any(), number

    meshdist.run(program, 2)


def test_out_alone_may_be_placed() -> None:
    def program(mesh: Any, _: Any) -> None:
        out = placed(np.zeros(4), mesh, Shard(0))
        assert np.add(np.arange(4.0), 1, out=out) is out
        assert_same(out, np.arange(4.0) + 1)

    on_meshes(program, meshes=[(2,)])


def test_clip_with_out_and_where() -> None:
    def program(mesh: Any, _: Any) -> None:
        whole, mask = np.arange(-3.0, 4.0), np.arange(7) % 2 == 0
        x, placed_mask = placed(whole, mesh, Shard(0)), placed(mask, mesh, Shard(0))
        for low, high in ((-1, 2), (None, 1.5), (0, None), (None, None), ([-2.0] * 7, 0)):
            wanted, out = np.full(7, 50.0), placed(np.full(7, 50.0), mesh, Shard(0))
            np.clip(whole, low, high, out=wanted, where=mask)
            assert np.clip(x, low, high, out=out, where=placed_mask) is out
            assert_same(out, wanted)
            assert np.clip(x, low, high, out=out) is out
            assert_same(out, np.clip(whole, low, high))
            assert_same(np.clip(x, low, high), np.clip(whole, low, high))
        integers = np.arange(7, dtype=np.int8)
        if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
            bounded = np.clip(placed(integers, mesh, Shard(0)), -1000, 1000)
            assert_same(bounded, np.clip(integers, -1000, 1000))

    on_meshes(program, meshes=[(2,)])


def test_out_of_a_dtype_that_loses_values_is_refused() -> None:
    def program(mesh: Any, _: Any) -> None:
        halves, out = placed(np.full(4, 0.5), mesh, Replicate()), placed(np.full(4, 7), mesh, Replicate())
        for call in (
            lambda: np.clip(halves, 0, 1, out=out),
            lambda: np.round(halves, 1, out=out),
            lambda: np.concatenate([halves], out=out),
            lambda: np.stack(list(halves), out=out),
        ):
            with pytest.raises(TypeError, match=r"[Cc]annot cast"):
                call()
            assert_same(out, np.full(4, 7))
        with pytest.raises(TypeError, match="according to the rule 'safe'"):
            np.take(out, [0, 1, 2, 3], out=halves)
        np.take(halves + 1, [0, 1, 2, 3], out=out)
        assert_same(out, np.ones(4, int))
        np.concatenate([halves + 2], out=out, casting="unsafe")
        assert_same(out, np.full(4, 2))

    on_meshes(program, meshes=[(2,)])


def test_sums_are_computed_before_they_are_joined_in_a_narrower_dtype() -> None:
    def program(mesh: Any, _: Any) -> None:
        half, huge = parts([0.5], mesh), parts([1e300 if mesh.get_rank() else -1e300], mesh)
        joined: Any = np.concatenate([half, half], dtype=int, casting="unsafe")
        assert_same(joined, np.array([1, 1]))
        assert_same(np.concatenate([huge], dtype=np.float32), np.zeros(1, np.float32))
        assert np.concatenate([half, np.ones(1, np.float32)]).layout.pending  # type: ignore[attr-defined]

    on_meshes(program, meshes=[(2,)])


def test_maxima_are_computed_before_they_become_complex() -> None:
    def program(mesh: Any, _: Any) -> None:
        for op, wanted in (("max", 2.0), ("min", 1.0), ("product", 2.0), ("sum", 3.0), ("avg", 1.5)):
            x, whole = parts([1.0 + mesh.get_rank()], mesh, op), np.array([wanted])
            for function in (
                lambda a: a.astype(complex),
                lambda a: np.where(np.array([True]), a, 1j),
                lambda a: np.concatenate([a, np.array([2j])]),
                lambda a: np.maximum(a, 1j),
                lambda a: np.multiply(a, 1j),
            ):
                assert_same(function(x), function(whole))
            assert may_pass([x], np.dtype(complex)) == (op in ("sum", "avg"))

    on_meshes(program, meshes=[(2,)])


def test_rows_of_cut_dimensions_are_copies_on_all_ranks() -> None:
    def program(mesh: Any, _: Any) -> None:
        whole = np.arange(12.0).reshape(4, 3)
        for key in (1, (3, slice(1, None)), (slice(None, 2), None), -1, (2, 1)):
            x = placed(whole, mesh, Shard(0))
            for _ in range(2):  # the second time the key is known
                y = x[key]
                if y.layout.pending:
                    assert not np.shares_memory(y.to_local(), x.to_local())
                    y.to_local()[...] = -1
                    assert_same(x, whole)

    on_meshes(program, meshes=[(2,), (3,)])


def test_what_is_a_view_in_numpy_is_one() -> None:
    def program(mesh: Any, _: Any) -> None:
        x = placed(np.arange(6.0).reshape(2, 3), mesh, Replicate())
        one = placed(np.ones((1, 1)), mesh, Replicate())
        for array, function, wanted in (
            (x, lambda a: a[True], False),
            (x, lambda a: a[False], False),
            (x, lambda a: a[...], True),
            (x, lambda a: a[0, 1, ...], True),
            (x, lambda a: a[0, 1], False),
            (one, np.squeeze, True),
            (one, lambda a: np.squeeze(a, 0), True),
            (placed(np.ones(()), mesh, Replicate()), np.squeeze, True),
        ):
            for _ in range(2):
                assert is_view(function, array) == wanted
            assert_same(function(array), function(array.full()))
        if mesh.shape == (1,):
            cut = placed(np.arange(6.0).reshape(2, 3), mesh, Shard(0))
            for function in (lambda a: a[::-1], np.flip, np.flipud, lambda a: a[::-1, ::2]):
                assert is_view(function, cut)
                assert_same(function(cut), function(cut.full()))

    on_meshes(program, meshes=[(1,), (2,)])


def test_arrays_changed_in_place_keep_shape_and_placements() -> None:
    def program(mesh: Any, _: Any) -> None:
        rows = placed(np.ones((4, 2)), mesh, Shard(0))
        few, whole = rows[:1], placed(np.ones((4, 2)), mesh, Replicate())
        with pytest.raises(ValueError, match=rf"{CHANGED}, must have the shape \(4, 2\) of the result, got"):
            few += rows
        with pytest.raises(PlacementError, match=rf"{CHANGED}, is \(4, 2"):
            whole += rows
        with pytest.raises(PlacementError, match=r"out= is \(4, 2\) as {'a': Replicate\(\)}; the result is"):
            np.add(rows, rows, out=whole)

    on_meshes(program, meshes=[(2,)])


def test_orders_and_shapes_that_are_refused() -> None:
    def program(mesh: Any, _: Any) -> None:
        whole = np.arange(6.0).reshape(2, 3)
        x, row, reshape = placed(whole, mesh, Replicate()), placed(np.arange(3.0), mesh, Shard(0)), _numpy.reshape
        for call in (
            lambda: np.ravel(x.T, order="K"),
            lambda: np.ravel(x.T, order="A"),
            lambda: reshape(x.T, 6, order="A"),
            lambda: reshape(x, 6, order="K"),
            lambda: reshape(x, 6, order="CF"),
            lambda: reshape(x, 6, order="F", copy=False),
            lambda: reshape(x, 6, copy=False),
            lambda: np.broadcast_to(x, (-1, 2, 3)),
            lambda: np.tile(x, -1),
            lambda: np.tile(x, (2, -1)),
        ):
            with pytest.raises(ValueError):  # noqa: PT011
                call()
        assert_same(np.ravel(row, order="K"), np.arange(3.0))
        assert_same(np.ravel(x, order="F"), np.ravel(whole, order="F"))
        column = placed(np.ones((3, 1)), mesh, Replicate())
        copied = reshape(column, (1, 3), order="F", copy=True)
        assert not np.shares_memory(copied.to_local(), column.to_local())
        for call in (
            lambda: reshape(x, (6.0,)),
            lambda: reshape(x, 6.0),
            lambda: np.broadcast_to(x, (2.9, 2, 3)),
            lambda: np.broadcast_to(row, 3.9),
            lambda: np.tile(x, 2.5),
            lambda: np.tile(x, (1.0, 2.5)),
        ):
            with pytest.raises(TypeError):
                call()
        assert_same(np.tile(x, np.int64(2)), np.tile(whole, 2))
        assert_same(np.tile(x, 0), np.tile(whole, 0))
        assert_same(np.broadcast_to(x, np.array([2, 2, 3])), np.broadcast_to(whole, (2, 2, 3)))

    on_meshes(program, meshes=[(2,)])


_numpy: Any = np  # whose stubs do not know of DTensors, and of `copy=` only from NumPy 2.1 on


def test_a_dtensor_beside_a_plain_array_that_is_computed_of() -> None:
    def program() -> None:
        x = distribute_tensor(np.arange(3.0), meshdist.init_device_mesh("cpu", (2,)), [Shard(0)], None)
        for call in (
            lambda: np.percentile(np.ones(3), x),
            lambda: np.quantile(np.ones(3), x),
            lambda: np.histogram(np.ones(3), x),
            lambda: np.isposinf(np.ones(3), x),
        ):
            with pytest.raises(TypeError, match=r"^np\.\w+: the array must be a DTensor where another argument is one"):
                call()

    meshdist.run(program, 2, timeout=30)
