"""Programs about everything that is not one collective of arrays: messages, objects, coalescing, async calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from both_sides import Side
from diff_values import COMPLEX, DTYPES, FLOAT8, any_bits, exact, zeros

_SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (7,), (3, 5))
# Below and above what is buffered.
_COUNTS = (1, 16 << 10, (16 << 10) + 1, 300_000)


def _zeros(on: Side, name: str, shape: tuple[int, ...]) -> Any:
    return on.array(zeros(name, shape))


def messages(on: Side) -> None:
    """Rank 0 sends to every other rank, and gets an answer."""

    def there_and_back(name: str, shape: tuple[int, ...]) -> Any:
        if on.rank:
            x = _zeros(on, name, shape)
            source = on.dist.recv(x, 0)
            on.dist.send(x, 0)
            return source, x
        answers = []
        for peer in range(1, on.size):
            on.dist.send(on.array(any_bits(name, shape, peer)), peer)
            x = _zeros(on, name, shape)
            answers.append((on.dist.recv(x, src=peer), x))
        return answers

    for name in (*DTYPES, *FLOAT8):
        for shape in _SHAPES:
            on.case(f"{name} {shape}", there_and_back, name, shape)
    for count in _COUNTS:
        on.case(f"{4 * count} bytes", there_and_back, "float32", (count,))


def tags(on: Side) -> None:
    """Rank 0 sends three messages; the last rank takes them in a different order.

    The sends are started, not made: Gloo's `send` waits for the receiver, however short the message.
    """

    def out_of_order() -> Any:
        last = on.size - 1
        if on.rank == 0:
            given = [on.array(any_bits("int64", (tag,), tag)) for tag in (1, 2, 3)]
            works = [on.dist.isend(x, dst=last, tag=tag) for tag, x in enumerate(given, 1)]
            return [work.wait() for work in works]
        if on.rank != last:
            return None
        received = [_zeros(on, "int64", (tag,)) for tag in (2, 3, 1)]
        for x, tag in zip(received, (2, 3, 1), strict=True):
            on.dist.recv(x, src=0, tag=tag)
        return received

    on.case("out of order", out_of_order)


def any_source(on: Side) -> None:
    def from_all() -> Any:
        if on.rank:
            on.dist.send(on.array(np.array([on.rank, 10 * on.rank])), 0)
            return None
        received = []
        for _ in range(1, on.size):
            x = on.array(np.zeros(2, np.int64))
            received.append([on.dist.recv(x), *x.tolist()])
        return sorted(received)

    on.case("recv from any rank", from_all)


def started_messages(on: Side) -> None:
    following, before = (on.rank + 1) % on.size, (on.rank - 1) % on.size

    def ring(count: int, tag: int) -> Any:
        x, y = on.array(any_bits("float32", (count,), on.rank)), _zeros(on, "float32", (count,))
        works = [on.dist.isend(x, following, tag=tag), on.dist.irecv(y, before, tag=tag)]
        return [work.wait() for work in works], y

    def works() -> Any:
        y = _zeros(on, "int32", (2,))
        give = on.dist.isend(on.array(any_bits("int32", (2,), on.rank)), following)
        take = on.dist.irecv(y, before)
        take.wait()
        give.wait()
        return [give, take, take.source_rank(), give.is_completed(), take.is_completed(), y]

    def many() -> Any:
        ys = [_zeros(on, "int32", (5,)) for _ in range(20)]
        takes = [on.dist.irecv(y, before) for y in ys]
        gives = [on.dist.isend(on.array(any_bits("int32", (5,), on.rank, k)), following) for k in range(20)]
        for work in (*takes, *gives):
            work.wait()
        return ys

    def batch(tag: int) -> Any:
        dist, y = on.dist, _zeros(on, "int32", (6,))
        ops = [
            dist.P2POp(dist.isend, on.array(any_bits("int32", (6,), on.rank)), following, tag=tag),
            dist.P2POp(dist.irecv, y, before, tag=tag),
        ]
        works = dist.batch_isend_irecv(ops)
        for work in works:
            work.wait()
        return len(works), works, y, ops[0].peer, ops[0].tag

    for count in _COUNTS:
        on.case(f"ring of {4 * count} bytes", ring, count, 0)
    on.case("ring with a tag", ring, 10, 7)
    on.case("works", works)
    on.case("many", many)
    on.case("batch", batch, 0)
    on.case("batch with a tag", batch, 3)
    on.case("batch of nothing", lambda: on.dist.batch_isend_irecv([]))
    on.case("batch of no P2POp", lambda: on.dist.batch_isend_irecv([1]))
    on.case("P2POp of another function", lambda: on.dist.P2POp(on.dist.broadcast, _zeros(on, "int32", (1,)), following))
    x = _zeros(on, "int32", (1,))
    on.case("P2POp isend of no rank", lambda: on.dist.P2POp(on.dist.isend, x))
    on.case("P2POp irecv of no rank", lambda: on.dist.P2POp(on.dist.irecv, x))
    on.case("P2POp of both ranks", lambda: on.dist.P2POp(on.dist.isend, x, following, group_peer=following))


def _things(rank: int) -> list[Any]:
    return [None, rank, {"rank": rank, "list": [1.5, "text"]}, b"\0" * (rank * 1000), (rank, [rank] * rank)]


def objects(on: Side) -> None:
    last = on.size - 1

    def broadcast(**root: int) -> Any:
        things = _things(on.rank)
        on.dist.broadcast_object_list(things, **root)  # which returns its list here, and None in torch
        return things

    def gather(**root: int) -> Any:
        out = [None] * on.size if on.rank == last else None
        on.dist.gather_object(_things(on.rank), out, **root)
        return out

    def all_gather() -> Any:
        out = [None] * on.size
        on.dist.all_gather_object(out, _things(on.rank))
        return out

    def scatter(**root: int) -> Any:
        out = [None, "kept"]
        things = [_things(rank) for rank in range(on.size)] if on.rank == last else None
        on.dist.scatter_object_list(out, things, **root)
        return out

    def send() -> Any:
        things = _things(7) if on.rank == 0 else [None] * 5
        if on.rank == 0:
            return [on.dist.send_object_list(things, dst=peer) for peer in range(1, on.size)]
        return on.dist.recv_object_list(things, src=0), things

    on.case("broadcast", broadcast, src=last)
    on.case("broadcast from a group rank", broadcast, group_src=last)
    on.case("broadcast from the first", broadcast)
    on.case("gather", gather, dst=last)
    on.case("gather to a group rank", gather, group_dst=last)
    on.case("all_gather", all_gather)
    on.case("scatter", scatter, src=last)
    on.case("scatter from a group rank", scatter, group_src=last)
    on.case("send and recv", send)


def arrays_as_objects(on: Side) -> None:
    def all_gather() -> Any:
        out = [None] * on.size
        on.dist.all_gather_object(out, {"x": on.array(any_bits("float32", (3,), on.rank))})
        return out

    on.case("all_gather", all_gather)


def coalesced(on: Side) -> None:
    def all_reduce(name: str, op: str) -> Any:
        arrays = on.arrays([exact(name, shape, op, on.rank) for shape in ((3,), (2, 2), ())])
        on.dist.all_reduce_coalesced(arrays, getattr(on.dist.ReduceOp, op))
        return arrays

    def all_gather() -> Any:
        shapes = ((3,), (2, 2), (1,))
        outputs = [[_zeros(on, "float32", shape) for shape in shapes] for _ in range(on.size)]
        on.dist.all_gather_coalesced(outputs, on.arrays([any_bits("float32", shape, on.rank) for shape in shapes]))
        return outputs

    for name in ("int32", "float32", "float64", *COMPLEX):
        for op in ("SUM", "MAX"):
            on.case(f"all_reduce {op} {name}", all_reduce, name, op)
    on.case("all_gather", all_gather)


def async_calls(on: Side) -> None:
    """Every collective with async_op=True: what `wait` returns, and the values after it."""
    dist, size, rank = on.dist, on.size, on.rank

    def fresh(*of: object) -> Any:
        return on.array(any_bits("int32", (6,), rank, *of))

    def empty(count: int = 6) -> Any:
        return _zeros(on, "int32", (count,))

    def whole() -> Any:
        return on.array(any_bits("int32", (6 * size,), rank))

    def step(name: str, outputs: Any, *args: Any, **kwargs: Any) -> None:
        def run() -> Any:
            work = getattr(dist, name)(*args, **kwargs, async_op=True)
            waited = [work.wait(), work.wait()]
            return work, waited, work.is_completed(), work.is_success(), outputs

        on.case(name, run)

    x, y, z, many = fresh(), fresh(), empty(), [empty() for _ in range(size)]
    wide, more = empty(6 * size), [empty() for _ in range(size)]
    step("all_reduce", x, x)
    step("broadcast", y, y, 0)
    step("reduce", y if rank == 1 else None, y, 1)
    step("all_gather", many, many, fresh())
    step("all_gather_into_tensor", wide, wide, fresh())
    step("gather", more if rank == 0 else None, fresh(), more if rank == 0 else None, dst=0)
    step("scatter", z, z, [fresh(to) for to in range(size)] if rank == 1 else None, src=1)
    step("reduce_scatter", z, z, [fresh(to) for to in range(size)])
    step("reduce_scatter_tensor", z, z, whole())
    step("all_to_all", more, more, [fresh(to) for to in range(size)])
    step("all_to_all_single", wide, wide, whole())
    step("barrier", None)


def works(on: Side) -> None:
    """What a Work and its Future answer."""

    def done() -> Any:
        x = on.array(exact("float32", (4,), "SUM", on.rank))
        work = on.dist.all_reduce(x, async_op=True)
        work.wait()
        return work

    on.case("result", lambda: done().result())
    on.case("exception", lambda: done().exception())
    on.case("source_rank of a collective", lambda: done().source_rank())
    on.case("value of the future", lambda: done().get_future().value())
    on.case("wait of the future", lambda: done().get_future().wait())
    on.case("done of the future", lambda: _settled(done().get_future()).done())
    on.case("then", lambda: done().get_future().then(lambda future: ("then", future.value())).wait())
    on.case(
        "then of then", lambda: done().get_future().then(lambda _: 1).then(lambda future: future.value() + 1).wait()
    )
    on.case("then that raises", lambda: done().get_future().then(lambda _: 1 // 0).wait())
    on.case("callback", lambda: _called_back(done().get_future()))


def _settled(future: Any) -> Any:
    future.wait()
    return future


def _called_back(future: Any) -> Any:
    calls: list[bool] = []
    future.add_done_callback(lambda done: calls.append(done.done()))
    return calls


def returns(on: Side) -> None:
    """What the sync calls return."""
    dist, size, rank = on.dist, on.size, on.rank

    def fresh() -> Any:
        return on.array(any_bits("int32", (4,), rank))

    def each() -> list[Any]:
        return [fresh() for _ in range(size)]

    whole = on.array(any_bits("int32", (4 * size,), rank))
    on.case("all_reduce", lambda: dist.all_reduce(fresh()))
    on.case("broadcast", lambda: dist.broadcast(fresh(), 0))
    on.case("reduce", lambda: dist.reduce(fresh(), 0))
    on.case("all_gather", lambda: dist.all_gather(each(), fresh()))
    on.case("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(whole, fresh()))
    on.case("gather", lambda: dist.gather(fresh(), each() if rank == 0 else None, dst=0))
    on.case("scatter", lambda: dist.scatter(fresh(), each() if rank == 0 else None, src=0))
    on.case("reduce_scatter", lambda: dist.reduce_scatter(fresh(), each()))
    on.case("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(fresh(), whole))
    on.case("all_to_all", lambda: dist.all_to_all(each(), each()))
    on.case("all_to_all_single", lambda: dist.all_to_all_single(on.array(zeros("int32", (4 * size,))), whole))
    on.case("all_reduce_coalesced", lambda: dist.all_reduce_coalesced([fresh()]))
    on.case("all_gather_coalesced", lambda: dist.all_gather_coalesced([[fresh()] for _ in range(size)], [fresh()]))
    on.case("barrier", lambda: dist.barrier())
    on.case("monitored_barrier", lambda: dist.monitored_barrier())
    on.case("monitored_barrier for all", lambda: dist.monitored_barrier(wait_all_ranks=True))


PROGRAMS = (
    messages,
    tags,
    any_source,
    started_messages,
    objects,
    arrays_as_objects,
    coalesced,
    async_calls,
    works,
    returns,
)
