"""Arrays on a GPU through MPI: as they are, where the MPI library takes such, else by way of the CPU.

MPI knows nothing of streams: what is sent must be there when it is called, and what it has received is there when it
returns. So the host waits for the current stream before, and has nothing to wait for after.
"""

from __future__ import annotations

import ctypes
import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.backends.base import Plan
from meshdist.backends.mpi import plans
from meshdist.backends.mpi.library import Session
from meshdist.backends.staged_devices import StagedCalls
from meshdist.call import Call
from meshdist.cupy_arrays import on_current_stream, outline
from meshdist.deadline import Deadline
from meshdist.device_calls import Request
from meshdist.plan_key import remember
from meshdist.reduce_op import ReduceOp, as_reduce_op
from meshdist.switches import MPI_CUDA, switch

if TYPE_CHECKING:
    from meshdist.backends.mpi.backend import MpiBackend

# Those of one array in and one out, which MPI reads and writes where they are.
PASSED = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_MPICH_CUDA = 0


def is_cuda_aware(session: Session) -> bool:
    """Return whether the MPI library says that it takes arrays on a GPU; MESHDIST_MPI_CUDA, 0 or 1, overrides it.

    MPI 4.1 has an info key for it, Open MPI and MPICH a function each.
    """
    given = switch(MPI_CUDA)
    if given is not None:
        return given
    with session.lock:
        return _says_so(session.mpi)


def _says_so(mpi: Any) -> bool:
    info = mpi.COMM_WORLD.Get_info()
    try:
        if "cuda" in (info.Get("mpi_memory_alloc_kinds") or "").replace(":", ",").split(","):
            return True
    finally:
        info.Free()
    library = _loaded()
    if library is None:
        return False
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        found = ctypes.c_int(0)
        return library.MPIX_GPU_query_support(_MPICH_CUDA, ctypes.byref(found)) == 0 and bool(found.value)
    return False


def _loaded() -> ctypes.CDLL | None:
    """Return the MPI library that mpi4py has loaded; None where it cannot be found."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libmpi" in line}
    except OSError:
        return None
    # Of a library and those that it brings along: libmpi.so.40, libmpi.so.12, but not libmpi_cxx.so.
    found = [path for path in paths if re.fullmatch(r"libmpi(ch)?\.so[.\d]*", os.path.basename(path))]
    return ctypes.CDLL(found[0]) if found else None


class PassingCalls(StagedCalls):
    """The calls of a group on arrays on a GPU, over an MPI library that takes such.

    Ranks need not agree: MPI does not care where the arrays of the others are.

    Args:
        backend: The group's engine.
    """

    def __init__(self, backend: MpiBackend) -> None:
        super().__init__()
        self._backend = backend
        self._plans: dict[Any, Plan | None] = {}

    def submit(self, request: Request) -> Any:
        plan = None if request.async_op or request.group.outstanding else self._plan(request)
        if plan is None:
            return super().submit(request)
        group, where = request.group, request.where
        given, taken = self.named_buffers(request)
        on_current_stream(int(given.device.id), lambda stream: stream.synchronize())
        try:
            plan.run(given, taken)
        except BaseException as error:
            raise group.fail(error, where) from None
        return request.recv

    def _plan(self, request: Request) -> Plan | None:
        """Return the plan of a call that passes its arrays on; None for one that has to be staged."""
        collective, group = request.collective, request.group
        if collective.native not in PASSED or request.splits is not None or request.timeout_s is not None:
            return None
        if group.size() == 1 or not isinstance(request.op, (ReduceOp, str, type(None))):
            return None
        given, taken = self.named_buffers(request)
        if not (given.flags.c_contiguous and taken.flags.c_contiguous and self._lie_apart(given, taken)):
            return None
        op = None if request.op is None else group.named(request.where, as_reduce_op, request.op)
        key = (collective, taken.dtype, taken.shape, given.dtype, given.shape, op, request.root)
        if key in self._plans:
            return self._plans[key]
        plan = self._made(request, given, taken, op)
        remember(self._plans, key, plan)
        return plan

    def _made(self, request: Request, given: Any, taken: Any, op: ReduceOp | None) -> Plan | None:
        group, collective, backend = request.group, request.collective, self._backend
        call = Call(collective, request.where, group.rank(), group.size(), given, taken, op, request.root)
        collective.check(call)
        try:
            for waitable in backend.connect():
                backend.wait(waitable, request.where, Deadline(group.timeout_s))
        except BaseException as error:
            raise group.fail(error, request.where) from None
        plan = backend.prepare(call)
        if not isinstance(plan, plans.MpiPlan):
            return None
        # An operation of ours is NumPy's, which cannot read the memory of a GPU.
        is_ours = isinstance(plan, plans.Reduction) and not plan.mpi_op.is_predefined
        return None if is_ours else plan

    def _lie_apart(self, given: Any, taken: Any) -> bool:
        return given is taken or not np.may_share_memory(outline(given), outline(taken))
