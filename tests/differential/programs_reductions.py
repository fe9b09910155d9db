"""Programs that reduce: the same bits where nothing rounds, the same within the bound of the dtype where it does."""

from __future__ import annotations

from typing import Any

import numpy as np
from both_sides import Side
from diff_values import COMPLEX, DTYPES, FLOATS, OPS, SHAPES, exact, large_bytes, rounding, unit_roundoff, zeros

_SOME_SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (7,), (3, 5))


def _op(on: Side, name: str) -> Any:
    return getattr(on.dist.ReduceOp, name)


def _result(on: Side, name: str, op: str, x: Any) -> Any:
    """Return what is compared of a result.

    The mean of complex numbers is the one that rounds: torch divides both parts in all_reduce, and elsewhere by a
    complex number. The parts are at most 8.
    """
    if op == "AVG" and name in COMPLEX:
        return on.close(x, np.full(tuple(x.shape), 8 * 4 * unit_roundoff(name)))
    return x


def all_reduce(on: Side) -> None:
    def run(name: str, op: str, shape: tuple[int, ...]) -> Any:
        x = on.array(exact(name, shape, op, on.rank))
        on.dist.all_reduce(x, _op(on, op))
        return x

    for name in DTYPES:
        for op in OPS:
            for shape in SHAPES:
                on.case(f"{op} {name} {shape}", run, name, op, shape)


def reduce(on: Side) -> None:
    def run(name: str, op: str, shape: tuple[int, ...], dst: int, **root: int) -> Any:
        x = on.array(exact(name, shape, op, on.rank))
        on.dist.reduce(x, op=_op(on, op), **(root or {"dst": dst}))
        # Gloo uses the arrays of the other ranks as it likes; meshdist leaves them as they were.
        return _result(on, name, op, x) if on.rank == dst else None

    for name in DTYPES:
        for op in OPS:
            for shape in _SOME_SHAPES:
                on.case(f"{op} {name} {shape}", run, name, op, shape, on.size - 1)
    for root in range(on.size):
        on.case(f"to {root}", run, "int32", "SUM", (9,), root)
        on.case(f"to group rank {root}", run, "int32", "SUM", (9,), root, group_dst=root)


def reduce_scatter(on: Side) -> None:
    def run(name: str, op: str, shape: tuple[int, ...]) -> Any:
        output = on.array(zeros(name, shape))
        blocks = on.arrays([exact(name, shape, op, on.rank, to) for to in range(on.size)])
        on.dist.reduce_scatter(output, blocks, _op(on, op))
        return [_result(on, name, op, output), *blocks]  # what is sent stays as it was

    for name in DTYPES:
        for op in OPS:
            for shape in _SOME_SHAPES:
                on.case(f"{op} {name} {shape}", run, name, op, shape)


def reduce_scatter_tensor(on: Side) -> None:
    def run(name: str, op: str, shape: tuple[int, ...], whole: tuple[int, ...], function: str) -> Any:
        output = on.array(zeros(name, shape))
        x = on.array(exact(name, whole, op, on.rank))
        getattr(on.dist, function)(output, x, _op(on, op))
        return [_result(on, name, op, output), x]

    tensor = "reduce_scatter_tensor"
    for name in DTYPES:
        for op in OPS:
            for shape in _SOME_SHAPES:
                if not shape:
                    continue  # Gloo reads past the shape of a 0-d output, and the process ends
                whole = (on.size * shape[0], *shape[1:])
                on.case(f"concatenated {op} {name} {shape}", run, name, op, shape, whole, tensor)
    on.case("stacked", run, "float32", "SUM", (3, 5), (on.size, 3, 5), tensor)
    on.case("reduce_scatter_single", run, "int64", "MAX", (4, 2), (4 * on.size, 2), "reduce_scatter_single")
    on.case("neither form", run, "int64", "MAX", (4, 2), (2, 4 * on.size), tensor)


