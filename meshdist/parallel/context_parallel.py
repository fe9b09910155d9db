"""ring_attention: attention over a sequence that is sharded over the ranks of an axis (context parallelism).

Each rank keeps the queries of its block. The keys and values go around the ring of ranks, one block at a time: while a
rank computes with the block that it holds, it passes it on and receives the next. It adds up the results by an online
softmax, which rescales what is there whenever a row finds a larger score, and so has the scores of one tile at a time.
In the backward pass keys and values go around again, and behind them the sums of their gradients.

Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3; the backward
pass of a block is that of Dao et al., "FlashAttention", algorithm 4.

With a causal mask and contiguous blocks, the last rank computes with all blocks and the first with one. Zig-zag
sharding has 2 * size chunks, of which rank i holds chunks i and 2 * size - 1 - i: all ranks have the same work in
each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from autograd.core import defvjp_argnums
from autograd.extend import primitive
from autograd.tracer import getval

from meshdist.arrays.host import AnyArray
from meshdist.autograd.tape import communicating
from meshdist.collectives.send_recv import irecv, isend
from meshdist.groups.process_group import ProcessGroup
from meshdist.parallel.layer_arguments import LayerCall
from meshdist.runtime.context import GroupLike

TILE = 512  # rows and columns of the scores that are computed at a time
KEYS_TAG, GRADIENTS_TAG = 32001, 32002  # apart from the messages of programs


def sequence_positions(length: int, *, axis: GroupLike, zigzag: bool = False) -> Any:
    """Return the positions of a sequence that this rank holds: `x[positions]` is its block of `x`.

    Args:
        length: The length of the whole sequence: a multiple of the number of ranks, with `zigzag` of twice that.
        axis: The ranks that share the sequence, as in `ring_attention`.
        zigzag: Whether each rank has an early and a late chunk, as in `ring_attention`.

    Raises:
        ValueError: `length` is not such a multiple.

    Example:
        >>> import meshdist
        >>> from meshdist.parallel import sequence_positions
        >>> world = lambda: meshdist.group.WORLD
        >>> meshdist.run(lambda: sequence_positions(8, axis=world(), zigzag=True).tolist(), 2)
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    call = LayerCall("sequence_positions", axis, "")
    parts = call.size * (1 + zigzag)
    if length % parts:
        raise ValueError(
            f"{call.prefix}: a sequence is split into {parts} equal chunks, got length {length}; pad it to"
            f" {math.ceil(length / parts) * parts}"
        )
    chunk = length // parts
    numbers = _chunk_numbers(call.rank, call.size, zigzag)
    return np.concatenate([np.arange(number * chunk, (number + 1) * chunk) for number in numbers])


def ring_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    axis: GroupLike,
    causal: bool = True,
    scale: float | None = None,
    zigzag: bool = False,
) -> AnyArray:
    """Return softmax(scale * q @ k.T) @ v for this rank's block of the queries, and all keys and values.

    The forward pass sends the keys and values of a block to the next rank size - 1 times; the backward pass sends them
    as often, and their gradients size times. All messages overlap with the computation. First derivatives only.

    Args:
        q: This rank's block of the queries, shape (batch, heads, block, head_size), of a floating dtype.
        k: This rank's block of the keys, likewise; with `causal`, there are as many keys as queries. With fewer heads
            than `q`, neighbouring heads of queries share one (grouped-query attention).
        v: This rank's block of the values, likewise; their head size may be different.
        axis: The ProcessGroup or the axis of a mesh, as `mesh["cp"]`, that shards the sequence into equal blocks. None:
            one rank.
        causal: Whether a query sees only the keys of its own and earlier positions.
        scale: The factor of the scores. None: 1 / sqrt(head_size).
        zigzag: Whether the ranks hold an early and a late chunk of the sequence each, as `sequence_positions` says,
            so that with `causal` all ranks have the same amount of computation. Otherwise they hold contiguous blocks
            in rank order.

    Returns:
        This rank's block, shape (batch, heads, block, head size of `v`).

    Raises:
        TypeError: An argument is a DTensor, or the arguments are not arrays of one floating dtype.
        ValueError: The shapes do not fit, or with `zigzag` a block has an odd length.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.parallel import ring_attention
        >>> x = np.random.default_rng(0).standard_normal((3, 1, 2, 8, 4))  # q, k, v of one sequence of 8, 2 heads
        >>> def program():
        ...     q, k, v = np.split(x, 4, axis=3)[meshdist.get_rank()]
        ...     return ring_attention(q, k, v, axis=meshdist.group.WORLD)
        >>> np.allclose(np.concatenate(meshdist.run(program, 4), axis=2), ring_attention(*x, axis=None))
        True
    """
    call = LayerCall("ring_attention", axis, "write x.to_local() for each, within meshdist.autograd.local_map")
    q, k, v = (call.floating(name, x, ndim=4) for name, x in (("q", q), ("k", k), ("v", v)))
    shapes = [np.shape(getval(x)) for x in (q, k, v)]
    _check_shapes(call, shapes, [getval(x).dtype for x in (q, k, v)], causal, zigzag)
    call.check_replicated("the shape of k", np.array(shapes[1]))
    call.check_replicated("the shape of v", np.array(shapes[2]))
    factor = 1 / math.sqrt(max(1, shapes[0][3])) if scale is None else float(scale)
    call.check_replicated("causal, zigzag and scale", np.array([causal, zigzag, factor]))
    plan = _Plan(call.members, call.rank, call.size, causal, zigzag and causal, factor)
    return _attention(q, k, v, plan, [])


