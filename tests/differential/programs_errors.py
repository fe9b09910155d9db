"""Programs that pass what is wrong, on all ranks alike, so that no rank waits for another.

Left out is what torch does not survive, or takes its whole timeout for: all_to_all_single of sizes that differ (it
writes past the output), messages to ranks that there are not (it waits for them), lists of objects that are too short
on the root alone (it sends all the same). meshdist refuses them all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from both_sides import Side


def _array(on: Side, shape: tuple[int, ...] = (4,), name: str = "float32") -> Any:
    return on.array(np.ones(shape, name))


def no_arrays(on: Side) -> None:
    dist, x = on.dist, _array(on)
    for label, wrong in (("None", None), ("a number", 1.5), ("a list", [1.0]), ("text", "x")):
        on.case(f"all_reduce {label}", lambda wrong=wrong: dist.all_reduce(wrong))
        on.case(f"broadcast {label}", lambda wrong=wrong: dist.broadcast(wrong, 0))
        on.case(f"reduce {label}", lambda wrong=wrong: dist.reduce(wrong, 0))
        on.case(f"send {label}", lambda wrong=wrong: dist.send(wrong, (on.rank + 1) % on.size))
        on.case(f"recv {label}", lambda wrong=wrong: dist.recv(wrong, (on.rank + 1) % on.size))
        on.case(f"isend {label}", lambda wrong=wrong: dist.isend(wrong, (on.rank + 1) % on.size))
        on.case(f"irecv {label}", lambda wrong=wrong: dist.irecv(wrong, (on.rank + 1) % on.size))
        on.case(f"all_gather of {label}", lambda wrong=wrong: dist.all_gather([x] * on.size, wrong))
        on.case(f"all_gather into a list of {label}", lambda wrong=wrong: dist.all_gather([wrong] * on.size, x))
        on.case(f"reduce_scatter of {label}", lambda wrong=wrong: dist.reduce_scatter(x, [wrong] * on.size))
        on.case(f"all_to_all of {label}", lambda wrong=wrong: dist.all_to_all([x] * on.size, [wrong] * on.size))
    on.case("all_gather into no list", lambda: dist.all_gather(None, x))
    on.case("all_gather into one array", lambda: dist.all_gather(5, x))
    on.case("reduce_scatter of no list", lambda: dist.reduce_scatter(x, None))


def lists(on: Side) -> None:
    """Lists of wrong length, and of arrays that differ."""
    dist, size = on.dist, on.size

    def many(count: int, shape: tuple[int, ...] = (4,), name: str = "float32") -> list[Any]:
        return [_array(on, shape, name) for _ in range(count)]

    x = _array(on)
    for count in (0, size - 1, size + 1):
        on.case(f"all_gather {count - size}", lambda count=count: dist.all_gather(many(count), x))
        on.case(f"reduce_scatter {count - size}", lambda count=count: dist.reduce_scatter(x, many(count)))
        on.case(f"all_to_all in {count - size}", lambda count=count: dist.all_to_all(many(size), many(count)))
        on.case(f"all_to_all out {count - size}", lambda count=count: dist.all_to_all(many(count), many(size)))
        if on.rank == 0:
            on.case(f"gather {count - size}", lambda count=count: dist.gather(x, many(count), dst=0))
            on.case(f"scatter {count - size}", lambda count=count: dist.scatter(x, many(count), src=0))
    on.case("all_gather of a different dtype", lambda: dist.all_gather(many(size, name="float64"), x))
    on.case("all_gather of a larger shape", lambda: dist.all_gather(many(size, (5,)), x))
    on.case("all_gather of a different shape", lambda: dist.all_gather(many(size, (2, 2)), x))
    on.case("reduce_scatter of a different dtype", lambda: dist.reduce_scatter(x, many(size, name="float64")))
    on.case("reduce_scatter of a larger shape", lambda: dist.reduce_scatter(x, many(size, (5,))))
    on.case("all_to_all of a different dtype", lambda: dist.all_to_all(many(size), many(size, name="float64")))
    if on.rank == 0:
        on.case("gather of a different dtype", lambda: dist.gather(x, many(size, name="float64"), dst=0))
        on.case("gather of a larger shape", lambda: dist.gather(x, many(size, (5,)), dst=0))
        on.case("scatter of a different dtype", lambda: dist.scatter(x, many(size, name="float64"), src=0))
        on.case("scatter of a larger shape", lambda: dist.scatter(x, many(size, (5,)), src=0))
        on.case("gather without a list", lambda: dist.gather(x, None, dst=0))
        on.case("scatter without a list", lambda: dist.scatter(x, None, src=0))
    else:
        on.case("gather with a list", lambda: dist.gather(x, many(size), dst=0))
        on.case("scatter with a list", lambda: dist.scatter(x, many(size), src=0))


def whole_arrays(on: Side) -> None:
    """Single arrays that do not fit each other."""
    dist, size = on.dist, on.size
    x = _array(on)
    gather, scatter, exchange = dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_to_all_single
    on.case("all_gather_into_tensor too small", lambda: gather(_array(on, (4 * size - 1,)), x))
    on.case("all_gather_into_tensor too large", lambda: gather(_array(on, (4 * size + 1,)), x))
    on.case("all_gather_into_tensor dtype", lambda: gather(_array(on, (4 * size,), "float64"), x))
    on.case("reduce_scatter_tensor too small", lambda: scatter(x, _array(on, (4 * size - 1,))))
    on.case("reduce_scatter_tensor too large", lambda: scatter(x, _array(on, (4 * size + 1,))))
    on.case("reduce_scatter_tensor dtype", lambda: scatter(x, _array(on, (4 * size,), "float64")))
    on.case("all_to_all_single dtype", lambda: exchange(_array(on, (size,), "float64"), _array(on, (size,))))
    on.case("all_to_all_single splits", lambda: exchange(x, x, [1] * (size + 1), [1] * (size + 1)))


def roots(on: Side) -> None:
    """Ranks that are none, as roots, and this rank as the other side of a message."""
    dist, x = on.dist, _array(on)
    for wrong in (on.size, -1):
        on.case(f"broadcast {wrong}", lambda wrong=wrong: dist.broadcast(x, wrong))
        on.case(f"reduce {wrong}", lambda wrong=wrong: dist.reduce(x, wrong))
    on.case("broadcast text", lambda: dist.broadcast(x, "0"))
    on.case("broadcast none", lambda: dist.broadcast(x))
    on.case("reduce none", lambda: dist.reduce(x))
    on.case("broadcast both", lambda: dist.broadcast(x, src=0, group_src=0))
    on.case("reduce both", lambda: dist.reduce(x, dst=0, group_dst=0))
    on.case("gather both", lambda: dist.gather(x, None, dst=0, group_dst=0))
    on.case("scatter both", lambda: dist.scatter(x, None, src=0, group_src=0))
    on.case("send both", lambda: dist.send(x, dst=0, group_dst=0))
    on.case("send none", lambda: dist.send(x))
    on.case("recv both", lambda: dist.recv(x, src=0, group_src=0))
    for name in ("send", "recv"):  # those that wait; isend and irecv to oneself work here
        on.case(f"{name} to oneself", lambda name=name: getattr(dist, name)(x, on.rank))


def ops(on: Side) -> None:
    dist, x = on.dist, _array(on)
    for label, op in (("a number", 3.5), ("None", None), ("unknown text", "no such op"), ("a function", np.add)):
        on.case(label, lambda op=op: dist.all_reduce(x, op))
    on.case("text", lambda: (dist.all_reduce(x, "max"), x)[1])
    on.case("unknown member", lambda: dist.ReduceOp.MEDIAN)
    on.case("names", lambda: [getattr(dist.ReduceOp, name) is not None for name in ("SUM", "AVG", "PREMUL_SUM")])
    for name in ("SUM", "PRODUCT", "MIN", "MAX"):
        on.case(f"reduce_op.{name}", lambda name=name: _reduced(on, getattr(dist.reduce_op, name)))


def _reduced(on: Side, op: Any) -> Any:
    x = on.array(np.array([on.rank + 1.0, -2.0]))
    on.dist.all_reduce(x, op)
    return x


def objects(on: Side) -> None:
    dist, size = on.dist, on.size

    def unpicklable() -> Any:
        return lambda: None

    on.case("all_gather_object that cannot be pickled", lambda: dist.all_gather_object([None] * size, unpicklable()))
    on.case("all_gather_object into a short list", lambda: dist.all_gather_object([None] * (size - 1), 1))
    on.case("all_gather_object into no list", lambda: dist.all_gather_object(None, 1))
    on.case("scatter_object_list into nothing", lambda: dist.scatter_object_list([], [1] * size, 0))
    on.case("scatter_object_list into no list", lambda: dist.scatter_object_list(None, [1] * size, 0))
    if on.rank:
        on.case("gather_object with a list elsewhere", lambda: dist.gather_object(1, [0] * size, 0))


def coalesced(on: Side) -> None:
    dist = on.dist
    x, y = _array(on), _array(on, (2,), "float64")
    on.case("all_reduce_coalesced of two dtypes", lambda: dist.all_reduce_coalesced([x, y]))
    on.case("all_reduce_coalesced of nothing", lambda: dist.all_reduce_coalesced([]))
    on.case("all_reduce_coalesced of None", lambda: dist.all_reduce_coalesced([None]))
    on.case("all_gather_coalesced of short lists", lambda: dist.all_gather_coalesced([[x]] * (on.size - 1), [x]))


def afterwards(on: Side) -> None:
    """After all that was refused, the world works."""
    x = on.array(np.arange(5.0) + on.rank)
    on.case("all_reduce", lambda: (on.dist.all_reduce(x), x)[1])
    on.case("barrier", lambda: on.dist.barrier())


PROGRAMS = (no_arrays, lists, whole_arrays, roots, ops, objects, coalesced, afterwards)
