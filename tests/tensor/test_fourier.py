"""numpy.fft on DTensors against NumPy on the whole array."""

from __future__ import annotations

import numpy as np
import pytest
from array_layouts import values
from placed_arrays import assert_same, cases, on_meshes, placed

import meshdist
from meshdist.tensor import PlacementError, Shard, distribute_tensor

DTYPES = [float, np.float32, complex, np.complex64, np.int16, bool]
NORMS = [None, "ortho", "forward", "backward"]


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft"])
@cases(8, slow=36)
def test_one_dimension(name, cases):
    function = getattr(np.fft, name)

    def program(mesh, rng):
        for case in range(cases):
            dtype = DTYPES[case % len(DTYPES)]
            if name == "rfft" and np.dtype(dtype).kind == "c":
                dtype = float
            whole = values(rng, ((5, 4), (3, 2, 6), (1, 7))[case % 3], dtype)
            x = placed(rng, whole, mesh)
            axis = int(rng.integers(-whole.ndim, whole.ndim))
            n = int(rng.integers(1, 9)) if case % 2 or whole.shape[axis] == 1 else None
            norm = NORMS[case % 4]
            found = function(x, n, axis, norm)
            assert_same(found, function(whole, n, axis, norm))
            if found.shape == x.shape:
                assert found.layout in (x.layout, x.layout.resolved())

    on_meshes(program)


@pytest.mark.parametrize("names", [("fftn", "fft2"), ("ifftn", "ifft2"), ("rfftn", "rfft2"), ("irfftn", "irfft2")])
@cases(4, slow=18)
def test_several_dimensions(names, cases):
    def program(mesh, rng):
        for case in range(cases):
            function = getattr(np.fft, names[case % 2])
            dtype = DTYPES[case % len(DTYPES)]
            if names[0] == "rfftn" and np.dtype(dtype).kind == "c":
                dtype = np.float32
            whole = values(rng, ((5, 4), (3, 2, 6), (2, 7, 3))[case % 3], dtype)
            x = placed(rng, whole, mesh)
            norm = NORMS[case % 4]
            assert_same(function(x, norm=norm), function(whole, norm=norm))
            axes = tuple(map(int, rng.permutation(whole.ndim)[:2]))
            assert_same(function(x, axes=axes), function(whole, axes=axes))
            s = tuple(map(int, rng.integers(1, 8, 2)))
            assert_same(function(x, s, axes, norm), function(whole, s, axes, norm))

    on_meshes(program)


def test_one_dimension_alone_cannot_be_transposed():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.arange(6.0), mesh, {"a": Shard(0)})
        with pytest.raises(PlacementError, match=r"np.fft.fft: .*x.redistribute\({.a.: Replicate\(\)}\)"):
            np.fft.fft(x)
        assert_same(np.fft.fft(x.redistribute()), np.fft.fft(np.arange(6.0)))

    meshdist.run(program, 2)


def test_a_transform_of_what_is_whole_sends_nothing():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.arange(12.0).reshape(4, 3), mesh, {"a": Shard(0)})
        with mesh.account() as account:
            np.fft.rfft(x)
        assert account.total().calls == 0

    meshdist.run(program, 2)


def test_shifts():
    def program(mesh, rng):
        for function in (np.fft.fftshift, np.fft.ifftshift):
            whole = values(rng, (5, 4, 3), float)
            for axes in (0, 1, (0, 2), (-1,), None):
                assert_same(function(placed(rng, whole, mesh), axes), function(whole, axes))

    on_meshes(program)


def test_bad_arguments():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.ones((4, 3)), mesh, {"a": Shard(0)})
        for call, error in (
            (lambda: np.fft.fft(x, axis=2), IndexError),
            (lambda: np.fft.fft(x, n=0), ValueError),
            (lambda: np.fft.fft(x, n=2.5), TypeError),
            (lambda: np.fft.fft(x, norm="none"), ValueError),
            (lambda: np.fft.fftn(x, s=(2,), axes=(0, 1)), ValueError),
            (lambda: np.fft.rfft(x * 1j, axis=0), TypeError),
            (lambda: np.fft.fft(distribute_tensor(np.float64(1), mesh)), IndexError),
            (lambda: np.fft.hfft(x), TypeError),
        ):
            with pytest.raises(error):
                call()

    meshdist.run(program, 2)
