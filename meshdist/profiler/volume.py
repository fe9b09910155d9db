"""Volume: sums over calls, and the size of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshdist.collectives.traffic import nbytes_of

if TYPE_CHECKING:
    from meshdist.runtime.hooks import CallInfo


@dataclass(frozen=True)
class Volume:
    """A sum over this rank's calls.

    Attributes:
        calls: The number of calls.
        nbytes: The sum of their sizes in bytes. The size of a call is the larger of input and output: the array of an
            all_reduce, the whole output of an all_gather, the whole input of a reduce_scatter.
        inside: The least bytes that this rank must send to ranks of its host.
        between: The same, to ranks of other hosts.
    """

    calls: int = 0
    nbytes: int = 0
    inside: int = 0
    between: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(
            self.calls + other.calls,
            self.nbytes + other.nbytes,
            self.inside + other.inside,
            self.between + other.between,
        )


def call_size(call: CallInfo) -> int:
    """Return the size of a call in bytes: the larger of this rank's input and output.

    For one array per device of a process it counts the process's own contribution: one array, or their reduction; for
    gather or reduce-scatter, all of them once.
    """
    longer = max(nbytes_of(call.send), nbytes_of(call.recv))
    collective = call.collective
    if collective is None or collective.composition is None or not collective.composition.by_device:
        return longer
    return longer // min(len(side) for side in (call.send, call.recv) if isinstance(side, (list, tuple)))
