"""halo, map_overlap, np.diff and np.gradient against NumPy on the whole array."""

from __future__ import annotations

import numpy as np
import pytest
from array_layouts import values
from placed_arrays import assert_same, cases, on_meshes, placed
from worlds import needs_linux

import meshdist
from meshdist.tensor import PlacementError, Shard, distribute_tensor, halo, map_overlap
from meshdist.tensor.halos import Piece, ghosts_of

TRAPEZOID = getattr(np, "trapezoid", None) or np.trapz  # by the version of NumPy
SHAPES = ((7,), (2,), (5, 4), (3, 1, 6), (0, 3), ())


def whole_halo(whole, index, widths, rings):
    """The rows around a block, from the whole array."""
    for dim, (held, width, ring) in enumerate(zip(index, widths, rings, strict=True)):
        rows = np.arange(held.start - width, held.stop + width)
        rows = rows % max(whole.shape[dim], 1) if ring else rows[(rows >= 0) & (rows < whole.shape[dim])]
        whole = np.take(whole, rows if whole.shape[dim] else [], axis=dim)
    return whole


def test_the_pieces_of_one_block():
    ghosts = ghosts_of((2, 0, 1, 3), 2, 2, 2, False)
    assert ghosts.before == (Piece(0, 0, 2),)
    assert ghosts.after == (Piece(3, 0, 2),)
    assert dict(ghosts.given) == {0: Piece(2, 0, 1), 1: Piece(2, 0, 1), 3: Piece(2, 0, 1)}
    assert ghosts_of((2, 1), 0, 4, 0, True).before == (Piece(1, 0, 1), Piece(0, 0, 2), Piece(1, 0, 1))


@cases(20, slow=120)
def test_halos_of_random_placements(cases):
    def program(mesh, rng):
        for case in range(cases):
            shape = SHAPES[case % len(SHAPES)]
            whole = values(rng, shape, [float, np.float32, complex, bool, np.int16][case % 5])
            x = placed(rng, whole, mesh)
            widths = rng.integers(0, 5, len(shape)).tolist()
            rings = rng.integers(0, 2, len(shape)).astype(bool).tolist()
            found = x.halo(widths, rings)
            wanted = whole_halo(whole, x.index, widths, rings)
            assert found.dtype == whole.dtype
            np.testing.assert_array_equal(found, wanted)
            assert not np.shares_memory(found, x.to_local())
            np.testing.assert_array_equal(halo(x, 1), whole_halo(whole, x.index, [1] * x.ndim, [False] * x.ndim))

    on_meshes(program)


@cases(8, slow=48)
def test_map_overlap_is_the_function_of_the_whole_array(cases):
    def smooth(a):
        for dim in range(a.ndim):
            ends = [(1, 1) if other == dim else (0, 0) for other in range(a.ndim)]
            b = np.pad(a, ends, "edge") if a.shape[dim] else a
            if a.shape[dim]:
                lead = (slice(None),) * dim
                a = b[(*lead, slice(None, -2))] + 2 * a + b[(*lead, slice(2, None))]
        return a

    def program(mesh, rng):
        for case in range(cases):
            shape = SHAPES[case % 4]
            whole = values(rng, shape, [float, np.int64, np.float32][case % 3])
            x = placed(rng, whole, mesh)
            assert_same(map_overlap(smooth, x, 1), smooth(whole))
            width = int(rng.integers(1, 4))
            wanted = smooth(np.pad(whole, width, "wrap"))[(slice(width, -width),) * whole.ndim]
            assert_same(map_overlap(smooth, x, width, periodic=True), wanted)
            result = map_overlap(lambda a: a.astype(np.complex64), x, 2)
            assert result.layout is x.layout.resolved()
            assert_same(result, whole.astype(np.complex64))

    on_meshes(program)


@cases(20, slow=120)
def test_differences(cases):
    def program(mesh, rng):
        for case in range(cases):
            whole = values(rng, SHAPES[case % 4], [float, np.int32, bool, complex, np.float32, np.uint8][case % 6])
            x = placed(rng, whole, mesh)
            axis, n = int(rng.integers(-whole.ndim, whole.ndim)), int(rng.integers(0, 4))
            assert_same(np.diff(x, n, axis), np.diff(whole, n, axis))
        x = distribute_tensor(np.arange(3.0), mesh)
        for bad, error in (((x, -1), ValueError), ((x, 1, 1), IndexError)):
            with pytest.raises(error):
                np.diff(*bad)

    on_meshes(program)


