"""broadcast, all_gather, all_gather_into_tensor, all_to_all_single and barrier against the reference."""

import itertools

import cases
import numpy as np
import pytest
import reference
from cases import DTYPES, EXTENSION_DTYPES, LARGE_BYTES, Placed, describe, values

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
KIB = cases.KIB
LARGE = (6 * KIB, 32 * KIB, 32 * KIB + 16, 100 * KIB, 600 * KIB)


@pytest.fixture(params=["numpy", "ml_dtypes"])
def dtypes(request):
    if request.param == "numpy":
        return DTYPES
    pytest.importorskip("ml_dtypes", reason="bfloat16 and float8 need ml_dtypes")
    return EXTENSION_DTYPES


def small(names):
    for number, (name, (shape, layout)) in enumerate(itertools.product(names, cases.SMALL)):
        yield name, shape, layout, number


# ---- broadcast


def check_broadcast(name, shape, layout, root, salt):
    rank, arrays = dist.get_rank(), [values(name, shape, rank, salt) for rank in range(dist.get_world_size())]
    x = Placed(arrays[rank], layout)
    y = dist.broadcast(x.view, root)
    x.check(reference.broadcast(arrays, root)[rank], f"broadcast {describe(name, shape, root=root)}")
    assert y is x.view


def broadcast_all(names):
    for name, shape, layout, number in small(names):
        for root in range(dist.get_world_size()):
            check_broadcast(name, shape, layout, root, number)


def broadcast_large():
    for name, shape, layout, number in cases.large(("uint8", "float64"), LARGE_BYTES):
        for root in {0, dist.get_world_size() - 1, number % dist.get_world_size()}:
            check_broadcast(name, shape, layout, root, number)


def broadcast_read_only():
    # The source's array is read only: it may be a view of memory that cannot be written, or repeat elements.
    for count in (5, 50_000):
        for x in (np.broadcast_to(np.array(7.0), (count,)), np.frombuffer(bytes(8 * count))):
            out = x if dist.get_rank() == 0 else np.empty(count)
            cases.same(bool((dist.broadcast(out, 0) == x).all()), True, f"broadcast of {count} elements")


def test_broadcast(world, dtypes):
    world.run(broadcast_all, dtypes)


def test_broadcast_of_large_arrays(world):
    world.run(broadcast_large)


def test_the_source_of_a_broadcast_may_be_read_only(world):
    world.run(broadcast_read_only)


# ---- all_gather


def check_all_gather(name, shapes, layout, salt):
    """`shapes` are those of the ranks' arrays."""
    rank, arrays = dist.get_rank(), [values(name, shape, rank, salt) for rank, shape in enumerate(shapes)]
    given = Placed(arrays[rank], layout)
    taken = [Placed(np.zeros_like(array), layout) for array in arrays]
    blocks = [block.view for block in taken]
    what = f"all_gather {describe(name, shapes[rank])}"
    assert dist.all_gather(blocks, given.view) is blocks
    for block, expected in zip(taken, reference.all_gather(arrays)[rank], strict=True):
        block.check(expected, what)
    given.check_unchanged(what)


def all_gather_small(names):
    for name, shape, layout, number in small(names):
        check_all_gather(name, [shape] * dist.get_world_size(), layout, number)


def all_gather_unequal():
    size = dist.get_world_size()
    for count, first in itertools.product((1, 5, 500, 5000, 50_000), range(min(size, 3))):
        shapes = [((rank + first) % size * count,) for rank in range(size)]
        check_all_gather("float32", shapes, "plain", first)
    check_all_gather("int8", [(rank % 3, 4) for rank in range(size)], "columns of more", 0)
    check_all_gather("int8", [(2,) * (rank % 3) for rank in range(size)], "plain", 0)


def all_gather_large():
    for name, shape, layout, number in cases.large(("uint8", "complex64"), LARGE):
        check_all_gather(name, [shape] * dist.get_world_size(), layout, number)


def test_all_gather(world, dtypes):
    world.run(all_gather_small, dtypes)


def test_all_gather_of_unequal_shapes(world):
    world.run(all_gather_unequal)


def test_all_gather_of_large_arrays(world):
    world.run(all_gather_large)


# ---- all_gather_into_tensor


def check_all_gather_into_tensor(name, shape, layout, salt, stacked):
    rank, size = dist.get_rank(), dist.get_world_size()
    arrays = [values(name, shape, rank, salt) for rank in range(size)]
    whole = (size, *shape) if stacked or not shape else (size * shape[0], *shape[1:])
    given, taken = Placed(arrays[rank], layout), Placed(np.zeros(whole, arrays[0].dtype), layout)
    what = f"all_gather_into_tensor {describe(name, shape)}, stacked {stacked}"
    assert dist.all_gather_into_tensor(taken.view, given.view) is taken.view
    taken.check(np.stack(reference.all_gather(arrays)[rank]).reshape(whole), what)
    given.check_unchanged(what)


def all_gather_into_tensor_all(names):
    for name, shape, layout, number in small(names):
        for stacked in (False, True):
            check_all_gather_into_tensor(name, shape, layout, number, stacked)


def all_gather_into_tensor_large():
    for name, shape, layout, number in cases.large(("uint8", "float32"), LARGE):
        check_all_gather_into_tensor(name, shape, layout, number, stacked=False)


