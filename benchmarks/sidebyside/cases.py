"""What is measured: collectives, their arrays, and what must come out.

A case's size is that of the longer array of a call: what all_gather takes and reduce_scatter gives, and the one array
of all_reduce, broadcast, exchange, sendrecv, irecv_and_send and all that is there and back. Each block has at least
one element: the smallest all_gather on four ranks takes four elements, even where less was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from sidebyside.contender import COALESCED, OUTSTANDING, Array, Call, Contender

KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
SHORT = SIZES[:2]
_CHECKED_CALLS = 3
# From this size on, a library may try several ways in its first calls.
_TRIED_BYTES, _TRIALS = 64 * KIB, 20
_PART = 1 << 18
_CHECKED_PARTS = 64


class Case(NamedTuple):
    """One measurement.

    Attributes:
        collective: A key of COLLECTIVES.
        nbytes: The size; 0 for what moves no array.
        dtype: The NumPy name of the elements' type.
    """

    collective: str
    nbytes: int
    dtype: str


class Kept(NamedTuple):
    """The order to take up a case that is prepared at the first such order, and kept with its arrays from then on."""

    case: Case


class Shape(NamedTuple):
    """The arrays of a collective.

    Attributes:
        gives_block: A rank gives one block, the size divided by the number of ranks; else the whole size.
        takes_block: A rank takes one block; else the whole size.
        in_place: What is given and what is taken is one array.
        expected: From what all ranks give, and the rank, what that rank must take.
        sizes: The sizes that are measured unless others are asked for.
        exchanges: A rank gives and takes a block for each rank, though it gives and takes the whole size.
        takers: The ranks that take something, -1 for the last; None for all.
    """

    gives_block: bool
    takes_block: bool
    in_place: bool
    expected: Callable[[list[Array], int], Array]
    sizes: tuple[int, ...] = SIZES
    exchanges: bool = False
    takers: tuple[int, ...] | None = None


def _block_of_all(everyone: list[Array], rank: int) -> Array:
    return np.concatenate([np.split(given, len(everyone))[rank] for given in everyone])


def _block_of_sum(everyone: list[Array], rank: int) -> Array:
    return np.split(sum(everyone[1:], everyone[0]), len(everyone))[rank]


COLLECTIVES: dict[str, Shape | None] = {
    "all_reduce": Shape(False, False, True, lambda all_, rank: sum(all_[1:], all_[0])),
    "broadcast": Shape(False, False, True, lambda all_, rank: all_[0]),
    "reduce": Shape(False, False, True, lambda all_, rank: sum(all_[1:], all_[0]), takers=(0,)),
    "all_gather_into_tensor": Shape(True, False, False, lambda all_, rank: np.concatenate(all_)),
    "all_gather": Shape(True, False, False, lambda all_, rank: np.concatenate(all_)),
    "gather": Shape(True, False, False, lambda all_, rank: np.concatenate(all_), takers=(0,)),
    "scatter": Shape(False, True, False, lambda all_, rank: np.split(all_[0], len(all_))[rank]),
    "reduce_scatter_tensor": Shape(False, True, False, _block_of_sum),
    "reduce_scatter": Shape(False, True, False, _block_of_sum),
    "all_to_all_single": Shape(False, False, False, _block_of_all, exchanges=True),
    "all_to_all": Shape(False, False, False, _block_of_all, exchanges=True),
    "scan": Shape(False, False, True, lambda all_, rank: sum(all_[1 : rank + 1], all_[0])),
    "all_reduce_outstanding": Shape(False, False, True, lambda all_, rank: sum(all_[1:], all_[0]), (OUTSTANDING * 8,)),
    "all_reduce_coalesced": Shape(
        False, False, True, lambda all_, rank: sum(all_[1:], all_[0]), (COALESCED * 8, 16 * MIB)
    ),
    "send_recv": Shape(False, False, False, lambda all_, rank: all_[0], takers=(0, -1)),
    "recv_from_any": Shape(False, False, False, lambda all_, rank: all_[0], SHORT, takers=(0, -1)),
    "probe_and_recv": Shape(False, False, False, lambda all_, rank: all_[0], SHORT, takers=(0, -1)),
    "send_object": Shape(False, False, False, lambda all_, rank: all_[0], SHORT, takers=(0, -1)),
    "exchange": Shape(False, False, False, lambda all_, rank: all_[0 if rank else -1], takers=(0, -1)),
    "sendrecv": Shape(False, False, False, lambda all_, rank: all_[rank - 1]),
    "irecv_and_send": Shape(False, False, False, lambda all_, rank: all_[rank - 1]),
    "barrier": None,
}
"""Every collective that can be measured; None for what moves no array."""
MESSAGES = frozenset(
    ("send_recv", "recv_from_any", "probe_and_recv", "send_object", "exchange", "sendrecv", "irecv_and_send")
)
"""Those of them that are messages between two ranks."""


def cases_of(collective: str, sizes: list[int] | None, dtype: str) -> list[Case]:
    """Return the cases of one collective at these sizes, or at its own."""
    shape = COLLECTIVES[collective]
    if shape is None:
        return [Case(collective, 0, dtype)]
    return [Case(collective, nbytes, dtype) for nbytes in sizes or shape.sizes]


class Lengths(NamedTuple):
    """How many elements the arrays of a case have on some ranks.

    Attributes:
        gives, takes: What a rank gives and takes.
        blocks_given, blocks_taken: In how many blocks.
        block: Elements of a block.
    """

    gives: int
    takes: int
    blocks_given: int
    blocks_taken: int
    block: int


def lengths_of(case: Case, shape: Shape, ranks: int) -> Lengths:
    """Return the lengths of the arrays of a case."""
    count = max(1, case.nbytes // np.dtype(case.dtype).itemsize)
    if not (shape.gives_block or shape.takes_block or shape.exchanges):
        return Lengths(count, count, 1, 1, count)
    block = max(1, count // ranks)
    given, taken = (1 if shape.gives_block else ranks), (1 if shape.takes_block else ranks)
    return Lengths(given * block, taken * block, given, taken, block)


def fits(case: Case, ranks: int, jobs: int) -> bool:
    """Return whether the arrays of a case, of so many ranks of each of so many jobs, leave memory free on this host."""
    shape = COLLECTIVES[case.collective]
    if shape is None:
        return True
    lengths = lengths_of(case, shape, ranks)
    arrays = lengths.gives if shape.in_place else lengths.gives + lengths.takes
    needed = jobs * ranks * arrays * np.dtype(case.dtype).itemsize
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    return needed < 0.7 * available


def prepare(contender: Contender, case: Case) -> Call:
    """Return the call to time, after it was called a few times and its results found right.

    Raises:
        ArithmeticError: The library's result is wrong.
    """
    shape, rank = COLLECTIVES[case.collective], contender.rank
    if shape is None:
        call: Call = getattr(contender, case.collective)()
        call()
        return call
    dtype = np.dtype(case.dtype)
    lengths = lengths_of(case, shape, contender.size)
    give = contender.array(lengths.gives, dtype)
    take = give if shape.in_place else contender.array(lengths.takes, dtype)
    take.fill(-1)
    method = getattr(contender, case.collective)
    call = method(take) if shape.in_place else method(give, take)
    # With other values each time: what is timed is the repeated call, which may take another path than the first.
    for repeat in range(_CHECKED_CALLS):
        for places in _columns(lengths.gives, 1):
            give[places] = _values(rank, repeat, places, dtype)
        call()
        if shape.takers is None or rank in [taker % contender.size for taker in shape.takers]:
            _check(contender, case, shape, take, repeat)
    # Zeros stay zeros however often they are summed. They are written, so that they are memory of their own.
    give.fill(0)
    take.fill(0)
    for _ in range(_TRIALS if case.nbytes >= _TRIED_BYTES else 0):
        call()
    return call


def _columns(block: int, ranks: int, most: int | None = None) -> Iterator[Array]:
    # A part of every block at a time, so that to check large arrays does not take the memory of many of them; with
    # `most`, so many parts, from the first to the last.
    part = max(1, _PART // ranks)
    begins = np.arange(0, block, part)
    if most is not None and len(begins) > most:
        begins = begins[np.linspace(0, len(begins) - 1, most).astype(int)]
    for begin in begins:
        yield np.arange(begin, min(block, begin + part))


def _places(blocks: int, block: int, columns: Array) -> Array:
    return (block * np.arange(blocks)[:, None] + columns).reshape(-1)


def _values(rank: int, repeat: int, places: Array, dtype: np.dtype) -> Array:
    # Small integers, whose sums are exact in any dtype, and no zeros, so that a rank left out of a sum shows in every
    # element. 61 is prime, so that no two blocks look alike.
    return ((places + 7 * rank + 11 * repeat) % 61 + 1).astype(dtype)


def _check(contender: Contender, case: Case, shape: Shape, take: Array, repeat: int) -> None:
    rank, ranks = contender.rank, contender.size
    lengths, first, wrong = lengths_of(case, shape, ranks), "", 0
    # All of small arrays. Of large ones on many ranks, every rank would make so many numbers for so many others that
    # the check took longer than the measurement.
    for columns in _columns(lengths.block, ranks, max(2, _CHECKED_PARTS // ranks)):
        given = _places(lengths.blocks_given, lengths.block, columns)
        taken = _places(lengths.blocks_taken, lengths.block, columns)
        due = shape.expected([_values(peer, repeat, given, take.dtype) for peer in range(ranks)], rank)
        at = np.flatnonzero(take[taken] != due)
        if len(at) and not wrong:
            place = taken[at[0]]
            first = f"element {place} must be {due[at[0]]}, got {take[place]}"
        wrong += len(at)
    if wrong:
        raise ArithmeticError(
            f"{case.collective} of {case.nbytes} bytes of {case.dtype}, rank {rank} of {ranks}: "
            f"{wrong} of {lengths.takes} elements are wrong; {first}"
        )
