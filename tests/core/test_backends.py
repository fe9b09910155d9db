"""Backends: their names, device strings, what is available, and engines of third parties."""

import pickle
import types

import numpy as np
import pytest
from backend_programs import (
    OnlyBarrier,
    disagree,
    register_and_run_every_collective,
    register_around,
    use_only_barrier,
)
from worlds import WorkerSet

import meshdist as dist
from meshdist.backends import Engine, Wrapper

pytestmark = pytest.mark.timeout(60)
FORM = "write a name, such as 'gloo', or pairs of device type and name, such as 'cpu:gloo,cuda:nccl'"
no_nccl = pytest.mark.skipif(dist.is_nccl_available(), reason="NCCL can be used here")


@pytest.fixture
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


class OnCard:
    """As much of an array on a GPU as is seen without one."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": (3,), "typestr": "<f8", "data": (0, False), "version": 3}


# ---- Names


def test_a_backend_is_a_string_in_lower_case():
    assert dist.Backend("GLOO") == "gloo" == dist.Backend.GLOO
    assert isinstance(dist.Backend("gloo"), str)
    names = [getattr(dist.Backend, name) for name in ("GLOO", "MPI", "NCCL", "UCC", "XCCL", "THREADS", "UNDEFINED")]
    assert names == ["gloo", "mpi", "nccl", "ucc", "xccl", "threads", "undefined"]
    assert pickle.loads(pickle.dumps(dist.Backend("gloo"))) == "gloo"
    assert dist.Backend("undefined") == dist.Backend.UNDEFINED


@pytest.mark.parametrize("name", ["fast", "", "gloo,nccl"])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match=f"unknown backend '{name}'; choose from .*gloo.*mpi.*nccl.*threads") as caught:
        dist.Backend(name)
    assert FORM in str(caught.value)
    assert not {"ucc", "xccl"} & set(str(caught.value).replace(",", "").split())  # names that torch has


@pytest.mark.parametrize(("name", "meant"), [("glooo", "gloo"), ("gloo ", "gloo"), ("thread", "threads")])
def test_a_misspelt_name_is_answered_with_the_one_that_was_meant(name, meant):
    with pytest.raises(ValueError, match=f"^unknown backend '{name}'; .*nccl, threads; did you mean '{meant}'[?]$"):
        dist.Backend(name)


def test_the_backend_tcp_of_old_versions_of_torch_is_gloo():
    with pytest.raises(ValueError, match=r"unknown backend 'glooo'; choose from .*; did you mean 'gloo'\?"):
        dist.init_process_group("glooo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(
        ValueError, match=r"unknown backend 'tcp'; choose from .*; use 'gloo' instead of torch's former backend 'tcp'"
    ):
        dist.Backend("tcp")


def test_names_of_another_type():
    with pytest.raises(TypeError, match="Backend: the name must be a string, got 3"):
        dist.Backend(3)


def test_attributes_that_are_not_there():
    assert not hasattr(dist.Backend, "FAST")
    assert not hasattr(dist.Backend, "gloo")


# ---- Device strings


@pytest.mark.parametrize(
    ("given", "backend", "config"),
    [
        ("gloo", "gloo", "cpu:gloo"),
        ("cpu:gloo", "gloo", "cpu:gloo"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("CUDA:nccl, cpu:GLOO", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        pytest.param(None, "gloo", "cpu:gloo", marks=no_nccl),
        pytest.param("undefined", "gloo", "cpu:gloo", marks=no_nccl),
    ],
)
def test_what_a_world_and_its_groups_have(given, backend, config):
    dist.init_process_group(given, store=dist.HashStore(), rank=0, world_size=1)
    try:
        for group in (None, dist.new_group([0]), dist.new_group([0], backend=given)):
            assert dist.get_backend(group) == backend
            assert dist.get_backend_config(group) == config
            assert dist.all_reduce(np.ones(2), group=group).tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


WRONG = {
    "no backend": ("cpu:", r"'cpu:' is not a pair"),
    "no device": (":gloo", r"':gloo' is not a pair"),
    "no colon": ("cpu:gloo,nccl", r"'nccl' is not a pair"),
    "a comma too many": ("cpu:gloo,", r"'' is not a pair"),
    "two colons": ("cpu:gloo:nccl", r"'cpu:gloo:nccl' is not a pair"),
    "unknown device": ("tpu:gloo", r"unknown device type 'tpu'; choose from cpu, cuda"),
    "device twice": ("cpu:gloo,cpu:gloo", r"device type 'cpu' is given twice"),
    "unknown backend": ("cpu:fast", r"unknown backend 'fast'; choose from .*gloo"),
}


@pytest.mark.usefixtures("_no_launcher")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_device_strings(name):
    given, words = WRONG[name]
    for refuse in (dist.Backend, dist.init_process_group):
        with pytest.raises(ValueError, match=words) as caught:
            refuse(given)
        assert FORM in str(caught.value)
    assert not dist.is_initialized()
    assert not dist.is_backend_available(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("cpu:nccl", "nccl does not support 'cpu' arrays; backends that do: .*gloo"),
        ("cuda:on_cpu", "on_cpu does not support 'cuda' arrays; backends that do: .*nccl"),
    ],
)
def test_backends_on_devices_that_they_do_not_carry(given, words):
    dist.Backend.register_backend("on_cpu", lambda *given: Engine(), devices="cpu")
    with pytest.raises(ValueError, match=words):
        dist.Backend(given)


def refuse_strings():
    for call in (
        lambda: dist.new_group([0, 1], backend="cpu:threads,cpu:threads"),
        lambda: dist.init_device_mesh("cpu", (2,), backend_override={0: "cpu:threads,cpu:threads"}),
    ):
        with pytest.raises(ValueError, match="is given twice"):
            call()
    assert dist.new_group(backend="cpu:threads").all_reduce(np.ones(1)).item() == 2


def test_groups_and_meshes_read_device_strings():
    dist.run(refuse_strings, 2, timeout=20)


def arrays_on_cards():
    dist.Backend.register_backend("threads_on_cpu", Wrapper.around("threads"), extended_api=True, devices="cpu")
    group = dist.new_group(backend="threads_on_cpu", group_desc="on the CPU")
    where = "on group 'on the CPU' (rank 0 of 1)"
    for name, call in {
        "all_reduce": lambda: group.all_reduce(OnCard()),
        "all_gather": lambda: group.all_gather([OnCard()], OnCard()),
    }.items():
        with pytest.raises(ValueError, match="backend") as caught:
            call()
        assert str(caught.value).startswith(
            f"{name} {where}: the array is on device type 'cuda', and the group's backends are cpu:threads_on_cpu; "
        )
    with pytest.raises(ValueError, match="all_gather .*several device types, cpu, cuda"):
        group.all_gather([OnCard()], np.zeros(3))
    assert group.all_reduce(np.ones(1)).item() == 1.0  # refused before anything was sent: nothing is broken


def test_an_array_that_no_backend_of_the_group_carries():
    dist.run(arrays_on_cards, 1, timeout=20)


def messages_on_cards():
    dist.Backend.register_backend("threads_on_cpu", Wrapper.around("threads"), extended_api=True, devices="cpu")
    group = dist.new_group(backend="threads_on_cpu")
    for call in (group.send, group.recv, group.isend, group.irecv):
        with pytest.raises(ValueError, match=rf"{call.__name__} on group .* device type 'cuda', and the group's"):
            call(OnCard(), 1 - dist.get_rank())
    group.barrier()


def test_messages_that_no_backend_of_the_group_carries():
    dist.run(messages_on_cards, 2, timeout=20)


@no_nccl
def test_a_backend_that_is_missing_is_missed_when_it_is_needed():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            dist.DistBackendError, match=r"all_reduce on group 'world' .*the 'nccl' backend is not available: "
        ):
            dist.all_reduce(OnCard())
        assert dist.all_reduce(np.ones(1)).item() == 1.0
    finally:
        dist.destroy_process_group()


# ---- What is available


@pytest.mark.usefixtures("_no_launcher")
@pytest.mark.parametrize("name", ["nccl", "ucc", "xccl", "mpi", "cuda:nccl"])
def test_what_is_not_available_says_why(name):
    if dist.is_backend_available(name):
        pytest.skip(f"{name} can be used here")
    with pytest.raises(dist.DistBackendError, match="is not available: .*; for arrays on the CPU use 'gloo'"):
        dist.init_process_group(name)
    assert not dist.is_initialized()


def test_what_is_available():
    assert dist.is_available() is True
    assert dist.is_gloo_available() is True
    assert dist.is_ucc_available() is False
    assert dist.is_xccl_available() is False
    for name in ("mpi", "nccl"):
        assert getattr(dist, f"is_{name}_available")() == dist.is_backend_available(name)
    names = ("GLOO", "threads", "cpu:gloo", "cpu:gloo,cuda:ucc", "fast")
    assert [dist.is_backend_available(name) for name in names] == [True, True, True, False, False]
    with pytest.raises(TypeError, match="backend must be a string, got None"):
        dist.is_backend_available(None)


def test_default_backend_of_a_device():
    devices = ("cpu", "cuda", "cuda:3", types.SimpleNamespace(type="cuda"))
    assert [dist.get_default_backend_for_device(device) for device in devices] == ["gloo", "nccl", "nccl", "nccl"]
    for device in ("tpu", "cpu:x", ""):
        with pytest.raises(ValueError, match=f"unknown device '{device}'; choose from cpu, cuda"):
            dist.get_default_backend_for_device(device)
    with pytest.raises(TypeError, match="device must be a device type, one of cpu, cuda, got 3"):
        dist.get_default_backend_for_device(3)


def test_ops_on_complex_numbers():
    able = [op.name for op in dist.ReduceOp if dist.supports_complex(op)]
    assert able == ["SUM", "PRODUCT", "AVG"]
    assert dist.supports_complex("sum")
    assert dist.supports_complex(dist.ReduceOp.PREMUL_SUM(2.0))
    with pytest.raises(ValueError, match="unknown op 'most'"):
        dist.supports_complex("most")


@no_nccl
@pytest.mark.usefixtures("_no_launcher")
def test_a_mesh_of_gpus_needs_what_carries_their_arrays():
    with pytest.raises(
        dist.DistBackendError, match="a mesh of 'cuda' needs a backend .*'nccl' backend is not available: "
    ):
        dist.init_device_mesh("cuda", (1,))
    assert not dist.is_initialized()


def mesh_of_gpus():
    with pytest.raises(dist.DistBackendError, match="a mesh of 'cuda' needs a backend"):
        dist.DeviceMesh("cuda", [0, 1])
    dist.Backend.register_backend("for_cards", lambda *given: Engine(), devices="cuda")
    mesh = dist.init_device_mesh("cuda", (2,), backend_override={0: "for_cards"})
    assert dist.get_backend_config(mesh.get_group()) == "cuda:for_cards"
    return mesh.device_type


@no_nccl
def test_a_mesh_of_gpus_in_a_world_without():
    assert dist.run(mesh_of_gpus, 2, timeout=20) == ["cuda", "cuda"]


def make_group_of_processes():
    with pytest.raises(ValueError, match="backend 'gloo' is for ranks that are processes"):
        dist.new_group(backend="gloo").barrier()


def test_backends_in_worlds_that_they_are_not_for():
    dist.run(make_group_of_processes, 1, timeout=20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            ValueError, match="barrier on .* 'threads' backend is for ranks that are threads: use meshdist.run"
        ):
            dist.new_group(backend="threads").barrier()
    finally:
        dist.destroy_process_group()


# ---- Third parties


def test_register_backend_refuses():
    register = dist.Backend.register_backend
    for name, kind, words in (
        (3, TypeError, "name must be a string, got 3"),
        ("gloo", ValueError, "'gloo' is a backend of meshdist; choose another name"),
        ("UNDEFINED", ValueError, "name must be a word"),
        ("cpu:mine", ValueError, "name must be a word of letters, digits and underscores"),
    ):
        with pytest.raises(kind, match=words):
            register(name, lambda *given: Engine())
    with pytest.raises(TypeError, match=r"register_backend\('mine'\): func must be callable, got None"):
        register("mine", None)
    for devices in ("tpu", [], ["cpu", "tpu"]):
        with pytest.raises(ValueError, match="devices must be some of cpu, cuda, got"):
            register("mine", lambda *given: Engine(), devices=devices)
    assert not dist.is_backend_available("mine")


def test_a_registered_name_is_known():
    dist.Backend.register_backend("Of_Others", lambda *given: Engine())
    assert dist.Backend.OF_OTHERS == dist.Backend("of_others") == "of_others"
    assert dist.is_backend_available("OF_OTHERS")
    assert dist.is_backend_available("cpu:gloo,cuda:of_others")
    dist.init_process_group("of_others", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend_config() == "cpu:of_others,cuda:of_others"
    finally:
        dist.destroy_process_group()


def one_more(store, rank, size, timeout, extra):
    return Engine()


@pytest.mark.parametrize(
    ("func", "extended_api", "words"),
    [
        (
            lambda options, pg_options: Engine(),
            False,
            r"<lambda> takes \(options, pg_options\), and with extended_api=False it is called as"
            r" func\(store, rank, size, timeout\).*; with extended_api=True it would be func\(options, pg_options\)$",
        ),
        (lambda store, rank, size, timeout: Engine(), True, r"called as func\(options, pg_options\)"),
        (
            one_more,
            False,
            r"one_more takes \(store, rank, size, timeout, extra\).*missing a required argument: 'extra'",
        ),
    ],
)
def test_a_function_of_another_form(func, extended_api, words):
    with pytest.raises(TypeError, match=rf"^register_backend\('other_form'\): .*{words}"):
        dist.Backend.register_backend("other_form", func, extended_api=extended_api)
    assert not hasattr(dist.Backend, "OTHER_FORM")


def fail_to_make(store, rank, size, timeout):
    return {}["no such key"]


def first_call_of_a_failing_one():
    dist.Backend.register_backend("failing", fail_to_make)
    words = "barrier on group '.*: backend 'failing': the registered function fail_to_make raised KeyError"
    with pytest.raises(dist.DistBackendError, match=words) as caught:
        dist.new_group(backend="failing").barrier()
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_that_raises():
    dist.run(first_call_of_a_failing_one, 1, timeout=20)


def test_a_name_is_registered_again():
    def barrier():
        return dist.new_group(backend="twice").barrier()

    dist.Backend.register_backend("twice", fail_to_make)
    dist.Backend.register_backend("TWICE", lambda store, rank, size, timeout: OnlyBarrier())
    assert dist.run(barrier, 1, timeout=20) == [None]


def make_nothing():
    dist.Backend.register_backend("nothing", lambda store, rank, size, timeout: None)
    with pytest.raises(
        TypeError, match="backend 'nothing': the registered function must return .*Engine, got NoneType"
    ):
        dist.new_group(backend="nothing").barrier()


def test_a_function_that_makes_no_engine():
    dist.run(make_nothing, 1, timeout=20)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_an_engine_of_messages_has_every_collective(size):
    dist.run(register_and_run_every_collective, size, ("by_store",), timeout=20)


def test_an_engine_of_messages_between_processes(worlds):
    with WorkerSet(worlds.nursery, 3) as workers:
        workers.join()
        workers.start(register_and_run_every_collective, "by_store")
        workers.gather()


def test_calls_that_disagree_are_found_over_messages():
    for said in dist.run(disagree, 3, ("by_store",), timeout=20):
        assert "the ranks disagree" in said
        assert "all_reduce(" in said
        assert "all_gather_into_tensor(" in said


def test_an_engine_of_one_collective():
    for rank, said in enumerate(dist.run(use_only_barrier, 2, timeout=20)):
        assert said.startswith("all_reduce on group ")
        assert (
            f"(rank {rank} of 2): OnlyBarrier cannot carry out this call: it has neither a method all_reduce(call)"
            in said
        )


def test_an_engine_around_that_of_the_world(worlds):
    assert dist.run(register_around, 2, ("around",), timeout=20) == [1, 1]  # one plan for three equal calls
    with WorkerSet(worlds.nursery, 2) as workers:
        workers.join()
        workers.start(register_around, "around")
        assert workers.gather() == [1, 1]


def test_options_of_the_world_reach_its_engine():
    given = []

    def make(options, pg_options):
        given.append((options.rank, options.ranks, pg_options))
        return OnlyBarrier(options)

    dist.Backend.register_backend("with_options", make, extended_api=True, devices="cpu")
    dist.init_process_group("with_options", store=dist.HashStore(), rank=0, world_size=1, pg_options="fast")
    try:
        dist.barrier()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert given == [(0, (0,), "fast")]
