"""The cost model: against formulas and a simulation, with measured curves, on meshes; and plan."""

import itertools
import math
import sys
import time

import networkx as nx
import numpy as np
import pytest

import meshdist
from meshdist import CostModel, Topology, plan
from meshdist.topology import Curve, Link, Part
from meshdist.topology.calibration import spread_note
from meshdist.topology.curve import monotone
from meshdist.topology.estimate import fitted

ALPHA, BETA = 1e-5, 1e-9  # of every link; a message crosses two
STAR_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all")


def star(num_ranks):
    """Hosts of one rank each, around a network: every pair alike, nobody shares a link in a ring."""
    return CostModel(Topology.uniform(num_ranks, 1, network=Link(ALPHA / 2, 1 / BETA)))


def log2(n):
    return (n - 1).bit_length()


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 16])
def test_formulas_of_the_literature(n):
    nbytes = 1e6
    cost = star(n)
    part = (n - 1) / n * nbytes * BETA

    def predicted(collective, algorithm):
        return cost.predict(collective, nbytes, n, algorithm=algorithm)

    near = pytest.approx
    assert predicted("all_gather", "ring") == near((n - 1) * ALPHA + part)
    assert predicted("all_gather", "tree") == near(log2(n) * ALPHA + part)
    assert predicted("reduce_scatter", "ring") == near((n - 1) * ALPHA + part)
    assert predicted("all_reduce", "ring") == near(2 * ((n - 1) * ALPHA + part))
    assert predicted("all_reduce", "tree") == near(2 * (log2(n) * ALPHA + part))
    assert predicted("broadcast", "tree") == near(log2(n) * (ALPHA + nbytes * BETA))
    assert predicted("reduce", "tree") == near(log2(n) * (ALPHA + nbytes * BETA))
    assert predicted("all_to_all", "pairwise") == near((n - 1) * ALPHA + part)
    assert predicted("scatter", "direct") == near((n - 1) * ALPHA + part)
    assert predicted("barrier", "tree") == near(log2(n) * ALPHA)
    assert predicted("send", "direct") == near(ALPHA + nbytes * BETA)
    if n & (n - 1) == 0:
        assert predicted("all_reduce", "doubling") == near(log2(n) * (ALPHA + nbytes * BETA))
        assert predicted("all_to_all", "tree") == near(log2(n) * (ALPHA + nbytes / 2 * BETA))
        assert predicted("gather", "tree") == near(log2(n) * ALPHA + part)
        assert predicted("broadcast", "ring") == near((log2(n) + n - 1) * ALPHA + 2 * part)


@pytest.mark.parametrize("collective", [*STAR_NAMES, "barrier", "send"])
def test_the_fastest_algorithm_is_taken(collective):
    cost = CostModel(Topology.uniform(2, 4))
    for nbytes in (8, 1e5, 1e9):
        found = cost.algorithms(collective, nbytes, 8)
        assert list(found.values()) == sorted(found.values())
        assert cost.predict(collective, nbytes, 8) == next(iter(found.values()))
    assert cost.predict(collective, 1e6, 1) == 0


def round_by_paths(graph, pairs):
    """The latency of the longest way and the seconds per byte on the fullest link, by networkx's paths."""
    loads, longest = {}, 0.0
    place = {rank: node for node, ranks in graph.nodes(data="ranks") for rank in ranks}
    for one, other in pairs:
        path = nx.shortest_path(graph, place[one], place[other])
        if len(path) == 1:
            given = graph.nodes[path[0]]
            longest = max(longest, given["memory_latency_s"])
            loads[path[0]] = loads.get(path[0], 0) + 1 / given["memory_bandwidth"]
            continue
        steps = list(itertools.pairwise(path))
        longest = max(longest, sum(graph.edges[step]["latency_s"] for step in steps))
        for step in steps:
            loads[step] = loads.get(step, 0) + 1 / graph.edges[step]["bandwidth"]
    return longest, max(loads.values())


