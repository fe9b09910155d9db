"""What `import meshdist` loads, and that every public name is listed and documented."""

import ast
import copy
import importlib.util
import inspect
import os
import pickle
import re
import subprocess
import sys
import types
from datetime import timedelta
from pathlib import Path

import pytest

import meshdist
from meshdist._torch_names import _OF_PARALLEL, no_attribute

pytestmark = pytest.mark.timeout(60)
# What is loaded when it is needed, or never.
HEAVY = ["networkx", "mpi4py", "cupy", "asyncio", "multiprocessing", "argparse", "tempfile", "torch", "matplotlib"]
HEAVY += ["ml_dtypes", "tqdm"]
# Modules of the standard library that importing the names of a usual program does not load, where NumPy does not. Each
# takes 0.3 to 4 ms; a world loads those that it needs.
UNUSED = ["array", "ctypes", "dataclasses", "fnmatch", "hashlib", "hmac", "html", "ipaddress", "json", "pathlib"]
UNUSED += ["queue", "secrets", "selectors", "shutil", "socket", "subprocess", "urllib", "uuid", "zlib"]
PROGRAM = "import meshdist; meshdist.init_process_group, meshdist.init_device_mesh, meshdist.all_reduce"


def loaded_by(statement):
    code = f"{statement}; import sys; print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=50
    )
    return set(process.stdout.split())


USE = "import meshdist; [getattr(meshdist, name) for name in dir(meshdist) if name not in {others}]"
# The packages autograd, dask, ray and torch load the library of that name.
USE_ALL_BUT_TOPOLOGY = USE.format(
    others=("CostModel", "Topology", "calibrate", "plan", "autograd", "dask", "ray", "torch")
)


def test_import_and_names_load_nothing_heavy():
    by_numpy = loaded_by("import numpy")
    ours = loaded_by(USE_ALL_BUT_TOPOLOGY) - by_numpy
    assert "meshdist.mesh.device_mesh" in ours
    assert sorted(ours & set(HEAVY)) == []


def test_names_of_a_program_load_little_of_the_standard_library():
    ours = loaded_by(PROGRAM) - loaded_by("import numpy")
    assert "meshdist.mesh.device_mesh" in ours
    assert sorted(ours & {*HEAVY, *UNUSED}) == []
    # What joins a world is loaded when one begins, and what few programs use when they do.
    assert sorted(name for name in ours if name.startswith(("meshdist.bootstrap", "meshdist.security"))) == []
    assert sorted(ours & {"meshdist.store.tcp", "meshdist.store.file", "meshdist.profiler.accounting"}) == []


def test_a_world_has_loaded_what_its_calls_and_its_end_need():
    # Ctrl-C in an import may leave its lock held, for which another call, or the end of the process, would wait.
    world = "meshdist.init_process_group(); import sys; before = set(sys.modules)"
    call = "import numpy; meshdist.all_reduce(numpy.ones(4)); meshdist.destroy_process_group()"
    code = f"{PROGRAM}; {world}; {call}; print(*{{*sys.modules}} - before, flush=True)"
    names = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    ).stdout.split()
    of_worlds = tuple(f"meshdist.{package}" for package in ("bootstrap", "debug", "groups", "runtime", "store"))
    assert sorted(name for name in names if name.startswith(of_worlds)) == []
    assert sorted({"hashlib", "json", "socket"} & {*names}) == []


def test_names_are_imported_when_they_are_used():
    ours = loaded_by("import meshdist, meshdist.launch.meshrun; meshdist.TCPStore")
    assert "meshdist.store.tcp" in ours
    assert sorted(ours & {"numpy", "dataclasses", "meshdist.collectives", "meshdist.groups", "meshdist.mesh"}) == []
    assert sorted(ours & {"hashlib", "ipaddress", "pathlib", "platform", "secrets", "shutil", "tempfile"}) == []


