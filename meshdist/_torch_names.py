"""What to write instead of a name that is not there: names of torch.distributed and of MPI, and misspelt ones.

Loaded only when such a name is accessed or imported. The reasons are those of docs/migration.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from inspect import Parameter, signature, unwrap
from typing import Any

from meshdist._spelling import CLOSE, NEAR, same_name, spelt


def no_attribute(
    owner: Any, prefix: str, what: str, name: str, known: Iterable[str] | None = None, *, otherwise: str = ""
) -> AttributeError:
    """Return the error for attribute `name`, which `owner` lacks; it names a similar one if there is one.

    `what` is the owner in messages, `prefix` that of its attributes in the table, such as "ProcessGroup.". `known` are
    the attributes that are meant to be used; all public ones if None. `otherwise` ends the message if no name is meant.
    """
    words = instead(owner, prefix, name, known)
    # Without `obj`, since Python would add a suggestion of its own.
    return AttributeError(f"{what} has no attribute {name!r}{otherwise if words is None else words}", name=name)


def no_attribute_of_class(
    owner: Any, cls: type, name: str, known: Iterable[str] | None = None, *, otherwise: str = ""
) -> AttributeError:
    """Return the error for attribute `name`, which `owner` lacks: the class `cls` or an object of it.

    The table has the names of a class under its own name or that of a base class.
    """
    prefixes = [f"{base.__name__}." for base in cls.__mro__]
    listed = (prefix for prefix in prefixes if prefix + name in REASONS or prefix + name in _INSTEAD)
    return no_attribute(owner, next(listed, prefixes[0]), cls.__name__, name, known, otherwise=otherwise)


def instead(owner: Any, prefix: str, name: str, known: Iterable[str] | None = None) -> str | None:
    """Return how an error about `name`, which `owner` lacks, ends: with what to write; None if no name is meant.

    The arguments are those of `no_attribute`.
    """
    if prefix + name in REASONS:
        return f" (torch.distributed has one): {REASONS[prefix + name]}; see docs/migration.md"
    words = _INSTEAD.get(prefix + name) or _OF_NO_OWNER.get(name)
    if words is not None:
        return f": {words}"
    public = [other for other in (dir(owner) if known is None else known) if not other.startswith("_")]
    same = same_name(name, public)
    if same is None and (function := _begun(owner, name, public)) is not None:
        return f": pass async_op=True to `{function}`"
    if same is None and prefix and _is_function_of_package(name):
        return f": write `meshdist.{name}`"
    similar = same or spelt(name, public)
    return None if similar is None else f"; did you mean {similar!r}?"


def _begun(owner: Any, name: str, known: Collection[str]) -> str | None:
    """Return the collective of `owner` that a nonblocking one of MPI, such as `Iallreduce`, begins; None if none is."""
    function = same_name(name[1:], known) if name[:1] in ("i", "I") else None
    if function is None or not _is_function_of_package(function):
        return None
    return function if "async_op" in signature(getattr(owner, function)).parameters else None


def _is_function_of_package(name: str) -> bool:
    package = sys.modules["meshdist"]
    value = getattr(package, name) if name in dir(package) else None
    return callable(value) and not isinstance(value, type)


_OF_TENSOR = ("DTensor", "Partial", "Replicate", "Shard", "distribute_tensor")
# The names of `meshdist.parallel` that scripts have most often.
_OF_PARALLEL = (
    *("GradientReducer", "HierarchicalAverager", "PeriodicAverager", "PipelineRunner", "PipelineStage"),
    *("ShardedOptimizer", "average_parameters", "broadcast_parameters", "column_parallel", "communication_hooks"),
    *("ring_attention", "row_parallel", "uneven_inputs"),
)
# Names of other libraries, and short ones, that are called otherwise here: of the package, and "DeviceMesh." of a mesh.
_INSTEAD = {
    **{name: f"write `from meshdist.tensor import {name}`" for name in _OF_TENSOR},
    **{name: f"write `from meshdist.parallel import {name}`" for name in _OF_PARALLEL},
    **{name: f"write `from meshdist.autograd import {name}`" for name in ("grad", "value_and_grad", "vjp")},
    **{name: f"write `ReduceOp.{name}`" for name in ("AVG", "BAND", "BOR", "BXOR", "MAX", "MIN", "PRODUCT", "SUM")},
    "PROD": "write `ReduceOp.PRODUCT`",
    "get_local_rank": "`get_node_local_rank()` is the rank on this host, `mesh.get_local_rank()` that along an axis",
    "Mesh": "`init_device_mesh` creates a DeviceMesh",
    # Where scripts for old versions say torch.distributed, and a replaced "torch" leaves a path that never was.
    **dict.fromkeys(
        ("distributed", "distributed_deprecated"),
        "`import meshdist as dist` is `import torch.distributed as dist`; see docs/migration.md",
    ),
    "make_mesh": '`init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))` creates a mesh',
    "halo_exchange": "it is a method of meshes: write `mesh.halo_exchange(block, width)`",
    "shift": 'it is a method of meshes: write `mesh["x"].shift(x)`',
    **dict.fromkeys(("isend_object", "isend_objects"), "write `isend_object_list([obj], dst)`"),
    **dict.fromkeys(
        ("irecv_object", "irecv_objects"), "write `irecv_object_list(src)`; `[obj] = work.result()` is the object"
    ),
    "get_group": "`group.WORLD` is the group of all ranks, `mesh.get_group(axis)` that of an axis of a mesh, and"
    " `new_group(ranks)` creates one",
    "rank": "write `get_rank()`",
    "size": "write `get_world_size()`",
    "DeviceMesh.axis_names": "write `mesh_dim_names`",
    "DeviceMesh.dim_names": "write `mesh_dim_names`",
    "DeviceMesh.names": "write `mesh_dim_names`",
    "DeviceMesh.group": "`get_group(axis)` is the group of an axis",
    "DeviceMesh.ranks": "the attribute `mesh` is the array of the global ranks",
    "DeviceMesh.world_size": "write `size()`",
    "DeviceMesh.coords": "write `get_coordinate()`",
    "DeviceMesh.dims": "`mesh_dim_names` has the names of the axes, `shape` their sizes",
    **dict.fromkeys(
        (f"Work.{name}" for name in ("Test", "test", "done", "is_done", "ready")), "write `is_completed()`"
    ),
    **dict.fromkeys(
        ("Work.Cancel", "Work.cancel"),
        "a call that has begun is carried out; `wait(timeout)` ends the wait, `abort_process_group` all calls",
    ),
    **dict.fromkeys(
        ("Work.Free", "Work.free"), "it is not needed: the call is carried out even if its Work is dropped"
    ),
    **dict.fromkeys(
        ("Work.Get_status", "Work.get_status"),
        "`is_completed()` tells whether the call is done, `source_rank()` of an irecv its sender",
    ),
    **dict.fromkeys(("Work.Waitall", "Work.waitall"), "write `for work in works: work.wait()`"),
    **dict.fromkeys((f"Work.{name}" for name in ("Waitany", "waitany")), "write `wait_any(works)`"),
    **dict.fromkeys(
        (f"Work.{name}" for name in ("Waitsome", "waitsome", "Testany", "testany", "Testsome", "testsome")),
        "`is_completed()` of each Work tells whether it is done; `wait_any(works)` waits for one",
    ),
    **dict.fromkeys(("Work.Testall", "Work.testall"), "write `all(work.is_completed() for work in works)`"),
    **{f"tensor.{name}": f"write `from meshdist import {name}`" for name in ("DeviceMesh", "init_device_mesh")},
    "tensor.parallel": "`meshdist.parallel` has `column_parallel` and `row_parallel`, functions of local shards; see"
    " docs/tensor-parallel.md",
    "tensor.placement_types": "import its names from `meshdist.tensor`",
    "tensor.experimental": "`meshdist.tensor` has `local_map` and `implicit_redistribution`",
    "tensor.distribute_module": "there are no modules; `distribute_tensor` places one parameter",
    **{
        f"tensor.{name}": "write `distribute_tensor(array, mesh, placements)`, with src_data_rank=None if all ranks"
        " have it"
        for name in ("array", "asarray", "asanyarray")
    },
    "tensor.distribute": "write `distribute_tensor(array, mesh, placements)`",
    "tensor.identity": "write `eye(n, mesh=mesh, placements=placements)`",
    "tensor.rand": "write `random(seed).random(shape, mesh=mesh, placements=placements)`",
    "tensor.randn": "write `random(seed).standard_normal(shape, mesh=mesh, placements=placements)`",
    "DeviceMesh.rank": "`get_local_rank()` is the rank along the axis, `get_rank()` that in the world",
}
NO_LOCATIONS = (
    "the location of the maximum or minimum is not supported: gather the values, and take np.argmax or np.argmin of"
    " them"
)
# Names of other libraries for which there is none.
_OF_NO_OWNER = {
    **dict.fromkeys(("ANY_SOURCE", "any_source", "recv_any", "recv_anysource"), "write `recv(x)`, without `src`"),
    "ANY_TAG": "`probe(src, tag=None)` returns the tag of a message; then receive that one",
    **dict.fromkeys(
        ("Comm_split", "Split"),
        '`new_subgroups_by_enumeration(lists)` creates groups, and each axis of a mesh has some: `mesh["x"]`',
    ),
    "Comm_split_type": "`new_subgroups()` creates a group of the ranks of each host",
    **dict.fromkeys(
        ("COMM_WORLD", "comm_world", "comm"),
        "the flat functions, such as `all_reduce(x)`, run on the world; `new_group` creates other groups",
    ),
    **dict.fromkeys(
        ("IN_PLACE", "in_place"),
        "`all_reduce(x)`, `broadcast(x)` and `reduce(x)` replace `x`; to keep it, use `meshdist.functional`",
    ),
    "timeline": "`profile()` records the calls of a block, and `p.merged()` of it is the timeline of all ranks",
    "DistributedDataParallel": "`meshdist.parallel.GradientReducer` averages gradients",
    "File": '`meshdist.checkpoint` saves and loads arrays; `np.load(path, mmap_mode="r")` reads a part of a file',
    "MPI": "see docs/from-mpi4py.md",
    "Cart_shift": "`mesh.shift(x)` sends to the next rank and receives from the one before",
    **dict.fromkeys(("MAXLOC", "MINLOC", "maxloc", "minloc", "argmax", "argmin"), NO_LOCATIONS),
    **dict.fromkeys(("Cart_sub", "Sub"), 'write `mesh["x"]` for an axis of a mesh, `mesh["x", "y"]` for several'),
    "PROC_NULL": "use `mesh.shift(x, periodic=False)`; elsewhere, skip the call",
    "Request": "`isend` and `irecv` return a Work; see its `wait` and `is_completed`",
    **dict.fromkeys(("Isendrecv", "isendrecv"), "call `isend` and `irecv`, then `wait` of both"),
    **dict.fromkeys(("Sendrecv_replace", "sendrecv_replace"), "write `sendrecv(x.copy(), x, dst, src)`"),
    "Allgatherv": "write `functional.all_gather(x, axis=0, uneven=True)`",
    "Gatherv": "write `functional.gather(x, dst, axis=0, uneven=True)`",
    "Scatterv": "write `functional.scatter(blocks, src=src)`, with a list of blocks on the source, and None elsewhere",
    "Status": "`recv` returns the source, `probe` the source, the tag and the size",
    "Win": "`empty`, `zeros` and `full` return arrays in shared memory; there are no one-sided messages",
    "Wtime": "write `time.perf_counter()`",
    "axis_index": 'write `get_rank()`, or along an axis `mesh["tp"].get_local_rank()`',
    "axis_size": 'write `get_world_size()`, or along an axis `mesh["tp"].size()`',
    "pmax": 'write `all_reduce(x, op="max")`',
    "pmean": 'write `all_reduce(x, op="avg")`',
    "pmin": 'write `all_reduce(x, op="min")`',
    "ppermute": "write `mesh.shift(x)`, or `isend` and `irecv`",
    "process_count": "write `get_world_size()`",
    "process_index": "write `get_rank()`",
    "psum": "write `all_reduce(x)`, or `functional.all_reduce(x)`, which returns a new array",
    "psum_scatter": "write `reduce_scatter_tensor(out, x)`",
    "shard_map": "the script is its body, which every rank runs; see docs/from-jax.md",
    **dict.fromkeys(("waitany", "Waitany"), "write `wait_any(works)`; `recv(x)` takes the first message from any rank"),
    **dict.fromkeys(
        ("wait_some", "waitsome", "Waitsome"),
        "write `wait_any(works)`, and `[work for work in works if work.is_completed()]`",
    ),
    **dict.fromkeys(("wait_all", "waitall", "Waitall"), "write `for work in works: work.wait()`"),
    **dict.fromkeys(
        (f"{test}{kind}" for test in ("test", "test_", "Test") for kind in ("any", "some")),
        "write `[work for work in works if work.is_completed()]`",
    ),
    **dict.fromkeys(("testall", "test_all", "Testall"), "write `all(work.is_completed() for work in works)`"),
}

_UNKNOWN_KEYWORD = re.compile(r"(\S+)\(\) got an unexpected keyword argument '(\w+)'$")
_MISSING = re.compile(r"(\S+)\(\) missing \d+ required positional arguments?: ")
_TOO_MANY = re.compile(r"(\S+)\(\) takes (?:from \d+ to )?(\d+) positional arguments? but (\d+)")
# Arguments of mpi4py, JAX and others, and what they are called here.
_KEYWORDS = {
    "axes": ("axis", "mesh_dim_names"),
    "axis_names": ("mesh_dim_names",),
    "axis_shapes": ("mesh_shape",),
    "asynchronous": ("async_op",),
    "buf": ("tensor",),
    "comm": ("group",),
    "dest": ("dst",),
    "dim_names": ("mesh_dim_names",),
    "direction": ("by",),
    "disp": ("by",),
    "device_mesh": ("mesh",),
    "displacement": ("by",),
    "dst": ("root",),
    "function": ("fn",),
    "global_shape": ("shape",),
    "group_dest": ("group_dst",),
    "group_source": ("group_src",),
    **dict.fromkeys(("ghost", "ghosts", "halo", "halos"), ("width",)),
    "local_tensor": ("local",),
    "mode": ("form",),
    "n": ("nprocs", "world_size"),
    "names": ("mesh_dim_names",),
    "np": ("nprocs", "world_size"),
    "nprocs": ("world_size",),
    "nproc_per_node": ("nprocs", "world_size"),
    "num_ranks": ("nprocs", "world_size"),
    "periods": ("periodic",),
    **dict.fromkeys(("reduce_op", "reduction", "operation", "operator"), ("op",)),
    "root": ("src", "dst"),
    "shape": ("mesh_shape",),
    "size": ("world_size",),
    "steps": ("by",),
    "source": ("src",),
    "src": ("root",),
}
_AXES = ("axis", "axis_name", "dim", "mesh_dim")
# The collectives whose forms in `meshdist.functional` have axis= and dim=.
_OF_DIMENSIONS = (
    *("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "gather", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter"),
)
# Those whose forms in `meshdist.functional` return what these write into an argument.
_RETURNED = (
    *("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "reduce_scatter"),
    "reduce_scatter_tensor",
)
_ASYNC_SHIFT = (
    "an async shift is two messages along the axis: line.isend(x, (i + 1) % n) and line.irecv(y, (i - 1) % n), with"
    " line = mesh['x'], i = line.get_local_rank() and n = line.size()"
)
_OF_ALL = "init_process_group and new_group take the timeout of all calls"
# Keywords that calls do not have: the parameters by which these calls are known, and what to write there.
_NO_KEYWORDS = (
    (_AXES, {"group"}, 'along an axis of a mesh: mesh["dp"].{function}(...)'),
    (("group",), {"group"}, 'a method runs over its own group: along an axis of a mesh, mesh["dp"].{function}(...)'),
    (("timeout",), {"tag", "group"}, f"`irecv(...).wait(timeout=...)` limits one wait; {_OF_ALL}"),
    (("timeout",), {"async_op"}, f"`{{function}}(..., async_op=True).wait(timeout=...)` limits one wait; {_OF_ALL}"),
    (("timeout",), {"group"}, _OF_ALL),
    (("timeout",), {"tag"}, _OF_ALL),
)


def explain_call(function: Callable[..., Any], error: TypeError, *, has_own_group: bool = False) -> None:
    """Add to an error which argument was meant, if `function` was called with one that it does not have.

    Methods have their own group.
    """
    words = str(error).partition(". Did you mean")[0]  # of Python 3.13, which knows no other libraries
    unknown, many, missing = (pattern.match(words) for pattern in (_UNKNOWN_KEYWORD, _TOO_MANY, _MISSING))
    found, function = unknown or many or missing, unwrap(function)
    if found is None or found[1].rpartition(".")[2] != function.__name__:
        return
    parameters = signature(function).parameters
    known = [name for name in parameters if name != "self" and not name.startswith("_")]
    keywords = [name for name in known if parameters[name].kind is Parameter.KEYWORD_ONLY]
    if missing is not None:
        if known[:1] == ["device_type"]:
            error.args = (f"{words}; the first argument is the device type, 'cpu' or 'cuda'",)
        elif function.__name__ in _RETURNED and "group" in known:
            error.args = (f"{words}; meshdist.functional.{function.__name__}(x, group=...) returns the result",)
        elif function.__name__ == "all_gather_object":
            error.args = (f"{words}; the first argument is a list that gets them: objects = [None] * size",)
    elif unknown is not None:
        keyword = unknown[2]
        if has_own_group and ("group" in _KEYWORDS.get(keyword, ()) or spelt(keyword, known, NEAR) == "group"):
            keyword = "group"
        error.args = (words + _instead_of_keyword(function.__name__, keyword, known),)
    elif function.__name__ == "redistribute":
        error.args = (f"{words}; an array stays on its mesh: write x.redistribute(placements)",)
    elif function.__qualname__ == "DeviceMesh.get_rank":
        error.args = (f"{words}; get_local_rank(axis) is the rank along an axis",)
    elif "mesh_dim_names" in known:
        error.args = (f"{words}; the names of the axes are a keyword: mesh_dim_names=",)
    elif keywords:
        shape = "the shape is one argument, a tuple, and " if known[:1] == ["shape"] else ""
        error.args = (f"{words}; {shape}these are keywords: {', '.join(f'{name}=' for name in keywords)}",)


def _instead_of_keyword(function: str, name: str, known: list[str]) -> str:
    meant = next((other for other in _KEYWORDS.get(name, ()) if other in known), None)
    if name == "uneven" and function in ("all_gather", "gather"):
        return f"; meshdist.functional.{function} takes uneven="
    if name == "async_op" and function == "shift":
        return f"; {_ASYNC_SHIFT}"
    if meant is None:
        of_array = name in ("axis", "dim") and function in _OF_DIMENSIONS
        first = f"; meshdist.functional.{function} takes {name}=, a dimension of the array" if of_array else ""
        for names, parameters, text in _NO_KEYWORDS:
            if name in names and parameters.issubset(known):
                return f"{first}; {text.format(function=function)}"
    if meant is None and name in _AXES:
        meant = next((other for other in ("axis", "mesh_dim") if other in known), None)
    if meant is None:
        meant = spelt(name, known, NEAR)
    if meant is not None:
        return f"; did you mean {meant}=?"
    return f"; it takes {', '.join(known)}" if known else ""


def no_command(name: str) -> str | None:
    """Return what to run instead of `python -m meshdist.<name>`; None if the name is not like that of a command."""
    if name in _NO_COMMANDS:
        return _NO_COMMANDS[name]
    close = get_close_matches(name, _COMMANDS, n=1, cutoff=CLOSE)
    return f"did you mean `python -m meshdist.{close[0]}`?" if close else None


_COMMANDS = ("bench", "checkpoint", "debug", "doctor", "launch", "topology")
# Functions of the package, and what other packages have as commands.
_NO_COMMANDS = {
    "profile": "`meshdist.profile` is a function, to use as `with meshdist.profile() as profile:`; to measure"
    " collectives, run `python -m meshdist.bench`",
    "run": "`meshdist.run` is a function; to start the ranks of a script, run `meshrun` or `python -m meshdist.launch`",
    "benchmark": "run `python -m meshdist.bench`",
}


REASONS = {
    "Backend.backend_list": 'use `is_backend_available(name)`; the error of `Backend("?")` lists all names',
    "Backend.backend_capability": 'the error of `Backend("cpu:nccl")` lists the backends for CPU arrays',
    "Backend.backend_type_map": "backends are identified by name, not by an enum",
    "Backend.default_device_backend_map": "use `get_default_backend_for_device`",
    "BackendConfig": "`get_backend_config` returns the configuration as a string",
    "ProcessGroupGloo": "create groups with `new_group`",
    "GroupName": "group names are strings",
    "RankType": "ranks are integers",
    "Store.barrier": "use `add` and `wait`, or `dist.barrier`",
    "Store.clone": "several threads may share a store; after a fork, open another one",
    "Store.queue_push": "use numbered keys",
    "Store.queue_pop": "use numbered keys",
    "Store.queue_len": "use numbered keys",
    "QueueEmptyError": "stores have no queues",
    "TCPStore.libuvBackend": "there is only one kind of server",
    "ProcessGroup.recv_anysource": "use `recv` without `src`",
    "ProcessGroup.allreduce": "use `all_reduce`",
    "ProcessGroup.allreduce_coalesced": "use `all_reduce_coalesced`",
    "ProcessGroup.allgather": "use `all_gather`",
    "ProcessGroup.allgather_coalesced": "use `all_gather_coalesced`",
    "ProcessGroup.allgather_into_tensor_coalesced": "use `all_gather_into_tensor_coalesced`",
    "ProcessGroup.all_gather_single_coalesced": "use `all_gather_into_tensor_coalesced`",
    "ProcessGroup.reduce_scatter_single_coalesced": "use `reduce_scatter_tensor_coalesced`",
    "ProcessGroup.alltoall": "use `all_to_all`",
    "ProcessGroup.alltoall_base": "use `all_to_all_single`",
    "ProcessGroup.split_group": "use the function `split_group`",
    "ProcessGroup.merge_remote_group": "a group cannot span several worlds",
    "ProcessGroup.get_group_store": "pass your own store to `init_process_group`",
    "ProcessGroup.set_timeout": "use `new_group(timeout=)`",
    "ProcessGroup.shutdown": "use `destroy_process_group(group)`",
    "ProcessGroup.bound_device_id": "groups are not bound to a device",
    "ProcessGroup.use_pg_for_symm_mem_rendezvous": "symmetric memory is a feature of GPUs",
    "ProcessGroup.boxed": "it is part of TorchScript",
    "ProcessGroup.unbox": "it is part of TorchScript",
    "ProcessGroup.BackendType": "backends are identified by name; use `get_backend(group)`",
    **{
        f"ProcessGroup.{name}": "use the names in `Backend`"
        for name in ("CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL")
    },
    "Work.synchronize": "use `wait()`",
    "Work.block_current_stream": "there are no streams on the CPU",
    "ReduceOp.RedOpType": "the members are `ReduceOp` objects themselves",
    "ReduceOp.op": "`value` is the lower-case name",
    "ReduceOp.factor": "the members have none; `premul_sum(factor)` has the attribute `factor`",
    "Work.get_future_result": "use `get_future()`; its `wait` raises the exception of the call",
    "Work.boxed": "it is part of TorchScript",
    "Work.unbox": "it is part of TorchScript",
    **{
        f"{name}Options": "`ProcessGroup` methods take plain arguments"
        for name in (
            *("AllToAll", "AllreduceCoalesced", "Allreduce", "Barrier", "Broadcast", "Gather", "Reduce"),
            *("ReduceScatter", "Scatter"),
        )
    },
    "log": 'use `logging.getLogger("meshdist")`',
    "record_comm": "it is part of torch's profiler; use `meshdist.profile()`",
    "Logger": "it is part of DistributedDataParallel; use `GradientReducer.statistics` of `meshdist.parallel`",
    "Reducer": "it is part of DistributedDataParallel; for arrays, use `meshdist.parallel.GradientReducer`",
    "GradBucket": "it is part of DistributedDataParallel; `GradientReducer` has `meshdist.parallel.GradBucket`",
    "BuiltinCommHookType": "it is part of DistributedDataParallel; use `meshdist.parallel.communication_hooks`",
    "nn": "`meshdist.functional` has the collectives; the modules need torch",
    "launcher": "use `spawn`",
    "elastic": "`meshrun` restarts jobs, also on other hosts (`--max-restarts`, `--nnodes 2:4`, as in torchrun); it "
    "writes error files (`--error-dir`) without a decorator",
    "argparse_util": "it is part of torch's launcher",
    "c10d_logger": 'use `logging.getLogger("meshdist")`',
    "collective_utils": "use `all_gather_object` and `broadcast_object_list`",
    "config": "meshdist has no such settings",
    "constants": "the default timeout is `default_pg_timeout`, 30 minutes",
    "distributed_c10d": "import its names from `meshdist`",
    "logging_handlers": "add a handler to the logger `meshdist`",
    "remote_device": "it is part of torch.rpc",
    "utils": "it has helpers for torch modules, which meshdist does not support",
    "rpc": "meshdist has no remote procedure calls; use `multiprocessing.managers` or an RPC library",
    "optim": "the optimizers need torch; `meshdist.parallel.ShardedOptimizer` shards any update function",
    "algorithms": "`meshdist.parallel` has communication hooks, `uneven_inputs` instead of `Join`, and model averaging",
    "fsdp": "it wraps torch modules, which meshdist does not support",
    "pipelining": "`meshdist.parallel` has the same schedules, with functions instead of modules as stages",
    "deprecated": "import its names from `meshdist`",
    "pipeline": "it wraps torch modules, which meshdist does not support; for functions as stages, use "
    "`meshdist.parallel`",
}
