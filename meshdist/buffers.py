"""What a call does with its buffers, one array or a list of them, before a backend gets them and after."""

from __future__ import annotations

from typing import Any

from meshdist.arrays import check_writable, native, pack
from meshdist.call import Buffers, Call
from meshdist.overlap import must_copy
from meshdist.plan_key import each
from meshdist.quiet import quietly
from meshdist.reduce_op import PremulSum


def in_native_order(buffers: Buffers) -> Buffers:
    """Return what stands for the buffers in checks and plans: of the same shapes, in the machine's byte order."""
    if isinstance(buffers, list):
        return [native(array) for array in buffers]
    return None if buffers is None else native(buffers)


def check_output(taken: Buffers, recv: Any, name: str) -> None:
    """Raise where what is received cannot be written: `taken` are the arrays of what the user passed, `recv`."""
    if isinstance(taken, list):
        for place, (array, value) in enumerate(zip(taken, recv, strict=True)):
            check_writable(array, f"{name}[{place}]", value)
    elif taken is not None:
        check_writable(taken, name, recv)


def must_be_copied(call: Call) -> bool:
    """Return whether what is sent has to be copied, because what is received is written over it."""
    # A staged collective copies what is sent in any case.
    if call.send is None or call.recv is None or call.collective.staging is not None:
        return False
    return must_copy(call.send, call.recv, call.rank, call.size, call.op is not None)


def packed(buffers: Buffers, copy: bool = False) -> Buffers:
    """Return the buffers as backends take them; with `copy` none of them shares memory with the user's."""
    if isinstance(buffers, list):
        return [pack(array, copy=copy) for array in buffers]
    return None if buffers is None else pack(buffers, copy=copy)


def scaled(factor: PremulSum, buffers: Buffers) -> Buffers:
    """Return new buffers: those given times the factor of a PREMUL_SUM."""
    products = [quietly(factor.scaled, array) for array in each(buffers)]
    return products if isinstance(buffers, list) else products[0]


def unpack(packed_buffers: Buffers, taken: Buffers) -> None:
    """Bring what was received where the user wants it, if it is not there."""
    for array, plain in zip(each(taken), each(packed_buffers), strict=True):
        if plain is not array:
            array[...] = plain
