"""Meshes flattened, unflattened, split, concatenated and transposed, on ranks as threads and as processes."""

import itertools
import pickle

import numpy as np
import pytest
from worlds import needs_linux

import meshdist
from meshdist.device_mesh import DeviceMesh, init_device_mesh
from meshdist.errors import UnknownAxisError

CUBE = np.array([[[7, 2], [0, 5]], [[3, 6], [1, 4]]])
NAMES = ("pp", "dp", "tp")


def plane(names, rank):
    """This rank's plane of the cube over some axes, in their order."""
    at = dict(zip(NAMES, np.argwhere(rank == CUBE)[0], strict=True))
    kept = tuple(slice(None) if name in names else at[name] for name in NAMES)
    ascending = [name for name in NAMES if name in names]
    return CUBE[kept].transpose([ascending.index(name) for name in names])


def sums_over_every_arrangement():
    """On a rank: check every pair of axes of the cube as one, and a sum along it; return how many groups there are."""
    mesh = DeviceMesh("cpu", CUBE, mesh_dim_names=NAMES)
    rank = mesh.get_rank()
    for first, second in itertools.permutations(NAMES, 2):
        expected = plane((first, second), rank).reshape(-1).tolist()
        flat = mesh[first, second].flatten()
        assert flat.mesh.tolist() == expected
        assert flat.get_group().ranks == tuple(expected)
        assert flat.get_group() is mesh[first, second].collective_group is mesh.get_group(f"{first}_{second}")
        assert flat is mesh[f"{first}_{second}"] is mesh[first, second].flatten()
        assert flat.all_reduce(np.array([rank])).item() == sum(expected)
        assert flat.get_local_rank() == expected.index(rank)
    before = meshdist.get_pg_count()
    again = DeviceMesh("cpu", CUBE, mesh_dim_names=("a", "b", "c"))
    for first, second in itertools.permutations("abc", 2):
        again[first, second].flatten().get_group()
    assert meshdist.get_pg_count() == before
    return before


def test_every_pair_of_axes_flattened():
    meshdist.run(sums_over_every_arrangement, 8, timeout=60)


@needs_linux
def test_every_pair_of_axes_flattened_on_processes(worlds):
    assert worlds.world("gloo", 8).run(sums_over_every_arrangement)


