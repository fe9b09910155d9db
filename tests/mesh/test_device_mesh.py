"""DeviceMesh on ranks as threads: places, slices, groups, meshes as values."""

import itertools
import pickle
import platform
import threading

import numpy as np
import pytest

import meshdist
from meshdist.device_mesh import DeviceMesh, get_current_mesh, init_device_mesh
from meshdist.runtime.context import current_world

ARRANGEMENTS = [
    pytest.param([[0, 1], [2, 3]], ("dp", "tp"), id="2x2"),
    pytest.param([[0, 1, 2], [3, 4, 5]], ("dp", "tp"), id="2x3"),
    pytest.param([[5, 0, 3], [2, 4, 1]], ("dp", "tp"), id="2x3 in no order"),
    pytest.param([[4], [0], [2]], ("dp", "tp"), id="3x1 of 6"),
    pytest.param([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ("pp", "dp", "tp"), id="2x2x2"),
    pytest.param([[[7, 2], [0, 5]], [[3, 6], [1, 4]]], ("pp", "dp", "tp"), id="2x2x2 in no order"),
]


def selections(names):
    """Every choice of one or more names, in every order."""
    return [chosen for count in range(1, len(names) + 1) for chosen in itertools.permutations(names, count)]


def expected_slice(ranks, names, rank, chosen):
    """The ranks that agree with `rank` in every axis not chosen, by the chosen axes in their order."""
    where = np.argwhere(ranks == rank)[0]
    shape = [ranks.shape[names.index(name)] for name in chosen]
    plane = np.empty(shape, dtype=int)
    for inner in np.ndindex(*shape):
        full = list(where)
        for name, index in zip(chosen, inner, strict=True):
            full[names.index(name)] = index
        plane[inner] = ranks[tuple(full)]
    return plane


@pytest.mark.parametrize(("ranks", "names"), ARRANGEMENTS)
def test_every_slice_holds_this_ranks_plane(ranks, names):
    array = np.array(ranks)

    def program():
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        rank = mesh.get_rank()
        assert rank == current_world().rank
        if rank not in array:
            assert mesh.get_coordinate() is None
            return
        coordinate = tuple(np.argwhere(array == rank)[0])
        assert mesh.get_coordinate() == coordinate
        assert (mesh.mesh.tolist(), mesh.shape, mesh.ndim) == (ranks, array.shape, array.ndim)
        assert (mesh.size(), mesh.mesh_dim_names, mesh.device_type) == (array.size, names, "cpu")
        for chosen in selections(names):
            part = mesh[chosen]
            assert part.mesh.tolist() == expected_slice(array, names, rank, chosen).tolist()
            assert part.mesh_dim_names == chosen
            assert part.get_coordinate() == tuple(coordinate[names.index(name)] for name in chosen)
            for axis, name in enumerate(chosen):
                assert part.size(name) == part.size(axis) == part.shape[axis] == mesh.size(name)
                assert part.get_local_rank(name) == part.get_local_rank(axis) == coordinate[names.index(name)]

    meshdist.run(program, max(6, array.size))


@pytest.mark.parametrize(("ranks", "names"), ARRANGEMENTS)
def test_groups_hold_the_rows_in_mesh_order(ranks, names):
    array = np.array(ranks)

    def program():
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        if mesh.get_coordinate() is None:
            return
        rank = mesh.get_rank()
        for axis, name in enumerate(names):
            group = mesh.get_group(name)
            assert group.ranks == tuple(expected_slice(array, names, rank, (name,)).tolist())
            assert group.rank() == mesh.get_coordinate()[axis] == mesh.get_local_rank(name)
            assert group.size() == mesh.size(name)
        assert mesh.get_all_groups() == [mesh.get_group(name) for name in names]
        for chosen in selections(names):
            members = tuple(expected_slice(array, names, rank, chosen).reshape(-1).tolist())
            assert mesh[chosen].collective_group.ranks == members

    meshdist.run(program, max(6, array.size))


def test_slices_are_the_same_object_each_time():
    def program():
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        assert mesh["tp"] is mesh["tp"]
        assert mesh[("tp",)] is mesh["tp"]
        assert mesh["dp", "tp"] is mesh["dp", "tp"]
        assert mesh["dp", "tp"] is not mesh["tp", "dp"]
        assert mesh["pp", "dp", "tp"] is mesh
        assert mesh["tp"]["tp"] is mesh["tp"]
        assert mesh["dp", "tp"]["tp"] is mesh["tp"]
        assert mesh["tp", "dp"]["dp", "tp"] is mesh["dp", "tp"]
        assert mesh["tp", "pp", "dp"]["pp", "tp"]["pp"] is mesh["pp"]

    meshdist.run(program, 8)


def test_slices_made_by_several_threads_of_a_rank_are_one():
    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        together = threading.Barrier(4)
        slices = []

        def take():
            together.wait(30)
            slices.append(mesh["tp"])

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert slices == [mesh["tp"]] * 4
        assert len(set(map(id, slices))) == 1

    meshdist.run(program, 4)


def test_groups_are_shared():
    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        group = mesh.get_group("tp")
        assert mesh.get_group("tp") is group
        assert mesh.get_group(1) is group
        assert mesh.get_group(-1) is group
        assert mesh["tp"].get_group() is group
        assert mesh["tp"].get_group("tp") is group
        assert mesh["tp", "dp"].get_group("tp") is group
        assert mesh["tp"].collective_group is group
        assert DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("a", "b")).get_group("b") is group
        assert mesh.collective_group is current_world().default_group
        assert init_device_mesh("cpu", (4,)).get_group() is current_world().default_group
        assert mesh["tp", "dp"].collective_group is not mesh.collective_group

    meshdist.run(program, 4)