@cases(9, slow=48)
def test_gradients(cases):
    def program(mesh, rng):
        for case in range(cases):
            whole = values(rng, ((7,), (5, 4), (3, 3, 6))[case % 3], [float, np.int32, complex, np.float32][case % 4])
            x = placed(rng, whole, mesh)
            order = int(rng.integers(1, 3))
            axes = tuple(map(int, rng.permutation(whole.ndim)[: rng.integers(1, whole.ndim + 1)]))
            coordinates = [np.cumsum(rng.integers(1, 4, whole.shape[axis])) for axis in axes]
            spacings = [float(rng.integers(1, 4)) if rng.integers(2) else at for at in coordinates]
            for found, wanted in (
                (np.gradient(x), np.gradient(whole)),
                (
                    np.gradient(x, 2.0, axis=axes, edge_order=order),
                    np.gradient(whole, 2.0, axis=axes, edge_order=order),
                ),
                (np.gradient(x, *spacings, axis=axes), np.gradient(whole, *spacings, axis=axes)),
            ):
                pairs = zip(found, wanted, strict=True) if type(found) is tuple else [(found, wanted)]
                for one, other in pairs:
                    assert_same(one, other)
        x = distribute_tensor(np.arange(2.0), mesh, {"a": Shard(0)})
        for args, options, error in (
            ((x,), {"edge_order": 2}, ValueError),
            ((x,), {"axis": 1}, IndexError),
            ((x, 1.0, 2.0), {}, TypeError),
            ((x, np.ones(3)), {}, ValueError),
        ):
            with pytest.raises(error):
                np.gradient(*args, **options)

    on_meshes(program)


CALLS = {
    "halo": lambda x: x.halo(1),
    "map_overlap": lambda x: map_overlap(np.sin, x, 1),
    "np.diff": lambda x: np.diff(x, 1, x.placements[0].dim),
    "np.gradient": np.gradient,
    "np.trapezoid": lambda x: TRAPEZOID(x, axis=x.placements[0].dim),
}


PAIRS = {"dimensions": (Shard(0), Shard(1)), "sizes": (Shard(0, (1, 3)), Shard(0, (3, 1)))}


def placed_otherwise(of, pair):
    """Each rank has a different layout of the same blocks' sizes, after all have used both."""
    mesh = meshdist.DeviceMesh.from_group(meshdist.new_group(), "cpu", mesh_dim_names=("a",))
    whole, call = np.arange(16.0).reshape(4, 4), CALLS[of]
    for placement in PAIRS[pair] * 3:
        call(distribute_tensor(whole, mesh, [placement], None))

    def differ():
        call(distribute_tensor(whole, mesh, [PAIRS[pair][meshdist.get_rank()]], None))
        mesh.barrier()  # which tells a rank that has only sent

    with pytest.raises(meshdist.DistBackendError) as info:
        differ()
    return str(info.value)


@pytest.mark.parametrize("backend", ["threads", pytest.param("gloo", marks=needs_linux)])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("of", CALLS)
def test_ranks_with_different_layouts_are_told(worlds, backend, of, pair):
    told = worlds.world(backend, 2).run(placed_otherwise, of, pair)
    assert any(said.startswith(f"{of} on group") for said in told)
    assert any(
        f"all ranks of the mesh must call it with the same arguments and with arrays of one layout; the array of this"
        f" rank is [{PAIRS[pair][rank]}] of (4, 4)" in said
        for rank, said in enumerate(told)
    )


ALONG_ROWS = {
    "halo": lambda x: x.halo((1, 0)),
    "map_overlap": lambda x: map_overlap(np.sin, x, (1, 0)),
    "np.diff": lambda x: np.diff(x, 1, 0),
    "np.gradient": lambda x: np.gradient(x, axis=0),
    "np.trapezoid": lambda x: TRAPEZOID(x, axis=0),
    "np.convolve": lambda x: np.convolve(x[:, 0], np.ones(3), "same"),
}


def one_exchanges_nothing(of):
    """The rows are sharded on one rank alone, so that the other one needs none of its neighbour."""
    mesh = meshdist.DeviceMesh.from_group(meshdist.new_group(), "cpu", mesh_dim_names=("a",))
    whole, placements = np.arange(16.0).reshape(4, 4), [Shard(meshdist.get_rank())]

    def differ():
        ALONG_ROWS[of](distribute_tensor(whole, mesh, placements, None))
        mesh.barrier()

    with pytest.raises(meshdist.DistBackendError) as info:
        differ()
    return str(info.value)


