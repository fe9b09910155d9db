"""A job of `meshdist.ray.run` on two nodes of Ray, both on this machine: its order of ranks, and the loss of a node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from ray_clusters import driven, marks
from until import loaded

pytestmark = [*marks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def said() -> Iterator[dict[str, Any]]:
    with driven("two_nodes_driver.py", limit_s=480) as said:
        yield said


def test_ranks_of_a_node_follow_each_other(said: dict[str, Any]) -> None:
    nodes, ranks, local_ranks = zip(*said["spread"], strict=True)
    assert ranks == (0, 1, 2, 3)
    assert local_ranks == (0, 1, 0, 1)
    assert (nodes[0], nodes[2]) == (nodes[1], nodes[3])
    assert nodes[0] != nodes[2]


def test_a_lost_node_is_noticed_within_seconds(said: dict[str, Any]) -> None:
    lost = said["lost"]
    assert re.match(r"rank \d of 2 \(pid \d+ on ", lost["text"])
    assert lost["seconds"] < loaded(15.0)


def test_what_the_cluster_has_is_counted_by_nodes(said: dict[str, Any]) -> None:
    assert "the cluster has 2 CPU on 1 node" in said["no place"]
