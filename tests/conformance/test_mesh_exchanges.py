"""shift along an axis and halo_exchange of blocks, against arrays that were cut out of the whole."""

import itertools

import cases
import numpy as np
import pytest

import meshdist as dist
from meshdist import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.timeout(120)


def every_shift(count):
    size = dist.get_world_size()
    row = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    me = row.get_local_rank()
    for by, periodic in itertools.product(range(-size - 1, size + 2), (True, False)):
        x, out = np.full((count, 2), me, np.int32), np.full((count, 2), -1, np.int32)
        before = (me - by) % size if periodic else me - by
        expected = [before] if 0 <= before < size else []
        found, given = row["x"].shift(x, by, periodic), row.shift(x, by, periodic, out=out)
        what = f"shift by {by}, periodic={periodic}"
        if expected:
            cases.same((found.dtype, found.shape, set(found.ravel().tolist())), (x.dtype, x.shape, set(expected)), what)
            assert given is out
        else:
            cases.same((found, given), (None, None), what)
        cases.same(set(out.ravel().tolist()), set(expected or [-1]), f"out of {what}")
        cases.same(set(x.ravel().tolist()), {me}, f"x after {what}")


def test_every_shift(world):
    # Buffered, and not.
    world.run(every_shift, 3)


def test_shifts_of_long_arrays(world_of_3):
    world_of_3.run(every_shift, 10_000)


def along_each_axis():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x"))
    mine, (y, x) = np.array(10.0 * mesh.get_coordinate()[0] + mesh.get_coordinate()[1]), mesh.get_coordinate()
    assert mesh.shift(mine, axis="x") == mesh["x"].shift(mine) == 10 * y + (x - 1) % 2
    assert mesh.shift(mine, axis=0, periodic=False) == (None if y == 0 else x)
    assert mesh["y"].shift(mine[None][::-1].astype(">f8"), -1).tolist() == [10 * ((y + 1) % 2) + x]
    plane = mesh.flatten()
    assert plane.shift(mine, 2) == 10 * ((y + 1) % 2) + x


def test_shifts_along_each_axis():
    dist.run(along_each_axis, 4)


def cut(whole, mesh, dims, widths, lengths):
    """Return this rank's part of `whole`, which has ghost cells, with ghost cells of its own."""
    place = [slice(None)] * whole.ndim
    for axis, (dim, width) in enumerate(zip(dims, widths, strict=True)):
        begin = sum(lengths[axis][: mesh.get_coordinate()[axis]])
        place[dim] = slice(begin, begin + lengths[axis][mesh.get_coordinate()[axis]] + 2 * width)
    return whole[tuple(place)]


