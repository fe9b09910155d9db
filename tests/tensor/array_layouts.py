"""Random arrays and random layouts, and the blocks that all ranks hold: arithmetic without ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from meshdist.arrays.reduce_op import ReduceOp, check_op_dtype
from meshdist.tensor import Partial, Placement, Replicate, Shard
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.placements import PENDING_OPS

Random: TypeAlias = np.random.Generator
Blocks: TypeAlias = dict[tuple[int, ...], Any]  # by coordinate

SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0)

# Reductions that can be pending at once.
_TOGETHER = (("sum", "avg"), ("product",), ("max",), ("min",))


def ops_of(dtype: Any) -> tuple[str, ...]:
    """Return the reductions that arrays of this dtype can leave pending, and whose parts any values have."""
    found = []
    for op in PENDING_OPS:
        if op == "product" and np.dtype(dtype).kind == "c":  # 1 times a complex infinity is NaN
            continue
        try:
            check_op_dtype(ReduceOp(op), np.dtype(dtype))
        except TypeError:
            continue
        found.append(op)
    return tuple(found)


def ops_together(rng: Random, ops: Sequence[str]) -> tuple[str, ...]:
    """Return those of `ops` that can be pending at once: sum and avg half of the time, or one of the others."""
    groups = [tuple(op for op in group if op in ops) for group in _TOGETHER]
    groups = [group for group in groups if group]
    if len(groups) < 2:
        return groups[0] if groups else ()
    return groups[0 if rng.random() < 0.5 else int(rng.integers(1, len(groups)))]


def random_shape(rng: Random) -> tuple[int, ...]:
    """Return a shape of up to three dimensions, some of them of one row or of none."""
    return tuple(rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8), int(rng.choice((0, 1, 1, 2, 2, 2, 3)))).tolist())


def random_sizes(rng: Random, rows: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of `parts` blocks of `rows` rows, some of them empty."""
    return tuple(
        end - start for start, end in pairwise([0, *sorted(rng.integers(0, rows + 1, parts - 1).tolist()), rows])
    )


def random_layout(
    rng: Random,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    ops: Sequence[str] = (),
    dims: Iterable[int] | None = None,
) -> ArrayLayout:
    """Return a layout of chunks, of blocks of any sizes, also within one another, and of pending reductions.

    Args:
        rng: Ranks that are to get the same layout pass generators of the same state.
        shape: Of the array.
        mesh_shape: Of the mesh.
        ops: The reductions that may be pending; of those that exclude one another, some are chosen.
        dims: The dimensions that may be cut. None: all.
    """
    pending = ops_together(rng, ops)
    may_cut = list(range(len(shape)) if dims is None else dims)
    placements: list[Placement] = [Replicate()] * len(mesh_shape)
    blocks = {dim: [shape[dim]] for dim in may_cut}  # as cut so far
    for axis, parts in enumerate(mesh_shape):
        kind = rng.random()
        if kind < 0.65 and may_cut:
            dim = may_cut[int(rng.integers(len(may_cut)))]
            sizes: tuple[Any, ...] | None = None
            if kind < 0.35:
                sizes = tuple(random_sizes(rng, rows, parts) for rows in blocks[dim])
                sizes = sizes if len(sizes) > 1 else sizes[0]
            placements[axis] = Shard(dim - len(shape) * int(rng.integers(2)), sizes)
            cut = ArrayLayout.of(shape, mesh_shape, placements).cuts[dim]
            assert cut is not None
            blocks[dim] = list(cut.sizes)
        elif 0.65 <= kind < 0.85 and pending:
            placements[axis] = Partial(pending[int(rng.integers(len(pending)))])
    return ArrayLayout.of(shape, mesh_shape, placements)


def random_pair(
    rng: Random, mesh_shape: Sequence[int], ops: Sequence[str] = PENDING_OPS
) -> tuple[ArrayLayout, ArrayLayout]:
    """Return two layouts of an array, of which a pending reduction does not become another one."""
    shape = random_shape(rng)
    pending = ops_together(rng, ops)
    while True:
        source, target = (random_layout(rng, shape, mesh_shape, pending) for _ in range(2))
        if all(target.pending.get(axis, op) == op for axis, op in source.pending.items()):
            return source, target


def values(rng: Random, shape: Sequence[int], dtype: Any, bound: int = 8, special: Sequence[float] = ()) -> Any:
    """Return random whole numbers of at most `bound`, which add up exactly; in a quarter of the places, special values.

    Special values are for floating and complex dtypes; of a complex number, they are the real part.
    """
    dtype = np.dtype(dtype)
    drawn: Any = rng.integers(-bound, bound + 1, shape)
    if dtype.kind in "bu":
        drawn = np.maximum(drawn, 0) if dtype.kind == "b" else np.abs(drawn)
    if dtype.kind == "c":
        drawn = drawn + 1j * rng.integers(-bound, bound + 1, shape)
    array = np.asarray(drawn).astype(dtype)
    if special and dtype.kind in "fc":
        array.real[rng.random(shape) < 0.25] = special[int(rng.integers(len(special)))]
        array.real[rng.random(shape) < 0.15] = special[int(rng.integers(len(special)))]
    return array


