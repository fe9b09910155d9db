"""The list of collectives and messages: methods of groups and meshes, and flat functions of `meshdist`.

Each is imported under its own name, so that type checkers treat it as public, and is an attribute of CollectiveMethods.
`import meshdist` and `meshdist.__all__` follow from this list.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from meshdist.collectives.all_gather import all_gather as all_gather
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor as all_gather_into_tensor
from meshdist.collectives.all_gather_into_tensor import all_gather_single as all_gather_single
from meshdist.collectives.all_reduce import all_reduce as all_reduce
from meshdist.collectives.all_to_all import all_to_all as all_to_all
from meshdist.collectives.all_to_all_single import all_to_all_single as all_to_all_single
from meshdist.collectives.barrier import barrier as barrier
from meshdist.collectives.barrier import monitored_barrier as monitored_barrier
from meshdist.collectives.broadcast import broadcast as broadcast
from meshdist.collectives.coalesced import all_gather_coalesced as all_gather_coalesced
from meshdist.collectives.coalesced import all_gather_into_tensor_coalesced as all_gather_into_tensor_coalesced
from meshdist.collectives.coalesced import all_reduce_coalesced as all_reduce_coalesced
from meshdist.collectives.coalesced import reduce_scatter_tensor_coalesced as reduce_scatter_tensor_coalesced
from meshdist.collectives.definition import GroupFunction
from meshdist.collectives.gather import gather as gather
from meshdist.collectives.multigpu import all_gather_multigpu as all_gather_multigpu
from meshdist.collectives.multigpu import all_reduce_multigpu as all_reduce_multigpu
from meshdist.collectives.multigpu import broadcast_multigpu as broadcast_multigpu
from meshdist.collectives.multigpu import reduce_multigpu as reduce_multigpu
from meshdist.collectives.multigpu import reduce_scatter_multigpu as reduce_scatter_multigpu
from meshdist.collectives.object_messages import irecv_object_list as irecv_object_list
from meshdist.collectives.object_messages import isend_object_list as isend_object_list
from meshdist.collectives.object_messages import recv_object as recv_object
from meshdist.collectives.object_messages import recv_object_list as recv_object_list
from meshdist.collectives.object_messages import send_object as send_object
from meshdist.collectives.object_messages import send_object_list as send_object_list
from meshdist.collectives.object_messages import sendrecv_object as sendrecv_object
from meshdist.collectives.objects import all_gather_object as all_gather_object
from meshdist.collectives.objects import broadcast_object_list as broadcast_object_list
from meshdist.collectives.objects import gather_object as gather_object
from meshdist.collectives.objects import scatter_object_list as scatter_object_list
from meshdist.collectives.probe import iprobe as iprobe
from meshdist.collectives.probe import probe as probe
from meshdist.collectives.reduce import reduce as reduce
from meshdist.collectives.reduce_scatter import reduce_scatter as reduce_scatter
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_single as reduce_scatter_single
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_tensor as reduce_scatter_tensor
from meshdist.collectives.scan import exscan as exscan
from meshdist.collectives.scan import scan as scan
from meshdist.collectives.scatter import scatter as scatter
from meshdist.collectives.send_recv import irecv as irecv
from meshdist.collectives.send_recv import isend as isend
from meshdist.collectives.send_recv import recv as recv
from meshdist.collectives.send_recv import send as send
from meshdist.collectives.send_recv import sendrecv as sendrecv

if TYPE_CHECKING:
    from meshdist.runtime.interfaces import Group


class CollectiveMethods:
    """Adds every collective as a method over the `collective_group` of a class.

    Methods take the arguments of the flat functions except `group`; `src` and `dst` are ranks in the group.
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
    scan = scan
    exscan = exscan
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
    isend_object_list = isend_object_list
    irecv_object_list = irecv_object_list
    send_object = send_object
    recv_object = recv_object
    sendrecv_object = sendrecv_object
    send = send
    recv = recv
    isend = isend
    irecv = irecv
    sendrecv = sendrecv
    probe = probe
    iprobe = iprobe

    @property
    @abstractmethod
    def collective_group(self) -> Group:
        """The group that the methods run over."""


if not TYPE_CHECKING:  # for type checkers, what is imported under its own name
    __all__ = [name for name, value in vars(CollectiveMethods).items() if isinstance(value, GroupFunction)]