UNEVEN = Topology(
    [
        Part("network", "network"),
        Part("a", "host", "network", Link(5e-6, 3e9), Link(1e-6, 20e9), (0, 5)),
        Part("b", "host", "network", Link(7e-6, 2e9), Link(2e-6, 10e9)),
        Part("b/s0", "socket", "b", Link(3e-7, 9e9), Link(1e-6, 30e9), (1, 2, 6)),
        Part("b/s1", "socket", "b", Link(4e-7, 8e9), Link(1e-6, 30e9), (3,)),
        Part("b/s1/gpu", "gpu", "b/s1", Link(2e-6, 5e9), ranks=(4,)),
    ]
)


def test_rounds_are_those_of_paths_in_the_graph():
    random = np.random.default_rng(0)
    for _ in range(30):
        src, dst = random.permutation(7), random.permutation(7)
        pairs = [(a, b) for a, b in zip(src.tolist(), dst.tolist(), strict=True) if a != b]
        if pairs:
            assert UNEVEN.routes.round(src, dst) == pytest.approx(round_by_paths(UNEVEN.graph, pairs))


def test_all_to_all_loads_every_pair():
    group = np.array([[0, 1, 2, 4], [3, 5, 6, 3]])[:1]
    pairs = [(a, b) for a in group[0].tolist() for b in group[0].tolist() if a != b]
    found = UNEVEN.routes.everyone_to_everyone(group)
    assert found.s_per_byte == pytest.approx(round_by_paths(UNEVEN.graph, pairs)[1])


def test_groups_of_an_axis_share_the_network():
    cost = CostModel(Topology.uniform(2, 8))
    ranks = np.arange(16).reshape(2, 8)
    alone = cost.predict("all_reduce", 1e9, [0, 8])
    assert cost.predict("all_reduce", 1e9, ranks, axis=0) == pytest.approx(8 * alone, rel=0.01)


def test_hierarchical_needs_equal_parts_of_several_hosts():
    cost = CostModel(Topology.uniform(2, 4))
    assert "hierarchical" in cost.algorithms("all_reduce", 1, 8)
    for group in (range(4), [0, 4], [0, 1, 2, 4], [0, 1, 2, 4, 5]):
        assert "hierarchical" not in cost.algorithms("all_reduce", 1, group)
    # In turns over the hosts a ring crosses the network at every step; by hosts it does not.
    found = cost.algorithms("all_reduce", 1e9, [0, 4, 1, 5, 2, 6, 3, 7])
    assert found["hierarchical"] < found["ring"] / 1.5


def test_meshes_and_groups():
    cost = CostModel(Topology.uniform(2, 2))

    def program():
        mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        group = mesh.get_group("tp")
        return (
            cost.predict("all_reduce", 1e6, mesh),
            cost.predict("all_reduce", 1e6, mesh, axis="tp"),
            cost.predict("all_reduce", 1e6, mesh["tp"]) == cost.predict("all_reduce", 1e6, group),
        )

    whole, axis = (cost.predict("all_reduce", 1e6, 4), cost.predict("all_reduce", 1e6, [[0, 1], [2, 3]], axis=1))
    assert meshdist.run(program, 4) == [(whole, axis, True)] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gossip", 8, 2), "unknown collective 'gossip'; choose from all_gather, .*all_gather_into_tensor"),
        (("all_reduce", -1, 2), "nbytes must be 0 or positive, got -1"),
        (("all_reduce", 8, 9), "rank 8 is not in the topology, which has ranks 0 to 7"),
        (("all_reduce", 8, [0, 0]), "rank 0 appears 2 times"),
        (("all_reduce", 8, 0), "a group has at least 1 rank, got 0"),
        (("all_reduce", 8, [[0, 1]], "tp"), "unknown axis 'tp'"),
    ],
)
def test_what_cannot_be_predicted_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CostModel(Topology.uniform(2, 4)).predict(*arguments)


def test_unknown_algorithm_lists_the_known():
    with pytest.raises(ValueError, match="no algorithm 'star' for all_gather on this group; there are 'ring', 'tree'"):
        CostModel(Topology.uniform(1, 4)).predict("all_gather", 8, 4, algorithm="star")


# ---- Measured curves

