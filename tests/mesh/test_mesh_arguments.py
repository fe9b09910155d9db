"""What init_device_mesh, DeviceMesh and its methods refuse, and in which words."""

import re

import numpy as np
import pytest

import meshdist
from meshdist.device_mesh import DeviceMesh, init_device_mesh

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def refusal(make, kind, world_size=4):
    """The words in which every rank of a world refuses `make()` with an error of `kind`."""

    def program():
        with pytest.raises(kind) as error:
            make()
        return str(error.value)

    reports = set(meshdist.run(program, world_size))
    assert len(reports) == 1
    return reports.pop()


def test_switches_of_torch_that_connect_groups_at_once_are_taken():
    def program():
        for switch in ("_init_backend", "_init_process_groups"):
            for wanted in (False, True):
                mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",), **{switch: wanted})
                assert mesh["tp"].all_reduce(np.ones(1)).item() == 2

    meshdist.run(program, 2)


@pytest.mark.parametrize(
    ("shape", "kind", "words"),
    [
        (
            (2, 4),
            ValueError,
            "needs 2 x 4 = 8 ranks, but the world has 4; start 8 (meshrun -n 8) or create a smaller mesh",
        ),
        ((5,), ValueError, "mesh_shape (5,) needs 5 ranks, but the world has 4"),
        ((10**6, 10**6), ValueError, "needs 1000000 x 1000000 = 1000000000000 ranks, but the world has 4"),
        ((2, 0), ValueError, "every size must be at least 1, got 0 in (2, 0)"),
        ((2, -1), ValueError, "got -1 in (2, -1); with 4 ranks, write (2, 2)"),
        ((-1, 2), ValueError, "every size must be at least 1, got -1 in (-1, 2); with 4 ranks, write (2, 2)"),
        ((-1,), ValueError, "got -1 in (-1,); with 4 ranks, write (4,)"),
        ((), ValueError, "expected at least one axis, got ()"),
        ((2.0, 2), TypeError, "expected integers, got 2.0 (float) in (2.0, 2)"),
        ((True, 2), TypeError, "expected integers, got True (bool)"),
        (4, TypeError, "expected a tuple of sizes, such as (2, 4), got 4"),
        ("22", TypeError, "expected a tuple of sizes, such as (2, 4), got '22'"),
        ({"a": 2, "b": 2}, TypeError, "got a dict; pass the sizes, (2, 2), and the names as mesh_dim_names=('a', 'b')"),
    ],
)
def test_shapes(shape, kind, words):
    assert words in refusal(lambda: init_device_mesh("cpu", shape), kind)


@pytest.mark.parametrize("shape", [(-1, 3), (-1, -1), (-1, 0), (-1, 2.0), (0, -1), (-2, 2)])
def test_a_size_of_minus_one_that_cannot_be_inferred(shape):
    assert "; with" not in refusal(lambda: init_device_mesh("cpu", shape), (ValueError, TypeError))


@pytest.mark.parametrize(("variable", "hint"), [("6", "; with 6 ranks, write (3, 2)"), ("six", ""), (None, "")])
def test_a_size_is_inferred_for_the_world_that_is_about_to_begin(monkeypatch, variable, hint):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if variable is not None:
        monkeypatch.setenv("WORLD_SIZE", variable)
    with pytest.raises(ValueError, match=re.escape(f"got -1 in (-1, 2){hint}") + "$"):
        init_device_mesh("cpu", (-1, 2))


def test_a_mesh_without_its_device_type():
    with pytest.raises(TypeError, match="'mesh_shape'; the first argument is the device type, 'cpu' or 'cuda'$"):
        init_device_mesh((2, 1), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        (("dp",), ValueError, "expected 2 names, one per axis of the mesh of shape (2, 2), got 1: ('dp',)"),
        (("dp", "tp", "pp"), ValueError, "expected 2 names, one per axis of the mesh of shape (2, 2), got 3"),
        (("tp", "tp"), ValueError, "'tp' is repeated in ('tp', 'tp')"),
        ("dp", TypeError, "expected a tuple of names, got the string 'dp'"),
        ((0, 1), TypeError, "expected strings, got 0 (int) in (0, 1)"),
    ],
)
def test_names(names, kind, words):
    assert words in refusal(lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=names), kind)
    assert words in refusal(lambda: DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names), kind)


@pytest.mark.parametrize(
    ("device_type", "kind", "words"),
    [
        ("cuda:0", ValueError, "expected a type without an index, got 'cuda:0'; write 'cuda'"),
        ("tpu", ValueError, "expected one of 'cpu', 'cuda', got 'tpu'"),
        ("", ValueError, "expected one of 'cpu', 'cuda', got ''"),
        (None, TypeError, "expected a string, got None"),
        ((2, 1), TypeError, "got (2, 1) (tuple); the first argument is the device type, 'cpu' or 'cuda'"),
    ],
)
def test_device_types(device_type, kind, words):
    assert words in refusal(lambda: init_device_mesh(device_type, (2,)), kind)
    assert words in refusal(lambda: DeviceMesh(device_type, [0, 1]), kind)


@pytest.mark.parametrize(
    ("ranks", "kind", "words"),
    [
        ([0, 4], ValueError, "DeviceMesh (2): the mesh has rank 4, but the world has only 4 ranks"),
        ([[0, 1], [1, 2]], ValueError, "rank 1 appears 2 times among the 4 given"),
        ([0, -1], ValueError, "global ranks must not be negative, got -1"),
        ([[0, 1], [2]], ValueError, "rows of unequal length"),
        ([], ValueError, "at least one axis and one rank"),
        (np.array([0.0, 1.0]), TypeError, "must be integers, got an array of float64"),
    ],
)
def test_ranks(ranks, kind, words):
    assert words in refusal(lambda: DeviceMesh("cpu", ranks), kind)


