"""DeviceCalls: the way of calls whose arrays are in the memory of a GPU.

The way of those on the CPU is in `process_group.py` and `messages.py`. Where an array is on a GPU, or the engine of the
group carries nothing else, it branches off to here, before anything is looked at.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshdist.call import Splits
from meshdist.reduce_op import Op
from meshdist.work import Work

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective
    from meshdist.process_group import ProcessGroup


@dataclass(slots=True)
class Request:
    """One call of a collective as the user made it; nothing of it is checked yet.

    Attributes:
        group: The group.
        where: How messages about the call begin.
        collective: Its definition.
        send: What this rank gives: an array, a list of arrays, or None.
        recv: What it gets, in the same forms.
        op: The reduction, where there is one.
        root: The source or destination, as a rank of the group.
        async_op: Return a Work at once.
        splits: Rows to and rows from each rank, for an all_to_all_single with split sizes.
        timeout_s: How long it may wait; the group's timeout where None.
        compares: The ranks' calls are compared whatever that costs: so it is at debug level DETAIL.
    """

    group: ProcessGroup
    where: str
    collective: Collective[..., Any]
    send: Any
    recv: Any
    op: Op | None
    root: int | None
    async_op: bool
    splits: Splits | None
    timeout_s: float | None
    compares: bool = False


@dataclass(slots=True)
class Parcel:
    """One message as the user made it.

    Attributes:
        group: The group.
        where: How messages about it begin.
        of: The function that was called.
        tensor: The array.
        peer: The other side, as a rank of the group; None takes any.
        tag: Its tag.
    """

    group: ProcessGroup
    where: str
    of: str
    tensor: Any
    peer: int | None
    tag: int


class DeviceCalls(ABC):
    """Carries out the calls of one group on arrays in the memory of a GPU.

    Attributes:
        device: The number of the GPU that the arrays of this rank must be on; None where it may be any.
    """

    device: int | None = None

    @abstractmethod
    def submit(self, request: Request) -> Any:
        """Carry out a collective; return what was received, or the Work."""

    @abstractmethod
    def send(self, parcel: Parcel) -> None:
        """Send a message; its array may then be changed."""

    @abstractmethod
    def recv(self, parcel: Parcel) -> int:
        """Receive a message; return the sender, as a rank of the group."""

    @abstractmethod
    def isend(self, parcel: Parcel) -> Work:
        """Begin to send a message."""

    @abstractmethod
    def irecv(self, parcel: Parcel) -> Work:
        """Begin to receive a message."""

    def connect(self, where: str) -> None:
        """Meet the other ranks now and not at the first call, where there is something to be made."""

    def begin_batch(self) -> None:
        """From now on messages that are begun wait for `end_batch`, where they must be posted together."""

    def end_batch(self, group: ProcessGroup, where: str | None) -> None:
        """Post the messages that wait; where None, as one of them was refused, none."""
