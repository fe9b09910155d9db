"""Meshes placed on hosts: rows that stay inside, ranks in any numbering, and equally on all ranks."""

import itertools
import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshdist
from meshdist.topology import Link, Part, Topology

CABLE = Link(1e-5, 1e9)


def on_hosts(*hosts):
    """A topology of hosts with these ranks."""
    return Topology(
        [
            Part("network", "network"),
            *(Part(f"h{index}", "host", "network", CABLE, ranks=tuple(ranks)) for index, ranks in enumerate(hosts)),
        ]
    )


def rows_that_leave(machine, ranks, axis):
    rows = np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis])
    return sum(len({machine.host_of(rank) for rank in row}) > 1 for row in rows.tolist())


IN_TURNS = on_hosts([0, 2, 4, 6], [1, 3, 5, 7])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 4), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ((4, 2), [[0, 2], [4, 6], [1, 3], [5, 7]]),
        ((8,), [0, 2, 4, 6, 1, 3, 5, 7]),
        ((1, 8, 1), [[[0], [2], [4], [6], [1], [3], [5], [7]]]),
        ((2, 2), [[0, 2], [4, 6]]),
        ((3, 2), [[0, 2], [4, 6], [1, 3]]),
    ],
)
def test_last_axes_stay_inside_hosts(shape, expected):
    assert IN_TURNS.place(shape).tolist() == expected


def test_ranks_in_blocks_stay_in_order():
    assert Topology.uniform(4, 8).place((4, 4, 2)).tolist() == np.arange(32).reshape(4, 4, 2).tolist()


def test_named_axes_stay_inside_wherever_they_stand():
    ranks = IN_TURNS.place((2, 2, 2), ("tp", "dp", "cp"), inside=("tp", "cp"))
    assert sorted(ranks[:, 0].flatten().tolist()) == [0, 2, 4, 6]
    assert sorted(ranks[:, 1].flatten().tolist()) == [1, 3, 5, 7]
    assert IN_TURNS.place((4, 2), ("tp", "dp"), "tp").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_unequal_hosts_mix_as_few_rows_as_they_must():
    machine = on_hosts([0, 1, 2], [3, 4, 5, 6], [7])
    ranks = machine.place((4, 2))
    assert ranks.tolist() == [[0, 1], [3, 4], [5, 6], [2, 7]]
    machine = on_hosts([0, 1, 2], [3, 4, 5, 6, 7])
    assert rows_that_leave(machine, machine.place((2, 4)), 1) == 1
    assert machine.place((3, 2)).tolist() == [[0, 1], [3, 4], [5, 6]]


def test_an_axis_larger_than_a_host_is_cut_evenly():
    machine = on_hosts(range(0, 12, 2), range(1, 12, 2))
    assert machine.place((12,)).tolist() == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]
    # Hosts of six hold blocks of four once each: the even part that fits is two.
    ranks = machine.place((3, 4))
    assert all(machine.host_of(a) == machine.host_of(b) for a, b in ranks.reshape(-1, 2).tolist())


def test_sockets_and_gpus_order_the_ranks_of_a_host():
    machine = Topology(
        [
            Part("node", "host"),
            Part("s0", "socket", "node", CABLE, ranks=(1, 3)),
            Part("s1", "socket", "node", CABLE, ranks=(0, 2)),
        ]
    )
    assert machine.place((2, 2)).tolist() == [[1, 3], [0, 2]]


@pytest.mark.parametrize(
    ("shape", "names", "inside", "message"),
    [
        ((2, 8), None, None, r"a mesh of shape \(2, 8\) needs 16 ranks, but the topology has 8"),
        ((8,), ("tp",), "tp", "'tp' is to stay inside hosts, which takes 1 block of 8 ranks, but the 2 hosts have 4"),
        ((2, 4), ("dp", "tp"), "pp", "there is no axis 'pp' to keep inside hosts; the axes are 'dp', 'tp'"),
        ((2, 4), None, "tp", "the mesh has no names; pass names, or its index"),
        ((), None, None, "a shape has at least one axis"),
        ((2, 4), ("dp",), None, "mesh_dim_names"),
    ],
)
def test_what_cannot_be_placed_is_refused(shape, names, inside, message):
    with pytest.raises(ValueError, match=message):
        IN_TURNS.place(shape, names, inside)