def test_type_checkers_know_the_same_names():
    tree = ast.parse(inspect.getsource(meshdist))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and node.orelse)
    names = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            names.update((alias.asname or alias.name, (node.module, alias.name)) for alias in node.names)
    assert names.pop("*") == ("meshdist.collectives.methods", "*")
    (listed,) = (
        ast.literal_eval(node.value)
        for node in block.body
        if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0])
    )
    collectives = importlib.import_module("meshdist.collectives.methods").__all__
    assert sorted(meshdist.__all__) == sorted({*listed, *collectives})
    assert sorted({name for name in names if name[0] != "_"} - set(collectives)) == sorted({*listed} - {"__version__"})
    for name, (module, name_there) in names.items():
        assert getattr(meshdist, name) is getattr(importlib.import_module(module), name_there)


def test_import_has_no_side_effects():
    code = (
        "import os, signal, threading, atexit, logging; before = dict(os.environ), signal.getsignal(signal.SIGINT);"
        f"{USE_ALL_BUT_TOPOLOGY};"
        "assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == before;"
        "assert threading.active_count() == 1;"
        "assert logging.getLogger().handlers == [] and logging.getLogger('meshdist').level == logging.NOTSET;"
        "links = [f'/proc/self/fd/{fd}' for fd in (3, 4, 5)]; "
        "assert not any('socket' in os.readlink(link) for link in links if os.path.exists(link))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=50)


def public_names():
    values = {name: getattr(meshdist, name) for name in dir(meshdist)} | vars(meshdist)
    return [name for name, value in values.items() if name[0] != "_" and not isinstance(value, types.ModuleType)]


def test_all_lists_every_public_name():
    listed = meshdist.__all__
    assert sorted(set(listed)) == sorted(listed)
    assert sorted(set(public_names()) - set(listed)) == []
    assert [name for name in listed if not hasattr(meshdist, name)] == []


def members(cls):
    for name, value in vars(cls).items():
        if name[0] != "_" and (callable(value) or isinstance(value, (property, staticmethod, classmethod))):
            yield f"{cls.__name__}.{name}", getattr(value, "__func__", value)


def documented():
    for name in public_names():
        value = getattr(meshdist, name)
        if callable(value):
            yield name, value
        if inspect.isclass(value):
            yield from members(value)


def test_every_public_name_is_documented():
    def undocumented(value):
        text = value.__doc__ if not inspect.isclass(value) else vars(value).get("__doc__")
        return not ((text and text.strip()[0].isupper()) or (text and text.strip()[0] in "`\"'0123456789"))

    missing = [name for name, value in documented() if undocumented(value)]
    # A method that overrides a documented one may leave it at that.
    missing = [name for name in missing if "." not in name or not overrides(name)]
    assert missing == []


def overrides(dotted):
    cls, _, name = dotted.partition(".")
    parents = getattr(meshdist, cls).__mro__[1:]
    return any(getattr(vars(parent).get(name), "__doc__", None) for parent in parents)


def described_arguments(doc):
    """Return the names under `Args:`: the lines of the least indentation, up to the first line further left."""
    lines = doc.split("Args:\n", 1)[1].splitlines()
    names = []
    for line in filter(str.strip, lines):
        if not line.startswith("    "):
            break
        if line[4] != " ":
            names.append(line.strip().partition(":")[0].split(" ")[0].lstrip("*"))
    return names


def test_documented_arguments_are_the_parameters():
    wrong = []
    for name, value in documented():
        doc = inspect.getdoc(value) or ""
        if "Args:\n" not in doc or inspect.isclass(value) or isinstance(value, property):
            continue
        parameters = [
            parameter for parameter in inspect.signature(value).parameters if parameter not in ("self", "cls")
        ]
        if sorted(described_arguments(doc)) != sorted(parameters):
            wrong.append((name, described_arguments(doc), parameters))
    assert wrong == []


def test_names_that_are_not_there_are_looked_up_only_when_asked_for():
    assert "meshdist._torch_names" not in loaded_by("import meshdist, meshdist.launch; meshdist.all_reduce")
    assert not hasattr(meshdist, "all_reduse")
    assert not hasattr(meshdist, "__path_to_nothing__")
    with pytest.raises(AttributeError, match="module 'meshdist' has no attribute 'abcdef'$") as caught:
        meshdist.abcdef  # noqa: B018
    # Without the object Python adds no suggestion of its own.
    assert (caught.value.name, caught.value.obj) == ("abcdef", None)
    assert getattr(meshdist, "all_reduse", None) is None
    with pytest.raises(ImportError, match="cannot import name 'abcdef' from 'meshdist' .*__init__.py"):
        exec("from meshdist import abcdef")
    exec("from meshdist import launch")
    assert pickle.loads(pickle.dumps(meshdist.ReduceOp.SUM)) is meshdist.ReduceOp.SUM
    (group,) = meshdist.run(lambda: meshdist.group.WORLD, 1)
    assert copy.copy(group).size() == 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("allreduce", "all_reduce"),
        ("Allreduce", "all_reduce"),
        ("all_reduse", "all_reduce"),
        ("Get_rank", "get_rank"),
        ("Get_size", "get_world_size"),
        ("Bcast", "broadcast"),
        ("DeviceMash", "DeviceMesh"),
        ("recieve", "recv"),  # codespell:ignore recieve
        ("receive", "recv"),
        ("init_mesh", "init_device_mesh"),
        ("ReduceOps", "ReduceOp"),
        ("Issend", "isend"),
    ],
)
def test_the_right_spelling_is_named(name, meant):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'; did you mean '{meant}'[?]$"):
        getattr(meshdist, name)
    with pytest.raises(ImportError, match=f"^cannot import name '{name}' from 'meshdist'; did you mean '{meant}'[?]$"):
        exec(f"from meshdist import {name}")


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("from meshdist import DistributedDataParallel", ": `meshdist.parallel.GradientReducer` averages gradients"),
        ("import meshdist.MPI", ": see docs/from-mpi4py.md"),
        ("from meshdist.MPI import COMM_WORLD", ": see docs/from-mpi4py.md"),
        ("from meshdist import GradientReducer", ": write `from meshdist.parallel import GradientReducer`"),
        ("from meshdist import Iallreduce", ": pass async_op=True to `all_reduce`"),
        ("from meshdist.store import HashStor", "; did you mean 'HashStore'?"),
        ("from meshdist.tensor import asarray", ": write `distribute_tensor(array, mesh, placements)`"),
    ],
)
def test_what_to_import_instead_is_named(statement, words):
    with pytest.raises(ModuleNotFoundError, match=rf"^cannot import name '\w+' from '[\w.]+'{re.escape(words)}"):
        exec(statement)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("ireduce", "reduce"),
        ("Iallreduce", "all_reduce"),
        ("Ibcast", "broadcast"),
        ("Ialltoallv", "all_to_all_single"),
        ("ibarrier", "barrier"),
    ],
)
def test_nonblocking_calls_of_mpi_are_async_calls(name, function):
    with meshdist.dry_run(4):
        for owner in (meshdist, meshdist.init_device_mesh("cpu", (4,)), meshdist.new_group()):
            with pytest.raises(AttributeError, match=f"has no attribute '{name}': pass async_op=True to `{function}`$"):
                getattr(owner, name)


