"""How many bytes a call is about, found in what the user passed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshdist.arrays import as_array
from meshdist.collectives.algorithms.pairwise import split_blocks

if TYPE_CHECKING:
    from meshdist.collectives.volume import Seat
    from meshdist.detour import Announcement


def collective_of(call: Announcement) -> str:
    """Return the collective that carries out a call, which may be one of lists or in disguise; of a message its way."""
    collective = call.collective
    if collective is None:
        return "recv" if call.send is None else "send"
    while collective.staging is not None:
        collective = collective.staging.inner
    return collective.native


def call_size(call: Announcement) -> int:
    """Return the size of a call in bytes: the longer of what this rank gives and what it gets.

    Of several arrays for the devices of one process it is what the process takes part with: one of them, or their
    reduction, or in a gather or reduce-scatter all of them once.
    """
    longer = max(_nbytes(call.send), _nbytes(call.recv))
    collective = call.collective
    if collective is None or collective.staging is None or not collective.staging.by_device:
        return longer
    return longer // min(len(side) for side in (call.send, call.recv) if isinstance(side, (list, tuple)))


def given_bytes(call: Announcement) -> int:
    """Return the bytes of what this rank gives."""
    return _nbytes(call.send)


def parts_bytes(call: Announcement, kind: str, seat: Seat) -> list[int] | None:
    """Return the bytes that are for each rank, where a call says so; None where all get as many, or this rank none."""
    if kind == "scatter" and call.root != seat.rank:
        return None
    if kind in ("all_to_all", "scatter"):
        return [_nbytes(part) for part in call.send]
    if call.splits is None:
        return None
    blocks = split_blocks(as_array(call.send, "input"), call.splits[0], seat.size)
    return [block.nbytes for block in blocks]


def _nbytes(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return int(value.nbytes if hasattr(value, "nbytes") else as_array(value, "tensor").nbytes)