def _check_shapes(call: LayerCall, shapes: list[Any], dtypes: list[Any], causal: bool, zigzag: bool) -> None:
    (batch, heads, rows, size), keys, values = shapes
    found = f"got q {shapes[0]}, k {keys}, v {values}"
    if len(set(dtypes)) > 1:
        raise TypeError(f"{call.prefix}: q, k and v must be of one dtype, got {', '.join(map(str, dtypes))}")
    if keys[:2] != values[:2] or keys[0] != batch or heads % max(1, keys[1]):
        raise ValueError(
            f"{call.prefix}: q, k and v must have the same batch size, k and v the same number of heads, and q a"
            f" multiple of that, {found}"
        )
    if keys[3] != size:
        raise ValueError(f"{call.prefix}: q and k must have the same head size, {found}")
    if values[2] != keys[2] or (causal and keys[2] != rows):
        which = "q, k and v" if causal else "k and v"
        raise ValueError(f"{call.prefix}: {which} must have blocks of one length, {found}")
    if zigzag and (rows % 2 or keys[2] % 2):
        raise ValueError(f"{call.prefix}: with zigzag a block is two chunks, so its length must be even, {found}")


def _chunk_numbers(rank: int, size: int, zigzag: bool) -> tuple[int, ...]:
    return (rank, 2 * size - 1 - rank) if zigzag else (rank,)


# ---- Which parts of blocks see which


class _Plan(NamedTuple):
    members: ProcessGroup | None
    rank: int
    size: int
    causal: bool
    zigzag: bool
    scale: float

    def pairs(self, source: int, rows: int, keys: int) -> Iterator[tuple[slice, slice, bool]]:
        """Yield what this rank's queries see of a rank's block: rows, keys, and whether it is a triangle."""
        seen_tiles = self._tiles(source, keys)
        for start, queries in self._tiles(self.rank, rows):
            for other_start, seen in seen_tiles:
                if not self.causal or other_start <= start:
                    yield queries, seen, self.causal and other_start == start

    def _tiles(self, rank: int, rows: int) -> list[tuple[int, slice]]:
        """Return the tiles of a rank's block, with their positions in the sequence; they never overlap in part."""
        numbers = _chunk_numbers(rank, self.size, self.zigzag)
        chunk = rows // len(numbers)
        return [
            (number * chunk + at, slice(place * chunk + at, place * chunk + min(at + TILE, chunk)))
            for place, number in enumerate(numbers)
            for at in range(0, chunk, TILE)
        ]


def _scores(q: Any, k: Any, triangle: bool) -> Any:
    scores = q @ k.swapaxes(-1, -2)
    if triangle:
        np.copyto(scores, -np.inf, where=np.triu(np.ones_like(scores, np.bool_, shape=scores.shape[-2:]), 1))
    return scores


# ---- The ring


def _around(held: Any, plan: _Plan) -> Iterator[tuple[int, Any]]:
    """Yield each rank's array, with its rank, and pass it on meanwhile. Its memory is used again."""
    members, spare = plan.members, np.empty_like(held)
    works: list[Any] = []
    for step in range(plan.size):
        if members is not None and step < plan.size - 1:
            works = _shifted(held, spare, members, KEYS_TAG)
        yield (plan.rank - step) % plan.size, held
        if step < plan.size - 1:
            for work in works:
                work.wait()
            held, spare = spare, held


def _shifted(held: Any, taken: Any, members: ProcessGroup, tag: int) -> list[Any]:
    """Begin to send `held` to the next rank, and to receive from the one before."""
    rank, size = members.rank(), members.size()
    tag = tag if members.messages.has_tags(held) else 0  # the ranks send both kinds in the same order
    receive = irecv(taken, group=members, group_src=(rank - 1) % size, tag=tag)
    return [receive, isend(held, group=members, group_dst=(rank + 1) % size, tag=tag)]


