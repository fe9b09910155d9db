"""Topologies: built, from graphs and files, found, drawn; and what is refused."""

import inspect
import subprocess
import sys
import types

import networkx as nx
import pytest

import meshdist
from meshdist.topology import Link, Part, Topology
from meshdist.topology.discovery import Machine, cores_in, numa_cores, parts_found

CABLE = Link(1e-5, 1e9)
needs_toml = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 reads TOML with tomli, which need not be installed"
)


def two_hosts(left, right):
    """Two hosts on a network, with these ranks."""
    return [
        Part("network", "network"),
        Part("left", "host", "network", CABLE, ranks=tuple(left)),
        Part("right", "host", "network", CABLE, ranks=tuple(right)),
    ]


def test_hosts_and_ranks():
    machine = Topology(two_hosts([0, 2], [1, 3, 4]))
    assert machine.num_ranks == 5
    assert machine.hosts == {"left": (0, 2), "right": (1, 3, 4)}
    assert [machine.host_of(rank) for rank in range(5)] == ["left", "right", "left", "right", "right"]
    assert str(machine) == "Topology: 5 ranks on 2 hosts: left (2), right (3)"
    with pytest.raises(ValueError, match="there is no rank 5, only 0 to 4"):
        machine.host_of(5)


def test_order_of_parts_does_not_matter():
    parts = two_hosts([0], [1])
    assert Topology([parts[0], parts[1], parts[2]]).hosts == Topology([parts[1], parts[0], parts[2]]).hosts


def test_uniform_spreads_ranks_over_sockets_and_gpus():
    machine = Topology.uniform(2, 8, sockets=2, gpus=4)
    where = {part.name: (part.parent, part.ranks) for part in machine.parts if part.kind == "gpu"}
    assert where["host0/gpu0"] == ("host0/socket0", (0, 1))
    assert where["host0/gpu3"] == ("host0/socket1", (6, 7))
    assert where["host1/gpu2"] == ("host1/socket1", (12, 13))
    assert machine.hosts == {"host0": tuple(range(8)), "host1": tuple(range(8, 16))}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology([]), "expected at least one part"),
        (lambda: Topology(two_hosts([0, 1], [1])), "rank 1 is on 'left' and on 'right'"),
        (lambda: Topology(two_hosts([0], [2])), "numbered 0 to 1, but rank 1 is nowhere and rank 2 is on 'right'"),
        (lambda: Topology(two_hosts([], [])), "no part has ranks"),
        (lambda: Topology([Part("a", "rack", ranks=(0,))]), "must be one of 'network', 'host', .*got 'rack'"),
        (
            lambda: Topology([Part("a", "gpu", ranks=(0,))]),
            r"ranks \[0\] are on 'a', of kind 'gpu', which is in no host",
        ),
        (lambda: Topology([Part("a", "host", ranks=(0,)), Part("b", "host", ranks=(1,))]), r"2 have none \('a', 'b'\)"),
        (lambda: Topology([Part("a", "host", "b", CABLE, ranks=(0,))]), r"0 have none \(none\)"),
        (
            lambda: Topology([Part("r", "host", ranks=(0,)), Part("a", "socket", "b", CABLE)]),
            "the parent of 'a' is 'b', which is not a part; there are 'r', 'a'",
        ),
        (
            lambda: Topology(
                [Part("r", "host", ranks=(0,)), Part("a", "gpu", "b", CABLE), Part("b", "gpu", "a", CABLE)]
            ),
            "the parents of 'a', 'b' form a cycle",
        ),
        (lambda: Topology([Part("a", "host", ranks=(0,)), Part("a", "host", ranks=(1,))]), "two parts are called 'a'"),
        (lambda: Part("a", "host", "b"), "part 'a' has a parent but no link"),
        (lambda: Part("a", "host", link=CABLE), "part 'a' has a link but no parent"),
        (lambda: Topology.uniform(2, 4, sockets=3), "4 ranks cannot be spread evenly over 3 sockets"),
        (lambda: Topology.uniform(2, 4, gpus=3), "4 ranks cannot be spread evenly over 3 GPUs"),
        (lambda: Topology.uniform(0, 4), "num_hosts must be at least 1, got 0"),
        (lambda: Link(-1, 1), "latency_s must be 0 or a positive number of seconds, got -1"),
        (lambda: Link(0, 0), "bandwidth must be a positive number of bytes per second, got 0"),
        (lambda: Link(float("nan"), 1), "latency_s must be 0 or a positive"),
        (lambda: Topology.of("cluster"), "expected 'auto' or the path of a .toml file, got 'cluster'"),
    ],
)
def test_what_is_no_topology_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link("fast", 1), "latency_s must be a number, got 'fast'"),
        (lambda: Topology(two_hosts([0.5], [1])), "ranks of 'left' must be integers, got 0.5"),
        (lambda: Topology.of(7), r"expected True, 'auto', a Topology.* got 7 \(int\)"),
        (lambda: Topology.from_graph(nx.DiGraph()), "expected an undirected networkx.Graph, got DiGraph"),
    ],
)
def test_what_is_of_the_wrong_type_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


