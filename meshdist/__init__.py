"""meshdist: torch.distributed and DeviceMesh for NumPy and CuPy.

    import meshdist as dist

    mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh["tp"].all_reduce(x)

The flat functions (`dist.all_reduce(x)`) have the names, argument order and meaning of torch.distributed.

In signatures, `AnyArray` is a NumPy or CuPy array, a torch tensor on the CPU, or another object that shares its memory;
`ArrayTree` an array, a number, or nested lists, tuples and dicts of them; `OutputOrWork` the output, or with
`async_op=True` a Work; `GroupLike` a ProcessGroup, a DeviceMesh, or None for all ranks; `Op` a ReduceOp, its name in
lower case, or the result of `premul_sum`.
"""

import typing as _typing

from meshdist._version import __version__
from meshdist.system.env_flags import has_mpi_launcher as _has_mpi_launcher
from meshdist.system.name_hints import explain_missing_modules as _explain_missing_modules

# Names are imported when they are first used: launchers and other tools need few of them, and no NumPy. What follows is
# for type checkers, and is equal to the table below it.
if _typing.TYPE_CHECKING:
    from meshdist import functional
    from meshdist.arrays.reduce_op import PremulSum, ReduceOp, premul_sum, reduce_op, supports_complex
    from meshdist.arrays.reduce_op import premul_sum as _make_nccl_premul_sum  # noqa: F401
    from meshdist.backends.device_backends import (
        Backend,
        get_default_backend_for_device,
        is_available,
        is_backend_available,
        is_gloo_available,
        is_mpi_available,
        is_nccl_available,
        is_ucc_available,
        is_xccl_available,
    )
    from meshdist.backends.nccl.pg_options import ProcessGroupNCCL
    from meshdist.bootstrap.rendezvous import register_rendezvous_handler, rendezvous
    from meshdist.collectives.coalescing import coalescing_manager
    from meshdist.collectives.coalescing import coalescing_manager as _coalescing_manager  # noqa: F401
    from meshdist.collectives.methods import *  # noqa: F403 - the collectives and messages, listed there
    from meshdist.collectives.methods import all_gather_into_tensor as _all_gather_base  # noqa: F401
    from meshdist.collectives.methods import reduce_scatter_tensor as _reduce_scatter_base  # noqa: F401
    from meshdist.collectives.probe import MessageInfo
    from meshdist.collectives.send_recv import P2POp, batch_isend_irecv
    from meshdist.debug.breakpoint import breakpoint
    from meshdist.debug.debug_level import DebugLevel, get_debug_level, set_debug_level, set_debug_level_from_env
    from meshdist.debug.dump import flight_recorder
    from meshdist.debug.replicated import check_replicated
    from meshdist.device_mesh import DeviceMesh, get_current_mesh, init_device_mesh
    from meshdist.errors import (
        DistBackendError,
        DistError,
        DistNetworkError,
        DistStoreError,
        DistTimeoutError,
        UnknownAxisError,
    )
    from meshdist.groups.api import (
        GroupMember,
        get_backend,
        get_backend_config,
        get_global_rank,
        get_group_rank,
        get_node_local_rank,
        get_pg_count,
        get_process_group_ranks,
        get_rank,
        get_world_size,
        group,
        new_group,
    )
    from meshdist.groups.process_group import ProcessGroup
    from meshdist.groups.shared_arrays import empty, full, zeros
    from meshdist.groups.shrink import SHRINK_ABORT, SHRINK_DEFAULT, shrink_group
    from meshdist.groups.subgroups import new_subgroups, new_subgroups_by_enumeration, split_group
    from meshdist.launch.dry_run import dry_run
    from meshdist.launch.spawn import ProcessExitedException, ProcessRaisedException, spawn
    from meshdist.launch.thread_ranks import run
    from meshdist.launch.worker_env import is_torchelastic_launched
    from meshdist.lifecycle import abort_process_group, destroy_process_group, init_process_group
    from meshdist.profiler.profile import profile
    from meshdist.runtime.context import is_initialized
    from meshdist.runtime.first_work import wait_any
    from meshdist.runtime.work import Future, Work
    from meshdist.store import FileStore, HashStore, PrefixStore, Store, TCPStore
    from meshdist.system.deadline import default_pg_timeout
    from meshdist.system.versions import show_versions
    from meshdist.topology import CostModel, Topology, calibrate, plan

    __all__ = [
        "SHRINK_ABORT",
        "SHRINK_DEFAULT",
        "Backend",
        "CostModel",
        "DebugLevel",
        "DeviceMesh",
        "DistBackendError",
        "DistError",
        "DistNetworkError",
        "DistStoreError",
        "DistTimeoutError",
        "FileStore",
        "Future",
        "GroupMember",
        "HashStore",
        "MessageInfo",
        "P2POp",
        "PrefixStore",
        "PremulSum",
        "ProcessExitedException",
        "ProcessGroup",
        "ProcessGroupNCCL",
        "ProcessRaisedException",
        "ReduceOp",
        "Store",
        "TCPStore",
        "Topology",
        "UnknownAxisError",
        "Work",
        "__version__",
        "abort_process_group",
        "batch_isend_irecv",
        "breakpoint",
        "calibrate",
        "check_replicated",
        "coalescing_manager",
        "default_pg_timeout",
        "destroy_process_group",
        "dry_run",
        "empty",
        "flight_recorder",
        "full",
        "functional",
        "get_backend",
        "get_backend_config",
        "get_current_mesh",
        "get_debug_level",
        "get_default_backend_for_device",
        "get_global_rank",
        "get_group_rank",
        "get_node_local_rank",
        "get_pg_count",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "group",
        "init_device_mesh",
        "init_process_group",
        "is_available",
        "is_backend_available",
        "is_gloo_available",
        "is_initialized",
        "is_mpi_available",
        "is_nccl_available",
        "is_torchelastic_launched",
        "is_ucc_available",
        "is_xccl_available",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "plan",
        "premul_sum",
        "profile",
        "reduce_op",
        "register_rendezvous_handler",
        "rendezvous",
        "run",
        "set_debug_level",
        "set_debug_level_from_env",
        "show_versions",
        "shrink_group",
        "spawn",
        "split_group",
        "supports_complex",
        "wait_any",
        "zeros",
    ]