def _packed(k: Any, v: Any) -> Any:
    return np.concatenate([np.ravel(k), np.ravel(v)])


def _unpacked(both: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Return the two arrays in `both`, of the shapes of `k` and `v`."""
    return both[: k.size].reshape(k.shape), both[k.size :].reshape(v.shape)


# ---- The two passes


def _heads_together(x: Any, k: Any) -> Any:
    """Return an array by (batch, heads of `k`, heads of queries that share one, block, head size)."""
    return x.reshape(*k.shape[:2], x.shape[1] // max(1, k.shape[1]), *x.shape[2:])


@primitive
def _attention(q: Any, k: Any, v: Any, plan: _Plan, saved: list[Any]) -> Any:
    """Return the result, and append the logarithms of the sums of exponentials of the scores to `saved`."""
    scaled = _heads_together(q * q.dtype.type(plan.scale), k)
    result = np.zeros_like(q, shape=(*scaled.shape[:4], v.shape[3]))
    top = np.full_like(q, -np.inf, shape=scaled.shape[:4])
    sums = np.zeros_like(top)
    for source, both in _around(_packed(k, v), plan):
        keys, values = (_heads_together(x, k) for x in _unpacked(both, k, v))
        for rows, seen, triangle in plan.pairs(source, q.shape[2], k.shape[2]):
            scores = _scores(scaled[..., rows, :], keys[..., seen, :], triangle)
            # Online softmax: what is there was relative to the old top, and is now relative to the new one.
            new_top = np.maximum(top[..., rows], scores.max(-1))
            rescale = np.exp(top[..., rows] - new_top)
            scores -= new_top[..., None]
            np.exp(scores, out=scores)
            sums[..., rows] = sums[..., rows] * rescale + scores.sum(-1)
            result[..., rows, :] = result[..., rows, :] * rescale[..., None] + scores @ values[..., seen, :]
            top[..., rows] = new_top
    result /= sums[..., None]
    saved.append(top + np.log(sums))
    return result.reshape(*q.shape[:3], v.shape[3])


@primitive
def _backward(g: Any, q: Any, k: Any, v: Any, y: Any, logarithms: Any, plan: _Plan) -> tuple[Any, Any, Any]:
    """Return the gradients of `q`, `k` and `v`."""
    works: list[Any] = []
    scale = q.dtype.type(plan.scale)
    scaled, g_result = _heads_together(q * scale, k), _heads_together(g, k)
    along = _heads_together(np.sum(g * y, -1), k)
    g_q = np.zeros_like(scaled)
    arrived = np.empty_like(k, shape=k.size + v.size)
    for step, (source, both) in enumerate(_around(_packed(k, v), plan)):
        keys, values = (_heads_together(x, k) for x in _unpacked(both, k, v))
        found = np.zeros_like(arrived)
        g_keys, g_values = _unpacked(found, k, v)
        for rows, seen, triangle in plan.pairs(source, q.shape[2], k.shape[2]):
            queries, g_rows = scaled[..., rows, :], g_result[..., rows, :]
            softmax = _scores(queries, keys[..., seen, :], triangle)
            softmax -= logarithms[..., rows, None]
            np.exp(softmax, out=softmax)
            g_values[..., seen, :] += (softmax.swapaxes(-1, -2) @ g_rows).sum(2)
            g_scores = g_rows @ values[..., seen, :].swapaxes(-1, -2)
            g_scores -= along[..., rows, None]
            g_scores *= softmax
            g_q[..., rows, :] += g_scores @ keys[..., seen, :]
            g_keys[..., seen, :] += (g_scores.swapaxes(-1, -2) @ queries).sum(2)
        # The sum for this block comes from the rank that had the block before, and goes on to the one that has it next.
        for work in works:
            work.wait()
        if step:
            found += arrived
        if plan.members is not None:
            arrived = np.empty_like(found)
            works = _shifted(found, arrived, plan.members, GRADIENTS_TAG)
    for work in works:
        work.wait()
    total = found if plan.members is None else arrived  # after the last step, the sum for the rank's own block
    return ((g_q * scale).reshape(q.shape), *_unpacked(total, k, v))


def _vjp(argnums: Sequence[int], y: Any, args: tuple[Any, ...], kwargs: Any) -> Callable[[Any], list[Any]]:
    q, k, v, plan, saved = args

    def vjp(g: Any) -> list[Any]:
        gradients = _backward(g, q, k, v, y, saved[0], plan)
        return [gradients[number] for number in argnums]

    return vjp


_attention.__name__ = "ring_attention"
_backward.__name__ = "ring_attention_backward"
defvjp_argnums(_attention, _vjp)
communicating.add(_attention)
