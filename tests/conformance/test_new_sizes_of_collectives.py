"""Collectives on arrays of sizes that were not seen before: the core makes their calls from those of other sizes."""

import itertools

import numpy as np
import pytest
from failing import fails
from python_calls import fewest_functions
from worlds import needs_linux

import meshdist as dist
from meshdist import core
from meshdist.runtime.flight_recorder import facts_in

pytestmark = [
    pytest.mark.timeout(60),
    needs_linux,
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]
# Around the sizes from which on calls take another slot, or another way: of 8-byte elements.
LENGTHS = [3, 2, 1, 0, 5, 7, 16, 126, 128, 129, 130, 1000, 2048, 2050, 3000, 4097, 12345, 16384, 16386, 32767, 32769]


def numbers(rank, length, dtype=np.float64):
    return (np.arange(length) % 101 + 3 * rank + 1).astype(dtype)


def of_all(size, length, dtype=np.float64):
    return np.stack([numbers(rank, length, dtype) for rank in range(size)])


class Collectives:
    """Each with its own arrays of a length, whose result it compares with NumPy's."""

    def __init__(self, group, dtype):
        self.group, self.rank, self.size, self.dtype = group, group.rank(), group.size(), dtype

    def _mine(self, length):
        return numbers(self.rank, length, self.dtype)

    def _all(self, length):
        return of_all(self.size, length, self.dtype)

    def all_reduce(self, length):
        array = self._mine(length)
        self.group.all_reduce(array)
        assert np.array_equal(array, self._all(length).sum(0, dtype=self.dtype))

    def all_reduce_of_rows(self, length):
        array = self._mine(3 * length).reshape(3, length)
        self.group.all_reduce(array, dist.ReduceOp.PRODUCT)
        assert np.array_equal(array.ravel(), self._all(3 * length).prod(0, dtype=self.dtype))

    def flat_all_reduce(self, length):
        array = self._mine(length)
        dist.all_reduce(array, group=self.group)
        assert np.array_equal(array, self._all(length).sum(0, dtype=self.dtype))

    def reduce(self, length):
        array = self._mine(length)
        self.group.reduce(array, 1)
        assert self.rank != 1 or np.array_equal(array, self._all(length).sum(0, dtype=self.dtype))

    def broadcast(self, length):
        array = self._mine(length)
        self.group.broadcast(array, 1)
        assert np.array_equal(array, numbers(1, length, self.dtype))

    def all_gather(self, length):
        arrays = [np.zeros(length, self.dtype) for _ in range(self.size)]
        self.group.all_gather(arrays, self._mine(length))
        assert np.array_equal(arrays, self._all(length))

    def all_gather_concatenated(self, length):
        array = np.zeros(self.size * length, self.dtype)
        self.group.all_gather_into_tensor(array, self._mine(length))
        assert np.array_equal(array, self._all(length).ravel())

    def all_gather_stacked(self, length):
        array = np.zeros((self.size, length), self.dtype)
        self.group.all_gather_into_tensor(array, self._mine(length))
        assert np.array_equal(array, self._all(length))

    def reduce_scatter(self, length):
        whole = self.size * length
        array = np.zeros(length, self.dtype)
        self.group.reduce_scatter_tensor(array, self._mine(whole))
        assert np.array_equal(array, np.split(self._all(whole).sum(0, dtype=self.dtype), self.size)[self.rank])

    def reduce_scatter_of_rows(self, length):
        array = np.zeros((length, 3), self.dtype)
        whole = 3 * self.size * length
        self.group.reduce_scatter_tensor(array, self._mine(whole).reshape(-1, 3))
        assert np.array_equal(array.ravel(), np.split(self._all(whole).sum(0, dtype=self.dtype), self.size)[self.rank])

    def reduce_scatter_of_a_list(self, length):
        whole = self.size * length
        array = np.zeros(length, self.dtype)
        self.group.reduce_scatter(array, [part.copy() for part in np.split(self._mine(whole), self.size)])
        assert np.array_equal(array, np.split(self._all(whole).sum(0, dtype=self.dtype), self.size)[self.rank])

    def all_to_all(self, length):
        array = np.zeros(self.size * length, self.dtype)
        self.group.all_to_all_single(array, self._mine(self.size * length))
        parts = [np.split(row, self.size)[self.rank] for row in self._all(self.size * length)]
        assert np.array_equal(array, np.concatenate(parts))

    def gather(self, length):
        arrays = [np.zeros(length, self.dtype) for _ in range(self.size)] if self.rank == 0 else None
        self.group.gather(self._mine(length), arrays, 0)
        assert arrays is None or np.array_equal(arrays, self._all(length))

    def scatter(self, length):
        array = np.zeros(length, self.dtype)
        self.group.scatter(array, [*self._all(length)] if self.rank == 1 else None, 1)
        assert np.array_equal(array, self._mine(length))

    def scan(self, length):
        array = self._mine(length)
        self.group.scan(array)
        assert np.array_equal(array, self._all(length)[: self.rank + 1].sum(0, dtype=self.dtype))

    def exscan(self, length):
        array = self._mine(length)
        self.group.exscan(array)
        assert self.rank == 0 or np.array_equal(array, self._all(length)[: self.rank].sum(0, dtype=self.dtype))


