"""What one rank passes to the call of a step, and what it must find in its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import meshdist as dist
from meshdist.arrays.reduce_op import identity
from soaking.program import Step
from soaking.values import Array, content, reduced

# Tags of messages that are received from any rank: nobody else may send with one.
_TAG_FROM_ANY = 1_000
# Objects have the contents of longer arrays as bytes.
_LONG_LIST = 1_000


@dataclass
class Made:
    """One rank's side of a call.

    Attributes:
        call: Makes it: `call(give, take, group, **how)`, with arrays of the contents below.
        give: Contents of the inputs.
        take: Contents of the outputs before the call.
        want: Those afterwards.
        how: The other arguments.
        result: What the call returns; None where that is not compared.
    """

    call: Callable[..., Any]
    give: Sequence[Array] = ()
    take: Sequence[Array] = ()
    want: Sequence[Array] = ()
    how: dict[str, Any] = field(default_factory=dict)
    result: Any = None


@dataclass(frozen=True)
class Side:
    """A step as one member sees it.

    Attributes:
        step: The step.
        members: Global ranks, in group order.
        rank: Of this side, in the group.
        key: What makes contents different from those of other calls.
    """

    step: Step
    members: tuple[int, ...]
    rank: int
    key: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    def of(self, rank: int, place: int = 0, shape: tuple[int, ...] | None = None) -> Array:
        """Return the array of a member."""
        step = self.step
        shape = step.shape if shape is None else shape
        return content(step.dtype, shape, (*self.key, self.members[rank], place), step.op == "product")

    def of_all(self, place: int = 0) -> list[Array]:
        """Return the arrays of all members."""
        return [self.of(rank, place) for rank in range(self.size)]


def make(side: Side) -> Made:
    """Return this rank's side of the call of a step."""
    made: Made = globals()[f"_{side.step.kind}"](side)
    if side.step.async_op and side.step.kind not in ("message", "ring"):
        made.how["async_op"] = True
    return made


def _junk(array: Array) -> Array:
    return np.ones(array.shape, array.dtype)


def _join(side: Side, blocks: Sequence[Array]) -> Array:
    return np.stack(blocks) if side.step.stacked or not blocks[0].ndim else np.concatenate(blocks)


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda give, take, group, **how: function(take[0], group=group, **how)


def _all_reduce(side: Side) -> Made:
    op = side.step.op
    return Made(
        _in_place(dist.all_reduce), (), [side.of(side.rank)], [reduced(side.of_all(), op)], {"op": dist.ReduceOp(op)}
    )


def _premul_sum(side: Side) -> Made:
    factors = [float(2.0 ** (member - 1)) for member in side.members]
    scaled = [array * array.dtype.type(factor) for array, factor in zip(side.of_all(), factors, strict=True)]
    op = dist.premul_sum(factors[side.rank])
    return Made(_in_place(dist.all_reduce), (), [side.of(side.rank)], [reduced(scaled, "sum")], {"op": op})


def _broadcast(side: Side) -> Made:
    root = side.step.root
    return Made(_in_place(dist.broadcast), (), [side.of(side.rank)], [side.of(root)], {"src": side.members[root]})


def _reduce(side: Side) -> Made:
    step = side.step
    want = reduced(side.of_all(), step.op) if side.rank == step.root else side.of(side.rank)
    return Made(
        _in_place(dist.reduce), (), [side.of(side.rank)], [want], {"op": step.op, "dst": side.members[step.root]}
    )


def _scan(side: Side) -> Made:
    op = "sum" if side.step.op == "avg" else side.step.op
    upto, call = side.of_all()[: side.rank + 1], dist.scan
    if side.step.stacked:
        upto, call = upto[:-1], dist.exscan
    own = side.of(side.rank)
    want = reduced(upto, op) if upto else np.full_like(own, identity(dist.ReduceOp(op), own.dtype))
    return Made(_in_place(call), (), [own], [want], {"op": op})


def _all_gather(side: Side) -> Made:
    want = side.of_all()
    return Made(
        lambda give, take, group, **how: dist.all_gather(take, give[0], group=group, **how),
        [side.of(side.rank)],
        list(map(_junk, want)),
        want,
    )


def _all_gather_into_tensor(side: Side) -> Made:
    want = _join(side, side.of_all())
    return Made(
        lambda give, take, group, **how: dist.all_gather_into_tensor(take[0], give[0], group=group, **how),
        [side.of(side.rank)],
        [_junk(want)],
        [want],
    )


def _gather(side: Side) -> Made:
    want = side.of_all() if side.rank == side.step.root else []
    return Made(
        lambda give, take, group, **how: dist.gather(give[0], list(take) or None, group=group, **how),
        [side.of(side.rank)],
        list(map(_junk, want)),
        want,
        {"group_dst": side.step.root},
    )


def _scatter(side: Side) -> Made:
    root, want = side.step.root, side.of(side.step.root, side.rank)
    return Made(
        lambda give, take, group, **how: dist.scatter(take[0], list(give) or None, group=group, **how),
        [side.of(root, place) for place in range(side.size)] if side.rank == root else [],
        [_junk(want)],
        [want],
        {"group_src": root},
    )


