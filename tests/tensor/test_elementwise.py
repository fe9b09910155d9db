"""Ufuncs and operators on arrays over a mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from placed_arrays import assert_same, mesh_2x2

import meshdist
from meshdist.tensor import (
    DTensor,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_redistribution,
)

WHOLE = np.arange(-7.0, 8.0).reshape(5, 3)


def placed(array: Any, **placements: Any) -> DTensor:
    return distribute_tensor(np.asarray(array), mesh_2x2(), placements, src_data_rank=None)


def test_what_is_cut_alike_stays_cut() -> None:
    def program() -> None:
        x, y = placed(WHOLE, dp=Shard(0), tp=Shard(1)), placed(WHOLE**2, dp=Shard(0), tp=Shard(1))
        for result, wanted in (
            (x + y, WHOLE + WHOLE**2),
            (x * 2 - 1, WHOLE * 2 - 1),
            (1 / (y + 1), 1 / (WHOLE**2 + 1)),
            (np.exp(x), np.exp(WHOLE)),
            (x > y, WHOLE > WHOLE**2),
            (-abs(x), -abs(WHOLE)),
            (x % 3 // 2, WHOLE % 3 // 2),
            (divmod(x, 2)[1], WHOLE % 2),
            (x**2, WHOLE**2),
            (np.hypot(x, 3), np.hypot(WHOLE, 3)),
        ):
            assert_same(result, wanted)
            assert result.placements == x.placements

    meshdist.run(program, 4)


def test_what_replicates_is_cut_for_free() -> None:
    def program() -> None:
        x, y = placed(WHOLE, dp=Shard(0), tp=Shard(1)), placed(WHOLE)
        row, column = placed(WHOLE[0], tp=Shard(0)), placed(WHOLE[:, :1])
        with x.mesh.account() as account:
            results = [x + y, y * x, x + WHOLE, WHOLE + x, x + row, x * column, column + row, x + 1.5, x + np.array(2)]
        assert account.as_dict() == {}
        wanted = [WHOLE + WHOLE, WHOLE**2, 2 * WHOLE, 2 * WHOLE, WHOLE + WHOLE[0], WHOLE * WHOLE[:, :1]]
        wanted += [WHOLE[:, :1] + WHOLE[0], WHOLE + 1.5, WHOLE + np.array(2)]
        for result, expected in zip(results, wanted, strict=True):
            assert_same(result, expected)

    meshdist.run(program, 4)


def test_a_cut_by_one_axis_is_cut_further_by_another() -> None:
    def program() -> None:
        outer, both = placed(WHOLE, dp=Shard(0)), placed(WHOLE, dp=Shard(0), tp=Shard(0))
        assert_same(outer + both, 2 * WHOLE)
        assert (outer + both).placements == (Shard(0), Shard(0))

    meshdist.run(program, 4)


@pytest.mark.parametrize(
    ("operation", "stays"),
    [
        (lambda x: x + x, True),
        (lambda x: x - 1, True),
        (lambda x: 3 - x, True),
        (lambda x: x * 2.5, True),
        (lambda x: x / 4, True),
        (lambda x: -x, True),
        (lambda x: x + WHOLE, True),
        (lambda x: x * np.arange(3), True),
        (lambda x: x * WHOLE, False),  # which could be infinite: parts of both signs would give NaN
        (lambda x: x * np.inf, False),
        (lambda x: x / 0, False),
        (lambda x: x * x, False),
        (lambda x: 1 / (x + 10), False),
        (lambda x: np.exp(x), False),
        (lambda x: x > 0, False),
        (lambda x: np.maximum(x, 0), False),
    ],
)
def test_a_pending_sum_passes_through_what_is_linear(operation: Any, stays: bool) -> None:
    def program() -> None:
        mesh = mesh_2x2()
        part = WHOLE / 4 + (mesh.get_local_rank("dp") - 0.5)
        x = DTensor.from_local(part, mesh, {"dp": Partial(), "tp": Replicate()}, shape=(5, 3))
        with mesh.account() as account, np.errstate(all="ignore"):
            result = operation(x)
            wanted = operation(WHOLE / 2)
        assert (result.placements[0] == Partial()) == stays
        assert (account.as_dict() == {}) == stays
        assert_same(result, wanted)

    meshdist.run(program, 4)


def test_a_pending_sum_beside_a_cut_is_scattered() -> None:
    def program() -> None:
        mesh = mesh_2x2()
        x = DTensor.from_local(WHOLE / 2, mesh, {"dp": Partial()}, shape=(5, 3))
        with mesh.account() as account:
            result = x + placed(WHOLE, dp=Shard(0))
        assert list(account.as_dict()["dp"]) == ["reduce_scatter"]
        assert_same(result, 2 * WHOLE)

    meshdist.run(program, 4)


def test_other_pending_reductions() -> None:
    def program() -> None:
        mesh = mesh_2x2()
        rank = mesh.get_local_rank("tp")
        most = DTensor.from_local(WHOLE + rank, mesh, {"tp": Partial("max")}, shape=(5, 3))
        assert_same(np.maximum(most, 0), np.maximum(WHOLE + 1, 0))
        assert np.maximum(most, 0).placements[1] == Partial("max")
        assert_same(most + 1, WHOLE + 2)
        mean = DTensor.from_local(WHOLE + rank, mesh, {"tp": Partial("avg")}, shape=(5, 3))
        assert_same(mean * 2 + 1, (WHOLE + 0.5) * 2 + 1)
        assert (mean * 2 + 1).placements[1] == Partial("avg")
        counts = DTensor.from_local(np.full(3, 100, np.int8), mesh, {"tp": Partial()}, shape=(3,))
        assert_same(counts * 0.5, np.full(3, -56, np.int8) * 0.5)  # 200 wraps, as a sum of int8 does
        assert_same(counts + np.ones(3, np.int8), np.full(3, -55, np.int8))

    meshdist.run(program, 4)


def test_in_place_and_out() -> None:
    def program() -> None:
        x = placed(WHOLE, dp=Shard(0))
        block = x.to_local()
        x += placed(WHOLE, dp=Shard(0), tp=Replicate())
        x *= 2
        x -= WHOLE
        assert x.to_local() is block
        assert_same(x, 3 * WHOLE)
        y = placed(np.zeros((5, 3)))
        assert np.add(placed(WHOLE), 1, out=y) is y
        assert_same(y, WHOLE + 1)
        y += placed(WHOLE, tp=Partial())  # computed, since y replicates
        assert_same(y, 2 * WHOLE + 1)
        z = placed(np.zeros((5, 3)), dp=Shard(0), tp=Shard(1))
        np.multiply(placed(WHOLE, dp=Shard(0)), 2, out=z)  # cut further for free
        assert_same(z, 2 * WHOLE)
        with pytest.raises(
            PlacementError,
            match=r"y = y [+] x makes .*, is \(5, 3\) as .* Call redistribute\(.*\) on the result, which sends",
        ):
            y += x
        with pytest.raises(TypeError, match="must be a DTensor where an operand is one"):
            np.add(x, 1, out=np.zeros((5, 3)))
        with pytest.raises(ValueError, match="out= must have the shape"):
            np.add(x, 1, out=placed(np.zeros(5)))

    meshdist.run(program, 4)


def test_where() -> None:
    def program() -> None:
        x = placed(WHOLE, dp=Shard(0))
        mask = placed(WHOLE > 0, tp=Shard(1))
        for chosen in (mask, x > 0, WHOLE > 0):
            out = placed(np.full((5, 3), 9.0), dp=Shard(0), tp=Shard(1))
            np.sqrt(placed(WHOLE, dp=Shard(0), tp=Shard(1)), where=chosen, out=out)
            assert_same(out, np.sqrt(WHOLE, where=WHOLE > 0, out=np.full((5, 3), 9.0)))

    meshdist.run(program, 4)


def test_cuts_that_do_not_fit_are_refused_with_what_to_write() -> None:
    def program() -> None:
        rows, columns = placed(WHOLE, dp=Shard(0)), placed(WHOLE, dp=Shard(1))
        with (
            rows.mesh.account() as account,
            pytest.raises(PlacementError, match=r"np.add: the placements do not match") as info,
        ):
            rows + columns
        assert account.as_dict() == {}
        assert "operand 0 is (5, 3) as {'dp': Shard(0), 'tp': Replicate()} and operand 1 is (5, 3)" in str(info.value)
        assert "Call redistribute({'dp': Shard(0), 'tp': Replicate()}) on operand 1, which sends" in str(info.value)
        assert_same(rows + columns.redistribute({"dp": Shard(0)}), 2 * WHOLE)
        with implicit_redistribution():
            assert_same(rows + columns, 2 * WHOLE)
        with pytest.raises(PlacementError):
            rows + columns

    meshdist.run(program, 4)


def test_what_there_is_not() -> None:
    def program() -> None:
        x = placed(WHOLE, dp=Shard(0))
        with pytest.raises(TypeError, match=r"np.polyfit does not take sharded or pending DTensors; pass x.redist"):
            np.polyfit(x, x, 1)
        with pytest.raises(TypeError, match=r"np.add.outer does not take sharded"):
            np.add.outer(x, x)
        with pytest.raises(TypeError, match="cannot combine a DTensor with"):
            x + object()
        with pytest.raises(ValueError, match=r"np.add: operands could not be broadcast .* \(5, 3\) \(4,\)"):
            x + np.zeros(4)
        for name in ("flat", "partition"):
            with pytest.raises(AttributeError, match=rf"{name} is not available for DTensors; use x.full\(\)"):
                getattr(x, name)
        with pytest.raises(AttributeError, match="DTensor has no attribute 'nothing'$"):
            _ = x.nothing
        other = meshdist.init_device_mesh("cpu", (4,))
        with pytest.raises(ValueError, match=r"must be on one mesh, got x on .* or move one: y = distribute_tensor\(y"):
            x + distribute_tensor(WHOLE, other)

    meshdist.run(program, 4)
