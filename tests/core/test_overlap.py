"""Which arrays lie over each other, and which inputs must be copied for it."""

import itertools
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdist.arrays.overlap import KnownApart, must_copy, repeats_elements, shared_pair

pytestmark = pytest.mark.timeout(60)

STEPS = st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 4)), max_size=3)


def placed(dims, begin=512, dtype="i2"):
    memory = np.zeros(1024, np.uint8)
    strides, shape = [step for step, _ in dims], [size for _, size in dims]
    return np.ndarray(shape, dtype, memory, begin, strides), memory


def addresses(array, dims, begin=512):
    return [
        begin + byte + sum(place * step for place, (step, _) in zip(places, dims, strict=True))
        for places in itertools.product(*(range(size) for _, size in dims))
        for byte in range(array.itemsize)
    ]


@settings(max_examples=200, derandomize=True)
@given(STEPS)
def test_repeated_elements_are_found(dims):
    array, _ = placed(dims)
    touched = addresses(array, dims)
    assert repeats_elements(array) == (len(set(touched)) < len(touched))


@settings(max_examples=200, derandomize=True)
@given(st.lists(st.tuples(STEPS, st.integers(480, 540)), max_size=7))
def test_arrays_that_share_memory_are_found(parts):
    memory = np.zeros(1024, np.uint8)
    arrays, touched = [], []
    for dims, begin in parts:
        array = np.ndarray([size for _, size in dims], "u1", memory, begin, [step for step, _ in dims])
        arrays.append(array)
        touched.append(set(addresses(array, dims, begin)))
    pairs = [
        (i, j)
        for (i, one), (j, other) in itertools.combinations(enumerate(touched), 2)
        if one and other and one & other
    ]
    found = shared_pair(arrays)
    assert (found in pairs) if pairs else found is None


def test_what_must_be_copied():
    out = np.zeros(12)
    rows = list(out.reshape(3, 4))
    for rank in range(3):
        assert not must_copy(rows[rank], out, rank, 3, False), "the own block, where it belongs"
        assert not must_copy(rows[rank], rows, rank, 3, False)
        assert not must_copy(rows, rows[rank], rank, 3, False)
        assert must_copy(rows, rows[rank], rank, 3, True), "a reduction is not what was sent"
        assert must_copy(rows[rank], out, (rank + 1) % 3, 3, False), "the block of another rank"
    assert must_copy(out[1:5], out, 0, 3, False)
    assert must_copy(rows, rows, 0, 3, False), "all_to_all in place"
    assert must_copy(out, out, 0, 3, False)
    assert not must_copy(np.zeros(4), out, 0, 3, False)
    assert not must_copy(out[::2], out[1::2], 0, 1, False), "they lie between each other"
    assert not must_copy(out[:0], out, 1, 3, False)


def test_arrays_that_were_apart_are_looked_at_again_when_others_take_their_places():
    memory = np.zeros(8)
    known = KnownApart(apart=True)
    give, take = [memory[:2], memory[2:4]], [memory[4:6], memory[6:]]
    for _ in range(3):
        assert not known.may_overlap(give, take)
    assert known.may_overlap(give, [take[0], memory[5:7]])
    assert known.may_overlap(take, take)
    take[1] = memory[4:6]
    assert known.may_overlap(give, take)
    assert known.may_overlap([give[0], take[0]], take[:1])


def test_an_array_in_the_place_of_one_that_is_gone_is_looked_at():
    memory = np.zeros(8)
    known = KnownApart(apart=False)
    first = memory[:4]
    # New arrays often get the ids of those that were freed right before.
    for begin in [4] * 5 + [3] * 5 + [4] * 5:
        assert known.may_overlap(None, [first, memory[begin:]]) == (begin == 3)


def test_inputs_count_only_where_they_must_be_apart():
    x = np.zeros(4)
    for _ in range(3):
        assert not KnownApart(apart=False).may_overlap(x[:3], [x[:2], x[2:]])
        assert KnownApart(apart=True).may_overlap(x[:3], [x[:2], x[2:]])


def test_remembered_arrays_are_not_kept_alive():
    known = KnownApart(apart=True)
    arrays = [np.zeros(2), np.zeros(2)]
    gone = [weakref.ref(array) for array in arrays]
    for _ in range(3):
        assert not known.may_overlap(None, arrays)
    arrays.clear()
    assert [found() for found in gone] == [None, None]