def premul_sum(on: Side) -> None:
    """PREMUL_SUM without its factor. torch keeps the factor for NCCL, so with one there is nothing to compare."""

    def run() -> Any:
        x = on.array(exact("float32", (6,), "SUM", on.rank))
        on.dist.all_reduce(x, on.dist.ReduceOp.PREMUL_SUM)
        return x

    on.case("no factor", run)


def rounded(on: Side) -> None:
    """Reductions that round: what comes out depends on their order, which each library has its own of.

    Added one by one in any order, n numbers are within (n - 1) u sum|x| of the right sum, u the unit roundoff (Higham,
    Accuracy and Stability of Numerical Algorithms, section 4.2), so two orders are within twice that of each other;
    products likewise, relative to the product. A complex number has both parts off by as much.
    """

    def run(name: str, op: str, count: int) -> Any:
        values = [rounding(name, (count,), op, rank) for rank in range(on.size)]
        x = on.array(values[on.rank])
        on.dist.all_reduce(x, _op(on, op))
        wide = np.complex128 if values[0].dtype.kind == "c" else np.float64
        sizes = np.abs(np.array([value.astype(wide) for value in values]))
        total = sizes.prod(axis=0) if op == "PRODUCT" else sizes.sum(axis=0)
        return on.close(x, 2 * (on.size - 1) * unit_roundoff(name) * (1 + 2**-6) * total)

    for name in (*FLOATS, *COMPLEX):
        for op in ("SUM",) if name in COMPLEX else ("SUM", "PRODUCT"):
            for count in (1, 33, 5000):
                on.case(f"{op} {name} [{count}]", run, name, op, count)


def special_values(on: Side) -> None:
    """Infinities add and compare as IEEE 754 has it; NaN in a sum stays."""

    def run(name: str, op: str, values: list[float]) -> Any:
        x = on.array(np.array(values, np.float64).astype(exact(name, (), op).dtype))
        on.dist.all_reduce(x, _op(on, op))
        return np_isnan(on, x), x if op != "SUM" else None

    def np_isnan(on: Side, x: Any) -> Any:
        return [value != value for value in x.tolist()]

    infinite = [[np.inf, -np.inf, 1.0], [np.inf, np.inf, -np.inf], [1.0, -np.inf, 2.0], [0.0, 0.0, 0.0]]
    for name in FLOATS:
        for op in ("SUM", "MIN", "MAX"):
            on.case(f"infinities {op} {name}", run, name, op, infinite[on.rank])
            for holder in (0, on.size - 1):
                number = [np.nan, 1.0] if on.rank == holder else [2.0, 3.0]
                on.case(f"NaN of rank {holder} {op} {name}", run, name, op, number)


def large(on: Side) -> None:
    for num_bytes in large_bytes(on.size):
        for name in ("float32", "int64") if num_bytes < 1 << 20 else ("float32",):
            _large(on, name, num_bytes // np.dtype(name).itemsize)


def _large(on: Side, name: str, count: int) -> None:
    def to_all() -> Any:
        x = on.array(exact(name, (count,), "SUM", on.rank))
        on.dist.all_reduce(x)
        return x

    def to_one() -> Any:
        x = on.array(exact(name, (count,), "SUM", on.rank))
        on.dist.reduce(x, 1)
        return x if on.rank == 1 else None

    def to_each() -> Any:
        output = on.array(zeros(name, (count,)))
        on.dist.reduce_scatter(output, on.arrays([exact(name, (count,), "SUM", on.rank, to) for to in range(on.size)]))
        return output

    def to_each_of_one() -> Any:
        output = on.array(zeros(name, (count,)))
        on.dist.reduce_scatter_tensor(output, on.array(exact(name, (on.size * count,), "SUM", on.rank)))
        return output

    for function in (to_all, to_one, to_each, to_each_of_one):
        on.case(f"{function.__name__} {name} x {count}", function)


PROGRAMS = (
    all_reduce,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    premul_sum,
    rounded,
    special_values,
    large,
)
