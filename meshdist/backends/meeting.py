"""compare_calls: the ranks' calls compared over messages, for engines that have no shorter way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from meshdist.call import Signature
from meshdist.collectives.algorithms.blocks import exchange
from meshdist.debug.mismatch import disagreement
from meshdist.errors import DistBackendError
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend

_TEXT_BYTES = 248


def compare_calls(backend: Backend, signature: Signature) -> Iterator[Waitable]:
    """Compare this rank's call with those of others, so that every rank's is compared with that of all.

    Raises:
        DistBackendError: Another rank makes another call.
    """
    text = signature.text.encode()[:_TEXT_BYTES]
    mine = np.frombuffer(signature.fingerprint.to_bytes(8, "little") + text.ljust(_TEXT_BYTES, b"\0"), np.uint8)
    other = np.empty_like(mine)
    # Dissemination: in round k with the rank 2 ** k further on. All are equal when each is equal to those compared with
    # it, since a chain of comparisons leads from every rank to every other.
    distance = 1
    while distance < backend.size:
        dst, src = (backend.rank + distance) % backend.size, (backend.rank - distance) % backend.size
        yield from exchange(backend, mine, dst, other, src)
        if not np.array_equal(mine, other):
            theirs = bytes(other[8:]).rstrip(b"\0").decode(errors="replace")
            raise DistBackendError(disagreement({backend.rank: signature.text, src: theirs}, backend.options.ranks))
        distance *= 2
