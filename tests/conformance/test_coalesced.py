"""Several calls in one: the coalesced forms, the coalescing manager, the newer names."""

import cases
import numpy as np
import pytest
import reference
from cases import Placed, values

import meshdist as dist
from meshdist import ReduceOp

pytestmark = pytest.mark.timeout(120)
SHAPES = [(), (3,), (0, 2), (2, 3, 4), (5,)]
LARGE = [(1,), (3000,), (200, 300), (70_000,)]
LAYOUTS = ("plain", "plain", "transposed", "Fortran", "every second")


def of_all_ranks(name, shapes):
    ranks = range(dist.get_world_size())
    return [[values(name, shape, rank, place) for place, shape in enumerate(shapes)] for rank in ranks]


def all_reduce_lists(shapes):
    rank = dist.get_rank()
    for name, op in (("float32", ReduceOp.SUM), ("int64", ReduceOp.MAX), ("float64", ReduceOp.AVG)):
        for async_op in (False, True):
            lists = of_all_ranks(name, shapes)
            placed = [Placed(array, layout) for array, layout in zip(lists[rank], LAYOUTS, strict=False)]
            views = [array.view for array in placed]
            result = dist.all_reduce_coalesced(views, op, async_op=async_op)
            assert (result.result() if async_op else result) is views
            for array, column in zip(placed, zip(*lists, strict=True), strict=True):
                array.check(reference.reduced(column, op), f"all_reduce_coalesced {name} {op}")


def all_gather_lists(shapes):
    rank, size = dist.get_rank(), dist.get_world_size()
    lists = of_all_ranks("int32", shapes)
    for async_op in (False, True):
        given = [Placed(array, layout) for array, layout in zip(lists[rank], LAYOUTS, strict=False)]
        taken = [[Placed(np.zeros_like(array), "plain") for array in lists[rank]] for _ in range(size)]
        outputs = [[array.view for array in arrays] for arrays in taken]
        result = dist.all_gather_coalesced(outputs, [array.view for array in given], async_op=async_op)
        assert result.wait() if async_op else result is outputs
        for arrays, expected in zip(taken, lists, strict=True):
            for array, content in zip(arrays, expected, strict=True):
                array.check(content, "all_gather_coalesced")


