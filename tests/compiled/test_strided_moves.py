"""Lists of arrays with strides, whose rows the core copies straight into the slots and out of them."""

from __future__ import annotations

import numpy as np
import pytest

import meshdist as dist
from meshdist import core

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]


@pytest.fixture
def trio(worlds):
    return worlds.world("gloo", 3)


# For each kind, the part of an array for one of `size` ranks; blocks are cut along the last dimension but for rows.
PARTS = {
    "columns": ((37, 30), lambda x, k, n: x[:, k * n : (k + 1) * n]),
    "one column": ((500, 3), lambda x, k, n: x[:, k : k + 1]),
    "bytes": ((301, 3), lambda x, k, n: x.view(np.uint8)[:, 3 * k : 3 * k + 3]),
    "every third": ((3000,), lambda x, k, n: x[k::3]),
    "backwards": ((40, 30), lambda x, k, n: x[::-1, k * n : (k + 1) * n]),
    "planes": ((5, 30, 7), lambda x, k, n: x[:, k * n : (k + 1) * n]),
    "boxes": ((6, 30, 8), lambda x, k, n: x[1:5, k * n : (k + 1) * n, 2:7]),
    "transposed": ((30, 41), lambda x, k, n: x[k * n : (k + 1) * n].T),
    "long columns": ((300, 300), lambda x, k, n: x[:, k * n : (k + 1) * n]),
    "long rows": ((9, 30_000), lambda x, k, n: x[:, k * n : (k + 1) * n]),
    "several chunks": ((640, 3000), lambda x, k, n: x[:, k * n : (k + 1) * n]),
    "contiguous": ((30, 500), lambda x, k, n: x[k * n : (k + 1) * n]),
}


def parts_of(kind, array, size):
    shape, part = PARTS[kind]
    extent = max(dim for dim in shape if dim % size == 0)
    return [part(array, peer, extent // size) for peer in range(size)]


def given_by(rank, kind, number):
    shape, _ = PARTS[kind]
    return np.arange(np.prod(shape), dtype="f8").reshape(shape) + 1000 * rank + 10_000 * number


def exchanged(kinds, number):
    """Call with new arrays, of kinds by rank, and compare what comes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kind = kinds[rank % len(kinds)]
    into = np.full(PARTS[kind][0], -1.0)
    outputs = parts_of(kind, into, size)
    dist.all_to_all(outputs, parts_of(kind, given_by(rank, kind, number), size))
    for peer, output in enumerate(outputs):
        sent = parts_of(kinds[peer % len(kinds)], given_by(peer, kinds[peer % len(kinds)], number), size)[rank]
        np.testing.assert_array_equal(output.reshape(-1), sent.reshape(-1))
    alone = np.full(PARTS[kind][0], -1.0)
    for part, output in zip(parts_of(kind, alone, size), outputs, strict=True):
        part[...] = output
    assert into.tobytes() == alone.tobytes(), "bytes between the parts were written"


def again(*kinds):
    for number in range(8):
        exchanged(kinds, number)


@pytest.mark.parametrize("kind", PARTS)
def test_every_rank_gets_every_part(trio, kind):
    trio.run(again, kind)


def in_turn(kinds):
    for number in range(24):
        exchanged([kinds[number % len(kinds)]], number)


def test_other_strides_and_sizes_from_call_to_call(trio):
    trio.run(in_turn, ["columns", "contiguous", "long columns", "backwards", "several chunks", "long columns", "boxes"])


def of_one_shape(length):
    """Ranks with strides, and without, in turns."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in range(60):  # the trials of the ways go on meanwhile
        is_strided = (number + rank) % 3 != 0 if number % 8 else number % 16 == 0
        cut = 2 if is_strided else 1
        given = [np.full((40, cut * length), 100.0 * rank + peer + number) for peer in range(size)]
        taken = [np.zeros((40, cut * length)) for _ in range(size)]
        dist.all_to_all([x[:, :length] for x in taken], [x[:, :length] for x in given])
        for peer, came in enumerate(taken):
            np.testing.assert_array_equal(came[:, :length], 100.0 * peer + rank + number)
            np.testing.assert_array_equal(came[:, length:], 0)


@pytest.mark.parametrize("length", [5, 300, 9000])
def test_some_ranks_have_strides_and_others_none(trio, length):
    trio.run(of_one_shape, length)


def overlapping():
    size = dist.get_world_size()
    given, into = np.ones((20, 4 * size)), np.zeros((20, 4 * size))
    apart = [slice(4 * peer, 4 * peer + 4) for peer in range(size)]
    for _ in range(4):
        dist.all_to_all([into[:, part] for part in apart], [given[:, part] for part in apart])
    too_near = [slice(3 * peer, 3 * peer + 4) for peer in range(size)]
    with pytest.raises(ValueError, match=r"\[0\] and .*\[1\] share memory"):
        dist.all_to_all([into[:, part] for part in too_near], [given[:, part] for part in apart])
    # Inputs may overlap, and the output may be the input.
    dist.all_to_all([into[:, part] for part in apart], [given[:, part] for part in too_near])
    for number in range(4):
        both = np.arange(20.0)[:, None] + 100 * np.arange(4 * size) + 10_000 * dist.get_rank() + number
        wanted = np.hstack(
            [both[:, apart[dist.get_rank()]] + 10_000 * (peer - dist.get_rank()) for peer in range(size)]
        )
        dist.all_to_all([both[:, part] for part in apart], [both[:, part] for part in apart])
        np.testing.assert_array_equal(both, wanted)


def test_outputs_that_overlap_are_refused_after_some_that_do_not(trio):
    trio.run(overlapping)
