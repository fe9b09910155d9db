"""Faults of calls: the ranks make calls that do not fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from faults_compared.fault import Fault
from faults_compared.library import Library, ones
from faults_compared.witness import Witness

Call = Callable[[Library], Any]


def _never() -> bool:
    return False


def _differ(lib: Library, witness: Witness, *calls: Call) -> None:
    """Each rank makes a call of its own; there is no right value where they do not fit."""
    witness.fault()
    witness.attempt(lambda: calls[lib.rank](lib), _never)


def other_count(lib: Library, witness: Witness) -> None:
    """The arrays have different lengths."""
    _differ(lib, witness, lambda lib: lib.all_reduce(ones(4)), lambda lib: lib.all_reduce(ones(5)))


def other_shape(lib: Library, witness: Witness) -> None:
    """The arrays are as long, and have different shapes."""
    x = np.ones((2, 3) if lib.rank == 0 else (3, 2), np.float32)
    witness.fault()
    witness.attempt(lambda: lib.all_reduce(x), lambda: bool((x == lib.size).all()))


def other_dtype(lib: Library, witness: Witness) -> None:
    """Floating point meets integers."""
    _differ(lib, witness, lambda lib: lib.all_reduce(ones(4)), lambda lib: lib.all_reduce(ones(4, "int32")))


def other_op(lib: Library, witness: Witness) -> None:
    """A sum meets a maximum."""
    _differ(lib, witness, lambda lib: lib.all_reduce(ones(4)), lambda lib: lib.all_reduce(ones(4), "max"))


def other_root(lib: Library, witness: Witness) -> None:
    """Each sends from itself, which need not wait for the other; in a barrier they do."""

    def broadcast_from(root: int) -> Call:
        return lambda lib: (lib.broadcast(ones(4), root), lib.barrier())

    _differ(lib, witness, broadcast_from(0), broadcast_from(1))


def other_collective(lib: Library, witness: Witness) -> None:
    """A barrier meets a sum."""
    _differ(lib, witness, lambda lib: lib.barrier(), lambda lib: lib.all_reduce(ones(4)))


def _message(lib: Library, witness: Witness, sent: Any, expected: Any) -> None:
    witness.fault()
    if lib.rank == 0:
        # What it takes to send says little; that the other has taken it, the next call does.
        witness.attempt(lambda: (lib.send(sent, 1), lib.barrier()), _never)
    else:
        witness.attempt(lambda: (lib.recv(expected, 0), lib.barrier()), _never)


def long_message(lib: Library, witness: Witness) -> None:
    """A message is longer than the array that it is received into."""
    _message(lib, witness, ones(5), ones(4))


def short_message(lib: Library, witness: Witness) -> None:
    """A message is shorter."""
    _message(lib, witness, ones(3), ones(4))


def other_message(lib: Library, witness: Witness) -> None:
    """A message has a different dtype."""
    _message(lib, witness, ones(4), ones(4, "int32"))


CALLS = (
    Fault("all_reduce of 4 elements and of 5", other_count),
    Fault("all_reduce of shape (2, 3) and of (3, 2)", other_shape, has_answer=True),
    Fault("all_reduce of float32 and of int32", other_dtype),
    Fault("all_reduce with SUM and with MAX", other_op),
    Fault("broadcast from 0 and from 1; then a barrier", other_root),
    Fault("barrier and all_reduce", other_collective),
    Fault("a message of 5 elements into an array of 4; then a barrier", long_message),
    Fault("a message of 3 elements into an array of 4; then a barrier", short_message),
    Fault("a message of float32 into an array of int32; then a barrier", other_message),
)
