"""Express: the short way of messages of one kind, those of few bytes that most programs send.

What they have in common, the header, is packed once. What is out of the ordinary takes the long way, through mail and
receipts: copies that wait to be sent, a receipt that was posted before, another letter that comes first, a failure.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array, as_bytes
from meshdist.backends.base import Express
from meshdist.backends.mpi.post_office import WHOLE, header_of
from meshdist.waiting import look_for

if TYPE_CHECKING:
    from meshdist.backends.mpi.mail import Mail

# How long a receiver looks, letting others run, before it posts a receipt.
_LOOKING_S = 0.0002


def express_to(
    mail: Mail, address: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...], dtype_name: bytes
) -> Express:
    """Return what sends messages of a kind to a rank, by its number in MPI."""
    office, token = mail.office, mail.token
    header = header_of(token, WHOLE, tag, math.prod(shape) * dtype.itemsize, dtype_name)
    send_one = office.send_one

    def send(array: Array) -> bool:
        return mail.failure is None and send_one(token, address, header + array.tobytes())

    return send


def express_from(
    mail: Mail, address: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...], dtype_name: bytes
) -> Express:
    """Return what receives messages of a kind from a rank, if they come in a moment."""
    session, matching, take_one = mail.session, mail.matching, mail.office.take_one
    lock, spins = session.lock, session.spins
    header = header_of(mail.token, WHOLE, tag, math.prod(shape) * dtype.itemsize, dtype_name)

    def take(into: Array) -> bool | None:
        with lock:
            # It is not this one's to take where another receipt may be for it, or another letter comes first.
            if not matching.is_idle or mail.failure is not None:
                return False
            return take_one(address, header, into)

    return lambda array: look_for(partial(take, as_bytes(array)), _LOOKING_S, spins)