@pytest.mark.parametrize("shapes", [SHAPES, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("program", [all_reduce_lists, all_gather_lists])
def test_coalesced(world, program, shapes):
    world.run(program, shapes)


def long_lists(sizes):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for name, op in (("float32", ReduceOp.SUM), ("complex128", ReduceOp.AVG)):
        for _ in range(2):
            lists = [[values(name, (size,), of, place) for place, size in enumerate(sizes)] for of in range(num_ranks)]
            placed = [Placed(array, "plain") for array in lists[rank]]
            dist.all_reduce_coalesced([array.view for array in placed], op)
            for array, column in zip(placed, zip(*lists, strict=True), strict=True):
                array.check(reference.reduced(column, op), f"all_reduce_coalesced {name} {op}")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sizes", [(1,) * 100 + (70_000,), (0, 3, 40_000, 0, 90_001, 5, 0)], ids=["many", "with empty"])
def test_long_lists(worlds, size, sizes):
    worlds.world("gloo", size).run(long_lists, sizes)


def managed(async_ops):
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y, z = np.full(3, float(rank)), np.full((2, 2), rank + 1.0), np.full(2, rank)
    with dist.coalescing_manager(async_ops=async_ops) as calls:
        assert dist.all_reduce(x) is x
        dist.all_reduce(y)
        dist.all_reduce(z)
        cases.same(x.tolist(), [float(rank)] * 3, "before the end of the manager")
    cases.same(calls.wait(), True, "calls.wait()")
    total = sum(range(size))
    cases.same((set(x), set(y.flat), set(z)), ({float(total)}, {float(total + size)}, {total}), "all_reduce, managed")
    group = dist.new_group()
    whole, rows = np.zeros((size, 3)), np.zeros((2 * size, 2))
    with dist.coalescing_manager(group, async_ops=async_ops) as calls:
        group.all_gather_into_tensor(whole, np.full(3, float(rank)))
        dist.all_gather_single(rows, np.full((2, 2), rank + 10.0), group=group)
        dist.barrier()  # on another group: not taken
    calls.wait()
    cases.same([row[0] for row in whole], [float(other) for other in range(size)], "all_gather, managed")
    cases.same([row[0] for row in rows[::2]], [other + 10.0 for other in range(size)], "all_gather, managed")
    one, two = np.zeros(2), np.zeros((1, 3))
    with dist.coalescing_manager(async_ops=async_ops) as calls:
        dist.reduce_scatter_tensor(one, np.arange(2.0 * size), "max")
        dist.reduce_scatter_single(two, np.arange(3.0 * size).reshape(size, 3), "max")
    calls.wait()
    cases.same((one.tolist(), two[0, 0]), ([2.0 * rank, 2.0 * rank + 1], 3.0 * rank), "reduce_scatter, managed")


@pytest.mark.parametrize("async_ops", [False, True])
def test_coalescing_manager(world, async_ops):
    world.run(managed, async_ops)


def managed_in_other_byte_orders():
    """The ranks' arrays lie in other byte orders: on one all alike, on the others not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.full(3, rank, np.float32 if rank else np.dtype(np.float32).newbyteorder("S"))
    y = np.full(3, rank, np.float32)
    with dist.coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    cases.same((x.tolist(), y.tolist()), ([float(sum(range(size)))] * 3,) * 2, "byte orders, managed")


def test_byte_orders_in_a_manager(world):
    world.run(managed_in_other_byte_orders)


def messages_inside(async_ops):
    rank, size = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    taken, total, large = np.zeros(3), np.full(2, rank), np.zeros(100_000)
    with dist.coalescing_manager(async_ops=async_ops) as calls:
        with pytest.raises(dist.DistError, match="wait after the block"):
            calls.wait()
        receipt = dist.irecv(taken, previous)
        dist.all_reduce(total)
        give = dist.P2POp(dist.isend, np.full(100_000, rank), following, tag=1)
        take = dist.P2POp(dist.irecv, large.view(np.int64), previous, tag=1)
        dist.batch_isend_irecv([give, take])
        dist.isend(np.full(3, rank + 7.0), following)
    cases.same(len(calls.works), 4 + async_ops, "len(calls.works)")
    if not async_ops:
        cases.same([work.is_completed() for work in calls.works], [True] * 4, "at the end of the block")
    cases.same(calls.wait(), True, "calls.wait()")
    cases.same(receipt.source_rank(), previous, "source_rank()")
    cases.same((set(taken), set(large.view(np.int64))), ({previous + 7.0}, {previous}), "messages, managed")
    cases.same(total.tolist(), [sum(range(size))] * 2, "all_reduce, managed with messages")


@pytest.mark.parametrize("async_ops", [False, True])
def test_messages_inside_a_manager(world_of_several, async_ops):
    world_of_several.run(messages_inside, async_ops)


def waited_for():
    rank, token, taken = dist.get_rank(), np.zeros(1), np.zeros(1)
    if rank == 0:  # sends when the other's block is behind it
        dist.recv(token, 1, tag=1)
        dist.send(np.full(1, 7.0), 1)
    if rank == 1:
        with dist.coalescing_manager(async_ops=True) as calls:
            dist.irecv(taken, 0)
        dist.send(token, 0, tag=1)
        calls.wait()
        cases.same(taken.tolist(), [7.0], "what wait has waited for")


def test_wait_waits_for_messages(world_of_several):
    world_of_several.run(waited_for)


def waiting_messages():
    x, other = np.ones(1), 1 - dist.get_rank()
    wrong = [
        ("isend and irecv; send would wait", lambda: dist.send(x, other)),
        ("isend and irecv; recv would wait", lambda: dist.recv(x, other)),
        ("isend and irecv; send_object_list would wait", lambda: dist.send_object_list([1], other)),
        ("; got barrier", dist.barrier),
    ]
    for text, call in wrong:
        with pytest.raises(ValueError, match=text), dist.coalescing_manager() as calls:
            call()
        with pytest.raises(dist.DistError, match="wait after the block"):
            calls.wait()
    work = dist.isend(x, other)
    cases.same((dist.recv(x, other), work.wait()), (other, True), "messages after the block")


def test_messages_that_would_wait_are_refused(worlds):
    for backend in ("threads", "gloo"):
        worlds.world(backend, 2).run(waiting_messages)


def refused():
    size, x = dist.get_world_size(), np.ones(2)
    with dist.coalescing_manager(group := dist.new_group()):
        with pytest.raises(ValueError, match="do not nest"), dist.coalescing_manager(group):
            pass
        dist.all_reduce(np.ones(2), group=group)
        with pytest.raises(ValueError, match="one kind"):
            dist.all_reduce(x, "max", group)
    with pytest.raises(ValueError, match="; got broadcast"), dist.coalescing_manager():
        dist.broadcast(x, 0)
    with dist.coalescing_manager() as calls:
        pass
    cases.same(calls.wait(), True, "an empty manager")
    cases.same(x.tolist(), [1.0, 1.0], "nothing was reduced")
    wrong = [
        (TypeError, "list of arrays, got one array", lambda: dist.all_reduce_coalesced(x)),
        (ValueError, "at least one array", lambda: dist.all_reduce_coalesced([])),
        (TypeError, "one dtype", lambda: dist.all_reduce_coalesced([x, np.ones(2, int)])),
        (TypeError, "list of lists", lambda: dist.all_gather_coalesced([x] * size, [x])),
        (ValueError, "lists? of 1 array, got lists of", lambda: dist.all_gather_coalesced([[x, x]] * size, [x])),
        (ValueError, "must have the shape", lambda: dist.all_gather_coalesced([[np.ones(3)]] * size, [x])),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()


def test_what_is_refused(world):
    world.run(refused)


def lists_that_differ():
    group, rank = dist.new_group(), dist.get_rank()
    sizes = (2, 3) if rank == 0 else (3, 2)
    with pytest.raises(
        dist.DistBackendError, match=r"disagree[^\n]*\n.*all_reduce_coalesced\(2 arrays float64\[2\], float64\[3\]"
    ):
        dist.all_reduce_coalesced([np.zeros(size) for size in sizes], group=group)


def test_lists_that_differ_raise_on_all_ranks(world_of_several):
    world_of_several.run(lists_that_differ)