def test_asking_for_any_name_raises_nothing_else():
    import meshdist.tensor

    with meshdist.dry_run(4):
        mesh, group = meshdist.init_device_mesh("cpu", (4,)), meshdist.new_group()
        owners = [meshdist, meshdist.tensor, meshdist.functional, mesh, group, meshdist.HashStore()]
        owners += [meshdist.ProcessGroup, meshdist.Store, meshdist.Work, meshdist.ReduceOp, meshdist.ReduceOp.SUM]
        for owner in [*owners, meshdist.Backend]:
            public = [name for name in dir(owner) if not name.startswith("_")]
            assert public
            unknown = [f"i{name}" for name in public if f"i{name}" not in public] + [f"{name}x_y" for name in public]
            assert [name for name in unknown if hasattr(owner, name)] == []


def test_an_error_of_a_property_is_not_replaced():
    class Broken(meshdist.HashStore):
        @property
        def part(self):
            return self.nothing_of_this_name

    with pytest.raises(AttributeError, match="^Broken has no attribute 'nothing_of_this_name'$"):
        _ = Broken().part


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GradientReducer", "write `from meshdist.parallel import GradientReducer`"),
        ("value_and_grad", "write `from meshdist.autograd import value_and_grad`"),
        ("ANY_SOURCE", "write `recv(x)`, without `src`"),
        ("DistributedDataParallel", "`meshdist.parallel.GradientReducer` averages gradients"),
        ("PROC_NULL", "use `mesh.shift(x, periodic=False)`; elsewhere, skip the call"),
        ("MAXLOC", "the location of the maximum or minimum is not supported: gather the values"),
        ("shift", 'it is a method of meshes: write `mesh["x"].shift(x)`'),
        ("halo_exchange", "it is a method of meshes: write `mesh.halo_exchange(block, width)`"),
    ],
)
def test_what_to_write_instead_is_named(name, words):
    owner = types.SimpleNamespace()  # the package itself may have been imported by other tests
    assert words in str(no_attribute(owner, "", "module 'meshdist'", name))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("randn", "write `random(seed).standard_normal(shape, mesh=mesh, placements=placements)`"),
        ("DeviceMesh", "write `from meshdist import DeviceMesh`"),
        ("distribute_tensr", "did you mean 'distribute_tensor'?"),
    ],
)
def test_names_of_torchs_arrays_are_explained(name, words):
    import meshdist.tensor

    with pytest.raises(AttributeError, match="module 'meshdist.tensor' has no attribute") as caught:
        getattr(meshdist.tensor, name)
    assert words in str(caught.value)


