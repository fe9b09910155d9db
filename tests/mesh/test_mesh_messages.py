"""Meshes as containers of axis names and in notebooks, and the texts of their errors."""

import inspect
import pickle

import numpy as np
import pytest

import meshdist
from meshdist.backends.threads import ThreadsBackend
from meshdist.device_mesh import DeviceMesh, init_device_mesh

NAMES = ("dp", "tp")


def test_names_in_a_mesh():
    with meshdist.dry_run(8, 3):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        mesh["dp", "tp"].flatten()
        assert "tp" in mesh
        assert "tp" not in mesh["pp", "dp"]
        assert "dp_tp" in mesh
        assert "dp_tp" not in mesh["pp", "dp"]
        assert "cp" not in mesh
        assert "tp" not in init_device_mesh("cpu", (8,))
        with pytest.raises(TypeError, match="asks a DeviceMesh for the name of an axis, got 3 .* in mesh.mesh"):
            assert 3 in mesh


def test_a_mesh_is_not_gone_through():
    with meshdist.dry_run(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        with pytest.raises(TypeError, match="'DeviceMesh' object is not iterable"):
            list(mesh)


def test_a_notebook_shows_a_mesh_as_a_table():
    with meshdist.dry_run(4, 1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
        assert mesh._repr_html_() == mesh.show("html")
        assert mesh._repr_html_().count("<td") == 4
    with meshdist.dry_run(4, 3):
        outside = init_device_mesh("cpu", (1, 2), mesh_dim_names=NAMES)["tp"]
        assert "rank 3 is outside" in outside._repr_html_()


def test_all_rows_along_an_axis():
    def program():
        mesh = DeviceMesh("cpu", [[5, 0, 3], [2, 4, 1]], mesh_dim_names=NAMES)
        rows, columns = mesh._get_all_submeshes("tp"), mesh._get_all_submeshes(mesh_dim_name="dp")
        assert [row.mesh.tolist() for row in rows] == [[5, 0, 3], [2, 4, 1]]
        assert [column.mesh.tolist() for column in columns] == [[5, 2], [0, 4], [3, 1]]
        assert {row.mesh_dim_names for row in rows} == {("tp",)}
        mine = [row for row in rows if row.get_coordinate() is not None]
        assert mine == [mesh["tp"]]
        assert mine[0] is mesh["tp"]
        return mine[0].all_reduce(np.array([mesh.get_rank()])).item()

    assert meshdist.run(program, 6) == [8, 7, 7, 8, 7, 8]


def test_a_shared_group_has_the_name_of_an_axis_that_has_one():
    with meshdist.dry_run(4):
        group = DeviceMesh("cpu", [0, 2]).get_group()
        plane = DeviceMesh("cpu", [[0], [3]]).collective_group
        group.barrier()
        assert (group.label, plane.label) == ("axis 0", "mesh")
        named = DeviceMesh("cpu", [0, 2], mesh_dim_names=("s",)).get_group()
        assert named is group
        assert DeviceMesh("cpu", [[0], [3]], mesh_dim_names=NAMES).collective_group is plane
        assert (group.label, plane.label) == ("s", "dp,tp")
        assert DeviceMesh("cpu", [0, 2], mesh_dim_names=("t",)).get_group().label == "s"
        with pytest.raises(TypeError, match="all_reduce on group 's'"):
            group.all_reduce("x")


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (
            lambda mesh: mesh.unflatten("tp", (2, 2), ("b",)),
            r"unflatten: axis 'tp' becomes 2 axes, so pass 2 names, got 1: \('b',\)",
        ),
        (lambda mesh: mesh.unflatten("tp", (2, 2)), "axis 'tp' becomes 2 axes, so pass 2 names, got none"),
        (
            lambda mesh: init_device_mesh("cpu", (8,)).unflatten(0, (2, 4), ("a", "b")),
            r"mesh \(8\) have no names, so the new axes must have none, got \('a', 'b'\); leave names out, or",
        ),
        (
            lambda mesh: DeviceMesh.concatenate([mesh, mesh["tp"]], "dp"),
            r"concatenate: meshes must have the same axes, got \(dp=2, tp=4\) and \(tp=4\)",
        ),
        (
            lambda mesh: DeviceMesh.concatenate(
                [
                    DeviceMesh("cpu", [0, 1]),
                    DeviceMesh("cpu", [2, 3], backend_override={0: "gloo"}),
                ],
                0,
            ),
            r"meshes must have the same backends, got \(None,\) and \('gloo',\)",
        ),
        (lambda mesh: mesh.split("dp", (1, 2)), r"axis 'dp' has 2 ranks, and parts of 1 \+ 2 are 3; pass parts whose"),
        (lambda mesh: mesh["tp", "tp"], "and each once, of 'dp', 'tp'; got repeated: 'tp'"),
        (lambda mesh: mesh[()], "and each once, of 'dp', 'tp'; got none"),
    ],
)
def test_words(ask, words):
    with meshdist.dry_run(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES)
        with pytest.raises(ValueError, match=words):
            ask(mesh)