def all_gather_in_place():
    # The input may be this rank's part of the output.
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (3, 3000, 50_000):
        out = np.zeros((size, count))
        out[rank] = rank + 1
        dist.all_gather_into_tensor(out, out[rank])
        cases.same([set(row) for row in out], [{other + 1.0} for other in range(size)], f"{count} elements in place")


def test_all_gather_into_tensor(world, dtypes):
    world.run(all_gather_into_tensor_all, dtypes)


def test_all_gather_into_tensor_of_large_arrays(world):
    world.run(all_gather_into_tensor_large)


def test_all_gather_into_tensor_in_place(world):
    world.run(all_gather_in_place)


# ---- all_to_all_single


def check_all_to_all(name, rows, rest, layout, salt, given_splits):
    """`rows[i][j]`: how many rows rank i sends to rank j; `given_splits`: which split sizes are passed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lists = [
        [values(name, (rows[i][j], *rest), i, salt + 7 * j) for j in range(size)]  # what i sends to j
        for i in range(size)
    ]
    given = Placed(np.concatenate(lists[rank]), layout)
    expected = np.concatenate(reference.all_to_all(lists)[rank])
    taken = Placed(np.zeros_like(expected), layout)
    rows_from, rows_to = [rows[i][rank] for i in range(size)], rows[rank]
    splits = [sizes if wanted else None for sizes, wanted in zip((rows_from, rows_to), given_splits, strict=True)]
    what = f"all_to_all_single {describe(name, expected.shape)}, rows {rows}, split sizes {splits}"
    assert dist.all_to_all_single(taken.view, given.view, *splits) is taken.view
    taken.check(expected, what)
    given.check_unchanged(what)


def even(count):
    return [[count] * dist.get_world_size() for _ in range(dist.get_world_size())]


def all_to_all_even(names):
    layouts = ["plain", "transposed", "columns of more"]
    for number, (name, layout, count) in enumerate(itertools.product(names, layouts, (0, 1, 3))):
        check_all_to_all(name, even(count), (5,), layout, number, (False, False))
        check_all_to_all(name, even(count), (5,), layout, number, (True, True))
        check_all_to_all(name, even(count), (), "plain", number, (number % 2 == 0, number % 2 == 1))


def uneven_rows(count):
    ranks = range(dist.get_world_size())
    yield [[(i + 2 * j) % 4 * count for j in ranks] for i in ranks]
    yield [[i * count for _ in ranks] for i in ranks]  # rank 0 sends nothing
    yield [[j * count for j in ranks] for _ in ranks]  # rank 0 gets nothing
    yield [[count if i == j else 0 for j in ranks] for i in ranks]  # all to themselves
    yield [[0 for _ in ranks] for _ in ranks]  # nothing at all


def all_to_all_uneven():
    for count in (1, 100, 2000):
        for number, rows in enumerate(uneven_rows(count)):
            check_all_to_all("float64", rows, (3,), "plain", number, (True, True))
    for number, rows in enumerate(uneven_rows(1)):
        for name in ("bool", "uint16", "complex128"):
            check_all_to_all(name, rows, (2, 3), "transposed", number, (True, True))


def all_to_all_with_tuples_and_arrays():
    size = dist.get_world_size()
    for kind in (tuple, np.array, lambda sizes: [np.int64(rows) for rows in sizes]):
        out = np.zeros(size)
        dist.all_to_all_single(out, np.full(size, dist.get_rank(), float), kind([1] * size), kind([1] * size))
        cases.same(out.tolist(), [float(rank) for rank in range(size)], f"split sizes {kind([1] * size)!r}")


def all_to_all_large():
    size = dist.get_world_size()
    for num_bytes in LARGE:
        for name in ("uint8", "float32"):
            rows = num_bytes // size // cases.dtype_of(name).itemsize
            check_all_to_all(name, even(rows), (), "plain", rows, (False, False))
    check_all_to_all("float32", even(5000), (), "every second", 0, (False, False))


def test_all_to_all_single(world, dtypes):
    world.run(all_to_all_even, dtypes)


def test_all_to_all_single_of_uneven_rows(world):
    world.run(all_to_all_uneven)


def test_split_sizes_may_be_any_sequence(world_of_3):
    world_of_3.run(all_to_all_with_tuples_and_arrays)


def test_all_to_all_single_of_large_arrays(world):
    world.run(all_to_all_large)


# ---- barrier


def barrier_orders():
    # Everybody tells everybody through a message sent before the barrier; after it, all messages are there at once.
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(20):
        for peer in range(size):
            if peer != rank:
                dist.send(np.array([rank]), peer)
        assert dist.barrier() is None
        for peer in range(size):
            if peer != rank:
                x = np.zeros(1, int)
                dist.recv(x, peer)
                cases.same(int(x[0]), peer, "message sent before a barrier")


def no_one_leaves_before_all_have_entered(counter):
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(30):
        counter.add(f"entered {step}", 1)
        dist.barrier()
        cases.same(counter.add(f"entered {step}", 0), size, f"ranks that have entered barrier {step}, seen by {rank}")


def test_messages_sent_before_a_barrier(world):
    world.run(barrier_orders)


def test_no_one_leaves_a_barrier_before_all_have_entered(world, tmp_path):
    world.run(no_one_leaves_with_file, str(tmp_path / "counter"))


def no_one_leaves_with_file(path):
    with dist.FileStore(path) as counter:
        no_one_leaves_before_all_have_entered(counter)
