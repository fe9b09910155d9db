"""vocab_parallel_embedding and vocab_parallel_cross_entropy: the first and last layer, sharded along the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive
from autograd.tracer import getval

from meshdist import functional
from meshdist.arrays.host import AnyArray
from meshdist.autograd.collectives import all_reduce, copy, reduce_scatter
from meshdist.autograd.device_arrays import beside
from meshdist.groups.process_group import ProcessGroup
from meshdist.mesh.layout.axes_and_chunks import chunk_sizes
from meshdist.parallel.layer_arguments import LayerCall
from meshdist.runtime.context import GroupLike


def vocab_parallel_embedding(
    indices: AnyArray,
    table: AnyArray,
    *,
    axis: GroupLike,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    vocab_size: int | None = None,
) -> AnyArray:
    """Return `table[indices]`, where each rank has the rows of a block of the vocabulary.

    The forward pass computes the result by an all_reduce; the backward pass sends nothing. With `sequence_parallel`,
    the forward pass makes a reduce_scatter, and the backward pass an all_gather. Without `vocab_size`, the forward pass
    also sends two numbers, to compare the sizes of the blocks.

    Args:
        indices: Integers of any shape, the same on all ranks of the axis, with `sequence_parallel` too.
        table: This rank's rows, shape (block, features), as `torch.chunk` splits: equal blocks, or smaller last ones.
        axis: The ranks that share the vocabulary, as in `column_parallel`.
        sequence_parallel: Whether the result is sharded along the sequence.
        sequence_dim: The dimension of the sequence, whose length is a multiple of the number of ranks.
        vocab_size: The rows of all blocks. None: they are equal.

    Returns:
        Shape `(*indices.shape, features)`, the same on all ranks. With `sequence_parallel` this rank's block of it
        along `sequence_dim`.

    Raises:
        TypeError: `indices` are not integers, `table` is not an array of a floating dtype, or an argument is a DTensor.
        ValueError: An index is outside the vocabulary, or the blocks are not equal and `vocab_size` is not given;
            raised on all ranks. Or `table` is not this rank's block, or the sequence cannot be split.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.parallel import vocab_parallel_embedding
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     table = np.arange(10.0).reshape(5, 2)
        ...     mine = table[3:] if mesh.get_rank() else table[:3]
        ...     return vocab_parallel_embedding(np.array([4, 0]), mine, axis=mesh["tp"], vocab_size=5).tolist()
        >>> meshdist.run(program, 2)[0]
        [[8.0, 9.0], [0.0, 1.0]]
    """
    call = LayerCall("vocab_parallel_embedding", axis, "write table[indices], with table placed Shard(0)")
    table = call.floating("table", table, ndim=2)
    rows = np.shape(getval(table))[0]
    first, vocabulary = _own_block(call, "table", "rows", rows, vocab_size)
    if vocab_size is None and call.members is not None:
        _check_equal(call, "table", "rows", rows, functional.all_reduce(_extremes(rows, table), "max", call.members))
    indices = call.integers("indices", indices, vocabulary, _described(call, rows, vocab_size))
    call.check_replicated("indices", indices)
    place = call.sequence_dim(indices, sequence_dim, features=0, divided=True) if sequence_parallel else 0
    taken = _rows(table, beside(indices, table).astype(np.int64) - first)
    if call.members is None:
        return taken
    if sequence_parallel:
        return reduce_scatter(taken, "sum", call.members, axis=place)
    return all_reduce(taken, "sum", call.members)


def vocab_parallel_cross_entropy(
    logits: AnyArray, targets: AnyArray, *, axis: GroupLike, vocab_size: int | None = None
) -> AnyArray:
    """Return the cross entropy of each target, -log(softmax(logits)[target]), of logits sharded along the vocabulary.

    The forward pass needs two all_reduces: of the maxima of the logits, and of the sums of exponentials and the logits
    of the targets; in all, 3 numbers for each target. The backward pass sends nothing. The logits are never gathered.

    Args:
        logits: This rank's block, shape (..., block), as `torch.chunk` splits the vocabulary. Dtypes of less than 4
            bytes are computed with as float32.
        targets: Integers of shape (...), the same on all ranks of the axis.
        axis: The ranks that share the vocabulary, as in `column_parallel`.
        vocab_size: The columns of all blocks. None: they are equal.

    Returns:
        Shape (...): a loss for each target, the same on all ranks. Its gradient must be the same on all ranks, too.

    Raises:
        TypeError: `logits` is not an array of a floating dtype, `targets` are not integers, or an argument is a
            DTensor.
        ValueError: A target is outside the vocabulary, or the blocks are not equal and `vocab_size` is not given;
            raised on all ranks. Or `logits` is not this rank's block, or `targets` has a different shape.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.parallel import vocab_parallel_cross_entropy
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     logits = np.log([[1.0, 2.0, 3.0, 4.0]])[:, 2 * mesh.get_rank() :][:, :2]
        ...     return np.exp(-vocab_parallel_cross_entropy(logits, np.array([3]), axis=mesh["tp"])).round(6).tolist()
        >>> meshdist.run(program, 2)
        [[0.4], [0.4]]
    """
    call = LayerCall(
        "vocab_parallel_cross_entropy", axis, "write np.log(np.sum(np.exp(logits), -1)), or pass logits.to_local()"
    )
    logits = call.floating("logits", logits, least=1)
    *shape, block = np.shape(getval(logits))
    first, vocabulary = _own_block(call, "logits", "columns", block, vocab_size)
    targets = call.array("targets", targets)
    call.check_shape("targets", targets, shape, f"that of logits {(*shape, block)} without the vocabulary")
    targets = call.integers("targets", targets, vocabulary, _described(call, block, vocab_size))
    call.check_replicated("targets", targets)
    if anp.result_type(logits).itemsize < 4:
        logits = logits.astype(np.float32)
    flat = anp.reshape(logits, (math.prod(shape), block))
    places = beside(targets, logits).reshape(-1).astype(np.int64) - first
    losses = _losses(flat, places, call, vocab_size is None)[0]
    return anp.reshape(losses, tuple(shape))


def _own_block(call: LayerCall, name: str, of: str, length: int, vocab_size: int | None) -> tuple[int, int]:
    """Return where this rank's block of the vocabulary begins, and the size of the vocabulary.

    Raises:
        ValueError: The block has not the size that `torch.chunk` gives it.
    """
    if vocab_size is None:
        return call.rank * length, call.size * length
    sizes = chunk_sizes(vocab_size, call.size)
    if sizes[call.rank] != length:
        raise ValueError(
            f"{call.prefix}: {name} must have {sizes[call.rank]} {of}, this rank's block of a vocabulary of"
            f" {vocab_size} in blocks of {', '.join(map(str, sizes))}, as torch.chunk splits it; got {length}"
        )
    return sum(sizes[: call.rank]), vocab_size


def _extremes(length: int, like: Any, dtype: Any = np.int64) -> Any:
    """Return the length of a block and its negative, in the memory of `like`: of both, ranks take the maximum."""
    extremes = np.full_like(getval(like), length, dtype, shape=2)
    extremes[1] = -length
    return extremes


def _check_equal(call: LayerCall, name: str, of: str, length: int, extremes: Any) -> None:
    """Check that all ranks have blocks of one length; `extremes` are the maxima of it and of its negative.

    Raises:
        ValueError: They have not; on all ranks.
    """
    longest, shortest = int(extremes[0]), -int(extremes[1])
    if longest != shortest:
        raise ValueError(
            f"{call.prefix}: {name} must have the same number of {of} on all ranks, and they have {shortest} to"
            f" {longest}, here {length}; for a vocabulary that cannot be divided pass vocab_size="
        )


def _described(call: LayerCall, length: int, vocab_size: int | None) -> str:
    if vocab_size is not None or call.size == 1:
        return f"the vocabulary of {call.size * length if vocab_size is None else vocab_size}"
    return f"the vocabulary of {call.size} blocks of {length} (pass vocab_size= if they are not equal)"


# ---- Rows of a table, and their gradients


@primitive
def _rows(table: Any, places: Any) -> Any:
    """Return the rows of the table at these places, zeros for places outside."""
    taken = np.zeros_like(table, shape=(*places.shape, table.shape[1]))
    inside = (places >= 0) & (places < len(table))
    taken[inside] = table[places[inside]]
    return taken


@primitive
def _sums_by_row(g: Any, places: Any, rows: int) -> Any:
    """Return a table whose rows are sums of those of `g` with their places."""
    table = np.zeros_like(g, shape=(rows, g.shape[-1]))
    inside = (places >= 0) & (places < rows)
    found = places[inside]
    if found.size:
        order = np.argsort(found, kind="stable")
        ordered = found[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        table[ordered[starts]] = np.add.reduceat(g[inside][order], starts, axis=0)
    return table


_rows.__name__ = "vocab_parallel_embedding"
_sums_by_row.__name__ = "vocab_parallel_embedding_backward"
defvjp(_rows, lambda y, table, places: lambda g: _sums_by_row(g, places, table.shape[0]))
defvjp(_sums_by_row, lambda table, g, places, rows: lambda h: _rows(h, places))


# ---- Losses, and their gradients


def _reduced(x: Any, op: str, members: ProcessGroup | None) -> Any:
    return x if members is None else functional.all_reduce(x, op, members)


@primitive
def _losses(logits: Any, places: Any, call: LayerCall, equal: bool) -> Any:
    """Return the losses, and below them the logarithms of the sums of exponentials.

    Args:
        logits: This rank's block, shape (n, block).
        places: The targets' columns in it; outside for those of other ranks.
        call: The call of the layer.
        equal: Whether to check that all blocks have one size.
    """
    block = logits.shape[1]
    top = logits.max(-1) if block else np.full_like(logits, -np.inf, shape=len(logits))
    if equal and call.members is not None:
        found = _reduced(np.concatenate([top, _extremes(block, logits, logits.dtype)]), "max", call.members)
        top = found[:-2]
        _check_equal(call, "logits", "columns", block, found[-2:])
    else:
        top = _reduced(top, "max", call.members)
    shifted = logits - top[:, None]
    sums = np.empty_like(logits, shape=(2, len(logits)))
    sums[1] = _picked_from(shifted, places)
    np.exp(shifted, out=shifted).sum(-1, out=sums[0])
    sums = _reduced(sums, "sum", call.members)
    logarithms = np.log(sums[0])
    return np.stack([logarithms - sums[1], top + logarithms])


def _pull_losses(g: Any, y: Any, logits: Any, places: Any, call: LayerCall) -> Any:
    call.check_replicated("the gradient of the result", g[0])
    logarithms = y[1]
    if call.members is not None:  # each rank uses them for its own columns
        g, logarithms = copy(g, call.members), copy(logarithms, call.members)
    softmax = anp.exp(logits - anp.reshape(logarithms, (-1, 1)))
    return _less_at(softmax * anp.reshape(g[0] + g[1], (-1, 1)), g[0], places)


def _picked_from(x: Any, places: Any) -> Any:
    picked = np.zeros_like(x, shape=len(x))
    inside = np.flatnonzero((places >= 0) & (places < x.shape[1]))
    picked[inside] = x[inside, places[inside]]
    return picked


@primitive
def _less_at(x: Any, values: Any, places: Any) -> Any:
    """Return `x` less one value in each row, in the column of its place."""
    less = x.copy()
    inside = np.flatnonzero((places >= 0) & (places < x.shape[1]))
    less[inside, places[inside]] -= values[inside]
    return less


_picked = primitive(_picked_from)
_losses.__name__ = "vocab_parallel_cross_entropy"
_less_at.__name__ = _picked.__name__ = "vocab_parallel_cross_entropy_backward"
defvjp(_losses, lambda y, logits, places, call, equal: lambda g: _pull_losses(g, y, logits, places, call))
defvjp(_less_at, lambda y, *args: lambda g: g, lambda y, x, values, places: lambda g: -_picked(g, places))
defvjp(_picked, lambda y, x, places: lambda g: _less_at(anp.zeros_like(x, dtype=g.dtype), -g, places))
