"""Every collective as data: what each rank passes to one call, and what it must find in its outputs afterwards.

Everybody can make the arrays of all ranks, so every rank knows by itself what is due. Values are small integers, whose
sums and products are exact in every dtype, so that the order of a reduction does not show.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import meshdist as dist

UFUNCS = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
ROOTED = {
    "broadcast": "src",
    "reduce": "dst",
    "gather": "dst",
    "scatter": "src",
    "message": "src",
    "broadcast_multigpu": "src",
    "reduce_multigpu": "dst",
    "broadcast_object_list": "src",
    "gather_object": "dst",
    "scatter_object_list": "src",
}


@dataclass(frozen=True)
class Case:
    """One call, the same on all ranks.

    Attributes:
        collective: The function; "message" is a send from the root to the next rank.
        dtype: Of all arrays; a name of NumPy, or of ml_dtypes.
        shape: Of this rank's block.
        op: The reduction.
        root: Rank in the group.
        rows: Row i: what rank i sends to each rank, for an all_to_all_single with split sizes.
        num_arrays: Length of the lists of the coalesced and the multi-GPU forms.
        stacked: The whole array has a dim more than its blocks, instead of a longer dim 0.
        async_op: Wait for a Work.
        salt: Other numbers have other values.
    """

    collective: str
    dtype: str = "float32"
    shape: tuple[int, ...] = (3,)
    op: str = "sum"
    root: int = 0
    rows: tuple[tuple[int, ...], ...] | None = None
    num_arrays: int = 2
    stacked: bool = False
    async_op: bool = False
    salt: int = 0


@dataclass
class Made:
    """What one rank passes.

    Attributes:
        call: Makes the call: `call(give, take, **how)`, with arrays of the contents below, in lists.
        give: Contents of the inputs.
        take: Contents of the outputs before the call.
        want: What must be in them afterwards.
        how: The other arguments, `group` excepted.
        result: What the call returns, where that is to be compared.
    """

    call: Callable[..., Any]
    give: list[np.ndarray] = field(default_factory=list)
    take: list[np.ndarray] = field(default_factory=list)
    want: list[np.ndarray] = field(default_factory=list)
    how: dict[str, Any] = field(default_factory=dict)
    result: Any = None


def dtype_of(name: str) -> np.dtype:
    """Return the dtype, of NumPy or of ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def content(case: Case, rank: int, place: int = 0, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Return an array of a rank."""
    shape = case.shape if shape is None else shape
    return _numbers(case.dtype, shape, (5 * rank + 2 * place + case.salt) % 3).copy()


@functools.lru_cache(maxsize=1000)  # every rank makes the arrays of all
def _numbers(dtype: str, shape: tuple[int, ...], first: int) -> np.ndarray:
    return ((np.arange(math.prod(shape)) + first) % 3).astype(np.int8).astype(dtype_of(dtype)).reshape(shape)


def junk(case: Case, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Return what is in an output before."""
    return np.ones(case.shape if shape is None else shape, np.int8).astype(dtype_of(case.dtype))


def is_defined(op: str, dtype: np.dtype) -> bool:
    """Return whether the documentation has `op` for `dtype`."""
    if dtype.kind in "biu":
        return op != "avg"
    return op in ("sum", "product", "avg") if dtype.kind == "c" else op not in ("band", "bor", "bxor")


def reduced(arrays: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Return the reduction of arrays; of one that is refused, anything."""
    total = np.array(arrays[0])
    if not is_defined(op, total.dtype):
        return total
    for array in arrays[1:]:
        UFUNCS[op](total, array, out=total)
    if op == "avg":
        wide = np.complex128 if total.dtype.kind == "c" else np.float64
        total = (total.astype(wide) / len(arrays)).astype(total.dtype)
    return total


def make(case: Case, rank: int, size: int) -> Made:
    """Return what `rank` of `size` passes to the call of `case`, and what it must get."""
    made = globals()[f"_{case.collective}"](case, rank, size)
    if case.collective in ROOTED and case.collective != "message":
        made.how[f"group_{ROOTED[case.collective]}"] = case.root
    if case.async_op and case.collective not in SYNC_ONLY:
        made.how["async_op"] = True
    return made


def join(blocks: Sequence[np.ndarray], stacked: bool) -> np.ndarray:
    """Return blocks as one array, concatenated or stacked."""
    return np.stack(blocks) if stacked or blocks[0].ndim == 0 else np.concatenate(blocks)


def _all_reduce(case: Case, rank: int, size: int) -> Made:
    arrays = [content(case, peer) for peer in range(size)]
    return Made(_in_place(dist.all_reduce), [], [arrays[rank]], [reduced(arrays, case.op)], {"op": case.op})


def _broadcast(case: Case, rank: int, size: int) -> Made:
    return Made(_in_place(dist.broadcast), [], [content(case, rank)], [content(case, case.root)])


def _reduce(case: Case, rank: int, size: int) -> Made:
    arrays = [content(case, peer) for peer in range(size)]
    want = reduced(arrays, case.op) if rank == case.root else arrays[rank]
    return Made(_in_place(dist.reduce), [], [arrays[rank]], [want], {"op": case.op})


def _all_gather(case: Case, rank: int, size: int) -> Made:
    arrays = [content(case, peer) for peer in range(size)]
    return Made(
        lambda give, take, **how: dist.all_gather(take, give[0], **how), [arrays[rank]], [junk(case)] * size, arrays
    )


def _all_gather_into_tensor(case: Case, rank: int, size: int) -> Made:
    want = join([content(case, peer) for peer in range(size)], case.stacked)
    return Made(
        lambda give, take, **how: dist.all_gather_into_tensor(take[0], give[0], **how),
        [content(case, rank)],
        [junk(case, want.shape)],
        [want],
    )


def _gather(case: Case, rank: int, size: int) -> Made:
    arrays = [content(case, peer) for peer in range(size)] if rank == case.root else []
    return Made(
        lambda give, take, **how: dist.gather(give[0], take or None, **how),
        [content(case, rank)],
        [junk(case) for _ in arrays],
        arrays,
    )


def _scatter(case: Case, rank: int, size: int) -> Made:
    give = [content(case, case.root, peer) for peer in range(size)] if rank == case.root else []
    return Made(
        lambda give, take, **how: dist.scatter(take[0], give or None, **how),
        give,
        [junk(case)],
        [content(case, case.root, rank)],
    )


def _reduce_scatter(case: Case, rank: int, size: int) -> Made:
    return Made(
        lambda give, take, **how: dist.reduce_scatter(take[0], give, **how),
        [content(case, rank, place) for place in range(size)],
        [junk(case)],
        [reduced([content(case, peer, rank) for peer in range(size)], case.op)],
        {"op": case.op},
    )


def _reduce_scatter_tensor(case: Case, rank: int, size: int) -> Made:
    made = _reduce_scatter(case, rank, size)
    made.give = [join(made.give, case.stacked)]
    made.call = lambda give, take, **how: dist.reduce_scatter_tensor(take[0], give[0], **how)
    return made


def _all_to_all(case: Case, rank: int, size: int) -> Made:
    return Made(
        lambda give, take, **how: dist.all_to_all(take, give, **how),
        [content(case, rank, place) for place in range(size)],
        [junk(case)] * size,
        [content(case, peer, rank) for peer in range(size)],
    )


def _all_to_all_single(case: Case, rank: int, size: int) -> Made:
    rows, tail = case.rows or ((1,) * size,) * size, case.shape[1:]
    to, come = rows[rank], tuple(rows[peer][rank] for peer in range(size))
    give = np.concatenate([content(case, rank, place, (count, *tail)) for place, count in enumerate(to)])
    want = np.concatenate([content(case, peer, rank, (count, *tail)) for peer, count in enumerate(come)])
    how = {} if case.rows is None else {"output_split_sizes": list(come), "input_split_sizes": list(to)}
    return Made(
        lambda give, take, **how: dist.all_to_all_single(take[0], give[0], **how),
        [give],
        [junk(case, want.shape)],
        [want],
        how,
    )


def _lists(case: Case, rank: int) -> list[np.ndarray]:
    return [content(case, rank, place) for place in range(case.num_arrays)]


def _all_reduce_coalesced(case: Case, rank: int, size: int) -> Made:
    lists = [_lists(case, peer) for peer in range(size)]
    want = [reduced(arrays, case.op) for arrays in zip(*lists, strict=True)]
    return Made(
        lambda give, take, **how: dist.all_reduce_coalesced(take, **how), [], lists[rank], want, {"op": case.op}
    )


def _all_gather_coalesced(case: Case, rank: int, size: int) -> Made:
    want = [array for peer in range(size) for array in _lists(case, peer)]

    def call(give: Any, take: Any, **how: Any) -> Any:
        count = len(take) // size
        return dist.all_gather_coalesced([take[k * count : (k + 1) * count] for k in range(size)], give, **how)

    return Made(call, _lists(case, rank), [junk(case) for _ in want], want)


def _all_reduce_multigpu(case: Case, rank: int, size: int) -> Made:
    want = reduced([array for peer in range(size) for array in _lists(case, peer)], case.op)
    return Made(
        lambda give, take, **how: dist.all_reduce_multigpu(take, **how),
        [],
        _lists(case, rank),
        [want] * case.num_arrays,
        {"op": case.op},
    )


def _broadcast_multigpu(case: Case, rank: int, size: int) -> Made:
    return Made(
        lambda give, take, **how: dist.broadcast_multigpu(take, **how),
        [],
        _lists(case, rank),
        [content(case, case.root, 0)] * case.num_arrays,
    )


def _reduce_multigpu(case: Case, rank: int, size: int) -> Made:
    want = _lists(case, rank)
    if rank == case.root:
        want[0] = reduced([array for peer in range(size) for array in _lists(case, peer)], case.op)
    return Made(
        lambda give, take, **how: dist.reduce_multigpu(take, **how), [], _lists(case, rank), want, {"op": case.op}
    )


def _all_gather_multigpu(case: Case, rank: int, size: int) -> Made:
    num, gathered = case.num_arrays, [array for peer in range(size) for array in _lists(case, peer)]

    def call(give: Any, take: Any, **how: Any) -> Any:
        return dist.all_gather_multigpu([take[k * num * size : (k + 1) * num * size] for k in range(num)], give, **how)

    return Made(call, _lists(case, rank), [junk(case) for _ in gathered * num], gathered * num)


def _reduce_scatter_multigpu(case: Case, rank: int, size: int) -> Made:
    num, length = case.num_arrays, case.num_arrays * size

    def give_of(peer: int) -> list[np.ndarray]:
        return [content(case, peer, place) for place in range(num * length)]

    def call(give: Any, take: Any, **how: Any) -> Any:
        return dist.reduce_scatter_multigpu(take, [give[k * length : (k + 1) * length] for k in range(num)], **how)

    lists = [give_of(peer)[k * length : (k + 1) * length] for peer in range(size) for k in range(num)]
    want = [reduced([arrays[rank * num + place] for arrays in lists], case.op) for place in range(num)]
    return Made(call, give_of(rank), [junk(case) for _ in want], want, {"op": case.op})


def _all_gather_into_tensor_coalesced(case: Case, rank: int, size: int) -> Made:
    lists = [_lists(case, peer) for peer in range(size)]
    want = [join(blocks, case.stacked) for blocks in zip(*lists, strict=True)]
    return Made(
        lambda give, take, **how: dist.all_gather_into_tensor_coalesced(take, give, **how),
        lists[rank],
        [junk(case, array.shape) for array in want],
        want,
    )


def _reduce_scatter_tensor_coalesced(case: Case, rank: int, size: int) -> Made:
    def whole(peer: int, number: int) -> list[np.ndarray]:
        return [content(case, peer, number + 2 * place) for place in range(size)]

    numbers = range(case.num_arrays)
    return Made(
        lambda give, take, **how: dist.reduce_scatter_tensor_coalesced(take, give, **how),
        [join(whole(rank, number), case.stacked) for number in numbers],
        [junk(case) for _ in numbers],
        [reduced([whole(peer, number)[rank] for peer in range(size)], case.op) for number in numbers],
        {"op": case.op},
    )


def _message(case: Case, rank: int, size: int) -> Made:
    if rank == case.root:
        how = {"group_dst": (rank + 1) % size}
        return Made(lambda give, take, **how: dist.send(give[0], **how), [content(case, rank)], how=how)
    if rank == (case.root + 1) % size:
        return Made(
            lambda give, take, **how: dist.recv(take[0], **how),
            [],
            [junk(case)],
            [content(case, case.root)],
            {"group_src": case.root},
        )
    return Made(lambda give, take, **how: None)


def _barrier(case: Case, rank: int, size: int) -> Made:
    return Made(lambda give, take, **how: dist.barrier(**how))


def _monitored_barrier(case: Case, rank: int, size: int) -> Made:
    return Made(lambda give, take, **how: dist.monitored_barrier(how["group"]))


def _object(case: Case, rank: int) -> Any:
    return {"from": rank, "what": content(case, rank).tolist()}


def _all_gather_object(case: Case, rank: int, size: int) -> Made:
    def call(give: Any, take: Any, **how: Any) -> Any:
        out = [None] * size
        dist.all_gather_object(out, _object(case, rank), **how)
        return out

    return Made(call, result=[_object(case, peer) for peer in range(size)])


def _broadcast_object_list(case: Case, rank: int, size: int) -> Made:
    def call(give: Any, take: Any, **how: Any) -> Any:
        objects = [_object(case, rank)] * case.num_arrays
        dist.broadcast_object_list(objects, **how)
        return objects

    return Made(call, result=[_object(case, case.root)] * case.num_arrays)


def _gather_object(case: Case, rank: int, size: int) -> Made:
    def call(give: Any, take: Any, **how: Any) -> Any:
        out = [None] * size if rank == case.root else None
        dist.gather_object(_object(case, rank), out, **how)
        return out

    return Made(call, result=[_object(case, peer) for peer in range(size)] if rank == case.root else None)


def _scatter_object_list(case: Case, rank: int, size: int) -> Made:
    def call(give: Any, take: Any, **how: Any) -> Any:
        out = [None]
        give = [_object(case, peer) for peer in range(size)] if rank == case.root else None
        dist.scatter_object_list(out, give, **how)
        return out

    return Made(call, result=[_object(case, rank)])


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda give, take, **how: function(take[0], **how)


COLLECTIVES = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "reduce_multigpu",
    "all_gather_multigpu",
    "reduce_scatter_multigpu",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
    "message",
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
]
SYNC_ONLY = ["message", *COLLECTIVES[COLLECTIVES.index("barrier") + 1 :]]
# Those that arrays go through.
OF_ARRAYS = COLLECTIVES[: COLLECTIVES.index("message") + 1]
REDUCING = [name for name in OF_ARRAYS if "reduce" in name]