_REDUCE: dict[str, Any] = {
    "sum": np.add.reduce,
    "product": np.multiply.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "avg": np.mean,
}


def reduced(arrays: Any, ops: Iterable[str]) -> Any:
    """Return the array whose parts are `arrays`, which has a dimension in front for each op."""
    dtype = arrays.dtype
    for op in ops:
        arrays = _REDUCE[op](arrays, axis=0)
    return np.asarray(arrays).astype(dtype)


def parts_of(rng: Random, whole: Any, layout: ArrayLayout) -> Any:
    """Return parts, which differ, that the pending reductions of `layout` reduce to `whole`.

    They have a dimension in front for each pending reduction. Each element has one part, chosen at random, that makes
    up for the others.
    """
    whole = np.asarray(whole)
    dtype, ops = whole.dtype, set(layout.pending.values())
    extents = [layout.mesh_shape[axis] for axis in layout.pending]
    count = math.prod(extents)
    owner = rng.integers(0, count, whole.shape)
    owns = np.stack([owner == number for number in range(count)])
    noise = np.stack([values(rng, whole.shape, dtype, 4) for _ in range(count)])
    with np.errstate(all="ignore"):
        if dtype.kind == "b":
            others = (noise & whole) if ops & {"sum", "max"} else (noise | whole)
            parts = np.where(owns, whole, others)
        elif ops <= {"sum", "avg"}:
            averaged = math.prod(layout.mesh_shape[axis] for axis, op in layout.pending.items() if op == "avg")
            others = np.where(owns, dtype.type(0), noise)
            total = whole if averaged == 1 else whole * dtype.type(averaged)  # 1 times a complex infinity is NaN
            parts = np.where(owns, total - others.sum(0, dtype=dtype), others)
        elif ops == {"product"}:
            others = np.where(owns | (noise > 1), 1, -1).astype(dtype)
            parts = np.where(owns, whole * others.prod(0, dtype=dtype), others)
        else:
            others = np.minimum(whole, noise) if ops == {"max"} else np.maximum(whole, noise)
            parts = np.where(owns, whole, others)
    return parts.astype(dtype).reshape((*extents, *whole.shape))


def block_of(parts: Any, layout: ArrayLayout, coordinate: Sequence[int]) -> Any:
    """Return a copy of what the rank at `coordinate` holds of the parts of an array."""
    return np.array(parts[(*(coordinate[axis] for axis in layout.pending), *layout.index(coordinate))])


def random_blocks(seed: int, layout: ArrayLayout, dtype: Any = np.float64) -> tuple[Blocks, Any]:
    """Return the block of each rank, and the whole array that they stand for."""
    rng = np.random.default_rng(seed)
    whole = values(rng, layout.shape, dtype)
    parts = parts_of(rng, whole, layout)
    return {coordinate: block_of(parts, layout, coordinate) for coordinate in layout.coordinates()}, whole


def check_blocks(blocks: Blocks, layout: ArrayLayout, whole: Any) -> None:
    """Check that the blocks are those of the array `whole` in this layout, in dtype, shape and values."""
    axes = list(layout.pending)
    extents = [layout.mesh_shape[axis] for axis in axes]
    for coordinate in layout.coordinates():
        parts = np.empty((*extents, *layout.local_shape(coordinate)), whole.dtype)
        for places in np.ndindex(*extents):
            peer = list(coordinate)
            for axis, place in zip(axes, places, strict=True):
                peer[axis] = place
            block = blocks[tuple(peer)]
            assert (block.dtype, block.shape) == (whole.dtype, parts[places].shape), (peer, layout)
            parts[places] = block
        found = reduced(parts, layout.pending.values())
        assert_close(found, whole[layout.index(coordinate)])


def assert_close(found: Any, wanted: Any, tolerance: float | None = None, signs: bool = False) -> None:
    """Compare two arrays: dtype, shape and values, exact ones but for floating and complex dtypes.

    Args:
        found: An array.
        wanted: An array.
        tolerance: Relative to each value and to the largest. None: some units in the last place.
        signs: Whether the signs must be equal as well, also those of zeros and of NaN.
    """
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), (found, wanted)
    if wanted.dtype.kind not in "fc":
        np.testing.assert_array_equal(found, wanted)
        return
    if signs:
        for part, other in ((found.real, wanted.real), (found.imag, wanted.imag)):
            assert np.array_equal(np.signbit(part), np.signbit(other)), (found, wanted)
    if np.array_equal(found, wanted, equal_nan=True):
        return
    rtol, atol = 50 * float(np.finfo(wanted.dtype).eps), 1000 * float(np.finfo(wanted.dtype).eps)
    if tolerance is not None:
        rtol = max(tolerance, rtol)
        atol = rtol * float(np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0))
    np.testing.assert_allclose(found, wanted, rtol, atol)
