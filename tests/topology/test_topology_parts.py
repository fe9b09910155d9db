"""The parts that topologies, their files and their drawings are made of."""

import numpy as np
import pytest

from meshdist.topology.calibration import sizes_for, spread_note
from meshdist.topology.curve import Curve, monotone
from meshdist.topology.discovery import cores_in, unique
from meshdist.topology.drawing import families_of, folded, label
from meshdist.topology.estimate import _in_memory, by_links, fit_link
from meshdist.topology.part import Link, Part
from meshdist.topology.planning import shapes
from meshdist.topology.toml_file import MOST_PARTS, check_number
from meshdist.topology.topology import Topology


def test_sizes_for():
    assert sizes_for(3, 4096) == [1020, 4092]


def test_spread_note():
    note = "the machine was busy: half of the rounds took at least 2.5 times as long as the shortest; measure again"
    assert spread_note(np.array([[1.0, 2.0], [3.0, 4.0], [3.0, 5.0]])) == note
    assert spread_note(np.array([[1.0], [1.2]])) == ""


def test_cores_in():
    assert cores_in("0-3,8") == 5


def test_unique():
    assert unique(["node", "node", "other"]) == ["node", "node#2", "other"]


def test_families_of():
    parts = [part for part in Topology.uniform(2, 2, gpus=2).parts if part.link is not None]
    assert [(what, len(members)) for (what, _), members in families_of(parts).items()] == [("host", 2), ("gpu", 4)]


def test_label():
    assert label(Part("node/gpu0", "gpu", ranks=(0, 1, 2, 3, 4))) == "gpu0\nranks 0-4"


def test_monotone():
    assert monotone([1.0, 4.0, 1.0, 8.0]) == [1.0, 2.0, 2.0, 8.0]


def test_fit_link():
    true = Topology.uniform(1, 2, memory=Link(1e-5, 1e9))
    costs = by_links(true, "all_reduce", np.array([[0, 1]])).values()
    times = tuple(min(cost.seconds(nbytes) for cost in costs) for nbytes in (8, 1 << 20))
    assert str(fit_link([Curve("all_reduce", (2,), (8, 1 << 20), times)], _in_memory)) == "1 GB/s, 10 us"


def test_folded():
    found = folded(Topology.uniform(16, 8, gpus=8).parts)
    assert (len(found.parts), found.stands_for) == (10, {"host0": "host0 … host15\n16 hosts, each 8 gpus"})


def test_shapes():
    assert list(shapes(4, [None, None])) == [(1, 4), (2, 2), (4, 1)]


def test_check_number():
    with pytest.raises(ValueError, match="a topology has at most 262144 parts, and this asks for 1000000000000"):
        check_number("parts", 10**12, MOST_PARTS)