def test_names_that_other_packages_have_are_there():
    import meshdist.autograd
    import meshdist.parallel

    assert set(_OF_PARALLEL) <= {*meshdist.parallel.__all__} - {*meshdist.__all__}
    assert {"grad", "value_and_grad", "vjp"} <= {*meshdist.autograd.__all__}


def test_the_right_spelling_is_named_for_groups_and_meshes():
    with meshdist.dry_run(4):
        mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        group = mesh.get_group("tp")
        for owner, name, words in (
            (group, "all_reduc", "ProcessGroup has no attribute 'all_reduc'; did you mean 'all_reduce'"),
            (group, "Get_size", "did you mean 'size'"),
            (mesh, "tp", """DeviceMesh has no attribute 'tp'; for the axis, write mesh["tp"]"""),
            (mesh, "Allreduce", "did you mean 'all_reduce'"),
            (mesh, "get_cordinate", "did you mean 'get_coordinate'"),
            (mesh, "TP", """DeviceMesh has no attribute 'TP'; for the axis, write mesh["tp"]"""),
            (mesh, "xyz", "DeviceMesh has no attribute 'xyz'; this mesh is (dp=2, tp=2), its axes are 'dp', 'tp'"),
            (mesh["tp"], "dp", "DeviceMesh has no attribute 'dp'; this mesh is (tp=2), its axis is 'tp'"),
            (mesh, "world_size", "write `size()`"),
            (mesh, "names", "write `mesh_dim_names`"),
            (mesh, "group", "`get_group(axis)` is the group of an axis"),
            (mesh, "ranks", "the attribute `mesh` is the array of the global ranks"),
            (mesh, "Sub", """'Sub': write `mesh["x"]` for an axis of a mesh"""),
            (mesh, "batch_isend_irecv", "'batch_isend_irecv': write `meshdist.batch_isend_irecv`"),
            (group, "wait_any", "'wait_any': write `meshdist.wait_any`"),
            (group, "world_size", "did you mean 'size'"),
            (group, "isendrecv", "call `isend` and `irecv`"),
            (
                meshdist.ProcessGroup,
                "all_reduc",
                "ProcessGroup has no attribute 'all_reduc'; did you mean 'all_reduce'",
            ),
            (meshdist.Work, "done", "Work has no attribute 'done': write `is_completed()`"),
            (meshdist.HashStore(), "sett", "HashStore has no attribute 'sett'; did you mean 'set'"),
        ):
            with pytest.raises(AttributeError) as caught:
                getattr(owner, name)
            assert words in str(caught.value)
        assert not hasattr(mesh, "__array__")
        assert copy.copy(mesh) == mesh


