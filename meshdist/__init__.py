"""meshdist: torch.distributed and DeviceMesh for NumPy and CuPy.

    import meshdist as dist

    mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh["tp"].all_reduce(x)

The flat functions (`dist.all_reduce(x)`) have the names, argument order and meaning of torch.distributed.
"""

import typing as _typing

from meshdist import functional
from meshdist._version import __version__
from meshdist.arrays.reduce_op import PremulSum, ReduceOp, premul_sum, reduce_op, supports_complex
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
from meshdist.backends.mpi.environment import has_launcher as _has_launcher
from meshdist.backends.nccl.pg_options import ProcessGroupNCCL
from meshdist.bootstrap.rendezvous import register_rendezvous_handler, rendezvous
from meshdist.collectives import methods as _methods
from meshdist.collectives.coalescing import coalescing_manager
from meshdist.collectives.methods import *  # noqa: F403 - the collectives and messages, listed there
from meshdist.collectives.methods import all_gather_into_tensor, reduce_scatter_tensor
from meshdist.collectives.probe import MessageInfo
from meshdist.collectives.send_recv import P2POp, batch_isend_irecv
from meshdist.debug.breakpoint import breakpoint
from meshdist.debug.debug_level import DebugLevel, get_debug_level, set_debug_level, set_debug_level_from_env
from meshdist.debug.dump import flight_recorder
from meshdist.debug.replicated import check_replicated
from meshdist.device_mesh import DeviceMesh, get_current_mesh, init_device_mesh
from meshdist.errors import DistBackendError, DistError, DistNetworkError, DistStoreError, DistTimeoutError
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
from meshdist.runtime.work import Future, Work
from meshdist.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from meshdist.system.deadline import default_pg_timeout
from meshdist.system.name_hints import explain_missing_modules as _explain_missing_modules
from meshdist.system.versions import show_versions

if _typing.TYPE_CHECKING:
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
    "zeros",
]

if not _typing.TYPE_CHECKING:  # type checkers know these names by the import
    __all__ += _methods.__all__

# Private names of torch that scripts use.
_all_gather_base = all_gather_into_tensor
_coalescing_manager = coalescing_manager
_make_nccl_premul_sum = premul_sum
_reduce_scatter_base = reduce_scatter_tensor

_explain_missing_modules()

if _has_launcher():  # the ranks of an MPI job wait for each other from its start on
    from meshdist.backends.mpi.aborting import abort_on_early_exceptions as _abort_on_early_exceptions

    _abort_on_early_exceptions()

if not _typing.TYPE_CHECKING:  # for type checkers, a name that is not there is an error

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in vars(_methods.CollectiveMethods) if _is_collective(name))})

    def _is_collective(name: str) -> bool:
        return not name.startswith("_") and name != "collective_group"

    def __getattr__(name: str) -> object:
        # Imported at first use: few programs need the topology, and it is a tenth of the import time.
        if name in ("CostModel", "Topology", "calibrate", "plan"):
            from meshdist import topology

            return getattr(topology, name)
        if name == "load_ipython_extension":  # for %load_ext meshdist
            from meshdist.notebook import magic

            return magic.load_ipython_extension
        # Python probes for names such as __path__ and __wrapped__; those need no reason.
        if name.startswith("__"):
            raise AttributeError(f"module 'meshdist' has no attribute {name!r}")
        if _is_collective(name) and name in (registered := vars(_methods.CollectiveMethods)):
            return registered[name]  # a collective that was added after the import
        import sys

        from meshdist._torch_names import no_attribute

        raise no_attribute(sys.modules[__name__], "", "module 'meshdist'", name)