@pytest.mark.parametrize("backend", ["threads", pytest.param("gloo", marks=needs_linux)])
@pytest.mark.parametrize("of", ALONG_ROWS)
def test_one_of_the_layouts_exchanges_nothing(worlds, backend, of):
    first, second = worlds.world(backend, 2).run(one_exchanges_nothing, of)
    assert first.startswith(f"{of} on group")
    assert "the array of this rank is [Shard(0)] of (4" in first
    for said in (first, second):
        assert f"must call {of}, with equal arguments and with arrays of one layout" in said


def other_widths(of):
    mesh = meshdist.DeviceMesh.from_group(meshdist.new_group(), "cpu", mesh_dim_names=("a",))
    x = distribute_tensor(np.arange(12.0), mesh, [Shard(0)], None)
    width = 1 + meshdist.get_rank()

    def differ():
        x.halo(width) if of == "halo" else map_overlap(np.sin, x, width)
        mesh.barrier()  # which tells a rank that has only sent

    with pytest.raises(meshdist.DistBackendError) as info:
        differ()
    return str(info.value)


@pytest.mark.parametrize("backend", ["threads", pytest.param("gloo", marks=needs_linux)])
@pytest.mark.parametrize("of", ["halo", "map_overlap"])
def test_ranks_with_different_widths_are_told_the_width(worlds, backend, of):
    told = worlds.world(backend, 2).run(other_widths, of)
    assert any(said.startswith(f"{of} on group") for said in told)
    assert any(f"with width {1 + rank}; this is message" in said for rank, said in enumerate(told))
    assert not any("tag" in said for said in told)


def test_bad_widths():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(np.ones((4, 2)), mesh, {"a": Shard(0)})
        for width, periodic, error in (
            (-1, False, ValueError),
            (1.5, False, TypeError),
            ((1,), False, ValueError),
            (1, (True, False, True), ValueError),
        ):
            with pytest.raises(error, match="halo"):
                x.halo(width, periodic)
        for width, periodic, said in (
            ({0: 1}, False, r"width must be an integer, or a tuple of one for each dimension, got \{0: 1\}"),
            ({1}, False, r"width must be an integer, or a tuple of one for each dimension, got \{1\}"),
            ("1", False, r"width must be an integer, or a tuple of one for each dimension, got '1'"),
            (1, {"a": True}, r"periodic must be True or False, or a tuple of one for each dimension, got \{'a': True"),
            (1, "no", r"periodic must be True or False, or a tuple of one for each dimension, got 'no'"),
        ):
            for call, name in ((x.halo, "halo"), (lambda *args: map_overlap(np.sin, x, *args), "map_overlap")):
                with pytest.raises(TypeError, match=f"{name}: {said}"):
                    call(width, periodic)
        for made in (lambda: halo(np.ones(3), 1), lambda: map_overlap(np.sort, np.ones(3), 1)):
            with pytest.raises(TypeError, match="x must be a DTensor, got ndarray"):
                made()
        with pytest.raises(ValueError, match="of the shape of its argument"):
            map_overlap(lambda a: a[1:], x, 1)

    meshdist.run(program, 2)


def test_shifted_slices_name_halos():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        u = distribute_tensor(np.arange(24.0).reshape(6, 4), mesh, {"a": Shard(0)})
        new = u.copy()

        def set_inner():
            new[1:-1, 1:-1] = u[:-2, 1:-1]

        for call in (
            lambda: u[:-2, 1:-1] + u[2:, 1:-1],
            lambda: np.where(u[:-1] > 0, u[1:], 0),
            lambda: np.add(u[:-2], 1, out=new[1:-1]),
            lambda: np.einsum("ij,ij->i", u[:-1], u[1:]),
            lambda: np.concatenate((u[:-1], u[1:]), axis=1),
            set_inner,
        ):
            with pytest.raises(PlacementError, match=r"redistribute\(.*map_overlap\(function, x, width\).*halo\("):
                call()
        with pytest.raises(PlacementError) as refused:
            u + u.T.T.redistribute({"a": Shard(1)})
        assert "halo" not in str(refused.value)
        inner = map_overlap(lambda a: np.pad(a[:-2] + a[2:], ((1, 1), (0, 0))), u, 1)[1:-1]
        assert_same(inner, u.full()[:-2] + u.full()[2:])

    meshdist.run(program, 2)