@pytest.mark.parametrize("make", [lambda: init_device_mesh("cpu", (2,)), lambda: DeviceMesh("cpu", [0, 1])])
def test_a_default_group_of_a_mesh_that_is_refused_is_ended(make, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="start"):
        make()
    assert not meshdist.is_initialized()
    meshdist.init_process_group()
    try:
        with pytest.raises(ValueError, match="start"):
            make()
        assert meshdist.is_initialized()
    finally:
        meshdist.destroy_process_group()


def test_a_backend_of_an_axis_with_options():
    given = []

    def engine(options, pg_options):
        given.append((options.ranks, pg_options))
        return ThreadsBackend(options)

    meshdist.Backend.register_backend("with_options", engine, extended_api=True)

    def program():
        override = {"tp": ("with_options", {"lanes": 2})}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES, backend_override=override)
        assert mesh["tp"].all_reduce(np.array([mesh.get_rank()])).item() in (1, 5)
        mesh["dp"].barrier()
        row = DeviceMesh("cpu", mesh["tp"].mesh, group=mesh["tp"], backend_override={0: ("with_options", {"lanes": 2})})
        assert row.get_group() is mesh.get_group("tp")
        assert pickle.loads(pickle.dumps(mesh)).get_group("tp") is mesh.get_group("tp")
        other = DeviceMesh(
            "cpu", mesh["tp"].mesh, group=mesh["tp"], backend_override={0: ("with_options", {"lanes": 3})}
        )
        with pytest.raises(ValueError, match=r"already exists, with the options \{'lanes': 2\} and not \{'lanes': 3\}"):
            other.get_group()

    meshdist.run(program, 4)
    assert sorted(given, key=lambda one: one[0]) == [
        (ranks, {"lanes": 2}) for ranks in ((0, 1), (0, 1), (2, 3), (2, 3))
    ]


def test_the_underscored_names_take_what_torchs_do():
    for method, names in {
        "_flatten": ["mesh_dim_name", "backend_override"],
        "_unflatten": ["dim", "mesh_sizes", "mesh_dim_names", "backend_override"],
        "_concatenate": ["device_mesh_list"],
        "_get_all_submeshes": ["mesh_dim_name"],
    }.items():
        found = [name for name in inspect.signature(getattr(DeviceMesh, method)).parameters if name != "self"]
        assert found == names
    with meshdist.dry_run(8, 5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES)
        assert mesh.get_coordinate() == (1, 1)
        assert isinstance(mesh.get_coordinate(), tuple)
        parted = mesh._unflatten(dim="tp", mesh_sizes=(2, 2), mesh_dim_names=("cp", "tp"), backend_override=None)
        assert parted.shape == (2, 2, 2)
        assert DeviceMesh._concatenate(device_mesh_list=[parted["tp"], parted["dp"]]).mesh_dim_names == ("tp", "dp")
