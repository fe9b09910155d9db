"""The `mpi` backend: which collectives the MPI library carries out, and by which plan."""

from __future__ import annotations

from typing import Any

from meshdist.backends.base import DefaultPlan, Plan, plan_alone
from meshdist.backends.mpi import plans
from meshdist.backends.mpi.cuda_aware import CudaAwareCalls, is_cuda_aware
from meshdist.backends.mpi.group import MpiGroup
from meshdist.runtime.call import Call, num_bytes
from meshdist.runtime.device_calls import DeviceCalls


class MpiBackend(MpiGroup):
    """Carries out the calls of a group over MPI; those without a plan use the default algorithm over messages."""

    @classmethod
    def has_own(cls, native: str) -> bool:
        return native in _PLANS

    def prepare(self, call: Call) -> Plan:
        if call.collective.composition is not None:
            return super().prepare(call)
        if self.size == 1:
            return plan_alone(self, call)
        make = _PLANS.get(call.collective.native)
        if make is None or self._is_too_large(call):
            return DefaultPlan(self, call)
        if call.collective.native == "all_gather" and isinstance(call.recv, list):
            return plans.AllGatherList(self, call)
        if call.collective.native == "all_to_all_single" and call.splits is not None:
            return plans.AllToAllVarying(self, call)
        plan: Plan = make(self, call)
        return plan

    def staged_calls(self) -> DeviceCalls:
        return CudaAwareCalls(self) if is_cuda_aware(self.session) else super().staged_calls()

    def _is_too_large(self, call: Call) -> bool:
        # If MPI counts in 32 bits, larger calls use our own algorithms, which send in pieces. All ranks must decide
        # alike, and not all of them know the sizes of all arrays.
        most, name = self.session.largest_count, call.collective.native
        if most is None or name == "all_to_all":
            return False
        if name in ("gather", "scatter"):
            block = call.send if name == "gather" else call.recv
            return self.size * num_bytes(block) > most
        return call.splits is None and max(num_bytes(call.send), num_bytes(call.recv)) > most


_PLANS: dict[str, Any] = {
    "all_gather": plans.AllGather,
    "all_gather_into_tensor": plans.AllGather,
    "all_reduce": plans.AllReduce,
    "all_to_all": plans.AllToAllVarying,
    "all_to_all_single": plans.AllToAll,
    "barrier": plans.Barrier,
    "broadcast": plans.Broadcast,
    "gather": plans.Gather,
    "reduce": plans.Reduce,
    "reduce_scatter": plans.ReduceScatter,
    "reduce_scatter_tensor": plans.ReduceScatter,
    "scatter": plans.Scatter,
}
