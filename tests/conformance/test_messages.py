"""send and recv: sizes, dtypes, tags, order."""

import itertools

import cases
import numpy as np
import pytest
from cases import DTYPES, EXTENSION_DTYPES, Placed, describe, values

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
KIB = cases.KIB
# Buffered, and not; pieces that divide and that do not.
LARGE = (64 * KIB - 8, 64 * KIB, 64 * KIB + 8, 200 * KIB, 1536 * KIB + 24)


@pytest.fixture(params=["numpy", "ml_dtypes"])
def dtypes(request):
    if request.param == "numpy":
        return DTYPES
    pytest.importorskip("ml_dtypes", reason="bfloat16 and float8 need ml_dtypes")
    return EXTENSION_DTYPES


def pairs():
    """Every rank with every other, in an order in which blocking calls do not deadlock."""
    return itertools.permutations(range(dist.get_world_size()), 2)


def pass_on(name, shape, layout, src, dst, salt):
    content = values(name, shape, src, salt)
    what = f"message from {src} to {dst} of {describe(name, shape)}"
    if dist.get_rank() == src:
        x = Placed(content, layout)
        assert dist.send(x.view, dst) is None
        x.check_unchanged(what)
    elif dist.get_rank() == dst:
        x = Placed(np.zeros_like(content), layout)
        cases.same(dist.recv(x.view, src), src, f"what recv returns, {what}")
        x.check(content, what)


def every_dtype_and_shape(names):
    for number, (name, (shape, layout)) in enumerate(itertools.product(names, cases.SMALL)):
        for src, dst in pairs():
            pass_on(name, shape, layout, src, dst, number)


def of_one_kind_again_and_again(names):
    for number, (name, (shape, _)) in enumerate(itertools.product(names, cases.SMALL)):
        for salt, (src, dst) in itertools.product(range(3), pairs()):
            pass_on(name, shape, "plain", src, dst, 100 * number + salt)