CURVES = (
    Curve("all_reduce", (2,), (1 << 10, 1 << 20), (1e-5, 1e-3)),
    Curve("all_reduce", (4,), (1 << 10, 1 << 20), (3e-5, 4e-3)),
)


def test_measured_groups_are_read_off_their_curves():
    cost = CostModel(Topology.uniform(2, 4), CURVES)
    assert cost.predict("all_reduce", 1 << 20, 2) == pytest.approx(1e-3)
    assert cost.predict("all_reduce", 1 << 20, [5, 7]) == pytest.approx(1e-3)
    assert cost.predict("all_reduce", 1 << 20, range(4)) == pytest.approx(4e-3)
    assert cost.predict("all_reduce", 1 << 15, 2) == pytest.approx(1e-4)  # the middle, on logarithmic scales
    assert cost.predict("all_reduce", 1 << 22, 2) == pytest.approx(4e-3)
    assert cost.predict("all_reduce", 8, 2) == pytest.approx(1e-5)


def test_other_groups_are_scaled_by_the_links():
    plain = CostModel(Topology.uniform(2, 4))
    cost = CostModel(plain.topology, CURVES)
    nbytes = 1 << 20
    ratio = plain.predict("all_reduce", nbytes, 3) / plain.predict("all_reduce", nbytes, 4)
    assert cost.predict("all_reduce", nbytes, 3) == pytest.approx(4e-3 * ratio)
    pairs = [[0, 1], [2, 3]]
    shared = plain.predict("all_reduce", nbytes, pairs, axis=1) / plain.predict("all_reduce", nbytes, 2)
    assert cost.predict("all_reduce", nbytes, pairs, axis=1) == pytest.approx(1e-3 * shared)
    for group in (8, [0, 4]):  # over two hosts nothing was measured
        assert cost.predict("all_reduce", nbytes, group) == plain.predict("all_reduce", nbytes, group)
    assert cost.predict("broadcast", nbytes, 2) == plain.predict("broadcast", nbytes, 2)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads TOML with tomli, which need not be installed")
def test_saved_and_loaded(tmp_path):
    cost = CostModel(Topology.uniform(2, 4), CURVES, "a note")
    cost.save(tmp_path / "cost.toml")
    loaded = CostModel.load(tmp_path / "cost.toml")
    assert (loaded.topology, loaded.curves, loaded.note) == (cost.topology, cost.curves, "a note")
    text = (tmp_path / "cost.toml").read_text()
    (tmp_path / "cost.toml").write_text(text.replace("nbytes = [1024, 1048576]", "nbytes = [1024]"))
    with pytest.raises(ValueError, match=r"cost.toml: curve of all_reduce on \(2,\): 1 size and 2 times"):
        CostModel.load(tmp_path / "cost.toml")


def test_a_model_is_carried_to_another_machine():
    link = Link(1e-5, 2e9)
    true = CostModel(Topology.uniform(1, 4, memory=link))
    sizes = (1 << 10, 1 << 20)
    curve = Curve("all_reduce", (4,), sizes, tuple(true.predict("all_reduce", nbytes, 4) for nbytes in sizes))
    network = Link(1e-4, 1e8)
    cost = CostModel(true.topology, [curve], "the machine was busy").on(Topology.uniform(64, 4, network=network))
    assert cost.predict("all_reduce", 1 << 20, range(252, 256)) == pytest.approx(curve.seconds[1])
    assert cost.note == "the machine was busy"
    assert repr(cost).endswith("1 measured curves; the machine was busy>")
    host = cost.topology.parts[1]
    assert host.link == network  # of which the curves say nothing
    assert host.memory.bandwidth == pytest.approx(2e9, rel=0.1)
    with pytest.raises(ValueError, match=r"take cost.on\(topology\)"):
        true.predict("all_reduce", 8, 8)


def test_curves_never_fall():
    times = [17.7e-6, 11.4e-6, 20e-6, 19e-6, 18e-6, 40e-6]
    found = monotone(times)
    assert found == sorted(found)
    assert found[0] == found[1] == pytest.approx(math.sqrt(17.7 * 11.4) * 1e-6)
    assert found[-1] == times[-1]
    assert monotone(sorted(times)) == sorted(times)
    assert monotone([3.0, 2.0, 1.0]) == pytest.approx([6 ** (1 / 3)] * 3)


