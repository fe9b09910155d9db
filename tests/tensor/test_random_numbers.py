"""Random arrays are the same on every mesh and with every placement."""

from __future__ import annotations

import numpy as np
import pytest
from array_layouts import random_layout
from placed_arrays import MESHES, on_meshes

import meshdist
from meshdist.tensor import Partial, PlacementError, Shard, random

CALLS = (
    ("standard_normal", (), {"dtype": np.float32}),
    ("standard_normal", (), {}),
    ("random", (), {}),
    ("normal", (3.0, 2.0), {}),
    ("uniform", (-1.0, 1.0), {}),
    ("integers", (0, 100), {"dtype": np.int16}),
    ("integers", (5, None), {"endpoint": True}),
    ("standard_exponential", (), {}),
)
SHAPES = ((300, 200), (7, 0), (), (40000,), (30, 40, 50))


def whole_arrays():
    """The arrays on one rank."""

    def program():
        mesh, generator = meshdist.init_device_mesh("cpu", (1,)), random(11)
        return [
            getattr(generator, name)(*args, SHAPES[number % 5], mesh=mesh, **options).full()
            for number, (name, args, options) in enumerate(CALLS)
        ]

    return meshdist.run(program, 1)[0]


def test_the_same_on_every_mesh():
    wanted = whole_arrays()

    def program(mesh, rng):
        generator = random(11)
        for number, (name, args, options) in enumerate(CALLS):
            shape = SHAPES[number % 5]
            placements = random_layout(rng, shape, mesh.shape).placements
            found = getattr(generator, name)(*args, shape, mesh=mesh, placements=placements, **options)
            assert found.dtype == wanted[number].dtype
            assert found.shape == shape
            np.testing.assert_array_equal(found.to_local(), wanted[number][found.index])

    on_meshes(program, meshes=(*MESHES, (2, 3)))


def test_permutations_are_the_same_on_every_mesh():
    found = []

    def program(mesh, rng):
        for placements in ({}, {"a": Shard(0)}):
            whole = random(3).permutation(50, mesh=mesh, placements=placements).full()
            assert sorted(whole) == list(range(50))
            found.append(tuple(whole))

    on_meshes(program)
    assert len(set(found)) == 1


def test_distributions_and_independence():
    def program():
        mesh, generator = meshdist.init_device_mesh("cpu", (1,)), random(0)
        x, y = (generator.standard_normal((400, 300), mesh=mesh).full() for _ in range(2))
        assert abs(x.mean()) < 0.02
        assert abs(x.std() - 1) < 0.02
        assert np.unique(np.concatenate((x, y))).size == 2 * x.size
        assert abs((x * y).mean()) < 0.02
        other = random(1).standard_normal((400, 300), mesh=mesh).full()
        assert not (other == x).any()
        uniform = generator.uniform(2, 6, (400, 300), mesh=mesh).full()
        assert uniform.min() >= 2
        assert uniform.max() < 6
        assert abs(uniform.mean() - 4) < 0.02

    meshdist.run(program, 1)


def test_nothing_is_sent():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        with mesh.account() as account:
            random(0).random((5, 3), mesh=mesh, placements={"a": Shard(1)})
        assert account.total().calls == 0

    meshdist.run(program, 2)


def test_bad_arguments():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (1,))
        for call, error in (
            (lambda: random(-1), ValueError),
            (lambda: random(0.5), TypeError),
            (lambda: random(0).random((-1,), mesh=mesh), ValueError),
            (lambda: random(0).random((2,), int, mesh=mesh), TypeError),
            (lambda: random(0).integers(5, 2, (2,), mesh=mesh), ValueError),
            (lambda: random(0).normal(np.zeros(2), 1, (2,), mesh=mesh), TypeError),
            (lambda: random(0).random((2,), mesh=mesh, placements=[Partial()]), PlacementError),
        ):
            with pytest.raises(error):
                call()
        with pytest.raises(
            AttributeError, match="no method 'choice' for DTensors; there are standard_normal, normal, "
        ):
            random(0).choice(3)

    meshdist.run(program, 1)