# ---- Graphs


@pytest.mark.parametrize(
    "machine",
    [
        Topology.uniform(1, 2),
        Topology.uniform(3, 4, sockets=2),
        Topology.uniform(2, 4, gpus=2),
        Topology(two_hosts([1], [0])),
    ],
)
def test_graph_and_back(machine):
    graph = machine.graph
    assert nx.is_tree(graph)
    assert set(Topology.from_graph(graph).parts) == set(machine.parts)
    assert Topology.of(graph).hosts == machine.hosts


def graph_of_gpus(*edges):
    graph = nx.Graph()
    graph.add_node("node", kind="host")
    for rank in range(2):
        graph.add_node(f"gpu{rank}", kind="gpu", ranks=[rank])
    for pair in edges:
        graph.add_edge(*pair, latency_s=1e-6, bandwidth=1e9)
    return graph


def without_kind():
    graph = graph_of_gpus(("node", "gpu0"), ("node", "gpu1"))
    del graph.nodes["gpu1"]["kind"]
    return graph


def without_bandwidth():
    graph = graph_of_gpus(("node", "gpu0"), ("node", "gpu1"))
    del graph.edges["node", "gpu1"]["bandwidth"]
    return graph


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (nx.Graph(), "the graph is empty"),
        (graph_of_gpus(("node", "gpu0")), "there is no route from 'node' to 'gpu1'"),
        (graph_of_gpus(("node", "gpu0"), ("node", "gpu1"), ("gpu0", "gpu1")), "is a cycle.*of kind 'switch'"),
        (without_kind(), "node 'gpu1' has no attribute 'kind'"),
        (without_bandwidth(), "node 'gpu1': the edge to 'node' has no attribute 'bandwidth'"),
    ],
)
def test_graphs_that_say_too_little_are_refused(graph, message):
    with pytest.raises(ValueError, match=message):
        Topology.from_graph(graph)


# ---- Files


@needs_toml
@pytest.mark.parametrize("machine", [Topology.uniform(3, 4, sockets=2, gpus=4), Topology(two_hosts([3, 0], [1, 2]))])
def test_saved_and_loaded(machine, tmp_path):
    machine.save(tmp_path / "machine.toml")
    assert Topology.load(tmp_path / "machine.toml") == machine
    assert Topology.of(str(tmp_path / "machine.toml")) == machine


@needs_toml
def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "machine.toml"
    with path.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ValueError, match=r"machine.toml: a topology file has at most 64 MiB, and this has more"):
        Topology.load(path)


@needs_toml
def test_dots_that_are_no_keys_are_counted_by_nobody(tmp_path):
    machine = Topology.uniform(1, 2)
    machine.save(tmp_path / "machine.toml")
    with (tmp_path / "machine.toml").open("a") as file:
        numbers = ", ".join(["0.25"] * 500)
        file.write(f"# {100 * '.'}\n[[measured]]\ncollective = 'all_reduce'\nseconds = [{numbers}]\n")
    assert Topology.load(tmp_path / "machine.toml") == machine


