"""The operations that can be measured: their arrays, their call, and their expected results."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

import meshdist as dist
from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import ReduceOp
from meshdist.bench.values import Part

BLOCK, WHOLE = "block", "whole"
# From the first on, arrays have pages of their own; from the second on, NumPy asks for large ones.
_OWN_PAGES_BYTES, _LARGE_PAGES_BYTES = 1 << 20, 4 << 20
ALWAYS, POSSIBLE, NEVER = "always", "possible", "never"


class Setting(NamedTuple):
    """The common setting of a measurement."""

    rank: int
    num_ranks: int
    dtype: np.dtype[Any]
    op: ReduceOp
    root: int  # the source or destination
    in_place: bool  # input and output are one array, if the operation allows it
    shared: bool  # the arrays are made by `meshdist.empty`

    def array(self, count: int) -> Array:
        """Return a new array of zeros, whose pages are mapped."""
        make = dist.empty if self.shared else _empty
        array: Array = make(count, self.dtype)
        array.fill(0)
        return array


def _empty(count: int, dtype: np.dtype[Any]) -> Array:
    """Return a new array; a large one in pages of its own, as one has that a program makes once.

    `malloc` gives it the memory of earlier arrays, elsewhere in its page and in small pages; which way is the fastest
    depends on both.
    """
    num_bytes = count * dtype.itemsize
    if sys.platform == "linux" and num_bytes >= _OWN_PAGES_BYTES:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if num_bytes >= _LARGE_PAGES_BYTES:
            with suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, dtype)
    return np.empty(count, dtype)


class Operation(NamedTuple):
    """An operation that can be measured. Its size is that of the longer of input and output."""

    # Input and output: one block (the size divided by the number of ranks), the whole size, or None.
    gives: str | None
    takes: str | None
    in_place: str  # whether these can be one array
    prepare: Callable[[Setting, Array, Array], Callable[[], object]]  # from setting, input and output, returns the call
    # From setting and elements of a block (of everything without blocks), returns the expected output.
    due: Callable[[Setting, int], list[Part]]
    volume: str  # the name under which `sent_bytes` knows the operation
    has_output: Callable[[Setting], bool] = lambda setting: True
    trips: int = 1  # how often the array travels in a call; the time is that of one trip
    reduces: bool = False  # whether `op` of the setting applies
    rooted: bool = False  # whether `root` of the setting applies
    divides: bool = True  # the size is divided into blocks


def elements(operation: Operation, num_bytes: int, setting: Setting) -> tuple[int, int, int]:
    """Return the number of elements of input, output and block, for about `num_bytes`."""
    count = max(1, num_bytes // setting.dtype.itemsize)
    block = max(1, count // setting.num_ranks) if operation.divides else count
    whole = block * setting.num_ranks if operation.divides else count
    lengths = {BLOCK: block, WHOLE: whole, None: 0}
    return lengths[operation.gives], lengths[operation.takes], block


def is_in_place(operation: Operation, setting: Setting) -> bool:
    return operation.in_place == ALWAYS or (setting.in_place and operation.in_place != NEVER)


def arrays(operation: Operation, num_bytes: int, setting: Setting) -> tuple[Array, Array]:
    """Return input and output of a rank, which may be one array."""
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


def _there_and_back(
    setting: Setting,
    send: Callable[[Array, int], object],
    recv: Callable[[Array, int], object],
    give: Array,
    take: Array,
) -> Callable[[], object]:
    def there() -> None:
        send(give, 1)
        recv(take, 1)

    def back() -> None:
        recv(take, 0)
        send(take, 0)

    def aside() -> None:
        return

    return (there, back)[setting.rank] if setting.rank < 2 else aside


def _send_recv(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    return _there_and_back(setting, dist.send, dist.recv, give, take)


def _recv_from_any(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    return _there_and_back(setting, dist.send, lambda array, _: dist.recv(array), give, take)


def _probe_and_recv(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    def recv(array: Array, _: int) -> None:
        found = dist.probe(tag=None)
        dist.recv(array, found.source, tag=found.tag)

    return _there_and_back(setting, dist.send, recv, give, take)


def _send_object_list(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    def recv(array: Array, sender: int) -> None:
        objects = [None]
        dist.recv_object_list(objects, sender)
        array[:] = objects[0]

    return _there_and_back(setting, lambda array, to: dist.send_object_list([array], to), recv, give, take)


def _shift(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    ring = dist.init_device_mesh("cpu", (setting.num_ranks,))
    return lambda: ring.shift(give, out=take)


def _sendrecv(setting: Setting, give: Array, take: Array) -> Callable[[], object]:
    after, before = (setting.rank + 1) % setting.num_ranks, (setting.rank - 1) % setting.num_ranks
    return lambda: dist.sendrecv(give, take, after, before)


def _between_two(make: Callable[[Setting, Array, Array], Callable[[], object]]) -> Operation:
    """Return the operation of a message from rank 0 to rank 1 and back."""
    return Operation(
        WHOLE,
        WHOLE,
        NEVER,
        make,
        lambda setting, count: [Part(0, (0,), 0, count)],
        "send",
        lambda setting: setting.rank < 2,
        trips=2,
        divides=False,
    )


def _around_the_ring(make: Callable[[Setting, Array, Array], Callable[[], object]]) -> Operation:
    """Return the operation of a message from each rank to the next one."""
    return Operation(
        WHOLE,
        WHOLE,
        NEVER,
        make,
        lambda setting, count: [Part(0, ((setting.rank - 1) % setting.num_ranks,), 0, count)],
        "send",
        divides=False,
    )


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
    "send_recv": _between_two(_send_recv),
    "recv_from_any": _between_two(_recv_from_any),
    "probe_and_recv": _between_two(_probe_and_recv),
    "send_object_list": _between_two(_send_object_list),
    "sendrecv": _around_the_ring(_sendrecv),
    "shift": _around_the_ring(_shift),
    "barrier": Operation(
        None, None, NEVER, _barrier, lambda setting, count: [], "barrier", lambda setting: False, divides=False
    ),
}
"""Every operation that can be measured, by name."""
