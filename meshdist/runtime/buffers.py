"""Prepare the buffers of a call, one array or a list of them, for the backend, and unpack them afterwards."""

from __future__ import annotations

from typing import Any

from meshdist.arrays.host import check_writable, native, pack
from meshdist.arrays.overlap import must_copy
from meshdist.arrays.reduce_op import PremulSum, quietly
from meshdist.runtime.call import Buffers, Call
from meshdist.runtime.plan_cache import each


def in_native_order(buffers: Buffers) -> Buffers:
    if isinstance(buffers, list):
        return [native(array) for array in buffers]
    return None if buffers is None else native(buffers)


def check_output(taken: Buffers, recv: Any, name: str) -> None:
    """Raise if an output cannot be written; `taken` are the arrays made from `recv`, which the user passed."""
    if isinstance(taken, list):
        for place, (array, value) in enumerate(zip(taken, recv, strict=True)):
            check_writable(array, f"{name}[{place}]", value)
    elif taken is not None:
        check_writable(taken, name, recv)


def must_be_copied(call: Call) -> bool:
    """Return whether the input must be copied, because the output overwrites it."""
    # A composed collective copies its input in any case.
    if call.send is None or call.recv is None or call.collective.composition is not None:
        return False
    return must_copy(call.send, call.recv, call.rank, call.size, call.op is not None)


def packed(buffers: Buffers, copy: bool = False) -> Buffers:
    if isinstance(buffers, list):
        return [pack(array, copy=copy) for array in buffers]
    return None if buffers is None else pack(buffers, copy=copy)


def scaled(factor: PremulSum, buffers: Buffers) -> Buffers:
    products = [quietly(factor.scaled, array) for array in each(buffers)]
    return products if isinstance(buffers, list) else products[0]


def unpack(packed_buffers: Buffers, taken: Buffers) -> None:
    """Copy the received data to the user's arrays, unless it was received there."""
    for array, plain in zip(each(taken), each(packed_buffers), strict=True):
        if plain is not array:
            array[...] = plain