def test_ranks_may_ask_for_the_groups_of_several_meshes_in_any_order():
    def program():
        one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        other = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("x", "y"), backend_override={"y": "threads"})
        asked = [one["tp"], other["y"], one["dp"], other["x"]]
        for mesh in asked if one.get_rank() % 2 else reversed(asked):
            mesh.get_group()
        return [mesh.all_reduce(np.array([one.get_rank()])).item() for mesh in asked]

    assert meshdist.run(program, 4, timeout=20) == [[1, 1, 2, 2], [1, 1, 4, 4], [5, 5, 2, 2], [5, 5, 4, 4]]


def test_a_mesh_of_one_axis_needs_no_axis_named():
    def program():
        mesh = DeviceMesh("cpu", [2, 0, 1])
        assert mesh.get_group().ranks == (2, 0, 1)
        assert mesh.get_local_rank() == mesh.get_group().rank() == (2, 0, 1).index(mesh.get_rank())
        assert mesh.get_coordinate() == (mesh.get_local_rank(),)
        assert mesh.mesh_dim_names is None

    meshdist.run(program, 3)


def test_several_meshes_at_once():
    def program():
        wide = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
        tall = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
        square = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
        halves = [DeviceMesh("cpu", ranks, mesh_dim_names=("x",)) for ranks in ([0, 1], [3, 2])]
        rank = wide.get_rank()
        assert wide["tp"].mesh.tolist() == [0, 1, 2, 3]
        assert tall["tp"].mesh.tolist() == [rank]
        assert square["tp"].mesh.tolist() == [[0, 2], [1, 3]][rank % 2]
        assert [half.get_coordinate() is not None for half in halves] == [rank < 2, rank >= 2]
        mine = halves[rank // 2]
        assert mine["x"] is mine
        assert mine.get_group().ranks == ((0, 1), (3, 2))[rank // 2]

    meshdist.run(program, 4)


def test_a_smaller_mesh_leaves_ranks_outside():
    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        part = mesh["tp"]
        assert (mesh.size(), mesh.mesh.tolist()) == (4, [[0, 1], [2, 3]])
        assert (part.size(), part.shape, part.mesh_dim_names) == (2, (2,), ("tp",))
        assert (mesh.get_coordinate() is None) == (part.get_coordinate() is None) == (mesh.get_rank() >= 4)
        assert mesh["tp", "dp"].mesh.tolist() == [[0, 2], [1, 3]]
        return mesh.get_coordinate()

    assert meshdist.run(program, 6) == [(0, 0), (0, 1), (1, 0), (1, 1), None, None]


def test_what_ranks_outside_are_told():
    asked = {
        "DeviceMesh.get_group": lambda mesh: mesh.get_group("tp"),
        "DeviceMesh.get_local_rank": lambda mesh: mesh.get_local_rank("tp"),
        "DeviceMesh.mesh": lambda mesh: mesh["tp"].mesh,
        "DeviceMesh": lambda mesh: mesh["tp"].all_reduce(np.ones(1)),
    }

    def program():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        if mesh.get_coordinate() is not None:
            return {}
        reports = {}
        for where, ask in asked.items():
            with pytest.raises(ValueError, match="go on only where mesh") as error:
                ask(mesh)
            reports[where] = str(error.value)
        with pytest.raises(ValueError, match="rank 2 is outside"):
            mesh.get_all_groups()
        with pytest.raises(ValueError, match="rank 2 is outside"):
            mesh.barrier()
        return reports

    for where, sentence in meshdist.run(program, 3)[2].items():
        assert sentence.startswith(f"{where}: rank 2 is outside the mesh (dp=1, tp=2) of ranks 0, 1; ")


def test_equality_and_hash_by_arrangement():
    meshdist.Backend.register_backend("cards", lambda *args: meshdist.backends.Engine(), devices="cuda")

    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        same = DeviceMesh("cpu", np.array([[0, 1], [2, 3]]), mesh_dim_names=["dp", "tp"])
        mine = [[0, 1], [2, 3]][mesh.get_rank() // 2]
        row = DeviceMesh("cpu", mine, mesh_dim_names=("tp",), group=meshdist.new_group(mine))
        assert (mesh, mesh["tp"]) == (same, row)
        assert (hash(mesh), hash(mesh["tp"])) == (hash(same), hash(row))
        assert len({mesh, same, mesh["tp"], row, same["tp"]}) == 2
        different = [
            DeviceMesh(
                "cuda", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), backend_override={0: "cards", 1: "cards"}
            ),
            DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp")),
            DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp")),
            DeviceMesh("cpu", [[0, 1], [2, 3]]),
            DeviceMesh("cpu", [0, 1, 2, 3]),
            mesh["tp", "dp"],
        ]
        assert all(mesh != other for other in different)
        assert mesh != "a mesh"

    meshdist.run(program, 4)


def test_pickle_keeps_the_arrangement_and_needs_no_world():
    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        copy = pickle.loads(pickle.dumps(mesh))
        assert copy == mesh
        assert copy.get_coordinate() == mesh.get_coordinate()
        assert copy["tp"] == mesh["tp"]
        assert copy.get_group("tp") is mesh.get_group("tp")
        assert pickle.loads(pickle.dumps(mesh["tp"])) == mesh["tp"]
        return pickle.dumps(mesh)

    copies = [pickle.loads(data) for data in meshdist.run(program, 4)]
    assert len(set(copies)) == 1
    mesh = copies[0]
    assert (mesh.shape, mesh.size("tp"), mesh.mesh.tolist()) == ((2, 2), 2, [[0, 1], [2, 3]])
    assert repr(mesh) == "DeviceMesh('cpu', (dp=2, tp=2), ranks 0, 1, 2, 3)"
    for ask in (mesh.get_coordinate, mesh.get_rank, lambda: mesh["tp"], lambda: mesh.get_group("tp")):
        with pytest.raises(ValueError, match="init_process_group"):
            ask()
    with pytest.raises(ValueError, match=r"the mesh has rank 3, but the world has only 2 ranks"):
        meshdist.run(mesh.get_coordinate, 2)


def test_the_ranks_cannot_be_written():
    def program():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with pytest.raises(ValueError, match="read-only"):
            mesh.mesh[0] = 1

    meshdist.run(program, 2)


def test_with_makes_a_mesh_current():
    together = threading.Barrier(4)

    def program():
        outer = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ValueError, match="no mesh is current; call it inside `with mesh:`"):
            get_current_mesh()
        with outer as entered:
            assert entered is get_current_mesh() is outer
            together.wait(30)
            with outer["tp"]:
                assert get_current_mesh() is outer["tp"]
            assert get_current_mesh() is outer
        with pytest.raises(RuntimeError, match="on purpose"), outer:
            raise RuntimeError("on purpose")
        with pytest.raises(ValueError, match="no mesh is current"):
            get_current_mesh()

    meshdist.run(program, 4)


def test_a_mesh_says_what_it_is():
    def program():
        named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meshes = [
            named,
            named["tp"],
            DeviceMesh("cpu", [[3, 1], [2, 0]]),
            init_device_mesh("cpu", (1, 2)),
            DeviceMesh("cpu", range(16)),
        ]
        return [repr(mesh) for mesh in meshes]

    reports = meshdist.run(program, 16)
    assert reports[3] == [
        "DeviceMesh('cpu', (dp=2, tp=2), rank 3 at (dp=1, tp=1), ranks 0, 1, 2, 3)",
        "DeviceMesh('cpu', (tp=2), rank 3 at (tp=1), ranks 2, 3)",
        "DeviceMesh('cpu', (2, 2), rank 3 at (0, 0), ranks 3, 1, 2, 0)",
        "DeviceMesh('cpu', (1, 2), rank 3 is outside, ranks 0, 1)",
        "DeviceMesh('cpu', (16), rank 3 at (3), ranks 0-15)",
    ]
    assert reports[9][1] == "DeviceMesh('cpu', (tp=2), rank 9 is outside)"


def test_a_printed_mesh_names_the_hosts():
    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return str(mesh), str(mesh["tp"])

    reports = meshdist.run(program, 5)
    assert reports[2] == (
        "DeviceMesh('cpu', (dp=2, tp=2), rank 2 at (dp=1, tp=0), ranks 0, 1, 2, 3,"
        f" ranks by host: {platform.node()} (4))",
        f"DeviceMesh('cpu', (tp=2), rank 2 at (tp=0), ranks 2, 3, ranks by host: {platform.node()} (2))",
    )
    assert reports[4][1] == "DeviceMesh('cpu', (tp=2), rank 4 is outside)"


def test_backend_override_is_given_to_the_axis_it_names():
    def program():
        override = {"tp": "threads", 0: "THREADS"}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override=override)
        assert override == {"tp": "threads", 0: "THREADS"}
        x = mesh["tp"].all_reduce(np.array([mesh.get_rank()]))
        y = mesh.all_reduce(np.array([mesh.get_rank()]))
        assert pickle.loads(pickle.dumps(mesh)).get_group("tp") is mesh.get_group("tp")
        assert mesh["tp", "dp"].get_group("tp") is mesh.get_group("tp")
        return int(x[0]), int(y[0])

    assert meshdist.run(program, 4) == [(1, 6), (1, 6), (5, 6), (5, 6)]


def test_every_mesh_belongs_to_its_run():
    def program():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        return mesh["dp"].all_reduce(np.array([mesh.get_rank() + 1])).item()

    assert [meshdist.run(program, 2) for _ in range(3)] == [[3, 3]] * 3
