"""Tensors and reductions of torch as the arrays and reductions of meshdist."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp as TorchReduceOp

from meshdist.arrays.host import Array
from meshdist.arrays.interchange import shared_array
from meshdist.arrays.reduce_op import Op, ReduceOp, premul_sum

_PREMUL_SUM = TorchReduceOp.RedOpType.PREMUL_SUM
OPS = {
    TorchReduceOp(getattr(TorchReduceOp.RedOpType, name)): ReduceOp[name]
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
"""The reductions without a factor. torch's ReduceOp and RedOpType are equal as keys."""


def as_array(tensor: Any, name: str = "tensor") -> Array:
    """Return a tensor as an array over the same memory.

    Raises:
        TypeError: It is no dense tensor in CPU memory.
    """
    try:
        array: Array = tensor.detach().numpy() if tensor.requires_grad else tensor.numpy()
    except (TypeError, RuntimeError, AttributeError, NotImplementedError):
        pass  # bfloat16, or what the backend does not take
    else:
        return array
    _check_dense(tensor, name)
    return shared_array(tensor, name)


def as_arrays(tensors: Any, name: str) -> list[Array]:
    return [as_array(tensor, f"{name}[{place}]") for place, tensor in enumerate(tensors)]


def as_op(op: Any) -> Op:
    """Return a reduction of torch as one of meshdist; None is SUM.

    Raises:
        ValueError: meshdist has no such reduction.
    """
    if op is None:
        return ReduceOp.SUM
    if isinstance(op, (TorchReduceOp, TorchReduceOp.RedOpType)):
        if op in OPS:
            return OPS[op]
        if op == _PREMUL_SUM:
            factor = getattr(op, "factor", None)
            if factor is None:
                raise ValueError("PREMUL_SUM needs a factor: torch.distributed.ReduceOp.PREMUL_SUM(factor)")
            return premul_sum(as_array(factor, "factor") if isinstance(factor, torch.Tensor) else factor)
    raise ValueError(
        f"unknown reduction {op!r}; choose from {', '.join(each.name for each in OPS.values())} and PREMUL_SUM"
    )


def flat_pair(whole: Array, block: Array, num_blocks: int) -> tuple[Array, Array]:
    """Return a pair of arrays flat, if one holds as many elements as `num_blocks` of the other.

    torch takes any shapes of which that is true. Pairs of which it is not stay as they are, for the check of the call.
    """
    if whole.size != num_blocks * block.size or not (whole.flags.c_contiguous and block.flags.c_contiguous):
        return whole, block
    return whole if whole.ndim == 1 else whole.reshape(-1), block if block.ndim == 1 else block.reshape(-1)


def of_one_dtype(arrays: list[Array]) -> list[list[int]]:
    """Return the places of arrays, those of each dtype together, in the order of their first."""
    places: dict[np.dtype[Any], list[int]] = {}
    for place, array in enumerate(arrays):
        places.setdefault(array.dtype, []).append(place)
    return list(places.values())


def _check_dense(tensor: Any, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{name} has layout {tensor.layout}, and backend meshdist takes dense tensors, as Gloo does, and those of"
            f" layout torch.sparse_coo in all_reduce alone; pass {name}.to_dense()"
        )
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{name} is on {tensor.device}, and backend meshdist takes CPU tensors; pass {name}.cpu(), or use a group"
            " of a backend for that device, such as torch.distributed.new_group(backend='nccl')"
        )