def large_ones():
    for num_bytes, (src, dst) in itertools.product(LARGE, pairs()):
        pass_on("float64", (num_bytes // 8,), "plain", src, dst, num_bytes)
    for src, dst in pairs():
        pass_on("float32", (50_000,), "every second", src, dst, 1)


def test_every_dtype_and_shape(world, dtypes):
    world.run(every_dtype_and_shape, dtypes)


def test_messages_of_one_kind_again_and_again(world, dtypes):
    world.run(of_one_kind_again_and_again, dtypes)


def test_large_messages(world):
    world.run(large_ones)


def around_the_ring(count):
    rank, size = dist.get_rank(), dist.get_world_size()
    token = np.full(count, rank)
    for _ in range(3):
        # One rank receives first, so that messages of any size go round.
        after, before = (rank + 1) % size, (rank - 1) % size
        taken = np.empty_like(token)
        if rank == 0:
            dist.send(token, after)
            dist.recv(taken, before)
        else:
            dist.recv(taken, before)
            dist.send(token, after)
        token = taken
    cases.same(set(token.tolist()), {(rank - 3) % size}, f"{count} numbers passed around")


@pytest.mark.parametrize("count", [1, 5_000, 100_000])
def test_around_the_ring(world_of_several, count):
    world_of_several.run(around_the_ring, count)


def small_ones_both_ways(count):
    # Small messages are buffered: all send before anyone receives.
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [peer for peer in range(size) if peer != rank]
    for peer in others:
        for number in range(count):
            dist.send(np.array([rank, number]), peer)
    for peer in reversed(others):
        for number in range(count):
            x = np.zeros(2, int)
            dist.recv(x, peer)
            cases.same(x.tolist(), [peer, number], "message both ways")


def test_small_messages_are_buffered(world):
    world.run(small_ones_both_ways, 20)


def in_a_row(count, num_bytes):
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for number in range(count):
            dist.send(np.full(num_bytes, number % 251, np.uint8), size - 1)
    elif rank == size - 1:
        x = np.zeros(num_bytes, np.uint8)
        for number in range(count):
            x[...] = 255
            dist.recv(x, 0)
            if not (x == number % 251).all():
                raise AssertionError(f"message {number} of {count}, {num_bytes} bytes each: {x}")


@pytest.mark.parametrize(("count", "num_bytes"), [(2000, 8), (2000, 0), (300, 4001), (60, 60 * KIB), (10, 300 * KIB)])
def test_many_messages_in_a_row(world_of_several, count, num_bytes):
    """More than any buffer holds: the sender waits for room, and nothing is lost or out of order."""
    world_of_several.run(in_a_row, count, num_bytes)


def out_of_order_tags(num_elements):
    rank, tags = dist.get_rank(), (7, 0, 3, 7, 1_000_000, 0)
    if rank == 0:
        # The long ones wait to be received; a thread for each would be another test.
        for number, tag in enumerate(tags):
            dist.send(np.full(num_elements, number), 1, tag=tag)
    elif rank == 1:
        for number in (4, 1, 0, 2, 5, 3):  # messages of one tag in order, the tags in any
            x = np.empty(num_elements, int)
            dist.recv(x, 0, tag=tags[number])
            cases.same(set(x.tolist()), {number}, f"message of tag {tags[number]}")


@pytest.mark.parametrize("num_elements", [1, 1000])
def test_tags_out_of_order(world_of_several, num_elements):
    world_of_several.run(out_of_order_tags, num_elements)


def long_one_is_kept_aside(num_bytes):
    # The receiver asks for the second message first: the long one before it is put aside, and its sender goes on.
    if dist.get_rank() == 0:
        dist.send(np.full(num_bytes, 1, np.uint8), 1, tag=1)
        dist.send(np.full(num_bytes, 2, np.uint8), 1, tag=2)
        dist.send(np.full(3, 3, np.uint8), 1, tag=1)
    elif dist.get_rank() == 1:
        for value, tag, size in ((2, 2, num_bytes), (1, 1, num_bytes), (3, 1, 3)):
            x = np.zeros(size, np.uint8)
            dist.recv(x, 0, tag=tag)
            cases.same(set(x.tolist()), {value}, f"message of tag {tag}")


@pytest.mark.parametrize("num_bytes", [65 * KIB, 700 * KIB])
def test_a_long_message_of_another_tag_is_kept_aside(world_of_several, num_bytes):
    world_of_several.run(long_one_is_kept_aside, num_bytes)


def between_collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(20):
        x = np.array([float(rank + step)])
        if rank == 0:
            dist.send(x, size - 1, tag=step)
        dist.all_reduce(y := x.copy())
        cases.same(y.item(), sum(other + step for other in range(size)), "all_reduce between messages")
        if rank == size - 1:
            z = np.empty(1)
            dist.recv(z, 0, tag=step)
            cases.same(z.item(), float(step), "message across a collective")


def test_messages_and_collectives_do_not_meet(world_of_several):
    world_of_several.run(between_collectives)


def on_two_groups():
    # Messages of one group never reach a receive of another, whatever the tags.
    rank = dist.get_rank()
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 0:
        dist.send(np.array([1]), 1, group=one, tag=5)
        dist.send(np.array([2]), 1, group=other, tag=5)
    elif rank == 1:
        for value, group in ((2, other), (1, one)):
            x = np.zeros(1, int)
            dist.recv(x, 0, group=group, tag=5)
            cases.same(x.item(), value, "message of a group")


def test_messages_of_two_groups_do_not_meet(world_of_several):
    world_of_several.run(on_two_groups)


TRAFFIC_DTYPES = ("bool", "int8", "float16", "float32", "float64", "complex128", "longdouble")
TRAFFIC_SHAPES = ((), (1,), (3,), (0,), (7, 5), (1000,), (9001,), (33, 17, 2))


def random_traffic(seed):
    """Bursts of messages from one rank to one other, which takes those of each tag in order, and the tags as it likes.

    Each rank knows all messages, so it knows what has to come.
    """
    rng, rank, ranks = np.random.default_rng(seed), dist.get_rank(), dist.get_world_size()
    for burst in range(60 if ranks > 1 else 0):
        src, dst = (int(each) for each in rng.permutation(ranks)[:2])
        messages = []
        for number in range(rng.integers(1, 7)):
            dtype, shape = rng.choice(TRAFFIC_DTYPES), TRAFFIC_SHAPES[rng.integers(len(TRAFFIC_SHAPES))]
            content = rng.integers(0, 100, shape).astype(dtype)
            messages.append((int(rng.integers(3)), content, bool(rng.integers(4)), f"message {number} of {burst}"))
        taken = sorted(messages, key=lambda message: (message[0] * int(rng.integers(3)), message[0]))
        asynchronous = rng.integers(0, 2, len(messages)).tolist()
        if rank == src:
            works = []
            for (tag, content, waits, _), later in zip(messages, asynchronous, strict=True):
                if later and waits:
                    works.append(dist.isend(content, dst, tag=tag))
                else:
                    dist.send(content, dst, tag=tag)
            for work in works:
                work.wait()
        elif rank == dst:
            in_order = {tag: iter([m for m in messages if m[0] == tag]) for tag in range(3)}
            expected = [next(in_order[tag]) for tag, *_ in taken]
            works = []
            for (tag, content, waits, what), later in zip(expected, asynchronous, strict=True):
                output = np.full_like(content, 1)
                if later:
                    works.append((dist.irecv(output, src if waits else None, tag=tag), output, content, what))
                else:
                    dist.recv(output, src if waits else None, tag=tag)
                    np.testing.assert_array_equal(output, content, err_msg=what)
            for work, output, content, what in works:
                work.wait()
                np.testing.assert_array_equal(output, content, err_msg=what)
        dist.barrier()


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(world, seed):
    world.run(random_traffic, seed)


def in_other_byte_orders(count):
    """Every message is of other dtypes to NumPy on its two sides, and of one to meshdist."""
    rank = dist.get_rank()
    for number in range(count):
        for src, dst in pairs():
            swapped = np.dtype(np.int32).newbyteorder("S" if (rank == src) == (number % 2 == 0) else "=")
            x = np.full(5, 1000 * number + src if rank == src else 0, swapped)
            if rank == src:
                dist.send(x, dst)
            elif rank == dst:
                dist.recv(x, src)
                assert x.tolist() == [1000 * number + src] * 5


def test_byte_orders_message_by_message(world):
    world.run(in_other_byte_orders, 4)
