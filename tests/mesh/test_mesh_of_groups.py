"""Meshes of groups that are there already, and meshes made inside a group."""

import pickle

import numpy as np
import pytest
from worlds import needs_linux

import meshdist
from meshdist.device_mesh import DeviceMesh, init_device_mesh


def test_a_mesh_of_one_group():
    def program():
        odd = meshdist.new_group([3, 1], sort_ranks=False)
        if meshdist.get_rank() % 2 == 0:
            with pytest.raises(ValueError, match=f"from_group: group: rank {meshdist.get_rank()} is not in it"):
                DeviceMesh.from_group(odd, "cpu")
            return None
        mesh = DeviceMesh.from_group(odd, "cpu", mesh_dim_names=("tp",))
        assert mesh.get_group() is mesh["tp"].get_group() is mesh.collective_group is odd
        assert mesh.mesh.tolist() == [3, 1]
        assert mesh == DeviceMesh.from_group(odd, "cpu", [3, 1], ("tp",))
        parted = DeviceMesh.from_group(odd, "cpu", mesh=[[3], [1]])
        assert parted.collective_group is odd
        return mesh.all_reduce(np.array([mesh.get_rank()])).item()

    assert meshdist.run(program, 4) == [None, 4, None, 4]


def mesh_of_two_groups():
    rank = meshdist.get_rank()
    rows, _ = meshdist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    columns, _ = meshdist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    ranks = [[0, 1], [2, 3]]
    mesh = DeviceMesh.from_group([columns, rows], "cpu", mesh=ranks, mesh_dim_names=("dp", "tp"))
    assert mesh.get_all_groups() == [columns, rows]
    assert mesh["tp"].get_group() is mesh["tp", "dp"].get_group("tp") is rows
    assert mesh == init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh["dp"].all_reduce(np.array([rank])).item() == [2, 4][rank % 2]
    return mesh["tp"].all_reduce(np.array([rank])).item()


def test_a_mesh_of_two_groups():
    assert meshdist.run(mesh_of_two_groups, 4) == [1, 1, 5, 5]


@needs_linux
def test_a_mesh_of_two_groups_on_processes(worlds):
    assert worlds.world("gloo", 4).run(mesh_of_two_groups) == [1, 1, 5, 5]


@pytest.mark.parametrize(
    ("ask", "kind", "words"),
    [
        (lambda rows, columns: DeviceMesh.from_group([], "cpu"), ValueError, "expected a group or a list of groups"),
        (lambda rows, columns: DeviceMesh.from_group("tp", "cpu"), TypeError, "must be a ProcessGroup, a DeviceMesh"),
        (lambda rows, columns: DeviceMesh.from_group(None, "cpu"), TypeError, "must be a ProcessGroup or a DeviceMesh"),
        (lambda rows, columns: DeviceMesh.from_group(rows, "cpu:0"), ValueError, "expected a type without an index"),
        (
            lambda rows, columns: DeviceMesh.from_group([rows, columns], "cpu"),
            ValueError,
            "give mesh, the global",
        ),
        (
            lambda rows, columns: DeviceMesh.from_group([rows, columns], "cpu", [[0, 1], [2, 3]]),
            ValueError,
            "they must be the same, in the same order",
        ),
        (
            lambda rows, columns: DeviceMesh.from_group([rows, columns], "cpu", [0, 1, 2, 3]),
            ValueError,
            "expected 1 group, one for each axis",
        ),
        (lambda rows, columns: DeviceMesh.from_group(rows, "cpu", [4, 5]), ValueError, "and not in the mesh"),
        (lambda rows, columns: DeviceMesh.from_group(rows, "cpu", [1, 0, 2, 3]), ValueError, "the mesh has the ranks"),
        (
            lambda rows, columns: DeviceMesh.from_group(rows, "cpu", mesh_dim_names=("a", "b")),
            ValueError,
            "expected 1 name,",
        ),
    ],
)
def test_groups_that_are_not_the_rows(ask, kind, words):
    def program():
        rows, _ = meshdist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        columns, _ = meshdist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        with pytest.raises(kind) as error:
            ask(rows, columns)
        return str(error.value)

    for reports in meshdist.run(program, 4):
        assert words in reports


def meshes_inside_groups():
    """On 4 ranks: a mesh inside a group, and one inside that mesh's group, while the others make theirs."""
    rank = meshdist.get_rank()
    half = meshdist.new_group([2, 0] if rank in (0, 2) else [1, 3], sort_ranks=False)
    inside = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"), group=half)
    assert inside.mesh.tolist() == ([[2], [0]] if rank in (0, 2) else [[1], [3]])
    assert inside.get_group("dp") is half is inside.collective_group
    again = init_device_mesh("cpu", (2,), mesh_dim_names=("x",), group=inside["dp"])
    assert again.get_group() is half
    alone = DeviceMesh("cpu", [rank], group=inside["tp"])
    assert alone.get_group().ranks == (rank,)
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert DeviceMesh("cpu", [0, 1, 2, 3], group=meshdist.group.WORLD).get_group() is meshdist.group.WORLD
    x = np.array([rank])
    return (
        inside["dp"].all_reduce(x.copy()).item(),
        alone.all_reduce(x.copy()).item(),
        whole["tp"].all_reduce(x.copy()).item(),
    )


def test_meshes_inside_groups():
    assert meshdist.run(meshes_inside_groups, 4) == [(2, 0, 1), (4, 1, 1), (2, 2, 5), (4, 3, 5)]


@needs_linux
def test_meshes_inside_groups_on_processes(worlds):
    assert worlds.world("gloo", 4).run(meshes_inside_groups) == [(2, 0, 1), (4, 1, 1), (2, 2, 5), (4, 3, 5)]


def test_a_mesh_that_only_some_ranks_make():
    def program():
        group = meshdist.new_group([0, 2])
        rank = meshdist.get_rank()
        if rank == 1:
            with pytest.raises(ValueError, match="DeviceMesh: group: rank 1 is not in it; only the ranks of a group"):
                init_device_mesh("cpu", (2,), group=group)
        else:
            for _ in range(3):
                part = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), group=group)
            smaller = init_device_mesh("cpu", (1,), group=group)
            assert (smaller.get_coordinate() is None) == (rank == 2)
            assert part.all_reduce(np.array([rank])).item() == 2
            with pytest.raises(ValueError, match=r"needs 3 ranks, but the group .* has 2"):
                init_device_mesh("cpu", (3,), group=group)
            with pytest.raises(ValueError, match=r"its ranks must be of the group .* got rank 1"):
                DeviceMesh("cpu", [0, 1], group=group)
        return init_device_mesh("cpu", (3,)).all_reduce(np.array([rank])).item()

    assert meshdist.run(program, 3) == [3, 3, 3]


def test_a_mesh_inside_a_group_has_its_backend():
    def program():
        group = meshdist.new_group([0, 1], backend="gloo")
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"), group=group)
        assert mesh.get_group("dp") is group is mesh.collective_group
        assert mesh.get_group("tp").backend_name == "gloo"
        other = init_device_mesh("cpu", (2,), group=group, backend_override={0: "threads"})
        assert other.get_group().backend_name == "threads"
        copy = pickle.loads(pickle.dumps(mesh))
        assert copy == mesh
        assert copy.get_group("dp").backend_name == "gloo"

    meshdist.run(program, 2)
