"""A mesh inside a group that is placed on a topology."""

import numpy as np
import pytest

import meshdist
from meshdist.topology import Link, Part, Topology

LINK = Link(1e-5, 1e9)
IN_TURNS = Topology(
    [
        Part("network", "network"),
        Part("even", "host", "network", LINK, ranks=(0, 2, 4, 6)),
        Part("odd", "host", "network", LINK, ranks=(1, 3, 5, 7)),
    ]
)


def mesh_of_the_last_six():
    if meshdist.get_rank() < 2:
        return None
    group = meshdist.new_group(range(2, 8))
    mesh = meshdist.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"), group=group, topology=IN_TURNS)
    return mesh.mesh.tolist()


def test_the_ranks_of_the_group_alone_are_placed():
    assert meshdist.run(mesh_of_the_last_six, 8) == [None] * 2 + [[[2, 4, 6], [3, 5, 7]]] * 6


def seen_of(mesh, capsys):
    mesh.show("text")
    return capsys.readouterr().out.splitlines()[-1]


def test_the_topology_says_the_hosts_of_the_mesh_and_of_what_is_derived(capsys):
    with meshdist.dry_run(8, 3, ranks_per_host=4) as dry:
        mesh = meshdist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), topology=IN_TURNS)
        assert seen_of(mesh, capsys) == "hosts (ranks): a even (4), b odd (4)"
        assert seen_of(mesh["tp"], capsys) == "all ranks on odd"
        assert seen_of(mesh.unflatten("tp", (2, 2), ("a", "b")), capsys) == "hosts (ranks): a even (4), b odd (4)"
        assert "ranks by host: even (4), odd (4)" in str(mesh)
        with mesh.account() as account:
            mesh["tp"].all_reduce(np.zeros(1000, np.uint8))
        assert account.as_dict()["tp"]["all_reduce"] == {"calls": 1, "nbytes": 1000, "inside": 1500, "between": 0}
        # Another mesh, and the run's own account, go by the hosts of the run.
        assert "node0" in str(meshdist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")))
        assert dry.account.total().between > 0


def hosts_seen():
    mesh = meshdist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), topology=IN_TURNS)
    return str(mesh).partition("ranks by host: ")[2], str(mesh["dp"]).partition("ranks by host: ")[2]


def test_so_it_is_in_a_world_of_threads():
    assert meshdist.run(hosts_seen, 8) == [("even (4), odd (4))", "even (1), odd (1))")] * 8


def test_a_dry_run_on_a_topology():
    with meshdist.dry_run(8, 5, topology=IN_TURNS) as dry:
        assert meshdist.get_node_local_rank() == 2
        assert meshdist.new_subgroups()[0].ranks == (1, 3, 5, 7)
        assert Topology.find() == IN_TURNS
        mesh = meshdist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), topology="auto")
        assert mesh["tp"].mesh.tolist() == [1, 3, 5, 7]
        mesh["tp"].all_reduce(np.zeros(1000, np.uint8))
    total = dry.account.total()
    assert (total.inside, total.between) == (1500, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": IN_TURNS, "ranks_per_host": 4}, "got both ranks_per_host and topology"),
        ({"topology": Topology.uniform(2, 2)}, "the topology has 4 ranks, but world_size is 8"),
    ],
)
def test_dry_runs_on_wrong_topologies(options, message):
    with pytest.raises(ValueError, match=message), meshdist.dry_run(8, **options):
        pass
