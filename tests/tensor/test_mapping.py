"""local_map: a function on the blocks."""

from __future__ import annotations

import numpy as np
import pytest
from placed_arrays import assert_same, on_meshes

import meshdist
from meshdist.tensor import (
    Partial,
    PlacementError,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_redistribution,
    local_map,
)

ROWS, COLUMNS, WHOLE = {"a": Shard(0)}, {"a": Shard(1)}, {"a": Replicate()}


def test_a_matrix_product_written_on_the_blocks():
    def program(mesh, rng):
        a, b = rng.standard_normal((5, 7)), rng.standard_normal((7, 3))
        product = local_map(np.matmul, {"a": Partial()}, in_placements=(COLUMNS, ROWS))
        for _ in range(3):
            assert_same(
                product(
                    distribute_tensor(a, mesh, COLUMNS, src_data_rank=None),
                    distribute_tensor(b, mesh, ROWS, src_data_rank=None),
                ),
                a @ b,
            )
        assert_same(product(distribute_tensor(a, mesh, COLUMNS, src_data_rank=None), b), a @ b)

    on_meshes(program)


def test_several_results_and_shapes_that_are_told_once():
    calls = []

    def both(block, factor, *, name):
        calls.append(name)
        return block[::2] * factor, name, block.sum()

    mapped = local_map(both, ([Shard(0)], None, (Partial("sum"),)))
    blocks = meshdist.run(lambda: _told(mapped), 3)
    assert len(calls) == 9
    assert blocks == [[0.0, 20.0], [30.0, 50.0], [60.0]]


def _told(mapped):
    mesh = meshdist.init_device_mesh("cpu", (3,), mesh_dim_names=("a",))
    x = distribute_tensor(np.arange(8.0), mesh, ROWS)
    for _ in range(3):
        with mesh.account() as account:
            first, name, total = mapped(x, 10, name="n")
    assert account.total().calls == 0
    assert name == "n"
    assert float(total) == 28.0
    assert first.placements == (Shard(0),)
    return first.to_local().tolist()


def test_what_does_not_fit():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.arange(12.0).reshape(3, 4), mesh, ROWS)
        twice = local_map(lambda block: block * 2, COLUMNS, in_placements=(COLUMNS,))
        with pytest.raises(PlacementError, match=r"redistribute\({'a': Shard\(1\)}\) on argument 0"):
            twice(x)
        with pytest.raises(TypeError, match="fn returned None where out_placements has placements"):
            local_map(lambda block: None, ROWS)(x)
        with implicit_redistribution():
            assert_same(twice(x), np.arange(12.0).reshape(3, 4) * 2)
        moved = local_map(lambda block: block * 2, COLUMNS, in_placements=(COLUMNS,), redistribute_inputs=True)
        assert moved(x).placements == (Shard(1),)
        for bad, match in (
            (local_map(np.sum, ([Partial()], None)), "2 results"),
            (local_map(np.sum, [Partial()], in_placements=(ROWS, ROWS)), "for each argument: expected 1, got"),
        ):
            with pytest.raises(ValueError, match=match):
                bad(x)
        with pytest.raises(ValueError, match="no argument is a DTensor"):
            twice(np.ones(3))

    meshdist.run(program, 2)


def test_results_whose_shapes_change():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.ones(4), mesh, ROWS)
        seen = []
        grows = local_map(lambda block: np.ones(len(seen)), ROWS)
        grows(x)
        seen.append(0)
        with pytest.raises(ValueError, match=r"had shape \(0,\) at the first call"):
            grows(x)

    meshdist.run(program, 2)


def test_given_sizes_are_not_told():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.arange(4.0), mesh, ROWS)
        head = local_map(lambda block: block[: 1 + mesh.get_rank()], {"a": Shard(0, sizes=(1, 2))})
        with mesh.account() as account:
            first = head(x)
        assert account.total().calls == 0
        assert first.full().tolist() == [0.0, 2.0, 3.0]
        made = local_map(lambda n: np.full(n, 1.0), {"a": Shard(0, sizes=(2, 2))}, device_mesh=mesh)
        assert_same(made(2), np.ones(4))

    meshdist.run(program, 2)
