"""meshdist: torch.distributed and DeviceMesh for NumPy and CuPy.

    import meshdist as dist

    mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh["tp"].all_reduce(x)

The flat functions (`dist.all_reduce(x)`) have the names, argument order and meaning of torch.distributed.
"""

import typing as _typing

from meshdist import functional
from meshdist._version import __version__
from meshdist.backends.availability import (
    is_available,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_ucc_available,
    is_xccl_available,
)
from meshdist.backends.device_backends import get_default_backend_for_device
from meshdist.backends.mpi.environment import has_launcher as _has_launcher
from meshdist.backends.names import Backend
from meshdist.collectives.all_gather import all_gather
from meshdist.collectives.all_gather_coalesced import all_gather_coalesced
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor, all_gather_single
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.all_reduce_coalesced import all_reduce_coalesced
from meshdist.collectives.all_to_all import all_to_all
from meshdist.collectives.all_to_all_single import all_to_all_single
from meshdist.collectives.barrier import barrier
from meshdist.collectives.batch import P2POp, batch_isend_irecv
from meshdist.collectives.broadcast import broadcast
from meshdist.collectives.coalescing import coalescing_manager
from meshdist.collectives.gather import gather
from meshdist.collectives.monitored_barrier import monitored_barrier
from meshdist.collectives.multigpu import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
    reduce_scatter_multigpu,
)
from meshdist.collectives.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from meshdist.collectives.point_to_point import irecv, isend, recv, send
from meshdist.collectives.reduce import reduce
from meshdist.collectives.reduce_scatter import reduce_scatter
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_single, reduce_scatter_tensor
from meshdist.collectives.scatter import scatter
from meshdist.collectives.tensor_coalesced import all_gather_into_tensor_coalesced, reduce_scatter_tensor_coalesced
from meshdist.current import is_initialized
from meshdist.deadline import default_pg_timeout
from meshdist.debug.breakpoint import breakpoint
from meshdist.debug.dump import flight_recorder
from meshdist.debug.levels import DebugLevel, get_debug_level, set_debug_level, set_debug_level_from_env
from meshdist.debug.replicated import check_replicated
from meshdist.device_mesh import DeviceMesh, get_current_mesh, init_device_mesh
from meshdist.dry_run import dry_run
from meshdist.errors import DistBackendError, DistError, DistNetworkError, DistStoreError, DistTimeoutError
from meshdist.future import Future
from meshdist.groups import (
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
from meshdist.launch.env import is_torchelastic_launched
from meshdist.launch.spawn import ProcessExitedException, ProcessRaisedException, spawn
from meshdist.launch.threads import run
from meshdist.process_group import ProcessGroup
from meshdist.profiler.profile import profile
from meshdist.reduce_op import PremulSum, ReduceOp, premul_sum, reduce_op, supports_complex
from meshdist.rendezvous import register_rendezvous_handler, rendezvous
from meshdist.shared_arrays import empty, full, zeros
from meshdist.shrink import SHRINK_ABORT, SHRINK_DEFAULT, shrink_group
from meshdist.start_and_end import abort_process_group, destroy_process_group, init_process_group
from meshdist.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from meshdist.subgroups import new_subgroups, new_subgroups_by_enumeration, split_group
from meshdist.work import Work

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
    "P2POp",
    "PrefixStore",
    "PremulSum",
    "ProcessExitedException",
    "ProcessGroup",
    "ProcessRaisedException",
    "ReduceOp",
    "Store",
    "TCPStore",
    "Topology",
    "Work",
    "__version__",
    "abort_process_group",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_multigpu",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_multigpu",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_multigpu",
    "broadcast_object_list",
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
    "gather",
    "gather_object",
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
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "plan",
    "premul_sum",
    "profile",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_multigpu",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_multigpu",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "register_rendezvous_handler",
    "rendezvous",
    "run",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "shrink_group",
    "spawn",
    "split_group",
    "supports_complex",
    "zeros",
]

# Names that scripts call although torch has them private.
_all_gather_base = all_gather_into_tensor
_coalescing_manager = coalescing_manager
_make_nccl_premul_sum = premul_sum
_reduce_scatter_base = reduce_scatter_tensor

if _has_launcher():  # the ranks of an MPI job wait for each other from its start on
    from meshdist.backends.mpi.aborting import abort_on_early_exceptions as _abort_on_early_exceptions

    _abort_on_early_exceptions()

if not _typing.TYPE_CHECKING:  # for type checkers, a name that is not there is an error

    def __getattr__(name: str) -> object:
        # Few programs ask for the topology, and it is a tenth of all there is to import: it comes when it is asked for.
        if name in ("CostModel", "Topology", "calibrate", "plan"):
            from meshdist import topology

            return getattr(topology, name)
        if name == "load_ipython_extension":  # which %load_ext meshdist asks for
            from meshdist.notebook import magic

            return magic.load_ipython_extension
        # Names of Python's own, such as __path__ or __wrapped__, are asked for in passing: nobody reads the reason.
        if name.startswith("__"):
            raise AttributeError(f"module 'meshdist' has no attribute {name!r}")
        import sys

        from meshdist.absent import no_attribute

        raise no_attribute(sys.modules[__name__], "", "module 'meshdist'", name)
