"""Inputs that lie in the outputs, or partly over them: right, as copies are. Outputs over each other: refused."""

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
# A few bytes, and so many that ranks read each other's memory.
COUNTS = (4, 60_000)


def block(count, rank, place=0):
    return (np.arange(count) * 7 + 31 * rank + 3 * place) % 101


def gathers():
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in COUNTS:
        wanted = np.stack([block(count, peer) for peer in range(size)])
        # Where the input begins in the output: at the own block, at another one's, across two.
        for begin in (rank * count, ((rank + 1) % size) * count, count // 2, (size - 1) * count - count // 3):
            for call in (into_tensor, into_rows, gather_rows):
                out = np.full(size * count, -1)
                mine = out[begin : begin + count]
                mine[...] = block(count, rank)
                call(out.reshape(size, count), mine)
                if call is not gather_rows or rank == size - 1:
                    np.testing.assert_array_equal(out.reshape(size, count), wanted)


def into_tensor(out, mine):
    dist.all_gather_into_tensor(out, mine)


def into_rows(out, mine):
    dist.all_gather(list(out), mine)


def gather_rows(out, mine):
    last = dist.get_world_size() - 1
    dist.gather(mine, list(out) if dist.get_rank() == last else None, dst=last)


def test_gathers(world_of_several):
    world_of_several.run(gathers)


def scatters():
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in COUNTS:
        for begin in (rank * count, ((rank + 1) % size) * count, count // 2):
            for call in (scatter, reduce_rows, reduce_tensor):
                whole = np.concatenate([block(count, rank, place) for place in range(size)])
                out = whole[begin : begin + count]
                call(out, whole.reshape(size, count))
                blocks = [block(count, peer, rank) for peer in range(size)]
                np.testing.assert_array_equal(out, blocks[size - 1] if call is scatter else sum(blocks))


def scatter(out, rows):
    last = dist.get_world_size() - 1
    dist.scatter(out, list(rows) if dist.get_rank() == last else None, src=last)


def reduce_rows(out, rows):
    dist.reduce_scatter(out, list(rows))


def reduce_tensor(out, rows):
    dist.reduce_scatter_tensor(out, rows)


def test_scatters_and_reductions(world_of_several):
    world_of_several.run(scatters)


def exchanges():
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in COUNTS:
        wanted = np.concatenate([block(count, peer, rank) for peer in range(size)])
        for shift in (0, 1, count // 2):
            memory = np.zeros(size * count + shift, int)
            give, take = memory[: size * count], memory[shift:]
            for splits in (None, [count] * size):
                give[...] = np.concatenate([block(count, rank, place) for place in range(size)])
                if shift == 0:
                    take = give
                dist.all_to_all_single(take, give, splits, splits)
                np.testing.assert_array_equal(take, wanted)
            give[...] = np.concatenate([block(count, rank, place) for place in range(size)])
            dist.all_to_all(list(take.reshape(size, count)), list(give.reshape(size, count)))
            np.testing.assert_array_equal(take, wanted)


def test_exchanges_in_place(world_of_several):
    world_of_several.run(exchanges)


def again_and_async():
    """A call that has a plan looks at where its arrays are as well."""
    rank, size, count = dist.get_rank(), dist.get_world_size(), COUNTS[1]
    wanted = np.concatenate([block(count, peer) for peer in range(size)])
    for is_async in (False, True):
        for mine_is_apart in (True, False, True):
            out = np.full(size * count, -1)
            mine = block(count, rank) if mine_is_apart else out[count // 2 : count // 2 + count]
            mine[...] = block(count, rank)
            work = dist.all_gather_into_tensor(out, mine, async_op=is_async)
            if is_async:
                work.wait()
            np.testing.assert_array_equal(out, wanted)


def test_with_a_plan(world_of_several):
    world_of_several.run(again_and_async)


def outputs_that_share():
    size = dist.get_world_size()
    x, whole = np.zeros(4), np.zeros(size * 4)
    parts = [whole[k : k + 4] for k in range(size)]
    calls = {
        r"tensor_list\[0\] and tensor_list\[1\]": lambda: dist.all_gather([x] * size, x.copy()),
        r"tensor_list\[0\] and tensor_list\[1\] ": lambda: dist.all_gather(parts, x),
        r"output_tensor_list\[0\] and output_tensor_list\[1\]": lambda: dist.all_to_all(parts, [x] * size),
        r"gather_list\[0\] and gather_list\[1\]": lambda: dist.gather(x, parts, dst=dist.get_rank()),
        r"tensors\[0\] and tensors\[2\]": lambda: dist.all_reduce_coalesced([x, whole, x]),
        r"tensor_list\[0\] and tensor_list\[1\]  ": lambda: dist.all_reduce_multigpu([x, x]),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=rf"(?s)rank {dist.get_rank()} of.*{words.strip()} share memory"):
            call()
    dist.all_to_all(list(whole.reshape(size, 4)), [x] * size)  # inputs may


def test_outputs_that_share_memory_are_refused(world_of_several):
    world_of_several.run(outputs_that_share)
