"""Collectives on meshes: along axes, over several axes in any order, on any arrangement of ranks."""

import itertools

import numpy as np
import pytest

import meshdist
from meshdist.device_mesh import DeviceMesh, init_device_mesh

ARRANGEMENTS = [
    pytest.param([[0, 1], [2, 3]], ("dp", "tp"), id="2x2"),
    pytest.param([[5, 0, 3], [2, 4, 1]], ("dp", "tp"), id="2x3 in no order"),
    pytest.param([[[7, 2], [0, 5]], [[3, 6], [1, 4]]], ("pp", "dp", "tp"), id="2x2x2 in no order"),
]


def selections(names):
    return [chosen for count in range(1, len(names) + 1) for chosen in itertools.permutations(names, count)]


def on_every_slice(ranks, names, check):
    """Run `check(sub_mesh, members)` for every slice on every rank; `members`: its ranks, row-major, by brute force."""
    array = np.array(ranks)

    def program():
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        where = mesh.get_coordinate()
        for chosen in selections(names):
            axes = [names.index(name) for name in chosen]
            members = []
            for inner in itertools.product(*(range(array.shape[axis]) for axis in axes)):
                full = list(where)
                for axis, index in zip(axes, inner, strict=True):
                    full[axis] = index
                members.append(int(array[tuple(full)]))
            check(mesh[chosen], members)

    meshdist.run(program, array.size)


@pytest.mark.parametrize(("ranks", "names"), ARRANGEMENTS)
def test_all_reduce(ranks, names):
    def check(mesh, members):
        x = np.array([1.0, 10.0 ** mesh.get_rank()])
        y = mesh.all_reduce(x)
        assert y is x
        assert y.tolist() == [len(members), sum(10.0**member for member in members)]
        assert mesh.all_reduce(np.array([mesh.get_rank()]), "max").item() == max(members)

    on_every_slice(ranks, names, check)


@pytest.mark.parametrize(("ranks", "names"), ARRANGEMENTS)
def test_broadcast_from_every_index_of_the_slice(ranks, names):
    def check(mesh, members):
        for index, member in enumerate(members):
            x = np.full(3, mesh.get_rank())
            mesh.broadcast(x, src=index)
            assert x.tolist() == [member] * 3

    on_every_slice(ranks, names, check)


@pytest.mark.parametrize(("ranks", "names"), ARRANGEMENTS)
def test_reduce_to_every_index_of_the_slice(ranks, names):
    def check(mesh, members):
        for index, member in enumerate(members):
            x = np.array([mesh.get_rank()])
            mesh.reduce(x, dst=index)
            assert x.item() == (sum(members) if mesh.get_rank() == member else mesh.get_rank())

    on_every_slice(ranks, names, check)


@pytest.mark.parametrize(("ranks", "names"), ARRANGEMENTS)
def test_all_gather_is_in_row_major_order_of_the_slice(ranks, names):
    def check(mesh, members):
        x = np.array([mesh.get_rank(), -mesh.get_rank()])
        out = np.empty((len(members), 2), dtype=x.dtype)
        mesh.all_gather_into_tensor(out, x)
        assert out.tolist() == [[member, -member] for member in members]

    on_every_slice(ranks, names, check)


@pytest.mark.parametrize(("ranks", "names"), ARRANGEMENTS)
def test_reduce_scatter_gives_each_index_its_row(ranks, names):
    def check(mesh, members):
        x = np.arange(len(members)) * 100 + mesh.get_rank()
        out = np.empty(1, dtype=x.dtype)
        mesh.reduce_scatter_tensor(out, x)
        assert out.item() == 100 * len(members) * members.index(mesh.get_rank()) + sum(members)

    on_every_slice(ranks, names, check)


def test_send_and_recv_along_an_axis():
    def program():
        mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("dp", "tp"))
        x = np.array([mesh.get_rank()])
        if mesh.get_local_rank("tp") == 0:
            mesh["tp"].send(x, dst=1)
        else:
            mesh["tp"].recv(x, src=0)
        return x.item()

    assert meshdist.run(program, 4) == [2, 3, 2, 3]


def test_tp_first_numbers_ranks_tp_major():
    def program():
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        gathered = []
        for part in (mesh, mesh["tp", "dp"]):
            out = np.empty(6, dtype=np.int64)
            part.all_gather_into_tensor(out, np.array([mesh.get_rank()]))
            gathered.append(out.tolist())
        return gathered

    assert meshdist.run(program, 6) == [[[0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5]]] * 6


def test_a_mesh_is_a_group_of_the_flat_functions():
    def program():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        by_mesh = meshdist.all_reduce(np.array([mesh.get_rank()]), group=mesh["tp"])
        by_group = meshdist.all_reduce(np.array([mesh.get_rank()]), group=mesh.get_group("tp"))
        return by_mesh.item(), by_group.item()

    assert meshdist.run(program, 4) == [(1, 1), (1, 1), (5, 5), (5, 5)]


def test_ranks_outside_do_not_hold_up_the_others():
    def program():
        mesh = DeviceMesh("cpu", [[4, 1], [0, 3]], mesh_dim_names=("dp", "tp"))
        if mesh.get_coordinate() is None:
            return None
        mesh.barrier()
        return [mesh[axes].all_reduce(np.array([mesh.get_rank()])).item() for axes in ("dp", "tp", ("tp", "dp"))]

    assert meshdist.run(program, 5) == [[4, 3, 8], [4, 5, 8], None, [4, 3, 8], [4, 5, 8]]


def test_two_meshes_take_turns():
    def program():
        rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        columns = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
        x = np.array([float(rows.get_rank())])
        for _ in range(5):
            rows["tp"].all_reduce(x, "avg")
            columns["tp"].all_reduce(x, "avg")
        return x.item()

    assert meshdist.run(program, 4) == [1.5] * 4
