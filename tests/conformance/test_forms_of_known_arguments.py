"""Exchanges that were made before, with arguments of other forms: dicts, sequences, and integers of NumPy."""

import cases
import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["threads", "gloo", "gloo-tcp"])
def pair(worlds, request):
    return worlds.world(request.param, 2)


# All on a mesh of 1 x 2 ranks, with the scalar or positional form of the same call.
FORMS = {
    "width by name": ({"width": {"y": 1, "x": 1}}, {"width": 1}),
    "width by index": ({"width": {-1: 1, 0: 1}}, {"width": 1}),
    "width by an index of NumPy": ({"width": {np.int64(0): np.int32(1), "x": 1}}, {"width": 1}),
    "widths": ({"width": (1, 1)}, {"width": 1}),
    "widths in a list": ({"width": [1, np.int64(1)]}, {"width": 1}),
    "widths in an array": ({"width": np.array([1, 1])}, {"width": 1}),
    "width of NumPy": ({"width": np.int64(1)}, {"width": 1}),
    "periodic by name": ({"periodic": {"x": True, "y": True}}, {"periodic": True}),
    "periodic axes": ({"periodic": (True, True)}, {"periodic": True}),
    "periodic axes of NumPy": ({"periodic": [np.True_, np.True_]}, {"periodic": True}),
    "periodic of NumPy": ({"periodic": np.True_}, {"periodic": True}),
    "periodic is 1": ({"periodic": 1}, {"periodic": True}),
    "dims by name": ({"dims": {"x": 1, "y": 0}}, {}),
    "dims": ({"dims": (0, -1)}, {}),
    "tag": ({"tag": np.int64(3)}, {"tag": 3}),
    "one of two widths": ({"width": {"x": 1}}, {"width": (0, 1)}),
    "one of two periodic axes": ({"periodic": {"x": True}}, {"periodic": (False, True)}),
}


def halos(name):
    given, same = FORMS[name]
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("y", "x"))
    for number in range(6):
        cells = np.arange(20.0).reshape(4, 5) + 100 * dist.get_rank() + 1000 * number
        wanted = mesh.halo_exchange(cells.copy(), **same)
        np.testing.assert_array_equal(mesh.halo_exchange(cells.copy(), **given), wanted)
        wide = np.zeros((4, 10))
        wide[:, ::2] = cells  # not contiguous
        np.testing.assert_array_equal(mesh.halo_exchange(wide[:, ::2], **given), wanted)
    assert (wanted != cells).any()


@pytest.mark.parametrize("name", FORMS)
def test_halos_are_those_of_scalar_arguments(pair, name):
    pair.run(halos, name)


def changing():
    """Return nothing; a dict and lists that the user changes in place are seen."""
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("y", "x"))
    rank = dist.get_rank()
    width, periodic, dims = {"x": 1}, [False, False], {"y": 0, "x": 1}

    def column(number):
        block = np.full((8, 8), 10.0 * number + rank)
        assert mesh.halo_exchange(block, width, periodic, dims=dims) is block
        mine, others = 10.0 * number + rank, 10.0 * number + 1 - rank
        return (block == others).any(axis=0).tolist(), (block == others).any(axis=1).tolist(), mine

    def ghosts(left, right):
        return [True] * left + [False] * (8 - left - right) + [True] * right

    for number in range(5):
        cases.same(column(number)[0], ghosts(rank, 1 - rank), "one cell, at the inner end")
    periodic[1] = True
    for number in range(5):
        cases.same(column(number)[0], ghosts(1, 1), "one cell, at both ends")
    width["x"] = 2
    for number in range(5):
        cases.same(column(number)[0], ghosts(2, 2), "two cells, at both ends")
    dims.update(y=1, x=0)
    for number in range(5):
        cases.same(column(number)[1], ghosts(2, 2), "along the other dimension")
    width["z"] = 1
    with pytest.raises(ValueError, match="unknown axis 'z'"):
        column(0)
    del width["z"]
    width["x"] = -1
    with pytest.raises(ValueError, match="width must not be negative"):
        column(0)
    width["x"] = 2.0
    with pytest.raises(TypeError, match="width must be an integer"):
        column(0)
    width["x"] = 2
    periodic.append(False)
    with pytest.raises(ValueError, match="must have 2 values"):
        column(0)
    periodic.pop()
    dims["y"] = 0
    with pytest.raises(ValueError, match="dims must be different"):
        column(0)
    width.clear()
    dims.clear()
    cases.same(column(0)[:2], ([False] * 8, [False] * 8), "no widths")


def test_a_dict_or_list_that_changes_between_calls_is_seen(pair):
    pair.run(changing)


def later_keys_count():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    for number in range(5):
        for width, wanted in (({"x": 1, 0: 2}, 2), ({0: 2, "x": 1}, 1)):
            block = np.full(8, 10 * number + dist.get_rank())
            mesh.halo_exchange(block, width, True)
            cases.same((block != 10 * number + dist.get_rank()).sum(), 2 * wanted, f"of {width}")


def test_the_last_key_of_an_axis_counts(pair):
    pair.run(later_keys_count)


