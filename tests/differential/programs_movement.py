"""Programs that move arrays: every bit must be the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from both_sides import Side
from diff_values import DTYPES, FLOAT8, SHAPES, any_bits, large_bytes, zeros

ALL_DTYPES = (*DTYPES, *FLOAT8)


def _zeros(on: Side, name: str, shape: tuple[int, ...]) -> Any:
    return on.array(zeros(name, shape))


def broadcast(on: Side) -> None:
    def run(name: str, shape: tuple[int, ...], src: int, group_src: int | None = None) -> Any:
        x = on.array(any_bits(name, shape, on.rank))
        if group_src is None:
            on.dist.broadcast(x, src)
        else:
            on.dist.broadcast(x, group_src=group_src)
        return x

    for name in ALL_DTYPES:
        for shape in SHAPES:
            on.case(f"{name} {shape}", run, name, shape, on.size - 1)
    for root in range(on.size):
        on.case(f"from {root}", run, "float32", (5,), root)
        on.case(f"from group rank {root}", run, "float32", (5,), root, root)


def all_gather(on: Side) -> None:
    def run(name: str, shape: tuple[int, ...]) -> Any:
        outputs = [_zeros(on, name, shape) for _ in range(on.size)]
        on.dist.all_gather(outputs, on.array(any_bits(name, shape, on.rank)))
        return outputs

    for name in ALL_DTYPES:
        for shape in SHAPES:
            on.case(f"{name} {shape}", run, name, shape)


def all_gather_uneven(on: Side) -> None:
    def run(rows: list[int]) -> Any:
        outputs = [_zeros(on, "int32", (count, 2)) for count in rows]
        on.dist.all_gather(outputs, on.array(any_bits("int32", (rows[on.rank], 2), on.rank)))
        return outputs

    on.case("rows by rank", run, [rank + 1 for rank in range(on.size)])


def all_gather_into_tensor(on: Side) -> None:
    def run(name: str, shape: tuple[int, ...], whole: tuple[int, ...], function: str) -> Any:
        output = _zeros(on, name, whole)
        getattr(on.dist, function)(output, on.array(any_bits(name, shape, on.rank)))
        return output

    for name in ALL_DTYPES:
        for shape in SHAPES:
            on.case(f"stacked {name} {shape}", run, name, shape, (on.size, *shape), "all_gather_into_tensor")
            if shape:
                whole = (on.size * shape[0], *shape[1:])
                on.case(f"concatenated {name} {shape}", run, name, shape, whole, "all_gather_into_tensor")
    on.case("all_gather_single", run, "int64", (4, 2), (4 * on.size, 2), "all_gather_single")
    on.case("neither form", run, "int64", (4, 2), (2, 4 * on.size), "all_gather_into_tensor")


def gather(on: Side) -> None:
    def run(name: str, shape: tuple[int, ...], dst: int, **root: int) -> Any:
        outputs = [_zeros(on, name, shape) for _ in range(on.size)] if on.rank == dst else None
        on.dist.gather(on.array(any_bits(name, shape, on.rank)), outputs, **(root or {"dst": dst}))
        return outputs

    for name in ALL_DTYPES:
        for shape in SHAPES:
            on.case(f"{name} {shape}", run, name, shape, on.size - 1)
    for root in range(on.size):
        on.case(f"to {root}", run, "float32", (5,), root)
        on.case(f"to group rank {root}", run, "float32", (5,), root, group_dst=root)


def scatter(on: Side) -> None:
    def run(name: str, shape: tuple[int, ...], src: int, **root: int) -> Any:
        blocks = [on.array(any_bits(name, shape, rank)) for rank in range(on.size)] if on.rank == src else None
        output = _zeros(on, name, shape)
        on.dist.scatter(output, blocks, **(root or {"src": src}))
        return output

    for name in ALL_DTYPES:
        for shape in SHAPES:
            on.case(f"{name} {shape}", run, name, shape, on.size - 1)
    for root in range(on.size):
        on.case(f"from {root}", run, "float32", (5,), root)
        on.case(f"from group rank {root}", run, "float32", (5,), root, group_src=root)


def defaults_of_roots(on: Side) -> None:
    def gather_to_the_first() -> Any:
        outputs = [_zeros(on, "int32", (2,)) for _ in range(on.size)] if on.rank == 0 else None
        on.dist.gather(on.array(any_bits("int32", (2,), on.rank)), outputs)
        return outputs

    def scatter_from_the_first() -> Any:
        blocks = [on.array(any_bits("int32", (2,), rank)) for rank in range(on.size)] if on.rank == 0 else None
        output = _zeros(on, "int32", (2,))
        on.dist.scatter(output, blocks)
        return output

    def empty_lists() -> Any:
        output = _zeros(on, "int32", (2,))
        on.dist.scatter(output, [on.array(any_bits("int32", (2,), 1))] * on.size if on.rank == 0 else [], src=0)
        return output

    on.case("gather", gather_to_the_first)
    on.case("scatter", scatter_from_the_first)
    on.case("scatter with empty lists elsewhere", empty_lists)


def all_to_all(on: Side) -> None:
    def run(name: str, shape: tuple[int, ...]) -> Any:
        outputs = [_zeros(on, name, shape) for _ in range(on.size)]
        on.dist.all_to_all(outputs, [on.array(any_bits(name, shape, on.rank, to)) for to in range(on.size)])
        return outputs

    def uneven() -> Any:
        # Rank r sends r + 2 * to + 1 elements to rank `to`.
        counts = [[rank + 2 * to + 1 for to in range(on.size)] for rank in range(on.size)]
        outputs = [_zeros(on, "int16", (counts[source][on.rank],)) for source in range(on.size)]
        inputs = [on.array(any_bits("int16", (count,), on.rank, to)) for to, count in enumerate(counts[on.rank])]
        on.dist.all_to_all(outputs, inputs)
        return outputs

    for name in ALL_DTYPES:
        for shape in SHAPES:
            on.case(f"{name} {shape}", run, name, shape)
    on.case("uneven", uneven)


def all_to_all_single(on: Side) -> None:
    def run(name: str, give: list[int], take: list[int], row: tuple[int, ...], splits: tuple[Any, ...]) -> Any:
        output = _zeros(on, name, (sum(take), *row))
        on.dist.all_to_all_single(output, on.array(any_bits(name, (sum(give), *row), on.rank)), *splits)
        return output

    for name in ALL_DTYPES:
        for rows in (0, 1, 3):
            even = [rows] * on.size
            on.case(f"{name} {rows} rows", run, name, even, even, (2,), ())
    table: dict[str, Callable[[int, int], int]] = {
        "some": lambda source, to: source + 2 * to + 1,
        "none to oneself": lambda source, to: int(source != to),
        "none but to the next": lambda source, to: 3 * int(to == (source + 1) % on.size),
        "none": lambda source, to: 0,
    }
    for label, count in table.items():
        give = [count(on.rank, to) for to in range(on.size)]
        take = [count(source, on.rank) for source in range(on.size)]
        on.case(f"splits {label}", run, "float64", give, take, (3,), (take, give))
        on.case(f"splits {label}, as tuples", run, "int8", give, take, (), (tuple(take), tuple(give)))
    even = [2] * on.size
    on.case("empty lists of splits", run, "int32", even, even, (), ([], []))
    on.case("splits of the output only", run, "int32", even, even, (), (even, None))
    on.case("splits that do not add up", run, "int32", even, even, (), ([1] * on.size, even))
    on.case("too many splits", run, "int32", even, even, (), ([*even, 0], [*even, 0]))
    on.case("rows that do not divide", run, "int32", [*even, 1], [*even, 1], (), ())


def large(on: Side) -> None:
    for count in (num_bytes // 4 for num_bytes in large_bytes(on.size)):
        _large(on, count)


def _large(on: Side, count: int) -> None:
    size, rank = on.size, on.rank

    def fresh(*of: int) -> Any:
        return on.array(any_bits("float32", (count,), *of))

    def empty() -> Any:
        return _zeros(on, "float32", (count,))

    def to_all() -> Any:
        x = fresh(rank)
        on.dist.broadcast(x, 1)
        return x

    def from_all() -> Any:
        outputs = [empty() for _ in range(size)]
        on.dist.all_gather(outputs, fresh(rank))
        return outputs

    def from_all_in_one() -> Any:
        output = _zeros(on, "float32", (size * count,))
        on.dist.all_gather_into_tensor(output, fresh(rank))
        return output

    def to_one() -> Any:
        outputs = [empty() for _ in range(size)] if rank == 1 else None
        on.dist.gather(fresh(rank), outputs, dst=1)
        return outputs

    def from_one() -> Any:
        output = empty()
        on.dist.scatter(output, [fresh(to) for to in range(size)] if rank == 1 else None, src=1)
        return output

    def exchanged() -> Any:
        output = _zeros(on, "float32", (size * count,))
        on.dist.all_to_all_single(output, on.array(any_bits("float32", (size * count,), rank)))
        return output

    for function in (to_all, from_all, from_all_in_one, to_one, from_one, exchanged):
        on.case(f"{function.__name__} {4 * count} bytes", function)


def strided(on: Side) -> None:
    """Arrays that are parts of others. What lies between their elements must stay, so the whole is recorded."""

    def every_second(values: np.ndarray) -> tuple[Any, Any]:
        whole = np.zeros((2 * len(values), *values.shape[1:]), values.dtype)
        whole[::2] = values
        base = on.array(whole)
        return base, base[::2]

    def columns(values: np.ndarray) -> tuple[Any, Any]:
        whole = np.zeros((values.shape[0], values.shape[1] + 3), values.dtype)
        whole[:, 1:-2] = values
        base = on.array(whole)
        return base, base[:, 1:-2]

    def transposed(values: np.ndarray) -> tuple[Any, Any]:
        base = on.array(values.T)
        return base, base.T

    def middle(values: np.ndarray) -> tuple[Any, Any]:
        whole = np.zeros((len(values) + 2, *values.shape[1:]), values.dtype)
        whole[1:-1] = values
        base = on.array(whole)
        return base, base[1:-1]

    for layout in (every_second, columns, transposed, middle):
        _strided(on, layout.__name__, layout)


def _strided(on: Side, label: str, layout: Callable[[np.ndarray], tuple[Any, Any]]) -> None:
    size, rank = on.size, on.rank
    block = any_bits("int32", (size * 2, 4), rank)
    nothing = np.zeros_like(block)

    def step(name: str, call: Callable[[], tuple[Any, ...]]) -> None:
        on.case(f"{name}, {label}", call)

    def all_reduce() -> Any:
        base, x = layout(block)
        on.dist.all_reduce(x)
        return (base,)

    def broadcast() -> Any:
        base, x = layout(block)
        on.dist.broadcast(x, 0)
        return (base,)

    def all_gather() -> Any:
        pairs = [layout(nothing) for _ in range(size)]
        on.dist.all_gather([x for _, x in pairs], layout(block)[1])
        return tuple(base for base, _ in pairs)

    def all_gather_of_plain() -> Any:
        pairs = [layout(nothing) for _ in range(size)]
        on.dist.all_gather([x for _, x in pairs], on.array(block))
        return tuple(base for base, _ in pairs)

    def all_gather_into_plain() -> Any:
        output = on.array(np.zeros((size, *block.shape), block.dtype))
        on.dist.all_gather_into_tensor(output, layout(block)[1])
        return (output,)

    def reduce_scatter_tensor() -> Any:
        output = on.array(np.zeros((2, 4), np.int32))
        on.dist.reduce_scatter_tensor(output, layout(block)[1])
        return (output,)

    def all_to_all_single() -> Any:
        base, output = layout(nothing)
        on.dist.all_to_all_single(output, layout(block)[1])
        return (base,)

    def all_to_all_of_plain() -> Any:
        base, output = layout(nothing)
        on.dist.all_to_all_single(output, on.array(block))
        return (base,)

    functions = (all_reduce, broadcast, all_gather, all_gather_of_plain, all_gather_into_plain)
    for function in (*functions, reduce_scatter_tensor, all_to_all_single, all_to_all_of_plain):
        step(function.__name__, function)


PROGRAMS = (
    broadcast,
    all_gather,
    all_gather_uneven,
    all_gather_into_tensor,
    gather,
    scatter,
    defaults_of_roots,
    all_to_all,
    all_to_all_single,
    large,
    strided,
)
