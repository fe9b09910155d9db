"""The operations that can be measured: their arrays, their call, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import meshdist as dist
from meshdist.arrays import Array
from meshdist.bench.values import Part
from meshdist.reduce_op import ReduceOp

BLOCK, WHOLE = "block", "whole"
ALWAYS, POSSIBLE, NEVER = "always", "possible", "never"


class Setting(NamedTuple):
    """What all sizes of a measurement have in common.

    Attributes:
        rank, num_ranks: Who measures.
        dtype: Of the elements.
        op: The reduction.
        root: The source or destination.
        in_place: What is given and what is taken lie in one array, where the operation can have it so.
        shared: The arrays are made by `meshdist.empty`.
    """

    rank: int
    num_ranks: int
    dtype: np.dtype[Any]
    op: ReduceOp
    root: int
    in_place: bool
    shared: bool

    def array(self, count: int) -> Array:
        """Return a new array, of zeros, whose pages are there."""
        array: Array = dist.empty(count, self.dtype) if self.shared else np.empty(count, self.dtype)
        array.fill(0)
        return array


class Operation(NamedTuple):
    """An operation that can be measured. Its size is that of the longer of what a rank gives and what it takes.

    Attributes:
        gives, takes: One block of the size divided by the number of ranks, or the whole size; None where there is no
            array.
        in_place: Whether what is given and what is taken can be one array.
        prepare: From setting, given and taken array, returns the call.
        due: From setting and elements of a block (or, where there are no blocks, of all), returns what must be taken.
        takes_there: Whether this rank takes something.
        volume: The name by which the bytes that have to be sent are known.
        trips: How often the array travels in a call; the time is that of one trip.
        reduces, rooted: What of the setting counts.
        divides: The size is divided into blocks.
    """

    gives: str | None
    takes: str | None
    in_place: str
    prepare: Callable[[Setting, Array, Array], Callable[[], object]]
    due: Callable[[Setting, int], list[Part]]
    volume: str
    takes_there: Callable[[Setting], bool] = lambda setting: True
    trips: int = 1
    reduces: bool = False
    rooted: bool = False
    divides: bool = True


def elements(operation: Operation, num_bytes: int, setting: Setting) -> tuple[int, int, int]:
    """Return how many elements a rank gives, how many it takes, and how many a block has, of about so many bytes."""
    count = max(1, num_bytes // setting.dtype.itemsize)
    block = max(1, count // setting.num_ranks) if operation.divides else count
    whole = block * setting.num_ranks if operation.divides else count
    lengths = {BLOCK: block, WHOLE: whole, None: 0}
    return lengths[operation.gives], lengths[operation.takes], block


def is_in_place(operation: Operation, setting: Setting) -> bool:
    """Return whether what is given and what is taken lie in one array."""
    return operation.in_place == ALWAYS or (setting.in_place and operation.in_place != NEVER)


def arrays(operation: Operation, num_bytes: int, setting: Setting) -> tuple[Array, Array]:
    """Return the arrays that a rank gives and takes, or one that is both."""
    gives, takes, block = elements(operation, num_bytes, setting)
    if operation.in_place == ALWAYS:
        both = setting.array(gives)
        return both, both
    if not is_in_place(operation, setting):
        return setting.array(gives), setting.array(takes)
    long = setting.array(max(gives, takes))
    own = long[setting.rank * block : (setting.rank + 1) * block]
    return (own, long) if operation.gives == BLOCK else (long, own)


def _blocks(setting: Setting, array: Array) -> list[Array]:
    return np.split(array, setting.num_ranks)


def _blocks_at_root(setting: Setting, array: Array) -> list[Array] | None:
    return _blocks(setting, array) if setting.rank == setting.root else None


def _everyone(setting: Setting) -> tuple[int, ...]:
    return tuple(range(setting.num_ranks))


def _sum(setting: Setting, count: int) -> list[Part]:
    return [Part(0, _everyone(setting), 0, count)]


def _block_of_sum(setting: Setting, block: int) -> list[Part]:
    return [Part(0, _everyone(setting), setting.rank * block, block)]


def _from_root(setting: Setting, count: int) -> list[Part]:
    return [Part(0, (setting.root,), 0, count)]


def _block_from_root(setting: Setting, block: int) -> list[Part]:
    return [Part(0, (setting.root,), setting.rank * block, block)]


def _one_after_the_other(setting: Setting, block: int) -> list[Part]:
    return [Part(rank * block, (rank,), 0, block) for rank in _everyone(setting)]


def _own_block_of_each(setting: Setting, block: int) -> list[Part]:
    return [Part(rank * block, (rank,), setting.rank * block, block) for rank in _everyone(setting)]


def _is_root(setting: Setting) -> bool:
    return setting.rank == setting.root


def _all_reduce(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    return lambda: dist.all_reduce(take, setting.op)


def _reduce(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    return lambda: dist.reduce(take, setting.root, setting.op)


def _broadcast(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    return lambda: dist.broadcast(take, setting.root)


def _all_gather(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    blocks = _blocks(setting, take)
    return lambda: dist.all_gather(blocks, give)


def _all_gather_into_tensor(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    return lambda: dist.all_gather_into_tensor(take, give)


def _gather(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    blocks = _blocks_at_root(setting, take)
    return lambda: dist.gather(give, blocks, setting.root)


def _scatter(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    blocks = _blocks_at_root(setting, give)
    return lambda: dist.scatter(take, blocks, setting.root)


def _reduce_scatter(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    blocks = _blocks(setting, give)
    return lambda: dist.reduce_scatter(take, blocks, setting.op)


def _reduce_scatter_tensor(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    return lambda: dist.reduce_scatter_tensor(take, give, setting.op)


def _all_to_all(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    taken, given = _blocks(setting, take), _blocks(setting, give)
    return lambda: dist.all_to_all(taken, given)


def _all_to_all_single(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    return lambda: dist.all_to_all_single(take, give)


def _barrier(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    return dist.barrier


def _send_recv(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    def there() -> None:
        dist.send(give, 1)
        dist.recv(take, 1)

    def back() -> None:
        dist.recv(take, 0)
        dist.send(take, 0)

    def aside() -> None:
        return

    return (there, back)[setting.rank] if setting.rank < 2 else aside


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(WHOLE, WHOLE, ALWAYS, _all_reduce, _sum, "all_reduce", reduces=True, divides=False),
    "reduce": Operation(
        WHOLE, WHOLE, ALWAYS, _reduce, _sum, "reduce", _is_root, reduces=True, rooted=True, divides=False
    ),
    "broadcast": Operation(WHOLE, WHOLE, ALWAYS, _broadcast, _from_root, "broadcast", rooted=True, divides=False),
    "all_gather_into_tensor": Operation(
        BLOCK, WHOLE, POSSIBLE, _all_gather_into_tensor, _one_after_the_other, "all_gather"
    ),
    "all_gather": Operation(BLOCK, WHOLE, POSSIBLE, _all_gather, _one_after_the_other, "all_gather"),
    "gather": Operation(BLOCK, WHOLE, POSSIBLE, _gather, _one_after_the_other, "gather", _is_root, rooted=True),
    "scatter": Operation(WHOLE, BLOCK, NEVER, _scatter, _block_from_root, "scatter", rooted=True),
    "reduce_scatter_tensor": Operation(
        WHOLE, BLOCK, POSSIBLE, _reduce_scatter_tensor, _block_of_sum, "reduce_scatter", reduces=True
    ),
    "reduce_scatter": Operation(WHOLE, BLOCK, POSSIBLE, _reduce_scatter, _block_of_sum, "reduce_scatter", reduces=True),
    "all_to_all_single": Operation(WHOLE, WHOLE, NEVER, _all_to_all_single, _own_block_of_each, "all_to_all"),
    "all_to_all": Operation(WHOLE, WHOLE, NEVER, _all_to_all, _own_block_of_each, "all_to_all"),
    "send_recv": Operation(
        WHOLE,
        WHOLE,
        NEVER,
        _send_recv,
        lambda setting, count: [Part(0, (0,), 0, count)],
        "send",
        lambda setting: setting.rank < 2,
        trips=2,
        divides=False,
    ),
    "barrier": Operation(
        None, None, NEVER, _barrier, lambda setting, count: [], "barrier", lambda setting: False, divides=False
    ),
}
"""Every operation that can be measured, by name."""
