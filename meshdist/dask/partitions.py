"""Dask's collections as DTensors, and back: which chunks make the block of which rank.

A rank's block consists of consecutive chunks. Chunks that lie so on the workers stay where they are, since the ranks
are numbered by them; Dask moves the others as what the rank's task depends on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
from dask.base import is_dask_collection
from dask.delayed import Delayed
from distributed import Client, Future, futures_of

from meshdist.arrays.trees import exchanged, values_in
from meshdist.dask.client_calls import called, settle
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.system.plurals import counted
from meshdist.tensor import DTensor, Partial, Shard

_log = logging.getLogger("meshdist.dask")
_KINDS = "biufc"


@dataclass(frozen=True, eq=False)
class Cut:
    """A Dask collection that becomes a DTensor, and the dimension that is sharded over the ranks.

    Attributes:
        array: The Dask array; that of a dataframe has a column for each of the dataframe's.
        dim: The dimension.
    """

    array: Any
    dim: int


def from_dask(collection: Any, dim: int | None = None) -> Cut:
    """Say how a Dask array or dataframe is sharded, as an argument of `meshdist.dask.run`.

    `run` calls it itself for arguments that are Dask collections. In `fn` the argument is a DTensor over the 1-d mesh
    of the job, with placement `Shard(dim)`, whose blocks consist of whole chunks and may have different sizes. The
    blocks are read-only, since Dask may use the chunks again.

    Args:
        collection: An array of shape `(..., rows, ...)`, also of unknown chunks; a dataframe or a series of
            numbers: an array of shape `(rows, columns)` or `(rows,)`, of the dtype that holds all columns.
        dim: The dimension that is sharded; None: the one with the most chunks, in doubt the first. Chunks along other
            dimensions are merged, and chunks fewer than ranks are split, which moves data.

    Raises:
        TypeError: No Dask array or dataframe, or columns that are not numbers; names them.
        ValueError: The array does not have this dimension.
    """
    if not is_dask_collection(collection):
        raise TypeError(f"from_dask: expected a Dask array or dataframe, got {type(collection).__name__}")
    is_delayed = isinstance(collection, Delayed)  # which has every attribute
    if not is_delayed and hasattr(collection, "to_dask_array"):
        collection = _array_of_frame(collection)
    if is_delayed or not all(hasattr(collection, name) for name in ("chunks", "dtype", "rechunk")):
        kind = "dask.delayed value" if is_delayed else f"{type(collection).__name__} of Dask"
        raise TypeError(f"from_dask: a {kind} cannot be a DTensor; pass an array or a dataframe, or compute() it first")
    if collection.dtype.kind not in _KINDS:
        raise TypeError(f"from_dask: a DTensor consists of numbers, and the array has dtype {collection.dtype}")
    if collection.ndim == 0:
        raise ValueError("from_dask: an array without dimensions cannot be sharded; pass its value, compute() it first")
    if dim is None:
        dim = max(range(collection.ndim), key=lambda each: (collection.numblocks[each], -each))
    if not -collection.ndim <= dim < collection.ndim:
        raise ValueError(f"from_dask: the array has {counted(collection.ndim, 'dimension')}, and no dim {dim}")
    return Cut(collection, dim % collection.ndim)


def _array_of_frame(frame: Any) -> Any:
    meta = frame._meta
    columns = dict(meta.dtypes.items()) if meta.ndim == 2 else {meta.name: meta.dtype}
    wrong = [
        f"{name!r} ({dtype})"
        for name, dtype in columns.items()
        if not isinstance(dtype, np.dtype) or dtype.kind not in _KINDS
    ]
    if wrong or not columns:
        raise TypeError(
            f"from_dask: a DTensor consists of numbers of NumPy's dtypes, which these columns are not:"
            f" {', '.join(wrong) or 'there are none'}; drop or convert them"
        )
    return frame.astype(np.result_type(*columns.values())).to_dask_array()


@dataclass(frozen=True)
class BlockOf:
    """An argument of one rank: the block of a DTensor, as the chunks that it consists of.

    Attributes:
        at: The first chunk in the list of all chunks of the rank.
        num: How many.
        dim: The dimension that is sharded.
        empty_shape: The shape of a block without rows.
        dtype: The dtype.
    """

    at: int
    num: int
    dim: int
    empty_shape: tuple[int, ...]
    dtype: str

    def to_dtensor(self, mesh: DeviceMesh | None, chunks: Sequence[Any]) -> DTensor:
        assert mesh is not None
        mine = [np.asarray(chunk) for chunk in chunks[self.at : self.at + self.num]]
        if not mine:
            block = np.empty(self.empty_shape, self.dtype)
        else:
            block = mine[0].view() if len(mine) == 1 else np.concatenate(mine, axis=self.dim)
            block = block.astype(self.dtype, copy=False)
        block.flags.writeable = False
        return DTensor.from_local(block, mesh, [Shard(self.dim)])


@dataclass
class Partitions:
    """The chunks of one argument in the memory of the workers.

    Attributes:
        cut: The argument.
        chunks: They, in order.
        rows: The rows of each; 1 where they are not known.
        owners: The workers that have each.
    """

    cut: Cut
    chunks: list[Future]
    rows: list[int]
    owners: list[Sequence[str]]

    @staticmethod
    def of(client: Client, cut: Cut, workers: Sequence[str]) -> Partitions:
        """Compute the chunks on these workers, and wait for them."""
        array, dim = cut.array, cut.dim
        others: dict[int, Any] = {each: -1 for each in range(array.ndim) if each != dim and array.numblocks[each] > 1}
        size = array.shape[dim]
        if array.numblocks[dim] < len(workers) <= size:  # also false for an unknown size
            others[dim] = _even(size, len(workers))
        array = client.persist(array.rechunk(others) if others else array, workers=list(workers))
        futures = futures_of(array)
        settle(client, futures)
        by_key = {future.key: future for future in futures}
        names = [(array.name, *at) for at in product(*map(range, array.numblocks))]
        chunks = [by_key[name] for name in names]
        for chunk in chunks:
            if chunk.status == "error":
                called(client, chunk.result)
        has = called(client, client.who_has, chunks)
        rows = [1 if np.isnan(each) else int(each) for each in array.chunks[dim]]
        return Partitions(replace(cut, array=array), chunks, rows, [has.get(chunk.key, ()) for chunk in chunks])

    def order(self, workers: Sequence[str]) -> list[str]:
        """Return the workers in the order of the chunks that they have."""
        places: dict[str, list[int]] = {worker: [] for worker in workers}
        for at, owners in enumerate(self.owners):
            for owner in owners:
                if owner in places:
                    places[owner].append(at)
        return sorted(workers, key=lambda worker: float(np.mean(places[worker] or [len(self.chunks)])))

    def split(self, workers: Sequence[str]) -> list[range]:
        """Return the chunks of each rank: those that its worker has, if they are consecutive, else as many rows."""
        here = [next((rank for rank, worker in enumerate(workers) if worker in owners), -1) for owners in self.owners]
        if sorted(here) != here or set(here) != set(range(len(workers))):
            total, starts = max(1, sum(self.rows)), np.cumsum([0, *self.rows])
            middles = [start + rows / 2 for start, rows in zip(starts, self.rows, strict=False)]
            here = [min(len(workers) - 1, int(middle * len(workers) / total)) for middle in middles]
        starts = np.searchsorted(here, range(len(workers) + 1))
        moved = sum(workers[rank] not in owners for rank, owners in zip(here, self.owners, strict=True))
        _log.info("from_dask: %d of %d chunks of %r move to other workers", moved, len(here), self.cut.array)
        return [range(int(start), int(end)) for start, end in pairwise(starts)]

    def block_of(self, mine: range, at: int) -> BlockOf:
        array = self.cut.array
        shape = tuple(0 if dim == self.cut.dim else int(rows) for dim, rows in enumerate(array.shape))
        return BlockOf(at, len(mine), self.cut.dim, shape, array.dtype.str)


def _even(size: int, parts: int) -> tuple[int, ...]:
    return tuple(size // parts + (part < size % parts) for part in range(parts))


@dataclass(frozen=True)
class Kept:
    """A DTensor that a rank returned; its block stays on the worker.

    Attributes:
        number: Of the block, among those of the rank.
        index: The part of the whole array that the block is, as starts and ends.
        shape: Of the whole array.
        dtype: Of both.
    """

    number: int
    index: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: str


def keep_blocks(result: Any, blocks: list[Any]) -> Any:
    """Return a result with `Kept` in place of its DTensors, also in tuples, lists and dicts; collect their blocks.

    Raises:
        TypeError: A DTensor is a pending reduction.
    """
    for value in values_in(result):
        if isinstance(value, DTensor) and any(isinstance(placement, Partial) for placement in value.placements):
            raise TypeError(
                f"a DTensor with placements {list(value.placements)} cannot become a Dask array; redistribute it to"
                " Shard or Replicate before it is returned"
            )

    def keep(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        coordinate = value.mesh.get_coordinate()
        assert coordinate is not None
        blocks.append(np.array(value.to_local()))
        index = tuple((part.start, part.stop) for part in value.layout.index(coordinate))
        return Kept(len(blocks) - 1, index, value.shape, value.dtype.str)

    return exchanged(result, keep)
