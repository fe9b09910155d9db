"""The documented examples of all_to_all and all_to_all_single, and what the pages say they are alike to."""

import itertools

import numpy as np
import pytest
from documented import check, lists, place

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
# Of four ranks, what each sends to each; smaller worlds take the upper left corner.
SPLITS = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]]
EVEN = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
UNEVEN = [
    [[0, 1], [10, 11, 12], [20, 21], [30, 31]],
    [[2, 3], [13, 14], [22], [32, 33]],
    [[4], [15, 16], [23], [34, 35]],
    [[5], [17, 18], [24], [36]],
]


def uneven(size):
    """Return what each rank gets from each."""
    found = []
    for rank in range(size):
        begins = [sum(SPLITS[other][:rank]) for other in range(size)]
        found.append([[10 * src + begins[src] + k for k in range(SPLITS[src][rank])] for src in range(size)])
    return found


def my_splits():
    """Return this rank's input, and how it is cut at the sender's and the receiver's end."""
    rank, size = place()
    input_splits = SPLITS[rank][:size]
    return np.arange(sum(input_splits)) + 10 * rank, input_splits, [SPLITS[src][rank] for src in range(size)]


def single():
    rank, size = place()
    output = np.empty(size, np.int64)
    dist.all_to_all_single(output, np.arange(size) + rank * size)
    return output.tolist()


def single_by_scatters():
    rank, size = place()
    given, output = np.arange(size) + rank * size, np.empty(size, np.int64)
    scatter_list, gather_list = np.split(given, size), np.split(output, size)
    for src in range(size):
        dist.scatter(gather_list[src], scatter_list if src == rank else [], src=src)
    return output.tolist()


@pytest.mark.parametrize("program", [single, single_by_scatters])
def test_single(initialised, program):
    size = initialised.size
    expected = [[src * size + rank for src in range(size)] for rank in range(size)]
    check(initialised, program, expected, {4: EVEN})


def single_with_splits():
    given, input_splits, output_splits = my_splits()
    output = np.empty(sum(output_splits), np.int64)
    dist.all_to_all_single(output, given, output_splits, input_splits)
    return output.tolist()


def test_single_with_uneven_splits(initialised):
    expected = [list(itertools.chain(*blocks)) for blocks in uneven(initialised.size)]
    check(initialised, single_with_splits, expected, {4: [list(itertools.chain(*blocks)) for blocks in UNEVEN]})


def single_complex():
    rank, size = place()
    given = ((np.arange(size) + 1 + size * rank) * (1 + 1j)).astype(np.complex64)
    # The pages make the output of int64, which cannot hold the numbers: that is refused.
    with pytest.raises(TypeError, match="int64"):
        dist.all_to_all_single(np.empty(size, np.int64), given)
    output = np.empty(size, np.complex64)
    dist.all_to_all_single(output, given)
    return output.tolist()


def complex_numbers(size):
    return [[(src * size + rank + 1) * (1 + 1j) for src in range(size)] for rank in range(size)]


COMPLEX = [[(number + 1) * (1 + 1j) for number in row] for row in EVEN]


def test_single_of_complex_numbers(initialised):
    check(initialised, single_complex, complex_numbers(initialised.size), {4: COMPLEX})


def of_lists():
    rank, size = place()
    given, output = np.split(np.arange(size) + rank * size, size), np.split(np.empty(size, np.int64), size)
    dist.all_to_all(output, given)
    return lists(output)


def lists_by_scatters():
    rank, size = place()
    scatter_list, gather_list = np.split(np.arange(size) + rank * size, size), np.split(np.empty(size, np.int64), size)
    for src in range(size):
        dist.scatter(gather_list[src], scatter_list if src == rank else [], src=src)
    return lists(gather_list)


@pytest.mark.parametrize("program", [of_lists, lists_by_scatters])
def test_lists(initialised, program):
    size = initialised.size
    expected = [[[src * size + rank] for src in range(size)] for rank in range(size)]
    check(initialised, program, expected, {4: [[[number] for number in row] for row in EVEN]})


def lists_with_splits():
    given, input_splits, output_splits = my_splits()
    output = [np.empty(count, np.int64) for count in output_splits]
    dist.all_to_all(output, np.split(given, np.cumsum(input_splits)[:-1]))
    return lists(output)


def test_lists_of_uneven_arrays(initialised):
    check(initialised, lists_with_splits, uneven(initialised.size), {4: UNEVEN})


def lists_of_complex_numbers():
    rank, size = place()
    given = ((np.arange(size) + 1 + size * rank) * (1 + 1j)).astype(np.complex64)
    output = np.split(np.empty(size, np.complex64), size)
    dist.all_to_all(output, np.split(given, size))
    return lists(output)


def test_lists_of_complex_numbers(initialised):
    expected = [[[number] for number in row] for row in complex_numbers(initialised.size)]
    check(initialised, lists_of_complex_numbers, expected, {4: [[[number] for number in row] for row in COMPLEX]})