else:
    # The modules that have the names. The collectives and messages are listed in `collectives.methods`.
    _MODULES = {
        "arrays.reduce_op": "PremulSum ReduceOp premul_sum reduce_op supports_complex",
        "backends.device_backends": (
            "Backend get_default_backend_for_device is_available is_backend_available is_gloo_available "
            "is_mpi_available is_nccl_available is_ucc_available is_xccl_available"
        ),
        "backends.nccl.pg_options": "ProcessGroupNCCL",
        "bootstrap.rendezvous": "register_rendezvous_handler rendezvous",
        "collectives.coalescing": "coalescing_manager",
        "collectives.probe": "MessageInfo",
        "collectives.send_recv": "P2POp batch_isend_irecv",
        "debug.breakpoint": "breakpoint",
        "debug.debug_level": "DebugLevel get_debug_level set_debug_level set_debug_level_from_env",
        "debug.dump": "flight_recorder",
        "debug.replicated": "check_replicated",
        "device_mesh": "DeviceMesh get_current_mesh init_device_mesh",
        "errors": "DistBackendError DistError DistNetworkError DistStoreError DistTimeoutError UnknownAxisError",
        "groups.api": (
            "GroupMember get_backend get_backend_config get_global_rank get_group_rank get_node_local_rank "
            "get_pg_count get_process_group_ranks get_rank get_world_size group new_group"
        ),
        "groups.process_group": "ProcessGroup",
        "groups.shared_arrays": "empty full zeros",
        "groups.shrink": "SHRINK_ABORT SHRINK_DEFAULT shrink_group",
        "groups.subgroups": "new_subgroups new_subgroups_by_enumeration split_group",
        "launch.dry_run": "dry_run",
        "launch.spawn": "ProcessExitedException ProcessRaisedException spawn",
        "launch.thread_ranks": "run",
        "launch.worker_env": "is_torchelastic_launched",
        "lifecycle": "abort_process_group destroy_process_group init_process_group",
        "profiler.profile": "profile",
        "runtime.context": "is_initialized",
        "runtime.first_work": "wait_any",
        "runtime.work": "Future Work",
        "store": "FileStore HashStore PrefixStore Store TCPStore",
        "system.deadline": "default_pg_timeout",
        "system.versions": "show_versions",
        "topology": "CostModel Topology calibrate plan",
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
    # Packages and modules that are attributes without being imported.
    _SUBMODULES = {
        "arrays",
        "backends",
        "bootstrap",
        "cluster",
        "collectives",
        "core",
        "debug",
        "device_mesh",
        "errors",
        "functional",
        "groups",
        "launch",
        "lifecycle",
        "mesh",
        "profiler",
        "runtime",
        "security",
        "store",
        "system",
    }
    # Packages of the API that are no names of `__all__`, and the libraries that they need. They are imported when they
    # are first used, not by `dir`, which lists those whose library is installed.
    _PACKAGES = dict.fromkeys(("checkpoint", "parallel", "tensor", "topology"), "numpy")
    _PACKAGES |= {"autograd": "autograd", "dask": "distributed", "ray": "ray", "torch": "torch"}
    # Private names of torch that scripts use.
    _ALIASES = {
        "_all_gather_base": "all_gather_into_tensor",
        "_coalescing_manager": "coalescing_manager",
        "_make_nccl_premul_sum": "premul_sum",
        "_reduce_scatter_base": "reduce_scatter_tensor",
    }

_explain_missing_modules()

if _has_mpi_launcher():  # the ranks of an MPI job wait for each other from its start on
    from meshdist.backends.mpi.aborting import abort_on_early_exceptions as _abort_on_early_exceptions

    _abort_on_early_exceptions()

if not _typing.TYPE_CHECKING:  # for type checkers, a name that is not there is an error

    def __dir__() -> list[str]:
        packages = (name for name, library in _PACKAGES.items() if name in globals() or _is_at_hand(library))
        return sorted(
            {*__getattr__("__all__"), "errors", *packages, *(name for name in _collectives() if _is_collective(name))}
        )

    def _is_at_hand(library: str) -> bool:
        import sys
        from importlib.util import find_spec

        return bool(sys.modules[library] if library in sys.modules else find_spec(library))

    def _collectives() -> _typing.Mapping[str, object]:
        from meshdist.collectives.methods import CollectiveMethods

        return vars(CollectiveMethods)

    def _is_collective(name: str) -> bool:
        return not name.startswith("_") and name != "collective_group"

    def __getattr__(name: str) -> object:
        if name == "load_ipython_extension":  # for %load_ext meshdist; no name of the package
            from meshdist.notebook import magic

            return magic.load_ipython_extension
        value = _imported(_ALIASES.get(name, name))
        globals()[name] = value  # from now on found without this function
        return value

    def _imported(name: str) -> object:
        from importlib import import_module

        if name in _MODULE_OF:
            return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        if name in _SUBMODULES:
            return import_module(f"{__name__}.{name}")
        if name in _PACKAGES:
            try:
                return import_module(f"{__name__}.{name}")
            except ImportError as error:  # a library is missing; `hasattr` and tools expect an AttributeError
                raise AttributeError(f"module 'meshdist' has no attribute {name!r}: {error}", name=name) from None
        if name == "__all__":
            from meshdist.collectives import methods

            return sorted({"__version__", "functional", *_MODULE_OF, *methods.__all__})
        # Python probes for names such as __path__ and __wrapped__; those need no reason.
        if name.startswith("__"):
            raise AttributeError(f"module 'meshdist' has no attribute {name!r}")
        if _is_collective(name) and name in (collectives := _collectives()):
            return collectives[name]
        import sys

        from meshdist._torch_names import no_attribute

        raise no_attribute(sys.modules[__name__], "", "module 'meshdist'", name)