@given(data=st.data())
def test_every_rank_once_and_rows_inside_where_hosts_allow(data):
    num_hosts, block, blocks = (data.draw(st.integers(1, 4)) for _ in range(3))
    order = data.draw(st.permutations(range(num_hosts * block * blocks)))
    machine = on_hosts(*np.array(order).reshape(num_hosts, -1).tolist())
    shape = (num_hosts * blocks, block)
    ranks = machine.place(shape)
    assert sorted(ranks.reshape(-1).tolist()) == list(range(math.prod(shape)))
    assert rows_that_leave(machine, ranks, 1) == 0
    named = machine.place(shape[::-1], ("tp", "dp"), "tp")
    assert rows_that_leave(machine, named, 0) == 0
    assert np.array_equal(named, machine.place(shape[::-1], ("tp", "dp"), ["tp"]))


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=5), row=st.integers(1, 6))
def test_of_unequal_hosts_no_more_rows_leave_than_must(counts, row):
    edges = np.cumsum([0, *counts])
    machine = on_hosts(*(range(low, high) for low, high in itertools.pairwise(edges.tolist())))
    num_rows = sum(counts) // row
    if not num_rows:
        return
    ranks = machine.place((num_rows, row))
    assert len(np.unique(ranks)) == num_rows * row
    if row <= max(counts):
        whole = sum(count // row for count in counts)
        assert rows_that_leave(machine, ranks, 1) >= max(0, num_rows - whole)
        if whole >= num_rows:
            assert rows_that_leave(machine, ranks, 1) == 0


# ---- Through init_device_mesh


def test_mesh_of_a_given_topology():
    def program(topology):
        mesh = meshdist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), topology=topology)
        x = np.array([float(mesh.get_rank())])
        return mesh.mesh.tolist(), mesh["tp"].all_reduce(x).item()

    expected = [[0, 2, 4, 6], [1, 3, 5, 7]]
    for topology in (IN_TURNS, IN_TURNS.graph):
        found = meshdist.run(program, 8, args=(topology,))
        assert found == [(expected, 12.0), (expected, 16.0)] * 4


def test_mesh_with_named_axes_inside():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (4, 2), mesh_dim_names=("tp", "dp"), topology=IN_TURNS.inside("tp"))
        return mesh["tp"].mesh.tolist()

    assert meshdist.run(program, 8) == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4


@pytest.mark.parametrize("topology", [True, "auto", None, False])
def test_mesh_on_one_host_is_in_order(topology):
    def program():
        return meshdist.init_device_mesh("cpu", (2, 2), topology=topology).mesh.tolist()

    assert meshdist.run(program, 4) == [[[0, 1], [2, 3]]] * 4


@pytest.mark.parametrize(
    ("topology", "kind", "message"),
    [
        (Topology.uniform(1, 4), ValueError, "it has 4 ranks, but the world has 2"),
        ("fast", ValueError, "expected 'auto' or the path of a .toml file, got 'fast'"),
        (3.5, TypeError, "expected True, 'auto', a Topology"),
        (Topology.uniform(2, 1).inside("tp"), ValueError, "'tp' is to stay inside hosts"),
        (Topology.uniform(2, 1).inside("pp"), ValueError, "there is no axis 'pp'"),
        (nx.path_graph(2), ValueError, "no node is of kind 'host'"),
    ],
)
def test_wrong_topologies_are_refused_on_every_rank(topology, kind, message):
    def program():
        with pytest.raises(kind, match=message):
            meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), topology=topology)

    meshdist.run(program, 2)
