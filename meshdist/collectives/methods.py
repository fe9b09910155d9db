"""The one list of the collectives: what ProcessGroup and DeviceMesh have as methods."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from meshdist.collectives.all_gather import all_gather
from meshdist.collectives.all_gather_coalesced import all_gather_coalesced
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor, all_gather_single
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.all_reduce_coalesced import all_reduce_coalesced
from meshdist.collectives.all_to_all import all_to_all
from meshdist.collectives.all_to_all_single import all_to_all_single
from meshdist.collectives.barrier import barrier
from meshdist.collectives.broadcast import broadcast
from meshdist.collectives.gather import gather
from meshdist.collectives.monitored_barrier import monitored_barrier
from meshdist.collectives.multigpu import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
    reduce_scatter_multigpu,
)
from meshdist.collectives.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from meshdist.collectives.point_to_point import irecv, isend, recv, send
from meshdist.collectives.reduce import reduce
from meshdist.collectives.reduce_scatter import reduce_scatter
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_single, reduce_scatter_tensor
from meshdist.collectives.scatter import scatter
from meshdist.collectives.tensor_coalesced import all_gather_into_tensor_coalesced, reduce_scatter_tensor_coalesced

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
    gather = gather
    scatter = scatter
    all_to_all = all_to_all
    all_to_all_single = all_to_all_single
    barrier = barrier
    all_gather_single = all_gather_single
    reduce_scatter_single = reduce_scatter_single
    all_gather_coalesced = all_gather_coalesced
    all_reduce_coalesced = all_reduce_coalesced
    monitored_barrier = monitored_barrier
    all_gather_into_tensor_coalesced = all_gather_into_tensor_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_tensor_coalesced
    all_gather_multigpu = all_gather_multigpu
    all_reduce_multigpu = all_reduce_multigpu
    broadcast_multigpu = broadcast_multigpu
    reduce_multigpu = reduce_multigpu
    reduce_scatter_multigpu = reduce_scatter_multigpu
    all_gather_object = all_gather_object
    broadcast_object_list = broadcast_object_list
    gather_object = gather_object
    recv_object_list = recv_object_list
    scatter_object_list = scatter_object_list
    send_object_list = send_object_list
    send = send
    recv = recv
    isend = isend
    irecv = irecv

    @property
    @abstractmethod
    def collective_group(self) -> ProcessGroup:
        """The group that the methods run over."""