@needs_toml
def test_hosts_in_a_file(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(
        'network = { latency_us = 5, bandwidth_gb_s = 2 }\n[[host]]\nname = "n"\ncount = 2\nranks = 2\n'
        '[[host]]\nname = "big"\nranks = [5, 4]\nnetwork = { latency_us = 5, bandwidth_gb_s = 4 }\n'
    )
    machine = Topology.load(path)
    assert machine.hosts == {"n0": (0, 1), "n1": (2, 3), "big": (4, 5)}
    links = {part.name: part.link for part in machine.parts if part.kind == "host"}
    assert links["n0"].bandwidth == 2e9
    assert links["big"].bandwidth == 4e9
    assert links["n0"].latency_s == pytest.approx(5e-6)


@needs_toml
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host = [", "this is not valid TOML"),
        ("", r"expected \[\[host\]\] tables, or \[\[part\]\] tables"),
        ('[[host]]\nname = "a"\nrank = 2', "unknown key 'rank'; choose from name, count, ranks"),
        ("[[host]]\nranks = 2", r"\[\[host\]\] 1: name must be a text in quotes, got nothing"),
        ('[[host]]\nname = "a"', "ranks must be an integer of at least 1, got 0"),
        ('[[host]]\nname = "a"\nranks = "2"', "ranks must be an integer of at least 1, got '2'"),
        ('[[host]]\nname = "a"\nranks = [0]\ncount = 2', "ranks is a list, which is for one host, but count is 2"),
        ('[[host]]\nname = "a"\nranks = 2\nnetwork = 3', "network: expected {"),
        ('[[host]]\nname = "a"\nranks = 2\nnetwork = { latency_us = 1 }', "network: expected bandwidth_gb_s"),
        (
            '[[host]]\nname = "a"\nranks = 2\nnetwork = { latency_us = -1, bandwidth_gb_s = 1 }',
            "network: latency_us must be 0 or positive, got -1",
        ),
        ('[[host]]\nname = "a"\nranks = [0, 0]', "rank 0 is listed twice on 'a'; name it once"),
        (
            '[[host]]\nname = "a"\nranks = 2\nnetwork = { latency_us = 1, bandwidth_gb_s = 0 }',
            "network: Link: bandwidth must be a positive",
        ),
        (
            '[[host]]\nname = "a"\nranks = 2\ncount = 10000000000000',
            "at most 262144 parts, and this asks for 10000000000000",
        ),
        ('[[host]]\nname = "a"\nranks = 8\ngpus = 99999999', "at most 262144 parts, and this asks for 100000000"),
        ('[[host]]\nname = "a"\nranks = 99999999', "at most 1048576 ranks, and this asks for 99999999"),
        ('[[host]]\nname = "a"\ncount = 4096\nranks = 4096', "at most 1048576 ranks"),
        ("a = " + 5000 * "[" + 5000 * "]", "its tables and lists are nested too deep"),
        ("a" + 20000 * ".a" + " = 1", "line 1 has a key of more than 32 words with dots"),
        ("\n[a" + 20000 * " . 'a'" + "]", "line 2 has a key of more than 32 words with dots"),
        (
            270000 * "[[part]]\n",
            r"at most 262144 \[\[part\]\] tables, and this asks for 270000",
        ),
        ('[host]\nname = "a"', r"'host' must be tables, each under a line \[\[host\]\]"),
        ('[[part]]\nname = "a"\nkind = "rack"', "must be one of 'network'"),
        ('[[part]]\nname = "a"\nkind = "host"\nranks = ["0"]', "ranks must be a list of numbers"),
    ],
)
def test_wrong_files_are_refused_by_name_and_table(text, message, tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"machine.toml: .*{message}"):
        Topology.load(path)


# ---- Found


def test_find_in_a_world():
    def program():
        found = Topology.find()
        (host,) = found.parts if len(found.parts) == 1 else found.parts[:1]
        return found.num_ranks, len(found.hosts), host.cores > 0

    assert meshdist.run(program, 3) == [(3, 1, True)] * 3


def test_find_without_a_world():
    with pytest.raises(ValueError, match="init_process_group"):
        Topology.find()