def _reduce_scatter(side: Side) -> Made:
    want = reduced(side.of_all(side.rank), side.step.op)
    return Made(
        lambda give, take, group, **how: dist.reduce_scatter(take[0], give, group=group, **how),
        [side.of(side.rank, place) for place in range(side.size)],
        [_junk(want)],
        [want],
        {"op": side.step.op},
    )


def _reduce_scatter_tensor(side: Side) -> Made:
    made = _reduce_scatter(side)
    made.give = [_join(side, made.give)]
    made.call = lambda give, take, group, **how: dist.reduce_scatter_tensor(take[0], give[0], group=group, **how)
    return made


def _all_to_all(side: Side) -> Made:
    # The sizes differ: rank i sends i more elements to rank j than the step says.
    def block(sender: int, receiver: int) -> Array:
        return side.of(sender, receiver, (int(np.prod(side.step.shape)) + sender * receiver,))

    want = [block(peer, side.rank) for peer in range(side.size)]
    return Made(
        lambda give, take, group, **how: dist.all_to_all(take, give, group=group, **how),
        [block(side.rank, peer) for peer in range(side.size)],
        list(map(_junk, want)),
        want,
    )


def _all_to_all_single(side: Side) -> Made:
    step, rank = side.step, side.rank
    rows = step.rows or ((step.shape[0],) * side.size,) * side.size
    to, come = rows[rank], [row[rank] for row in rows]
    tail = step.shape[1:]
    want = np.concatenate([side.of(peer, rank, (count, *tail)) for peer, count in enumerate(come)])
    return Made(
        lambda give, take, group, **how: dist.all_to_all_single(take[0], give[0], group=group, **how),
        [np.concatenate([side.of(rank, peer, (count, *tail)) for peer, count in enumerate(to)])],
        [_junk(want)],
        [want],
        {"output_split_sizes": list(come), "input_split_sizes": list(to)} if step.rows else {},
    )


def _lists(side: Side) -> list[list[Array]]:
    return [side.of_all(place) for place in range(side.step.num_arrays)]


def _all_reduce_coalesced(side: Side) -> Made:
    op, lists = side.step.op, _lists(side)
    return Made(
        lambda give, take, group, **how: dist.all_reduce_coalesced(take, group=group, **how),
        (),
        [arrays[side.rank] for arrays in lists],
        [reduced(arrays, op) for arrays in lists],
        {"op": op},
    )


def _coalescing_manager(side: Side) -> Made:
    def call(give: Any, take: Sequence[Array], group: Any, op: str) -> None:
        with dist.coalescing_manager(group):
            for array in take:
                dist.all_reduce(array, op, group=group)

    made = _all_reduce_coalesced(side)
    made.call = call
    return made


def _barrier(side: Side) -> Made:
    return Made(lambda give, take, group, **how: dist.barrier(group=group, **how))


def _object(side: Side, rank: int) -> Any:
    # Not lists of a million numbers: Python would keep most of their memory, and hide what the library does not free.
    what = side.of(rank)
    return {"from": rank, "what": what.tolist() if what.size < _LONG_LIST else what.tobytes()}


def _all_gather_object(side: Side) -> Made:
    def call(give: Any, take: Any, group: Any) -> Any:
        objects = [None] * side.size
        dist.all_gather_object(objects, _object(side, side.rank), group=group)
        return objects

    return Made(call, result=[_object(side, rank) for rank in range(side.size)])


def _broadcast_object_list(side: Side) -> Made:
    def call(give: Any, take: Any, group: Any) -> Any:
        objects = [_object(side, side.rank), side.rank]
        dist.broadcast_object_list(objects, group=group, group_src=side.step.root)
        return objects

    return Made(call, result=[_object(side, side.step.root), side.step.root])


def _message(side: Side) -> Made:
    step = side.step
    receiver = (step.root + step.peer) % side.size
    tag = step.tag if not step.from_any else _TAG_FROM_ANY + step.number
    if side.rank == step.root:
        give = dist.isend if step.async_op else dist.send
        return Made(
            lambda arrays, take, group: give(arrays[0], group=group, tag=tag, group_dst=receiver), [side.of(side.rank)]
        )
    if side.rank == receiver:
        take = dist.irecv if step.async_op else dist.recv
        source = {} if step.from_any else {"group_src": step.root}
        want = side.of(step.root)
        return Made(
            lambda give, arrays, group: take(arrays[0], group=group, tag=tag, **source), (), [_junk(want)], [want]
        )
    return Made(lambda give, take, group: None)


def _ring(side: Side) -> Made:
    """Every rank sends some arrays to the next and receives some from the one before, all begun at once."""
    step, size = side.step, side.size
    after, before = (side.rank + step.peer) % size, (side.rank - step.peer) % size
    want = [side.of(before, place) for place in range(step.num_arrays)]

    def call(give: Sequence[Array], take: Sequence[Array], group: Any) -> Any:
        op = partial(dist.P2POp, group=group, tag=step.tag)
        sends = [op(dist.isend, array, side.members[after]) for array in give]
        receives = [op(dist.irecv, array, side.members[before]) for array in take]
        works = dist.batch_isend_irecv(sends + receives if side.rank % 2 else receives + sends)
        return works if step.async_op else [work.wait() for work in works]

    return Made(call, [side.of(side.rank, place) for place in range(step.num_arrays)], list(map(_junk, want)), want)