def test_calibrated_curves_never_fall():
    for cost in meshdist.run(lambda: meshdist.calibrate(0.2, max_bytes=1 << 16), 2):
        assert cost.curves
        assert all(list(curve.seconds) == sorted(curve.seconds) for curve in cost.curves)


def test_a_busy_machine_is_told():
    quiet = np.full((10, 4), 1e-3) * np.linspace(1, 1.2, 10).reshape(10, 1)
    assert spread_note(quiet) == ""
    busy = np.where(np.arange(10).reshape(10, 1) == 0, 1e-3, 3e-3) * np.ones((1, 4))
    assert spread_note(busy).startswith("the machine was busy: half of the rounds took at least 3.0 times as long")


def test_links_are_fitted_to_curves():
    true = Topology.uniform(4, 4, memory=Link(2e-6, 4e9), network=Link(3e-5, 1e9))
    cost = CostModel(true)
    sizes = tuple(1 << power for power in range(10, 27, 2))
    groups = {(2,): range(2), (4,): range(4), (1, 1): [0, 4], (1, 1, 1, 1): [0, 4, 8, 12]}
    curves = [
        Curve(name, members, sizes, tuple(cost.predict(name, nbytes, group) for nbytes in sizes))
        for members, group in groups.items()
        for name in ("all_reduce", "all_gather", "all_to_all", "broadcast")
    ]
    found = Topology(fitted(Topology.uniform(4, 4).parts, curves))
    host = found.parts[1]
    assert host.memory.bandwidth == pytest.approx(4e9, rel=0.15)
    assert host.memory.latency_s == pytest.approx(2e-6, rel=0.3)
    assert host.link.bandwidth == pytest.approx(1e9, rel=0.15)
    assert host.link.latency_s == pytest.approx(3e-5, rel=0.3)
    assert fitted(true.parts, []) == list(true.parts)


def test_fitted_links_are_never_negative():
    falling = Curve("all_reduce", (2,), (1 << 10, 1 << 20), (1e-3, 1e-5))
    steep = Curve("all_reduce", (2,), (1 << 10, 1 << 20), (1e-9, 1.0))
    for curve in (falling, steep):
        (host,) = fitted(Topology.uniform(1, 2).parts, [curve])
        assert host.memory.latency_s >= 0
        assert host.memory.bandwidth > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "seconds must be a positive number, got 0"),
        (("x",), "seconds must be a positive number, got 'x'"),
        ((1, "auto"), "max_bytes must be at least 1024, got 8"),
        ((1, Topology.uniform(1, 3)), "the world has 2 and the topology 3"),
    ],
)
def test_calibrations_that_make_no_sense_are_refused(arguments, message):
    def program():
        with pytest.raises(ValueError, match=message):
            meshdist.calibrate(*arguments, max_bytes=8 if "max_bytes" in message else 1024)

    meshdist.run(program, 2)


# ---- plan


def test_plan_tries_every_shape_and_sorts():
    found = plan({"dp": {"all_reduce": 1e9}, "tp": {"all_reduce": (1e8, 64)}}, Topology.uniform(2, 4))
    assert sorted(each.shape for each in found) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert found.best is found[0]
    by_shape = {each.shape: each for each in found}
    cost = CostModel(Topology.uniform(2, 4))
    ranks = np.arange(8).reshape(2, 4)
    assert by_shape[2, 4].axis_seconds == pytest.approx(
        {
            "dp": cost.predict("all_reduce", 1e9, ranks, axis=0),
            "tp": 64 * cost.predict("all_reduce", 1e8, ranks, axis=1),
        }
    )
    assert by_shape[2, 4].ranks.tolist() == ranks.tolist()
    assert by_shape[8, 1].axis_seconds["tp"] == 0
    assert len(found[:2]) == 2
    head, first, *_ = str(found).splitlines()
    assert head.split() == ["dp", "tp", "step", "in", "dp", "in", "tp"]
    assert first.split()[:3] == ["1", *map(str, found.best.shape)]