def test_cores_of_numa_nodes(tmp_path):
    for name, cpulist in (("node0", "0-3,8\n"), ("node1", "4-7\n"), ("node10", "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpulist)
    assert numa_cores(tmp_path) == (5, 4)
    assert numa_cores(tmp_path / "nothing") == ()
    assert cores_in("0") == 1


def test_parts_of_a_machine_with_gpus():
    machine = Machine(cores=8, sockets=(4, 4), gpus=4, peers=True)
    parts = parts_found("node", [0, 2, 5], machine, linked=False)
    assert {part.name: part.ranks for part in parts if part.ranks} == {
        "node/gpu0": (0,),
        "node/gpu1": (2,),
        "node/gpu2": (5,),
    }
    assert [part.cores for part in parts if part.kind in ("host", "socket")] == [8, 4, 4]
    assert {part.parent for part in parts if part.kind == "gpu"} == {"node/nvlink"}


def test_more_ranks_than_gpus_stay_on_the_host():
    parts = parts_found("node", [0, 1, 2], Machine(cores=8, sockets=(), gpus=2, peers=False), linked=False)
    assert {part.name: part.ranks for part in parts if part.ranks} == {"node": (0, 1, 2)}


class NoDriverError(Exception):
    pass


def cupy_with(count):
    """A CuPy on a host with so many GPUs."""

    def get_device_count():
        if not count:
            raise NoDriverError("no CUDA-capable device is detected")
        return count

    runtime = types.SimpleNamespace(
        getDeviceCount=get_device_count, deviceCanAccessPeer=lambda one, other: 1, CUDARuntimeError=NoDriverError
    )
    module = types.ModuleType("cupy")
    module.cuda = types.SimpleNamespace(runtime=runtime)
    return module


def test_gpus_are_found_through_cupy(monkeypatch):
    def kinds(gpus=None):
        return meshdist.run(lambda: [part.kind for part in Topology.find(gpus=gpus).parts if part.kind != "socket"], 2)[
            0
        ]

    monkeypatch.setitem(sys.modules, "cupy", cupy_with(2))
    assert kinds() == ["host", "switch", "gpu", "gpu"]
    assert kinds(gpus=False) == ["host"]
    monkeypatch.setitem(sys.modules, "cupy", cupy_with(0))
    assert kinds() == ["host"]
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"pip install cupy-cuda12x"):
        kinds(gpus=True)


# ---- Drawn


def test_draw_shows_every_part_and_its_ranks():
    matplotlib = pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    ax = Topology.uniform(2, 8, gpus=4).draw()
    shown = {text.get_text() for text in ax.texts}
    assert {"network", "host0", "host1", "gpu3\nranks 6, 7"} <= shown
    ax.figure.canvas.draw()
    given = pyplot.figure().add_subplot()
    assert Topology.uniform(1, 2).draw(given) is given
    pyplot.close("all")


def drawn_texts(topology):
    matplotlib = pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    ax = topology.draw()
    ax.figure.canvas.draw()
    found = [text.get_text() for text in ax.texts], [text.get_text() for text in ax.get_legend().get_texts()]
    pyplot.close(ax.figure)
    return found


def test_draw_folds_equal_hosts_and_names_every_family_of_links():
    texts, legend = drawn_texts(Topology.uniform(16, 8, gpus=8))
    assert sorted(texts)[-2:] == ["host0 … host15\n16 hosts, each 8 gpus", "network"]
    assert len(texts) == 10
    assert legend == ["each host: 12.5 GB/s, 5 us", "each gpu: 25 GB/s, 2 us"]
    texts, _ = drawn_texts(Topology.uniform(4, 2))
    assert {"host0\nranks 0, 1", "host3\nranks 6, 7"} <= set(texts)


def test_draw_folds_only_what_is_equal():
    hosts = [Part(f"h{k}", "host", "network", CABLE, ranks=(2 * k, 2 * k + 1)) for k in range(6)]
    fast = Part("fast", "host", "network", Link(1e-6, 9e9), ranks=(12, 13))
    texts, legend = drawn_texts(Topology([Part("network", "network"), *hosts, fast]))
    assert sorted(texts) == ["fast\nranks 12, 13", "h0 … h5\n6 hosts, each 2 ranks", "network"]
    assert legend == ["each host: 1 GB/s, 10 us", "each host: 9 GB/s, 1 us"]


def test_draw_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="Topology.draw needs matplotlib and networkx: pip install"):
        Topology.uniform(1, 2).draw()


# ---- As names of the package


@pytest.mark.parametrize("name", ["CostModel", "Topology", "calibrate", "plan"])
def test_the_package_has_it_when_it_is_asked_for(name):
    value = getattr(meshdist, name)
    assert value is getattr(meshdist.topology, name)
    assert name in meshdist.__all__
    public = [value, *(member for key, member in vars(value).items() if key[0] != "_" and callable(member))]
    assert all(inspect.getdoc(each) for each in public)


def test_import_leaves_the_topology_for_later():
    code = "import sys, meshdist; assert not [name for name in sys.modules if 'topology' in name]; meshdist.Topology"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
