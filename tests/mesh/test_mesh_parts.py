"""The parts that meshes are made of: layouts, axes as strides, hosts, and what drawings are made of."""

import numpy as np
import pytest

import meshdist
from meshdist.errors import UnknownAxisError
from meshdist.groups.world import current_world
from meshdist.mesh.layout.axes_and_chunks import checked_sizes, part_sizes
from meshdist.mesh.layout.layout import Layout
from meshdist.mesh.layout.rank_list import RankList
from meshdist.mesh.layout.strides import fit, joined, parted, row_major, way_along
from meshdist.mesh.mesh_check import Agreement
from meshdist.mesh.mesh_groups import MeshGroups
from meshdist.mesh.mesh_slices import MeshSlices
from meshdist.mesh.mesh_state import MeshHosts, MeshState
from meshdist.mesh.show.grid import Window
from meshdist.mesh.show.plot import panels_across
from meshdist.mesh.show.text import mark
from meshdist.store import HashStore


def test_unknown_axis_error():
    sentence = "unknown axis 'pp': this mesh is (tp=2), its axes are 'tp'"
    assert str(UnknownAxisError(sentence)) == sentence


def test_checked_sizes():
    assert checked_sizes("mesh_shape", [2, 4]) == (2, 4)


def test_part_sizes():
    assert (part_sizes("split", 2, 6), part_sizes("split", (1, 5), 6)) == ((3, 3), (1, 5))


def test_layout():
    layout = Layout([[0, 1, 2], [3, 4, 5]], names=("dp", "tp"))
    assert layout.coordinate(4) == (1, 1)
    assert layout.row(layout.axis("dp"), (1, 1)).tolist() == [1, 4]
    assert layout.select((1, 0), (1, 1)).ranks.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert layout.transpose((1, 0)).flatten((0, 1), "all").ranks.tolist() == [0, 3, 1, 4, 2, 5]


def test_layout_flatten():
    layout = Layout([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ("pp", "dp", "tp"))
    assert layout.flatten((0, 2), "pp_tp").ranks.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_layout_unflatten():
    assert Layout([0, 1, 2, 3], ("world",)).unflatten(0, (2, 2), ("dp", "tp")).ranks.tolist() == [[0, 1], [2, 3]]


def test_layout_split():
    assert [part.ranks.tolist() for part in Layout([[0, 1, 2], [3, 4, 5]]).split(1, (1, 2))] == [
        [[0], [3]],
        [[1, 2], [4, 5]],
    ]


def test_layout_concatenate():
    assert Layout.concatenate([Layout([[0], [3]]), Layout([[1, 2], [4, 5]])], 1).ranks.tolist() == [
        [0, 1, 2],
        [3, 4, 5],
    ]


def test_layout_over():
    layout = Layout([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ("pp", "dp", "tp"))
    assert layout.over([layout.axes[2], layout.axes[0]], ("tp", "pp"), rank=6).ranks.tolist() == [[2, 6], [3, 7]]


def test_rank_list():
    ranks = RankList(np.array([4, 7, 5]))
    assert (ranks.position(5), ranks.position(6)) == (2, None)


def test_row_major():
    assert row_major((2, 3)) == (((2, 3),), ((3, 1),))


def test_joined():
    assert joined(row_major((2, 3))) == ((6, 1),)
    assert joined([((3, 1),), ((2, 3),)]) == ((3, 1), (2, 3))


def test_parted():
    assert parted(((6, 1),), (2, 3)) == (((2, 3),), ((3, 1),))
    assert parted(((3, 1), (2, 3)), (2, 3)) is None  # the axis counts three twos, not two threes


def test_fit():
    dp, tp = row_major((2, 3))
    assert (fit([tp], [dp, tp]), fit([tp, tp], [dp, tp]), fit([((4, 1),)], [dp, tp])) == (True, False, False)


def test_way_along():
    dp, tp = row_major((2, 3))
    assert (way_along([tp], [dp, tp], 5), way_along([dp], [dp, tp], 5)) == (2, 3)


def test_agreement():
    assert Agreement(HashStore(), "mesh/world/1").broken() is None


@pytest.mark.parametrize("base", [MeshState, MeshGroups, MeshSlices])
def test_a_device_mesh_has_the_parts_of_its_bases(base):
    assert issubclass(meshdist.DeviceMesh, base)


def test_mesh_hosts():
    with meshdist.dry_run(4):
        world = current_world()
        assert MeshHosts(world, meshdist.Topology.uniform(2, 2)).hosts([0, 3]) == ["host0", "host1"]
        assert MeshHosts(world, None).hosts([0, 3]) == ["node0", "node0"]


def test_window_around():
    assert Window.around(19, 16, 256) == Window(first=12, end=28, size=256)
    assert Window.around(255, 16, 256) == Window(first=240, end=256, size=256)


def test_panels_across():
    assert (panels_across(8, 5, 9.2, 1.5), panels_across(1, 5, 9.2, 1.5), panels_across(8, 3, 3.2, 1.5)) == (2, 1, 4)
    assert (panels_across(2, 2, 2, 3), panels_across(2, 2, 2, 0.5)) == (2, 1)  # wide, and tall


def test_mark():
    assert (mark(0), mark(25), mark(26), mark(701), mark(702)) == ("a", "z", "aa", "zz", "aaa")
