"""all_reduce of sparse tensors: the ranks gather each other's entries, and each adds them up."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from meshdist.arrays.reduce_op import Op, ReduceOp
from meshdist.groups.process_group import ProcessGroup
from meshdist.torch.tensors import as_array, as_arrays


def all_reduce_sparse(group: ProcessGroup, tensor: Any, op: Op) -> None:
    """Replace a tensor of layout `torch.sparse_coo` by its sum over the group.

    Each rank may have other entries, and another number of them. The sum is made in the order of the ranks.

    Raises:
        ValueError: The reduction is not SUM.
        TypeError: The tensor is not in CPU memory.
    """
    if op is not ReduceOp.SUM:
        raise ValueError(f"{group.error_prefix('all_reduce')}: sparse tensors can be reduced by SUM alone, got {op}")
    mine = tensor.detach().coalesce()
    places, values = mine.indices().T.contiguous(), mine.values()
    counts = np.empty(group.size(), np.int64)
    group.all_gather_into_tensor(counts, np.array([len(values)], np.int64))
    all_places, all_values = (_gathered(group, rows, counts.tolist()) for rows in (places, values))
    with torch.no_grad():
        tensor.copy_(torch.sparse_coo_tensor(all_places.T, all_values, mine.shape).coalesce())


def _gathered(group: ProcessGroup, rows: Any, counts: list[int]) -> Any:
    """Return the rows of all ranks, in their order."""
    whole = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype)
    group.all_gather(as_arrays(whole.split(counts), "rows"), as_array(rows))
    return whole
