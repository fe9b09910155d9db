"""A call that is repeated on the blocks alone gives what the first call gave."""

from __future__ import annotations

import numpy as np
import pytest
from placed_arrays import assert_same, layout_for, on_meshes, place

import meshdist
from meshdist.tensor import Replicate, Shard, distribute_tensor

CALLS = [
    lambda x: x.reshape(3, 2, 4),
    lambda x: x.reshape(24),
    lambda x: np.ravel(x),
    lambda x: np.where(x > 2, x, 0.5),
    lambda x: np.where(x > 2, x, 7),
    lambda x: np.concatenate([x, x], 1),
    lambda x: np.stack([x, x], axis=-1),
    lambda x: np.clip(x, 1, 4),
    lambda x: np.clip(x, 1.5, None),
    lambda x: np.take(x, [0, -1], axis=1),
    lambda x: np.take(x, np.array([2, 1]), axis=0),
    lambda x: np.tril(x),
    lambda x: np.triu(x, 1),
    lambda x: np.broadcast_to(x, (2, 6, 4)),
    lambda x: np.expand_dims(x, 1),
    lambda x: np.moveaxis(x, 0, 1),
    lambda x: np.einsum("ij,ij->i", x, x),
    lambda x: np.einsum("ij,ij->j", x, x),
    lambda x: np.tensordot(x, x, axes=([0], [0])),
    lambda x: np.outer(x, np.arange(3)),
    lambda x: np.roll(x, 1, axis=1),
    lambda x: np.roll(x, 6, axis=0),
    lambda x: np.repeat(x, 2, axis=1),
    lambda x: np.repeat(x, 2, axis=0),
    lambda x: np.pad(x, ((0, 0), (1, 2))),
    lambda x: np.pad(x, ((1, 2), (0, 0))),
    lambda x: np.argmax(x, axis=1),
    lambda x: np.argmax(x, axis=0),
    lambda x: np.diff(x, axis=1),
    lambda x: np.diff(x, axis=0),
    lambda x: np.tile(x, (1, 2)),
    lambda x: np.flip(x, 1),
    lambda x: np.isclose(x, 2.0),
    lambda x: np.round(x / 3, 1),
    lambda x: np.select([x > 3, x > 1], [x, -x], 9),
]


def test_every_call_twice():
    def program(mesh, rng):
        for dtype in (float, np.int64):
            first, second = (rng.integers(0, 6, (6, 4)).astype(dtype) for _ in range(2))
            for layout in [layout_for(rng, first, mesh) for _ in range(2)]:
                for call in CALLS:
                    with meshdist.tensor.implicit_redistribution():
                        for whole in (first, second, first):
                            assert_same(call(place(whole, mesh, layout)), call(whole))

    on_meshes(program)


def test_numbers_of_one_value_and_several_types():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,))
        x = distribute_tensor(np.arange(4), mesh, [Shard(0)])
        for number in (1, 1.0, True, 1 + 0j, 0.0, -0.0):
            found = np.where(x > 1, x, number)
            assert_same(found, np.where(np.arange(4) > 1, np.arange(4), number))

    meshdist.run(program, 2)


def test_the_mesh_and_the_outputs_are_those_of_the_call():
    def program():
        one, other = (meshdist.init_device_mesh("cpu", (2,)) for _ in range(2))
        x, y = (distribute_tensor(np.arange(4.0), mesh, [Shard(0)]) for mesh in (one, other))
        for _ in range(2):
            assert np.clip(x, 0, 1).mesh is one
            assert np.clip(y, 0, 1).mesh is other
            out = np.zeros_like(x)
            assert np.clip(x, 0, 1, out) is out
            np.round(x / 2, 1, out)
            assert_same(out, np.arange(4.0) / 2)
        named = [x.redistribute(placements) for placements in ({0: Replicate()}, {0: Shard(0)}, [Replicate()])]
        assert [array.layout.is_replicated for array in named] == [True, False, True]
        with pytest.raises(TypeError):
            x.redistribute({True: Replicate()})

    meshdist.run(program, 2)


@pytest.mark.parametrize("dtype", [float, np.uint8])
def test_large_blocks_are_sent_in_parts(dtype):
    def program(mesh, rng):
        whole = rng.integers(0, 100, (600, 300)).astype(dtype)
        x = place(whole, mesh, {0: Shard(0)})
        assert_same(x.redistribute({0: Shard(1)}), whole)
        assert_same(x.T.redistribute({0: Shard(0)}), whole.T)
        assert_same(x.redistribute({0: Shard(0, (0,) * (mesh.shape[0] - 1) + (600,))}), whole)

    on_meshes(program, meshes=((1,), (2,), (3,)))
