"""Collectives that a program adds: each is its definition and the line that registers it."""

from collections.abc import Iterator

import numpy as np

from meshdist.collectives.algorithms.blocks import exchange, flat, shares_of
from meshdist.collectives.algorithms.ring import pass_around, ring_all_reduce
from meshdist.collectives.checks import agree_on_array, agree_on_one, check_one, check_same_shape, one
from meshdist.collectives.dataflow import ALL_REDUCE
from meshdist.collectives.definition import collective
from meshdist.collectives.registry import functions, register, unregister
from meshdist.runtime.call import Call
from meshdist.runtime.context import resolve
from meshdist.runtime.waiting import Waitable


def check_alike(call: Call) -> None:
    check_same_shape(call, one(call, "recv"), one(call, "send"), ("output", "input"))


def pass_on(backend, call, send, recv) -> Iterator[Waitable]:
    after, before = (call.rank + 1) % call.size, (call.rank - 1) % call.size
    if call.size == 1:
        recv[...] = send
    else:
        yield from exchange(backend, flat(send), after, flat(recv), before)


@collective(
    names=("input", "output"), check=check_alike, agreed=lambda call: agree_on_one(call, "send"), default=pass_on
)
def rotate(output, input, group=None, async_op=False):
    """Give every rank the array of the rank before it."""
    return resolve(group).submit(rotate, input, output, None, None, async_op)


def scatter_and_pass_around(backend, call, send, recv) -> Iterator[Waitable]:
    yield from pass_around(backend, call, shares_of(flat(recv), call.size))


@collective(check=check_one, agreed=agree_on_array, default=scatter_and_pass_around)
def patch(tensor, group=None, async_op=False):
    """Give every rank the i-th share of rank i's array, in place."""
    return resolve(group).submit(patch, tensor, tensor, None, None, async_op)


@collective(check=check_one, agreed=agree_on_array, default=ring_all_reduce, dataflow=ALL_REDUCE)
def total(tensor, op="sum", group=None, async_op=False):
    """Reduce the arrays of all ranks, in place, as backends reduce by themselves."""
    return resolve(group).submit(total, tensor, tensor, op, None, async_op)


ADDED = (rotate, patch, total)


def add() -> None:
    for function in ADDED:
        if function.name not in functions():
            register(function)


def take_away() -> None:
    for function in ADDED:
        unregister(function.name)


def rotated(rank: int, size: int) -> np.ndarray:
    return np.arange(3.0) + (rank - 1) % size
