"""Names of torch.distributed that meshdist lacks, with the reasons that docs/migration.md gives.

Loaded only when such a name is accessed.
"""

from __future__ import annotations

from typing import Any


def no_attribute(owner: Any, prefix: str, what: str, name: str) -> AttributeError:
    """Return the error for attribute `name`, which `owner` lacks; Python suggests similar names among those it has.

    `what` is the owner in messages, `prefix` that of its attributes in the table, such as "ProcessGroup.".
    """
    text = f"{what} has no attribute {name!r}"
    if prefix + name in REASONS:
        text += f" (torch.distributed has one): {REASONS[prefix + name]}; see docs/migration.md"
    return AttributeError(text, name=name, obj=owner)


def reason_for_module(name: str) -> str | None:
    """Return why there is no module `meshdist.<name>`, None if torch.distributed has none of that name either."""
    return _MODULES.get(name) or REASONS.get(name)


# Where scripts for old versions say torch.distributed, and a replaced "torch" leaves a path that never was.
_MODULES = dict.fromkeys(
    ("distributed", "distributed_deprecated"), "`import meshdist as dist` is `import torch.distributed as dist`"
)

REASONS = {
    "BackendConfig": "`get_backend_config` returns it as a string",
    "ProcessGroupGloo": "groups are made by `new_group`",
    "GroupName": "group names are strings",
    "RankType": "ranks are integers",
    "QueueEmptyError": "there are no queues",
    "ProcessGroup.recv_anysource": "`recv` without `src`",
    "ProcessGroup.allreduce": "`all_reduce`",
    "ProcessGroup.allreduce_coalesced": "`all_reduce_coalesced`",
    "ProcessGroup.allgather": "`all_gather`",
    "ProcessGroup.allgather_coalesced": "`all_gather_coalesced`",
    "ProcessGroup.allgather_into_tensor_coalesced": "`all_gather_into_tensor_coalesced`",
    "ProcessGroup.all_gather_single_coalesced": "`all_gather_into_tensor_coalesced`",
    "ProcessGroup.reduce_scatter_single_coalesced": "`reduce_scatter_tensor_coalesced`",
    "ProcessGroup.alltoall": "`all_to_all`",
    "ProcessGroup.alltoall_base": "`all_to_all_single`",
    "ProcessGroup.split_group": "`split_group`",
    "ProcessGroup.merge_remote_group": "groups are of one world",
    "ProcessGroup.get_group_store": "give `init_process_group` a store of yours",
    "ProcessGroup.set_timeout": "`new_group(timeout=)`",
    "ProcessGroup.shutdown": "`destroy_process_group(group)`",
    "ProcessGroup.bound_device_id": "groups are bound to no device",
    "ProcessGroup.use_pg_for_symm_mem_rendezvous": "symmetric memory is of GPUs",
    "ProcessGroup.boxed": "for TorchScript",
    "ProcessGroup.unbox": "for TorchScript",
    "ProcessGroup.BackendType": "backends have names, `get_backend(group)`",
    "ProcessGroup.CUSTOM": "`Backend` has the names",
    "ProcessGroup.GLOO": "`Backend` has the names",
    "ProcessGroup.MPI": "`Backend` has the names",
    "ProcessGroup.NCCL": "`Backend` has the names",
    "ProcessGroup.UCC": "`Backend` has the names",
    "ProcessGroup.UNDEFINED": "`Backend` has the names",
    "ProcessGroup.XCCL": "`Backend` has the names",
    "AllToAllOptions": "`ProcessGroup` methods take plain arguments",
    "AllreduceCoalescedOptions": "`ProcessGroup` methods take plain arguments",
    "AllreduceOptions": "`ProcessGroup` methods take plain arguments",
    "BarrierOptions": "`ProcessGroup` methods take plain arguments",
    "BroadcastOptions": "`ProcessGroup` methods take plain arguments",
    "GatherOptions": "`ProcessGroup` methods take plain arguments",
    "ReduceOptions": "`ProcessGroup` methods take plain arguments",
    "ReduceScatterOptions": "`ProcessGroup` methods take plain arguments",
    "ScatterOptions": "`ProcessGroup` methods take plain arguments",
    "log": '`logging.getLogger("meshdist")`',
    "record_comm": "of torch's profiler",
    "Logger": "of DistributedDataParallel",
    "Reducer": "of DistributedDataParallel",
    "GradBucket": "of DistributedDataParallel",
    "BuiltinCommHookType": "of DistributedDataParallel",
    "nn": "`meshdist.functional` has the collectives, the modules need torch",
    "launcher": "`spawn`",
    "elastic": "`meshrun` runs jobs of a fixed size, and restarts all ranks after a failure (`--max-restarts`); it"
    " writes error files (`--error-dir`) without a decorator",
    "argparse_util": "of torch's launcher",
    "c10d_logger": '`logging.getLogger("meshdist")`',
    "collective_utils": "`all_gather_object` and `broadcast_object_list`",
    "config": "there is nothing to configure",
    "constants": "30 minutes is the default timeout",
    "distributed_c10d": "import its names from `meshdist`",
    "logging_handlers": "give the logger `meshdist` a handler",
    "remote_device": "of rpc",
    "utils": "helpers of torch modules",
    "rpc": "remote calls are no collectives; `multiprocessing.managers` or an RPC library",
    "autograd": "there is no autograd",
    "optim": "optimizers are torch's",
    "algorithms": "hooks of DistributedDataParallel",
    "checkpoint": "no checkpoint format: save arrays with NumPy, see the section Checkpoints of docs/migration.md",
    "fsdp": "wraps torch modules",
    "pipelining": "wraps torch modules; `isend` and `irecv` are what it stands on",
    "tensor": "there is no DTensor; `DeviceMesh` has the collectives",
    "deprecated": "import its names from `meshdist`",
    "pipeline": "wraps torch modules; `isend` and `irecv` are what it stands on",
}
