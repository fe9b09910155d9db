"""The documented examples of collectives over arrays: reduce, gather, scatter and their kin."""

import numpy as np
import pytest
from documented import check, lists, place

import meshdist as dist
from meshdist import ReduceOp

pytestmark = pytest.mark.timeout(60)
COMPLEX = np.array([1 + 1j, 2 + 2j], np.complex64)


def all_reduce_integers():
    rank, _ = place()
    tensor = np.arange(2, dtype=np.int64) + 1 + 2 * rank
    dist.all_reduce(tensor, op=ReduceOp.SUM)
    return tensor.tolist()


def test_all_reduce_of_integers(initialised):
    ranks = range(initialised.size)
    expected = [[sum(1 + 2 * rank for rank in ranks), sum(2 + 2 * rank for rank in ranks)]] * len(ranks)
    check(initialised, all_reduce_integers, expected, {2: [[4, 6], [4, 6]]})


def all_reduce_complex():
    rank, _ = place()
    tensor = COMPLEX + 2 * rank * (1 + 1j)
    tensor = tensor.astype(np.complex64)
    dist.all_reduce(tensor, op=ReduceOp.SUM)
    return tensor.tolist()


def test_all_reduce_of_complex_numbers(initialised):
    ranks = range(initialised.size)
    first = sum(1 + 2 * rank for rank in ranks) * (1 + 1j)
    second = sum(2 + 2 * rank for rank in ranks) * (1 + 1j)
    check(initialised, all_reduce_complex, [[first, second]] * len(ranks), {2: [[4 + 4j, 6 + 6j]] * 2})


def all_gather_integers():
    rank, size = place()
    tensor_list = [np.zeros(2, np.int64) for _ in range(size)]
    dist.all_gather(tensor_list, np.arange(2, dtype=np.int64) + 1 + 2 * rank)
    return lists(tensor_list)


def test_all_gather_of_integers(initialised):
    expected = [[[1 + 2 * rank, 2 + 2 * rank] for rank in range(initialised.size)]] * initialised.size
    check(initialised, all_gather_integers, expected, {2: [[[1, 2], [3, 4]]] * 2})


def all_gather_complex():
    rank, size = place()
    tensor_list = [np.zeros(2, np.complex64) for _ in range(size)]
    dist.all_gather(tensor_list, (COMPLEX + 2 * rank * (1 + 1j)).astype(np.complex64))
    return lists(tensor_list)


def test_all_gather_of_complex_numbers(initialised):
    rows = [[(1 + 2 * rank) * (1 + 1j), (2 + 2 * rank) * (1 + 1j)] for rank in range(initialised.size)]
    printed = {2: [[[1 + 1j, 2 + 2j], [3 + 3j, 4 + 4j]]] * 2}
    check(initialised, all_gather_complex, [rows] * initialised.size, printed)


def all_gather_into_one():
    rank, size = place()
    tensor_in = np.arange(2, dtype=np.int64) + 1 + 2 * rank
    concatenated = np.zeros(size * 2, np.int64)
    dist.all_gather_into_tensor(concatenated, tensor_in)
    stacked = np.zeros((size, 2), np.int64)
    dist.all_gather_into_tensor(stacked, tensor_in)
    return concatenated.tolist(), stacked.tolist()


def test_all_gather_into_tensor_concatenates_or_stacks(initialised):
    size = initialised.size
    expected = list(range(1, 2 * size + 1)), [[1 + 2 * rank, 2 + 2 * rank] for rank in range(size)]
    check(initialised, all_gather_into_one, [expected] * size, {2: [([1, 2, 3, 4], [[1, 2], [3, 4]])] * 2})


def reduce_scatter_one(form):
    _, size = place()
    tensor_in = np.arange(size * 2, dtype=np.int64)
    tensor_out = np.zeros(2, np.int64)
    dist.reduce_scatter_tensor(tensor_out, tensor_in if form == "concatenated" else tensor_in.reshape(size, 2))
    return tensor_out.tolist()


@pytest.mark.parametrize("form", ["concatenated", "stacked"])
def test_reduce_scatter_tensor(initialised, form):
    size = initialised.size
    expected = [[size * 2 * rank, size * (2 * rank + 1)] for rank in range(size)]
    check(initialised, reduce_scatter_one, expected, {2: [[0, 2], [4, 6]]}, (form,))


def scatter_ones_and_fives():
    rank, size = place()
    output = np.zeros(2)
    scatter_list = [np.ones(2), np.ones(2) * 5, np.ones(2) * 9, np.ones(2) * 13][:size] if rank == 0 else None
    dist.scatter(output, scatter_list, src=0)
    return output.tolist()


def test_scatter(initialised):
    expected = [[1 + 4 * rank] * 2 for rank in range(initialised.size)]
    check(initialised, scatter_ones_and_fives, expected, {2: [[1.0, 1.0], [5.0, 5.0]]})


def the_rest():
    # What the pages describe without a program: who gets what from reduce, broadcast, gather and reduce_scatter.
    rank, size = place()
    reduced = np.array([rank + 1])
    dist.reduce(reduced, dst=size - 1)
    sent = np.array([rank + 1])
    dist.broadcast(sent, src=1)
    taken = [np.zeros(1, np.int64) for _ in range(size)] if rank == 0 else None
    dist.gather(np.array([rank]), taken, dst=0)
    part = np.zeros(1, np.int64)
    dist.reduce_scatter(part, [np.array([rank * size + other]) for other in range(size)])
    dist.barrier()
    return reduced.item(), sent.item(), None if taken is None else lists(taken), part.item()


def test_collectives_that_are_described_in_words(initialised):
    size = initialised.size
    total = size * (size + 1) // 2
    expected = [
        (
            total if rank == size - 1 else rank + 1,
            2,
            [[other] for other in range(size)] if rank == 0 else None,
            sum(other * size + rank for other in range(size)),
        )
        for rank in range(size)
    ]
    check(initialised, the_rest, expected)


def operators():
    rank, _ = place()
    found = {}
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        x = np.array([rank + 1])
        dist.all_reduce(x, op)
        found[op.name] = x.item()
    mean = np.array([rank + 1.0])
    dist.all_reduce(mean, ReduceOp.AVG)
    scaled = np.array([rank + 1.0])
    dist.all_reduce(scaled, ReduceOp.PREMUL_SUM(2.0))
    with pytest.warns(FutureWarning, match="ReduceOp"):
        older = dist.reduce_op.SUM
    return {**found, "AVG": mean.item(), "PREMUL_SUM": scaled.item(), "older": older is ReduceOp.SUM}


def test_every_reduction_of_the_list(initialised):
    ones = range(1, initialised.size + 1)
    expected = {
        "SUM": sum(ones),
        "PRODUCT": int(np.prod(ones)),
        "MIN": 1,
        "MAX": initialised.size,
        "BAND": int(np.bitwise_and.reduce(ones)),
        "BOR": int(np.bitwise_or.reduce(ones)),
        "BXOR": int(np.bitwise_xor.reduce(ones)),
        "AVG": sum(ones) / len(ones),
        "PREMUL_SUM": 2.0 * sum(ones),
        "older": True,
    }
    check(initialised, operators, [expected] * initialised.size)


def reductions_of_complex_numbers():
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        with pytest.raises(TypeError, match="complex"):
            dist.all_reduce(COMPLEX.copy(), op)


def test_reductions_that_complex_numbers_have_not(initialised):
    initialised.run(reductions_of_complex_numbers)