def unflattened_sums(size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("world",))
    both = mesh.unflatten("world", (2, size // 2), ("dp", "tp"))
    ranks = np.arange(size).reshape(2, size // 2)
    x = np.array([mesh.get_rank()])
    row, column = np.argwhere(ranks == mesh.get_rank())[0]
    assert both["tp"].all_reduce(x.copy()).item() == ranks[row].sum()
    assert both["dp"].all_reduce(x.copy()).item() == ranks[:, column].sum()
    assert both.all_reduce(x.copy()).item() == ranks.sum()
    assert both.collective_group is mesh.get_group()
    parts = mesh.split("world", (1, size - 1))
    mine = parts[min(mesh.get_rank(), 1)]
    other = parts[1 - min(mesh.get_rank(), 1)]
    assert other.get_coordinate() is None
    assert mine.all_reduce(x.copy()).item() == (sum(range(1, size)) if mesh.get_rank() else 0)


@needs_linux
@pytest.mark.parametrize("size", [2, 4])
def test_unflattened_and_split_on_processes(worlds, size):
    worlds.world("gloo", size).run(unflattened_sums, size)


def test_flatten_as_torch_does():
    def program():
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        flat = mesh["dp", "cp"]._flatten()
        assert flat.mesh_dim_names == ("dp_cp",)
        assert flat is mesh["dp_cp"] is mesh["dp", "cp"]._flatten("dp_cp")
        assert mesh["tp"]._flatten("tp") is mesh["tp"]
        assert mesh["dp"]._flatten(mesh_dim_name="replicate").get_group() is mesh.get_group("dp")
        assert mesh._flatten().mesh.tolist() == list(range(8))
        assert mesh._flatten("everything").collective_group is mesh.collective_group
        return flat.mesh.tolist()

    assert meshdist.run(program, 8)[::7] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_flattened_axis_is_found_where_it_lies_inside():
    def program():
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        flat = mesh["pp", "tp"].flatten("x")
        assert mesh["x"] is flat is mesh["tp", "pp"]["x"] is mesh["x"]["x"]
        assert mesh["dp", "x"].shape == (2, 4)
        assert mesh["x", "dp"]["x"] is flat
        for slice_of_it in (mesh["dp"], mesh["dp", "tp"]):
            with pytest.raises(UnknownAxisError, match="unknown axis 'x'"):
                slice_of_it["x"]
        with pytest.raises(ValueError, match=r"DeviceMesh\['tp', 'x'\]: these axes overlap"):
            mesh["tp", "x"]
        with pytest.raises(UnknownAxisError, match="its axes are 'pp', 'dp', 'tp', 'x'"):
            mesh["y"]

    meshdist.run(program, 8)


def test_flatten_of_some_axes_keeps_the_others():
    def program():
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        flat = mesh.flatten(axes=("tp", "pp"))
        assert flat.mesh_dim_names == ("dp", "tp_pp")
        assert flat.mesh.tolist() == [[0, 4, 1, 5], [2, 6, 3, 7]]
        assert flat is mesh.flatten(axes=(2, 0)) is mesh["dp", "tp_pp"]
        assert mesh.flatten("model", axes="tp").mesh_dim_names == ("pp", "dp", "model")
        unnamed = init_device_mesh("cpu", (2, 2, 2))
        assert unnamed.flatten(axes=(0, 1)).mesh.tolist() == np.arange(8).reshape(4, 2).tolist()
        assert unnamed.flatten("all")["all"] is unnamed.flatten("all") is unnamed["all"]
        assert unnamed.flatten(axes=(1, 2)) is unnamed.flatten(axes=(1, 2))

    meshdist.run(program, 8)


def test_unflatten_and_back():
    def program():
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        parted = mesh.unflatten("dp", (2, 2), ("replicate", "shard"))
        assert parted is mesh.unflatten(0, [2, 2], ["replicate", "shard"])
        assert parted is mesh._unflatten("dp", (2, 2), ("replicate", "shard"))
        assert parted["tp"] is mesh["tp"]
        assert parted.flatten("dp", axes=("replicate", "shard")) is mesh
        assert parted.collective_group is mesh.collective_group
        # Three axes of two that count 0 4 2 6 ..., read as four and two: still the same ranks.
        odd = mesh["tp", "dp"].flatten().unflatten(0, (4, 2), ("a", "b"))
        assert odd.mesh.tolist() == [[0, 2], [4, 6], [1, 3], [5, 7]]
        return parted["shard"].mesh.tolist()

    assert meshdist.run(program, 8)[5] == [5, 7]


def test_unflatten_at_other_seams_than_were_flattened():
    def program():
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        other = mesh["tp", "dp"].flatten("all").unflatten("all", (2, 3), ("a", "b"))
        assert other.mesh.tolist() == [[0, 3, 1], [4, 2, 5]]
        assert other is mesh["tp", "dp"].flatten("all").unflatten("all", (2, 3), ("a", "b"))
        assert other["b"].all_reduce(np.array([mesh.get_rank()])).item() in (4, 11)
        with pytest.raises(ValueError, match="of different meshes"):
            DeviceMesh.concatenate([other["a"], mesh["tp"]])

    meshdist.run(program, 6)


def test_transpose():
    def program():
        mesh = init_device_mesh("cpu", (1, 2, 3), mesh_dim_names=("a", "b", "c"))
        assert mesh.transpose() is mesh["c", "b", "a"]
        assert mesh.transpose("b", 0, -1) is mesh["b", "a", "c"] is mesh.transpose(("b", "a", "c"))
        assert mesh.transpose().transpose() is mesh
        unnamed = init_device_mesh("cpu", (2, 3))
        assert unnamed.transpose().mesh.tolist() == [[0, 3], [1, 4], [2, 5]]
        assert unnamed.transpose(1, 0).get_group(0) is unnamed.get_group(1)

    meshdist.run(program, 6)


def test_split_and_concatenate():
    def program():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        left, right = mesh.split("tp", 2)
        assert (left.mesh.tolist(), right.mesh.tolist()) == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
        assert mesh.split(1, (2, 2))[1] is right
        inside, outside = (left, right) if left.get_coordinate() else (right, left)
        assert (outside.get_coordinate(), outside["tp"].shape) == (None, (2,))
        with pytest.raises(ValueError, match="outside the mesh"):
            outside.get_group("tp")
        assert inside["dp"].get_group() is mesh.get_group("dp")
        whole = DeviceMesh.concatenate([left, right], "tp")
        assert whole == mesh
        assert whole is DeviceMesh.concatenate([left, right], "tp")
        assert whole.get_group("tp") is mesh.get_group("tp")
        assert DeviceMesh.concatenate([right, left], axis=1).mesh[0].tolist() == [2, 3, 0, 1]
        assert DeviceMesh._concatenate([mesh["tp"], mesh["dp"]]) is mesh["tp", "dp"]
        parted = mesh.unflatten("tp", (2, 2), ("ep", "etp"))
        assert DeviceMesh.concatenate([mesh["dp"], parted["etp"]]).shape == (2, 2)
        return inside["tp"].all_reduce(np.array([mesh.get_rank()])).item()

    assert meshdist.run(program, 8) == [1, 1, 5, 5, 9, 9, 13, 13]


def test_backends_go_with_their_axes():
    def program():
        override = {"tp": "threads", "dp": "threads"}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override=override)
        copy = pickle.loads(pickle.dumps(mesh.flatten()))
        assert copy.get_group() is mesh.flatten().get_group() is mesh.collective_group
        assert mesh.unflatten("tp", (2, 1), ("a", "b")).get_group("a") is mesh.get_group("tp")
        with pytest.raises(ValueError, match="flatten: 'dp_tp' is the name of an axis that was flattened"):
            mesh.flatten("dp_tp", backend_override="gloo")
        with pytest.raises(ValueError, match="smoke"):
            mesh.flatten("other", backend_override="smoke")

    meshdist.run(program, 4)


@pytest.mark.parametrize(
    ("ask", "kind", "words"),
    [
        (lambda m: m["dp", "cp"].flatten("tp"), ValueError, "'tp' is the name of another axis of (dp=2, cp=2, tp=2)"),
        (lambda m: (m["dp"].flatten("x"), m["cp"].flatten("x")), ValueError, "'x' is the name of an axis that was"),
        (lambda m: m.flatten(axes=("dp", "dp")), ValueError, "flatten: pass at least one axis of"),
        (lambda m: m.flatten(axes=("pp",)), UnknownAxisError, "unknown axis 'pp'"),
        (lambda m: m.unflatten("dp", (2, 2), ("a", "b")), ValueError, "axis 'dp' has 2 ranks, but 2 x 2 is 4"),
        (lambda m: m.unflatten("dp", (2, 1), ("a", "tp")), ValueError, "'tp' is repeated"),
        (lambda m: m.unflatten("dp", (2, 1)), ValueError, "axis 'dp' becomes 2 axes, so pass 2 names, got none"),
        (lambda m: m.unflatten("dp", (2, 0), ("a", "b")), ValueError, "every size must be at least 1, got 0"),
        (lambda m: m.unflatten("dp", 2, ("a", "b")), TypeError, "unflatten: sizes: expected a tuple of sizes"),
        (lambda m: m.unflatten(3, (2, 1), ("a", "b")), UnknownAxisError, "unknown axis 3"),
        (lambda m: m.transpose("dp", "tp"), ValueError, "transpose: name all 3 axes"),
        (lambda m: m.split("dp", 3), ValueError, "axis 'dp' has 2 ranks, which cannot be parted into 3"),
        (lambda m: m.split("dp", (1, 2)), ValueError, "axis 'dp' has 2 ranks, and parts of 1 + 2 are 3"),
        (lambda m: m.split("dp", 1.0), TypeError, "expected a tuple of sizes"),
        (lambda m: DeviceMesh.concatenate([]), TypeError, "at least one DeviceMesh"),
        (lambda m: DeviceMesh.concatenate([m["dp"], m["dp", "tp"]]), ValueError, "a name can be used only once"),
        (lambda m: DeviceMesh.concatenate([m["dp"].flatten("x"), m["dp"]]), ValueError, "overlap"),
        (lambda m: DeviceMesh.concatenate([m, m], "dp"), ValueError, "rank 0 appears 2 times"),
        (lambda m: DeviceMesh.concatenate([m["dp"], m["tp"]], 0), ValueError, "must have the same axes"),
    ],
)
def test_what_is_refused(ask, kind, words):
    def program():
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        with pytest.raises(kind) as error:
            ask(mesh)
        return str(error.value)

    for reports in meshdist.run(program, 8):
        assert words in reports


def test_ranks_outside_rearrange_as_well():
    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if mesh.get_coordinate() is not None:
            return
        assert mesh.flatten().mesh.tolist() == [0, 1, 2, 3]
        assert mesh.transpose().mesh.tolist() == [[0, 2], [1, 3]]
        assert mesh.unflatten("tp", (1, 2), ("a", "b")).shape == (2, 1, 2)
        assert [part.mesh.tolist() for part in mesh.split("tp", 2)] == [[[0], [2]], [[1], [3]]]
        assert mesh["tp"].flatten("x").shape == (2,)
        for ask in (lambda: mesh["tp"].flatten("x").mesh, mesh.flatten().get_group, lambda: mesh["tp"].split(0, 2)):
            with pytest.raises(ValueError, match="rank 4 is outside the mesh"):
                ask()

    meshdist.run(program, 5)
