"""The documented examples of DeviceMesh. The pages have eight GPUs; these take the processes there are."""

import numpy as np
import pytest
from documented import check, place

import meshdist as dist
from meshdist.device_mesh import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.timeout(60)


def shape_of(size):
    """Return two axes for `size` ranks."""
    return (2, size // 2) if size % 2 == 0 else (1, size)


def named_axes():
    rank, size = place()
    mesh_1d = init_device_mesh("cpu", mesh_shape=(size,))
    mesh_2d = init_device_mesh("cpu", mesh_shape=shape_of(size), mesh_dim_names=("dp", "tp"))
    found = []
    for axis in ("dp", "tp"):
        x = np.array([rank])
        dist.all_reduce(x, group=mesh_2d.get_group(axis))
        found.append(x.item())
    return mesh_1d.shape, mesh_2d.get_coordinate(), found


def test_init_device_mesh(initialised):
    ranks = np.arange(initialised.size).reshape(shape_of(initialised.size))
    expected = [
        ((initialised.size,), (row, column), [int(ranks[:, column].sum()), int(ranks[row].sum())])
        for row, column in np.ndindex(ranks.shape)
    ]
    check(initialised, named_axes, expected)


def along_both_axes(rows):
    mesh = DeviceMesh(device_type="cpu", mesh=rows)
    rank, _ = place()
    members = [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(2)]
    totals = []
    for dim in range(2):
        x = np.array([rank])
        dist.all_reduce(x, group=mesh.get_group(dim))
        totals.append(x.item())
    with mesh:
        pass
    return members, totals


def columns_and_rows(rows):
    ranks = np.array(rows)
    return [
        ([ranks[:, column].tolist(), ranks[row].tolist()], [int(ranks[:, column].sum()), int(ranks[row].sum())])
        for row, column in np.ndindex(ranks.shape)
    ]


def test_device_mesh_of_ranks(initialised):
    rows = np.arange(initialised.size).reshape(shape_of(initialised.size)).tolist()
    check(initialised, along_both_axes, columns_and_rows(rows), args=(rows,))


def test_two_hosts_of_four():
    rows = [[0, 1, 2, 3], [4, 5, 6, 7]]
    found = dist.run(along_both_axes, 8, (rows,))
    assert found == columns_and_rows(rows)
    assert found[0][0] == [[0, 4], [0, 1, 2, 3]]
    assert found[7][0] == [[3, 7], [4, 5, 6, 7]]