@pytest.mark.parametrize(
    ("override", "kind", "words"),
    [
        ({"pp": "gloo"}, KeyError, "unknown axis 'pp': this mesh is (dp=2, tp=2), its axes are 'dp', 'tp'"),
        ({2: "gloo"}, ValueError, "unknown axis 2: this mesh is (dp=2, tp=2)"),
        ({"tp": "gloo", 1: "gloo"}, ValueError, "axis 1 of (dp=2, tp=2) is given twice, by ['tp', 1]"),
        ({"tp": None}, TypeError, "backend_override['tp']: expected the name of a backend, or a pair of it"),
        ("gloo", TypeError, "expected a dict of axis to backend name, got str"),
        ({"tp": "no such backend"}, ValueError, "no such backend"),
    ],
)
def test_backend_overrides(override, kind, words):
    def make():
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override=override)

    assert words in refusal(make, kind)


@pytest.mark.parametrize(
    ("use", "kind", "words"),
    [
        (lambda mesh: mesh["pp"], KeyError, "unknown axis 'pp': this mesh is (dp=2, tp=2), its axes are 'dp', 'tp'"),
        (lambda mesh: mesh["pp"], ValueError, "its axes are 'dp', 'tp'"),
        (lambda mesh: mesh["tp", "pp"], KeyError, "unknown axis 'pp'"),
        (lambda mesh: mesh["tp"]["dp"], KeyError, "unknown axis 'dp': this mesh is (tp=2), its axis is 'tp'"),
        (lambda mesh: mesh["tp", "tp"], ValueError, "name at least one axis, and each once, of 'dp', 'tp'"),
        (lambda mesh: mesh[()], ValueError, "name at least one axis"),
        (lambda mesh: mesh[0], TypeError, 'expected axis names, as in mesh["dp"], got 0 (int)'),
        (lambda mesh: mesh[["dp"]], TypeError, "got ['dp'] (list)"),
        (lambda mesh: mesh["dp", 1], TypeError, "got ('dp', 1) (tuple)"),
        (lambda mesh: mesh[:], TypeError, "expected axis names"),
        (lambda mesh: mesh.get_group("pp"), KeyError, "unknown axis 'pp'"),
        (lambda mesh: mesh.get_group(2), ValueError, "unknown axis 2: this mesh is (dp=2, tp=2)"),
        (lambda mesh: mesh.get_group(), ValueError, "this mesh (dp=2, tp=2) has 2 axes, so name one of 'dp', 'tp'"),
        (lambda mesh: mesh.get_local_rank(), ValueError, "of 'dp', 'tp', as in get_local_rank(mesh_dim='dp')"),
        (lambda mesh: mesh.shift(np.ones(2)), ValueError, "so name one of 'dp', 'tp', as in shift(x, axis='dp')"),
        (lambda mesh: mesh["dp,tp"], KeyError, 'write the names one by one: mesh["dp", "tp"]'),
        (lambda mesh: mesh.get_local_rank("pp"), KeyError, "unknown axis 'pp'"),
        (lambda mesh: mesh.size("pp"), KeyError, "unknown axis 'pp'"),
        (lambda mesh: mesh.size(1.0), TypeError, "an axis is a name or an index, got 1.0"),
    ],
)
def test_axes(use, kind, words):
    assert words in refusal(lambda: use(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))), kind)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (
            lambda mesh: mesh["dp"],
            "this mesh (2, 2) has no axis names to slice by; pass mesh_dim_names when creating it",
        ),
        (
            lambda mesh: mesh.get_group("dp"),
            "unknown axis 'dp': this mesh is (2, 2) and has no names; use an index below 2",
        ),
        (lambda mesh: mesh.get_group(), "has 2 axes, so name one of 0, 1"),
    ],
)
def test_axes_without_names(use, words):
    assert words in refusal(lambda: use(init_device_mesh("cpu", (2, 2))), ValueError)


@pytest.mark.parametrize("make", [lambda: init_device_mesh("cpu", (1,)), lambda: DeviceMesh("cpu", [0])])
def test_without_a_launcher_the_missing_variables_are_named(make, monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT, WORLD_SIZE are missing"):
        make()
    assert not meshdist.is_initialized()


def test_without_a_launcher_the_world_is_this_process(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="needs 4 ranks, but the world has 1"):
        init_device_mesh("cpu", (4,))
    assert not meshdist.is_initialized()
    assert init_device_mesh("cpu", (1,)).mesh.tolist() == [0]
    meshdist.destroy_process_group()


@pytest.mark.parametrize("make", [lambda: init_device_mesh("cpu", (1,)), lambda: DeviceMesh("cpu", [0])])
def test_the_default_group_is_initialised_if_there_is_none(make, monkeypatch):
    for name, value in zip(LAUNCHER_VARIABLES, ("0", "1", "0", "127.0.0.1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    mesh = make()
    try:
        assert meshdist.is_initialized()
        assert mesh.get_coordinate() == (0,)
        assert mesh.all_reduce(np.array([3.0])).tolist() == [3.0]
    finally:
        meshdist.destroy_process_group()


def test_wrong_arguments_are_refused_before_a_world_is_joined(monkeypatch):
    for name, value in zip(LAUNCHER_VARIABLES, ("0", "1", "0", "127.0.0.1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="expected 1 name,"):
        init_device_mesh("cpu", (1,), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="rank 0 appears 2 times"):
        DeviceMesh("cpu", [0, 0])
    assert not meshdist.is_initialized()