def test_plan_with_limits():
    volumes = {"dp": {"all_reduce": 1e9}, "pp": None, "tp": lambda size: {"all_gather": 1e6 * size["tp"]}}
    found = plan(volumes, 64, sizes={"pp": 2, "tp": [2, 4, 8]})
    assert sorted(each.shape for each in found) == [(4, 2, 8), (8, 2, 4), (16, 2, 2)]
    inside = plan({"dp": None, "tp": {"all_reduce": 1e6}}, 64, inside="tp")
    assert max(each.shape[1] for each in inside) == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan({}, 8), "volumes must name at least one axis, got none"),
        (lambda: plan({"dp": None}, 0), "the number of ranks must be at least 1, got 0"),
        (lambda: plan({"dp": None}, 8, sizes={"tp": 2}), "sizes: there is no axis 'tp'; the axes are 'dp'"),
        (lambda: plan({"dp": None}, 8, sizes={"dp": 3}), "no mesh over 8 ranks has the axes 'dp' with sizes"),
        (lambda: plan({"dp": {"gossip": 1}}, 8), "unknown collective 'gossip'"),
        (lambda: plan({"dp": {"allreduce": 1}}, 8), "unknown collective 'allreduce'; .*; did you mean 'all_reduce'"),
        (lambda: plan({"dp": {"all_reduce": -1}}, 8), "axis 'dp': all_reduce: bytes and calls must not be negative"),
        (lambda: plan({"dp": None}, 8, inside="tp"), "there is no axis 'tp'"),
    ],
)
def test_plans_that_make_no_sense_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("volumes", "message"),
    [
        ({"dp": 5}, "the volume of axis 'dp' must be a dict"),
        ("dp", "volumes must be a dict of the traffic of each axis, .* got 'dp'"),
        ({"dp": {"all_reduce": (1, 2, 3)}}, r"all_reduce: expected bytes, or \(bytes, calls\), got \(1, 2, 3\)"),
        ({"dp": {"all_reduce": "x"}}, r"all_reduce: expected bytes, or \(bytes, calls\), got 'x'"),
    ],
)
def test_volumes_of_the_wrong_type_are_refused(volumes, message):
    with pytest.raises(TypeError, match=message):
        plan(volumes, 8)


def test_a_number_of_ranks_is_hosts_of_eight_and_a_smaller_last_one():
    found = plan({"dp": {"all_reduce": 1e9}, "tp": {"all_reduce": 1e6}}, 12)
    assert sorted(each.shape for each in found) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    machine = CostModel(12).topology
    assert {name: len(ranks) for name, ranks in machine.hosts.items()} == {"host0": 8, "host1": 4}
    assert CostModel(16).topology == Topology.uniform(2, 8)
    assert CostModel(6).topology == Topology.uniform(1, 6)
    with pytest.raises(ValueError, match="the number of ranks must be at least 1, got 0"):
        CostModel(0)


def test_axes_without_names_stay_inside_by_index():
    machine = Topology.uniform(2, 4)
    assert machine.place((4, 2), None, 0).tolist() == machine.place((4, 2), ("tp", "dp"), "tp").tolist()
    assert machine.place((4, 2), ("tp", "dp"), -2).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ValueError, match="there is no axis 2 to keep inside hosts; the axes are 0, 1"):
        machine.place((4, 2), None, 2)
    with pytest.raises(ValueError, match="gpus must be 0 or positive, got -1"):
        Topology.uniform(2, 4, gpus=-1)
    with pytest.raises(FileNotFoundError, match="topology: there is no file '/nowhere/machine.toml'"):
        Topology.of("/nowhere/machine.toml")


@pytest.mark.slow
def test_plan_at_8192_ranks():
    begin = time.process_time()
    found = plan(
        {"dp": {"all_reduce": 1e9}, "cp": {"all_gather": 1e8}, "tp": {"all_reduce": (1e8, 64)}},
        Topology.uniform(1024, 8, gpus=8),
    )
    assert len(found) == math.comb(15, 2)
    assert time.process_time() - begin < 20  # some tenths of a second, on a machine that does nothing else