def exchange(shape, widths, periodic, dims, tail, order):
    """Blocks of different lengths, of an array of three numbers along each axis more than its width times two."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("zyx"[-len(shape) :]))
    lengths = [
        [max(width, 1) + place % 2 for place in range(extent)] for width, extent in zip(widths, shape, strict=True)
    ]
    extents = list(tail)
    for dim, axis in sorted((dim, axis) for axis, dim in enumerate(dims)):
        extents.insert(dim, sum(lengths[axis]))
    cells = np.arange(1.0, 1 + np.prod(extents)).reshape(extents)
    whole = cells
    for dim, width, wraps in zip(dims, widths, periodic, strict=True):
        pads = [(0, 0)] * cells.ndim
        pads[dim] = width, width
        whole = np.pad(whole, pads, **({"mode": "wrap"} if wraps else {"constant_values": -7}))
    expected = cut(whole, mesh, dims, widths, lengths)
    block = np.full(expected.shape, -7.0, order=order)
    inside = [slice(None)] * cells.ndim
    for dim, width in zip(dims, widths, strict=True):
        inside[dim] = slice(width, expected.shape[dim] - width)
    block[tuple(inside)] = expected[tuple(inside)]
    for _ in range(2):
        assert mesh.halo_exchange(block, widths, periodic, dims=dims) is block
        np.testing.assert_array_equal(block, expected)


@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (0, 3)])
@pytest.mark.parametrize("periodic", [(False, False), (True, True), (False, True)])
def test_blocks_on_a_plane(widths, periodic):
    for shape, (dims, tail), order in itertools.product(
        [(2, 2), (3, 1), (1, 4)], [((0, 1), ()), ((2, 0), (3,)), ((0, 1), (2,))], "CF"
    ):
        dist.run(exchange, int(np.prod(shape)), (shape, widths, periodic, dims, tail, order))


def test_blocks_in_space():
    dist.run(exchange, 8, ((2, 2, 2), (1, 2, 1), (True, False, True), (0, 1, 2), (), "C"))


def on_a_row(periodic):
    size = dist.get_world_size()
    exchange((size,), (1,), (periodic,), (0,), (), "C")
    exchange((size,), (2,), (periodic,), (1,), (9000,), "C")


@pytest.mark.parametrize("periodic", [True, False])
def test_blocks_on_a_row(world, periodic):
    world.run(on_a_row, periodic)


def forms_of_arguments():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x"))
    cells = np.full((2, 2), mesh.get_rank())
    both = mesh.halo_exchange(np.pad(cells, 1, constant_values=-1), 1, True)
    for width, periodic, dims in (
        ({"y": 1, "x": 1}, {"x": True, "y": True}, None),
        ((1, 1), (True, np.True_), {"x": 1, "y": -2}),
        (np.int64(1), True, (-2, -1)),
    ):
        block = np.pad(cells, 1, constant_values=-1)
        np.testing.assert_array_equal(mesh.halo_exchange(block, width, periodic, dims=dims), both)
    one = np.pad(cells, ((0, 0), (1, 1)), constant_values=-1)
    np.testing.assert_array_equal(mesh.halo_exchange(one.copy(), {"x": 1}), mesh["x"].halo_exchange(one, dims=1))
    assert one[:, 0].tolist() == ([-1, -1] if mesh.get_coordinate()[1] == 0 else [mesh.get_rank() - 1] * 2)


def test_forms_of_arguments():
    dist.run(forms_of_arguments, 4)


x = np.zeros((4, 4))
WRONG = {
    "width": (
        lambda m: m.halo_exchange(x, 2),
        ValueError,
        "dim 0 of block has length 4; with width=2 it has no interior cells.*need 2.*least 6",
    ),
    "negative width": (lambda m: m.halo_exchange(x, -1), ValueError, "width must not be negative, got -1 for 'y'"),
    "fraction": (lambda m: m.halo_exchange(x, 0.5), TypeError, "halo_exchange on mesh .*width must be an integer"),
    "periodic": (lambda m: m.halo_exchange(x, 1, "yes"), TypeError, "periodic must be True or False, got 'yes'"),
    "too many widths": (
        lambda m: m.halo_exchange(x, (1, 1, 1)),
        ValueError,
        "must have 2 values, one for each axis, got 3",
    ),
    "no such axis": (lambda m: m.halo_exchange(x, {"z": 1}), ValueError, "unknown axis 'z'"),
    "no such axis of dims": (lambda m: m.halo_exchange(x, dims={"z": 1}), ValueError, "unknown axis 'z'"),
    "no such dim": (lambda m: m.halo_exchange(x, dims=(0, 2)), ValueError, "axis 'x' divides dim 2, and block has 2"),
    "too few dims": (lambda m: m.halo_exchange(x[0]), ValueError, "axis 'x' divides dim 1, and block has 1"),
    "a dim twice": (lambda m: m.halo_exchange(x, dims=(1, -1)), ValueError, "dims must be different"),
    "list": (lambda m: m.halo_exchange([1.0, 2.0]), TypeError, "halo_exchange on mesh .*block"),
    "read-only": (lambda m: m.halo_exchange(np.broadcast_to(0.0, (4, 4))), ValueError, "block is read-only"),
    "texts": (lambda m: m.halo_exchange(np.full((4, 4), "a")), TypeError, "dtype <U1"),
    "shift: which axis": (lambda m: m.shift(x), ValueError, "shift: .* has 2 axes, so name one of 'y', 'x'"),
    "shift: no such axis": (lambda m: m.shift(x, axis="z"), ValueError, "unknown axis 'z'"),
    "shift: fraction": (lambda m: m["x"].shift(x, 0.5), TypeError, "shift on group 'x' .*by must be an integer"),
    "shift: periodic": (lambda m: m["x"].shift(x, 1, None), TypeError, "periodic must be True or False, got None"),
    "shift: list": (lambda m: m["x"].shift([1.0]), TypeError, "shift on group 'x' .*x must be"),
    "shift: shared": (lambda m: m["x"].shift(x, out=x), ValueError, "out shares memory with x"),
    "shift: read-only": (
        lambda m: m["x"].shift(x, out=np.broadcast_to(0.0, (4, 4))),
        ValueError,
        "shift on group 'x' .*out is read-only",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    call, kind, words = WRONG[name]

    def main():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x"))
        with pytest.raises(kind, match=words):
            call(mesh)
        mesh.barrier()

    dist.run(main, 4)


def test_outside_of_the_mesh():
    def main():
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",))
        if dist.get_rank() == 2:
            for call in (lambda: mesh.halo_exchange(np.zeros(3)), lambda: mesh.shift(np.zeros(3))):
                with pytest.raises(ValueError, match="rank 2 is outside"):
                    call()

    dist.run(main, 3)


def test_in_dry_runs_and_accounts():
    with dist.dry_run(16, 5):
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("y", "x"))
        with mesh.account() as account:
            block = mesh.halo_exchange(np.ones((10, 20)), periodic=True)
            assert mesh["x"].shift(np.ones(3)).tolist() == [0] * 3
        assert block[0].tolist() == block[:, 0].tolist() * 2 == [0] * 20
        assert block[1:-1, 1:-1].all()
        sent = {axis: {of: call["inside"] for of, call in calls.items()} for axis, calls in account.as_dict().items()}
        assert sent == {"y": {"halo_exchange": 2 * 20 * 8}, "x": {"halo_exchange": 2 * 10 * 8, "shift": 3 * 8}}
        assert dist.get_world_size() == 16