# Each equals an argument that is right, by ==.
WRONG = {
    "width": lambda m, x, out: m.halo_exchange(x, width=1.0),
    "width, a truth of NumPy": lambda m, x, out: m.halo_exchange(x, width=np.True_),
    "widths": lambda m, x, out: m.halo_exchange(x, width=(1.0,)),
    "widths in a dict": lambda m, x, out: m.halo_exchange(x, width={"x": np.float64(1)}),
    "axis": lambda m, x, out: m.halo_exchange(x, width={0.0: 1}),
    "axis, a truth": lambda m, x, out: m.halo_exchange(x, width={False: 1}),
    "periodic": lambda m, x, out: m.halo_exchange(x, periodic=1.0),
    "periodic, an integer of NumPy": lambda m, x, out: m.halo_exchange(x, periodic=np.int64(1)),
    "periodic axes": lambda m, x, out: m.halo_exchange(x, periodic=(np.int64(1),)),
    "dims": lambda m, x, out: m.halo_exchange(x, dims=(0.0,)),
    "tag": lambda m, x, out: m.halo_exchange(x, tag=3.0),
    "by": lambda m, x, out: m.shift(x, 1.0, out=out),
    "by, a truth of NumPy": lambda m, x, out: m.shift(x, np.True_, out=out),
    "periodic of shift": lambda m, x, out: m.shift(x, 1, np.int64(1), out=out),
    "axis of shift": lambda m, x, out: m.shift(x, axis=False, out=out),
    "tag of shift": lambda m, x, out: m.shift(x, tag=3.0, out=out),
    "tag of shift, a truth of NumPy": lambda m, x, out: m.shift(x, tag=np.True_, out=out),
    "tag of sendrecv": lambda m, x, out: m.sendrecv(x, out, 1 - m.get_rank(), 1 - m.get_rank(), tag=3.0),
    "dst": lambda m, x, out: m.sendrecv(x, out, float(1 - m.get_rank()), 1 - m.get_rank()),
    "dst, a time": lambda m, x, out: m.sendrecv(x, out, np.timedelta64(1 - m.get_rank()), 1 - m.get_rank()),
    "src, a truth of NumPy": lambda m, x, out: m.sendrecv(x, out, 1 - m.get_rank(), np.bool_(1 - m.get_rank())),
}


def wrong_after_right():
    """Return which wrong arguments were taken for equal ones that were right."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    other, x, out = 1 - dist.get_rank(), np.zeros((4, 2)), np.zeros((4, 2))
    for _ in range(4):
        for given in (
            {"width": 1},
            {"width": (1,)},
            {"width": {"x": 1}},
            {"width": {0: 1}},
            {"tag": 3},
            {"dims": (0,)},
        ):
            mesh.halo_exchange(x, **given)
        for periodic in (True, (True,)):
            mesh.halo_exchange(x, periodic=periodic)
        for given in ({"by": 1}, {"periodic": True}, {"axis": 0}, {"tag": 3}, {"tag": 1}):
            mesh.shift(x, out=out, **given)
        for tag in (0, 3):
            mesh.sendrecv(x, out, other, other, tag=tag)
    taken = []
    for name, call in WRONG.items():
        try:
            call(mesh, x, out)
        except TypeError:
            continue
        taken.append(name)
    mesh.halo_exchange(x)
    return taken


def test_wrong_arguments_that_equal_right_ones(pair):
    assert pair.run(wrong_after_right) == [[], []]


def disagree(ours, theirs):
    mesh = dist.DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("x",))
    block = np.zeros((8, 2))
    for given in (ours, theirs):
        for _ in range(4):
            mesh.halo_exchange(block, **given)
    with pytest.raises(dist.DistBackendError, match="the same width, `periodic` and tag|periodic=True there"):
        mesh.halo_exchange(block, **(theirs if dist.get_rank() else ours))


@pytest.mark.parametrize("name", ["width", "periodic"])
def test_ranks_must_agree_on_what_a_dict_holds(worlds, name):
    values = {"width": ({"x": 1}, {"x": 2}), "periodic": ((True,), (False,))}[name]
    worlds.world("gloo", 2).run(disagree, *({name: value} for value in values))


def numpy_numbers():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    rank, other, out = dist.get_rank(), np.int64(1 - dist.get_rank()), np.zeros(3)
    for number in range(6):
        x = np.full(3, 10 * number + rank, float)
        wanted = [10.0 * number + 1 - rank] * 3
        for tag in (np.int64(5), np.uint8(6)):
            source = mesh.sendrecv(x, out, other, other, tag=tag, recv_tag=np.int16(tag))
            cases.same((type(source), source, out.tolist()), (int, 1 - rank, wanted), "sendrecv")
            out[:] = -1
            assert dist.sendrecv(x, out, group_dst=other, group_src=other, tag=tag) == other
            cases.same(out.tolist(), wanted, "flat sendrecv")
            out[:] = -1
            works = [dist.irecv(out, other, tag=tag), dist.isend(x, other, tag=int(tag))]
            for work in works:
                work.wait()
            cases.same(out.tolist(), wanted, "isend and irecv")
            out[:] = -1
            mesh.shift(x, np.int64(1), np.True_, out, axis=np.int64(0), tag=tag)
            cases.same(out.tolist(), wanted, "shift")
            if rank == 0:
                dist.send(x, other, tag=tag)
                dist.send_object_list([number], other, tag=tag)
            else:
                info = dist.probe(other, tag=tag)
                cases.same((info.source, info.tag, type(info.tag)), (0, int(tag), int), "probe")
                assert dist.recv(out, other, tag=tag) == 0
                objects = [None]
                dist.recv_object_list(objects, other, tag=tag)
                cases.same((out.tolist(), objects), (wanted, [number]), "send and recv")


def test_integers_of_numpy(pair):
    pair.run(numpy_numbers)