NAMES = [name for name in vars(Collectives) if not name.startswith("_")]


def of_random_lengths(seed, dtype):
    collectives, random = Collectives(dist.new_group(), dtype), np.random.default_rng(seed)
    for _ in range(1500):
        name, length = random.choice(NAMES), random.choice(LENGTHS) + random.choice([0, 0, 1, 2])
        getattr(collectives, name)(int(length))


@pytest.mark.parametrize("dtype", ["float64", "int8", "complex64"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_whatever_the_sizes_before(worlds, size, dtype):
    worlds.world("gloo", size).run(of_random_lengths, size, dtype)


def functions_of_new_lengths():
    found = {}
    for name in NAMES:
        collective, lengths = getattr(Collectives(dist.new_group(), np.float64), name), itertools.count(130)
        collective(129)
        found[name] = fewest_functions(lambda collective=collective, lengths=lengths: collective(next(lengths)))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_they_are_made_without_python(worlds, size):
    for found in worlds.world("gloo", size).run(functions_of_new_lengths):
        del found["all_gather_stacked"], found["exscan"]  # the first rank of an exscan gets what nobody sends
        assert set(map(tuple, found.values())) == {()}, found


def records_of_new_lengths():
    group = dist.new_group()
    for length in range(4, 9):
        group.all_reduce(np.zeros((length, 2), np.float32))
        group.all_gather_into_tensor(np.zeros(2 * length), np.zeros(length))
    facts = [facts_in(record) for record in group.recorder.records()]
    return [(one.text, one.sent, one.received) for one in facts if one.group == group.name]


def test_the_flight_recorder_has_the_shape_of_each(worlds):
    for found in worlds.world("gloo", 2).run(records_of_new_lengths):
        reduced, gathered = found[::2], found[1::2]
        arrays = [[("float32", (length, 2))] for length in range(4, 9)]
        assert reduced == [
            (f"all_reduce(float32[{length}, 2], op=sum)", array, array)
            for length, array in zip(range(4, 9), arrays, strict=True)
        ]
        assert gathered == [
            (f"all_gather_into_tensor(2 x float64[{n}])", [("float64", (n,))], [("float64", (2 * n,))])
            for n in range(4, 9)
        ]


def with_other_layouts_on_some_ranks():
    """One rank passes arrays with strides, or by name: its calls are made in other ways than those of the others."""
    group = dist.new_group()
    rank, size = group.rank(), group.size()
    for length in range(2, 40):
        array = numbers(rank, 2 * length)[::2].copy() if (length + rank) % size else numbers(rank, 2 * length)[::2]
        expected = of_all(size, 2 * length)[:, ::2]
        if (length + rank) % 2:
            group.all_reduce(array)
        else:
            group.all_reduce(tensor=array)
        assert np.array_equal(array, expected.sum(0))
        gathered = np.zeros(size * length)
        group.all_gather_into_tensor(output_tensor=gathered, input_tensor=array) if rank == 1 else (
            group.all_gather_into_tensor(gathered, array)
        )
        assert np.array_equal(gathered, np.tile(expected.sum(0), size))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_make_them_in_other_ways(worlds, size):
    worlds.world("gloo", size).run(with_other_layouts_on_some_ranks)


def wrong_ones():
    group = dist.new_group()
    rank = group.rank()
    for length in (4, 6, 8):
        group.all_to_all_single(np.zeros(length), np.zeros(length))
        group.all_to_all_single(np.zeros((length, 3)), np.zeros((length, 3)))
        group.all_gather_into_tensor(np.zeros(2 * length), np.zeros(length))
        group.reduce_scatter_tensor(np.zeros(length), np.zeros(2 * length))
        group.all_reduce(np.zeros(length))
    fails(ValueError, lambda: group.all_to_all_single(np.zeros(7), np.zeros(7)), "must be a multiple of 2 ranks")
    fails(ValueError, lambda: group.all_to_all_single(np.zeros((5, 4)), np.zeros((5, 4))), "must be a multiple")
    fails(ValueError, lambda: group.all_to_all_single(np.zeros(8), np.zeros(6)), "must have the shape of input")
    fails(ValueError, lambda: group.all_gather_into_tensor(np.zeros(13), np.zeros(7)), "must have shape (14,)")
    fails(ValueError, lambda: group.reduce_scatter_tensor(np.zeros(7), np.zeros(13)), "must have shape (14,)")
    fails(TypeError, lambda: group.all_gather_into_tensor(np.zeros(14, np.int8), np.zeros(7)), "dtype")
    read_only = np.zeros(5)
    read_only.flags.writeable = False
    fails(ValueError, lambda: group.all_reduce(read_only), "read-only")
    both = np.zeros(15)
    both[...] = 1
    group.reduce_scatter_tensor(both[:5], both[3:13])  # which share memory
    assert both.tolist() == [2] * 5 + [1] * 10
    fails(
        dist.DistBackendError,
        lambda: group.all_reduce(np.zeros(11 + rank)),
        "the ranks disagree",
        "rank 0 calls all_reduce(float64[11], op=sum)",
        "rank 1 calls all_reduce(float64[12], op=sum)",
    )


def test_wrong_ones_are_refused_as_if_they_were_the_first(worlds):
    worlds.world("gloo", 2).run(wrong_ones)


def stacked_ones():
    group = dist.new_group()
    for length in (3, 6):
        group.reduce_scatter_tensor(np.zeros(length), np.zeros((3, length)))
        group.all_gather_into_tensor(np.zeros((3, length)), np.zeros(length))
    for length in (4, 5, 7):
        wrong = np.zeros((length, 3)), np.zeros((length, 6))
        for whole in wrong:
            words = f"must have shape ({3 * length},) or (3, {length})"
            fails(ValueError, lambda a=whole, n=length: group.reduce_scatter_tensor(np.zeros(n), a), words)
            fails(ValueError, lambda a=whole, n=length: group.all_gather_into_tensor(a, np.zeros(n)), words)


def test_blocks_that_are_stacked_have_a_dimension_of_their_own(worlds):
    worlds.world("gloo", 3).run(stacked_ones)


def with_words_that_look_like_a_shape():
    group = dist.new_group()
    rank = group.rank()
    for length in (5, 6, 7, 8):
        with group.hooks.comparing("step [5]"):
            if rank == 0 and length == 8:  # there is no call of this form from which the core could make it
                dist.all_reduce(np.zeros(length), group=group)
            else:
                group.all_reduce(np.zeros(length))
    with group.hooks.comparing("step [5]"):
        fails(
            dist.DistBackendError,
            lambda: group.all_reduce(np.zeros(6 + rank)),
            "rank 0 calls all_reduce(float64[6], op=sum, step [5])",
            "rank 1 calls all_reduce(float64[7], op=sum, step [5])",
        )


def test_what_else_the_ranks_compare_stays(worlds):
    worlds.world("gloo", 2).run(with_words_that_look_like_a_shape)
