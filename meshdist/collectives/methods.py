"""The one list of the collectives: what ProcessGroup and DeviceMesh have as methods."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from meshdist.collectives.all_gather import all_gather
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.all_to_all_single import all_to_all_single
from meshdist.collectives.barrier import barrier
from meshdist.collectives.broadcast import broadcast
from meshdist.collectives.point_to_point import irecv, isend, recv, send
from meshdist.collectives.reduce import reduce
from meshdist.collectives.reduce_scatter import reduce_scatter
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_tensor

if TYPE_CHECKING:
    from meshdist.process_group import ProcessGroup


class CollectiveMethods:
    """Gives a class every collective as a method, over its `collective_group`.

    The methods take the arguments of the flat functions but `group`; `src` and `dst` are ranks in the group.
    """

    all_reduce = all_reduce
    broadcast = broadcast
    reduce = reduce
    all_gather = all_gather
    all_gather_into_tensor = all_gather_into_tensor
    reduce_scatter = reduce_scatter
    reduce_scatter_tensor = reduce_scatter_tensor
    all_to_all_single = all_to_all_single
    barrier = barrier
    send = send
    recv = recv
    isend = isend
    irecv = irecv

    @property
    @abstractmethod
    def collective_group(self) -> ProcessGroup:
        """The group that the methods run over."""
