"""gather, scatter and all_to_all against the reference; arguments that are wrong on one rank."""

import itertools

import cases
import numpy as np
import pytest
from cases import DTYPES, EXTENSION_DTYPES, Placed, describe, values

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
KIB = cases.KIB
LARGE = (8 * KIB, 32 * KIB + 16, 100 * KIB, 600 * KIB)


@pytest.fixture(params=["numpy", "ml_dtypes"])
def dtypes(request):
    if request.param == "numpy":
        return DTYPES
    pytest.importorskip("ml_dtypes", reason="bfloat16 and float8 need ml_dtypes")
    return EXTENSION_DTYPES


def check_gather(name, shape, layout, root, salt):
    rank, size = dist.get_rank(), dist.get_world_size()
    arrays = [values(name, shape, other, salt) for other in range(size)]
    given = Placed(arrays[rank], layout)
    taken = [Placed(np.zeros_like(array), layout) for array in arrays] if rank == root else []
    blocks = [block.view for block in taken] if rank == root else None
    what = f"gather {describe(name, shape, root=root)}"
    assert dist.gather(given.view, blocks, root) is blocks
    for block, expected in zip(taken, arrays, strict=rank == root):
        block.check(expected, what)
    given.check_unchanged(what)


def check_scatter(name, shape, layout, root, salt):
    rank, size = dist.get_rank(), dist.get_world_size()
    arrays = [values(name, shape, other, salt) for other in range(size)]
    given = [Placed(array, layout) for array in arrays] if rank == root else []
    taken = Placed(np.zeros_like(arrays[rank]), layout)
    what = f"scatter {describe(name, shape, root=root)}"
    assert dist.scatter(taken.view, [block.view for block in given] or None, root) is taken.view
    taken.check(arrays[rank], what)
    for block in given:
        block.check_unchanged(what)


def small(check, names):
    for number, (name, (shape, layout)) in enumerate(itertools.product(names, cases.SMALL)):
        for root in range(dist.get_world_size()):
            check(name, shape, layout, root, number)


def large(check):
    for name, shape, layout, number in cases.large(("uint8", "float64"), LARGE):
        check(name, shape, layout, number % dist.get_world_size(), number)


@pytest.mark.parametrize("check", [check_gather, check_scatter])
def test_small(world, check, dtypes):
    world.run(small, check, dtypes)


@pytest.mark.parametrize("check", [check_gather, check_scatter])
def test_large(world, check):
    world.run(large, check)


