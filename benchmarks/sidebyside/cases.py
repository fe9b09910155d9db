"""What is measured: collectives, their arrays, and what must come out.

A case's size is that of the longer array of a call: what all_gather takes and reduce_scatter gives, and the one array
of all_reduce, broadcast and send_recv. Each block has at least one element: the smallest all_gather on four ranks takes
four elements, even where less was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sidebyside.contender import COALESCED, OUTSTANDING, Array, Call, Contender

KIB, MIB = 1 << 10, 1 << 20
_CHECKED_CALLS = 3


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
        takers: How many ranks take something; the first ones.
    """

    gives_block: bool
    takes_block: bool
    in_place: bool
    expected: Callable[[list[Array], int], Array]
    sizes: tuple[int, ...] = (8, 16 * MIB)
    exchanges: bool = False
    takers: int | None = None


def _block_of_all(everyone: list[Array], rank: int) -> Array:
    return np.concatenate([np.split(given, len(everyone))[rank] for given in everyone])


def _block_of_sum(everyone: list[Array], rank: int) -> Array:
    return np.split(sum(everyone[1:], everyone[0]), len(everyone))[rank]


COLLECTIVES: dict[str, Shape | None] = {
    "all_reduce": Shape(
        False, False, True, lambda all_, rank: sum(all_[1:], all_[0]), (8, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
    ),
    "broadcast": Shape(False, False, True, lambda all_, rank: all_[0]),
    "reduce": Shape(False, False, True, lambda all_, rank: sum(all_[1:], all_[0]), takers=1),
    "all_gather_into_tensor": Shape(True, False, False, lambda all_, rank: np.concatenate(all_)),
    "all_gather": Shape(True, False, False, lambda all_, rank: np.concatenate(all_)),
    "gather": Shape(True, False, False, lambda all_, rank: np.concatenate(all_), takers=1),
    "scatter": Shape(False, True, False, lambda all_, rank: np.split(all_[0], len(all_))[rank]),
    "reduce_scatter_tensor": Shape(False, True, False, _block_of_sum),
    "reduce_scatter": Shape(False, True, False, _block_of_sum),
    "all_to_all_single": Shape(False, False, False, _block_of_all, exchanges=True),
    "all_to_all": Shape(False, False, False, _block_of_all, exchanges=True),
    "all_reduce_outstanding": Shape(False, False, True, lambda all_, rank: sum(all_[1:], all_[0]), (OUTSTANDING * 8,)),
    "all_reduce_coalesced": Shape(
        False, False, True, lambda all_, rank: sum(all_[1:], all_[0]), (COALESCED * 8, 16 * MIB)
    ),
    "send_recv": Shape(False, False, False, lambda all_, rank: all_[0], takers=2),
    "barrier": None,
}
"""Every collective that can be measured; None for what moves no array."""


def cases_of(collective: str, sizes: list[int] | None, dtype: str) -> list[Case]:
    """Return the cases of one collective at these sizes, or at its own."""
    shape = COLLECTIVES[collective]
    if shape is None:
        return [Case(collective, 0, dtype)]
    return [Case(collective, nbytes, dtype) for nbytes in sizes or shape.sizes]


def prepare(contender: Contender, case: Case) -> Call:
    """Return the call to time, after it was called a few times and its results found right.

    Raises:
        ArithmeticError: The library's result is wrong.
    """
    shape, rank, size = COLLECTIVES[case.collective], contender.rank, contender.size
    if shape is None:
        call: Call = getattr(contender, case.collective)()
        call()
        return call
    dtype = np.dtype(case.dtype)
    block = max(1, case.nbytes // dtype.itemsize // size)
    divided = shape.gives_block or shape.takes_block or shape.exchanges
    whole = block * size if divided else max(1, case.nbytes // dtype.itemsize)
    gives, takes = (block if shape.gives_block else whole), (block if shape.takes_block else whole)
    give = np.empty(gives, dtype)
    take = give if shape.in_place else np.full(takes, -1, dtype)
    method = getattr(contender, case.collective)
    call = method(take) if shape.in_place else method(give, take)
    # With other values each time: what is timed is the repeated call, which may take another path than the first.
    for repeat in range(_CHECKED_CALLS):
        give[:] = _values(rank, repeat, gives, dtype)
        call()
        if shape.takers is None or rank < shape.takers:
            everyone = [_values(peer, repeat, gives, dtype) for peer in range(size)]
            _check(contender, case, take, shape.expected(everyone, rank))
    # Zeros stay zeros however often they are summed. They are written, so that they are memory of their own.
    give.fill(0)
    take.fill(0)
    return call


def _values(rank: int, repeat: int, elements: int, dtype: np.dtype) -> Array:
    # Small integers, whose sums are exact in any dtype, and no zeros, so that a rank left out of a sum shows in every
    # element. 61 is prime, so that no two blocks look alike.
    return ((np.arange(elements) + 7 * rank + 11 * repeat) % 61 + 1).astype(dtype)


def _check(contender: Contender, case: Case, found: Array, expected: Array) -> None:
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        at = wrong[0]
        raise ArithmeticError(
            f"{case.collective} of {case.nbytes} bytes of {case.dtype}, rank {contender.rank} of {contender.size}: "
            f"{len(wrong)} of {len(found)} elements are wrong; element {at} must be {expected[at]}, got {found[at]}"
        )