def test_dir_shows_the_public_names():
    modules = {"checkpoint", "errors", "parallel", "tensor", "topology"}
    modules |= {name for name, library in NEEDED.items() if importlib.util.find_spec(library) is not None}
    assert sorted(dir(meshdist)) == sorted({*meshdist.__all__, *modules})
    assert all(hasattr(meshdist, name) for name in dir(meshdist) if name not in NEEDED)


def test_packages_are_attributes_that_are_imported_when_they_are_used():
    ours = loaded_by("import meshdist; dir(meshdist); meshdist.tensor.Shard(0), meshdist.checkpoint.save")
    assert "meshdist.tensor" in ours
    unused = {"meshdist.parallel", *(f"meshdist.{name}" for name in NEEDED), *NEEDED.values(), *HEAVY}
    assert sorted(ours & unused) == []


def test_a_package_whose_library_is_missing_says_what_to_install():
    code = (
        "import sys, meshdist; sys.modules['distributed'] = None; assert not hasattr(meshdist, 'dask'); meshdist.dask"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=50)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("AttributeError: module 'meshdist' has no attribute 'dask': "), done.stderr
    assert "pip install distributed" in last


# The modules of the package that say what their API is, and the one below them that does.
PACKAGE = Path(meshdist.__file__).parent
WITH_API = [
    *(path.stem for path in PACKAGE.glob("[!_]*.py") if "\n__all__ = " in path.read_text()),
    *(path.parent.name for path in PACKAGE.glob("*/__init__.py") if "\n__all__ = " in path.read_text()),
    "parallel.communication_hooks",
]


NEEDED = {"autograd": "autograd", "dask": "distributed", "ray": "ray", "torch": "torch"}


@pytest.mark.parametrize("name", sorted(WITH_API))
def test_dir_of_a_module_shows_its_api_alone(name):
    needed = NEEDED.get(name, "numpy")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    # In a process of its own, into which torch and Ray are loaded.
    loaded_by(f"import meshdist.{name} as module; assert dir(module) == sorted(module.__all__), dir(module)")


def test_private_names_of_torch_that_scripts_call():
    assert meshdist._coalescing_manager is meshdist.coalescing_manager
    assert meshdist._all_gather_base is meshdist.all_gather_into_tensor
    assert meshdist._reduce_scatter_base is meshdist.reduce_scatter_tensor
    assert meshdist._make_nccl_premul_sum is meshdist.premul_sum
    assert meshdist.default_pg_timeout == timedelta(minutes=30)


def test_collectives_are_functions_and_methods():
    from meshdist import DeviceMesh, ProcessGroup

    names = ["all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"]
    for name in [*names, "reduce_scatter_tensor"]:
        assert inspect.signature(getattr(meshdist, name)).parameters.keys() >= {"group", "async_op"}
        assert getattr(ProcessGroup, name) is getattr(meshdist, name)
        assert getattr(DeviceMesh, name) is getattr(meshdist, name)
    for name in ("all_to_all_single", "barrier", "send", "recv"):
        assert getattr(ProcessGroup, name) is getattr(meshdist, name)


@pytest.mark.parametrize("name", ["all_reduce", "send", "barrier"])
def test_collectives_say_what_they_are(name):
    function = getattr(meshdist, name)
    assert function.__name__ == name
    assert name in repr(function)
    assert function.__doc__


def test_the_version_is_there():
    assert meshdist.__version__.count(".") >= 1


def test_a_name_of_torch_that_is_missing_is_explained():
    expected = "module 'meshdist' has no attribute 'rpc' (torch.distributed has one)"
    assert no_attribute(None, "", "module 'meshdist'", "rpc").args[0].partition(":")[0] == expected


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--help"], 0), (["bench"], 2)])
def test_the_package_as_a_program_lists_the_commands(arguments, status):
    command = [sys.executable, "-m", "meshdist", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert "python -m meshdist.bench" in (done.stderr if status else done.stdout)