def check_all_to_all(name, counts, rest, layout, salt):
    """`counts[i][j]`: rows that rank i sends to rank j."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lists = [[values(name, (counts[i][j], *rest), i, salt + j) for j in range(size)] for i in range(size)]
    given = [Placed(block, layout) for block in lists[rank]]
    taken = [Placed(np.zeros_like(lists[other][rank]), layout) for other in range(size)]
    outputs = [block.view for block in taken]
    what = f"all_to_all {name}, rows {counts}"
    assert dist.all_to_all(outputs, [block.view for block in given]) is outputs
    for other, block in enumerate(taken):
        block.check(lists[other][rank], what)
    for block in given:
        block.check_unchanged(what)


def all_to_all_lists(names):
    ranks = range(dist.get_world_size())
    for number, (name, layout) in enumerate(itertools.product(names, ("plain", "every second"))):
        check_all_to_all(name, [[3] * len(ranks) for _ in ranks], (2,), layout, number)
        check_all_to_all(name, [[(i + 2 * j) % 4 for j in ranks] for i in ranks], (3,), layout, number)


def all_to_all_large():
    ranks = range(dist.get_world_size())
    for count in (700, 5000, 40_000):
        check_all_to_all("float32", [[(i + j) % 3 * count for j in ranks] for i in ranks], (2,), "plain", count)


def test_all_to_all(world, dtypes):
    world.run(all_to_all_lists, dtypes)


def test_all_to_all_of_large_arrays(world):
    world.run(all_to_all_large)


def without_a_root():
    rank, size = dist.get_rank(), dist.get_world_size()
    blocks = [np.zeros(2) for _ in range(size)] if rank == 0 else []
    dist.gather(np.full(2, float(rank)), blocks)
    cases.same([block[0] for block in blocks], [float(other) for other in range(size) if rank == 0], "gather to rank 0")
    x = np.zeros(2)
    dist.scatter(x, blocks or None)
    cases.same(x[0], float(rank), "scatter from rank 0")


def test_the_root_is_the_first_rank_where_none_is_given(world):
    world.run(without_a_root)


def read_only_scatter():
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (3, 50_000):
        x = np.zeros(count)
        blocks = [np.broadcast_to(np.array(float(other)), (count,)) for other in range(size)]
        dist.scatter(x, blocks if rank == 0 else None, 0)
        cases.same(set(x), {float(rank)}, "scatter of read-only arrays")


def test_what_is_scattered_may_be_read_only(world):
    world.run(read_only_scatter)


def in_groups_and_async():
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    place = group.rank()
    for root in range(size):
        blocks = [np.zeros(3) for _ in range(size)] if place == root else None
        group.gather(np.full(3, float(rank)), blocks, dst=root)
        expected = [float(member) for member in group.ranks]
        cases.same(None if blocks is None else [b[0] for b in blocks], expected if blocks else None, "group.gather")
        x = np.zeros(3)
        work = dist.scatter(x, blocks, group=group, group_src=root, async_op=True)
        work.wait()
        cases.same(x.tolist(), [float(rank)] * 3, "scatter in a group, async")
    out = [np.zeros(1) for _ in range(size)]
    dist.all_to_all(out, [np.full(1, 10.0 * rank + other) for other in range(size)], async_op=True).wait()
    cases.same([b[0] for b in out], [10.0 * other + rank for other in range(size)], "all_to_all, async")


def test_in_groups_and_async(world):
    world.run(in_groups_and_async)


def wrong_arguments():
    rank, size = dist.get_rank(), dist.get_world_size()
    x, blocks = np.zeros(3), [np.zeros(3) for _ in range(size)]
    other = (rank + 1) % size
    wrong = [
        (ValueError, "gather_list is for the rank that is dst", lambda: dist.gather(x, blocks, other)),
        (ValueError, "scatter_list is for the rank that is src", lambda: dist.scatter(x, blocks, other)),
        (ValueError, f"must hold {size} arrays", lambda: dist.gather(x, blocks[1:], rank)),
        (ValueError, f"must hold {size} arrays", lambda: dist.scatter(x, blocks * 2, rank)),
        (TypeError, "got None", lambda: dist.gather(x, None, rank)),
        (TypeError, "got one array", lambda: dist.scatter(x, x, rank)),
        (ValueError, "must have the shape", lambda: dist.gather(x, [*blocks[1:], np.zeros(4)], rank)),
        (TypeError, "one dtype", lambda: dist.scatter(x, [*blocks[1:], np.zeros(3, int)], rank)),
        (ValueError, "both", lambda: dist.gather(x, None, 0, group_dst=0)),
        (ValueError, "must be a rank in the group", lambda: dist.scatter(x, None, size)),
        (ValueError, f"must hold {size} arrays", lambda: dist.all_to_all(blocks, blocks[1:])),
        (TypeError, "one dtype", lambda: dist.all_to_all(blocks, [np.zeros(3, int) for _ in blocks])),
        (ValueError, "read-only", lambda: dist.all_to_all([np.frombuffer(bytes(24)) for _ in blocks], blocks)),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()


def test_wrong_arguments_are_refused_before_anything_is_sent(world_of_several):
    world_of_several.run(wrong_arguments)


def sizes_that_differ():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    take = [np.zeros(2) for _ in range(size)]
    give = [np.zeros(3 if (rank, other) == (0, 1) else 2) for other in range(size)]
    with pytest.raises(dist.DistBackendError, match=r"rank 0 sends .* to rank 1, which expects"):
        dist.all_to_all(take, give, group=group)


def calls_that_differ():
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in range(2):
        group = dist.new_group()
        x = np.zeros(3 + (rank == 0 and number == 0))
        blocks = [np.zeros_like(x) for _ in range(size)]
        root = int(rank == 0 and number == 1)

        def gather_and_meet(group=group, x=x, blocks=blocks if rank == root else None, root=root):
            dist.gather(x, blocks, group=group, group_dst=root)
            group.barrier()  # ranks that give may have returned before the others came

        with pytest.raises(dist.DistBackendError, match="the ranks disagree"):
            gather_and_meet()


def test_sizes_that_differ_raise_on_all_ranks(world_of_several):
    world_of_several.run(sizes_that_differ)


def test_calls_that_differ_raise_on_all_ranks(world_of_several):
    world_of_several.run(calls_that_differ)
