"""A mesh inside a group that is placed on a topology."""

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
