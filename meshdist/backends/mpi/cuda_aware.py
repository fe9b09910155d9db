"""GPU arrays over MPI: passed as they are if the MPI library is CUDA-aware, otherwise staged through the CPU.

MPI does not know streams: the data must be ready when it is called, and is complete when it returns. So the host
synchronizes the current stream before the call; after it there is nothing to wait for.
"""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any

import numpy as np

from meshdist.arrays.device import on_current_stream, outline
from meshdist.arrays.reduce_op import ReduceOp
from meshdist.backends.base import Backend, Plan
from meshdist.backends.host_staging import HostStagedCalls
from meshdist.backends.mpi import plans
from meshdist.backends.mpi.library import Session
from meshdist.runtime.call import Call
from meshdist.runtime.device_calls import Request
from meshdist.system.deadline import Deadline
from meshdist.system.env_flags import MPI_CUDA, switch

# Collectives with one input and one output array, which MPI can access in place.
PASSED = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_MPICH_CUDA = 0


def is_cuda_aware(session: Session) -> bool:
    """Return whether the MPI library reports CUDA support; MESHDIST_MPI_CUDA, 0 or 1, overrides it.

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
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libmpi" in line}
    except OSError:
        return None
    # libmpi.so.40 or libmpi.so.12, but not libmpi_cxx.so.
    found = [path for path in paths if re.fullmatch(r"libmpi(ch)?\.so[.\d]*", os.path.basename(path))]
    return ctypes.CDLL(found[0]) if found else None


class CudaAwareCalls(HostStagedCalls):
    """Calls on GPU arrays over a CUDA-aware MPI library; ranks may differ in where their arrays are."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def submit(self, request: Request) -> Any:
        if request.async_op or request.group.outstanding or not _can_pass(request):
            return super().submit(request)
        given, taken = self.arrays(request)
        is_plain = given.flags.c_contiguous and taken.flags.c_contiguous
        plan = None
        if is_plain and (given is taken or not np.may_share_memory(outline(given), outline(taken))):
            plan = self.plan(request, given, taken, lambda call: self._made(request, call))
        if plan is None:
            return super().submit(request)
        group, error_prefix = request.group, request.error_prefix
        on_current_stream(int(given.device.id), lambda stream: stream.synchronize())
        try:
            plan.run(given, taken)
        except BaseException as error:
            raise group.fail(error, error_prefix) from None
        return request.recv

    def _made(self, request: Request, call: Call) -> Plan | None:
        """Return the plan of a call on the arrays themselves; None if the call has to be staged."""
        group, backend = request.group, self._backend
        try:
            for waitable in backend.connect():
                backend.wait(waitable, request.error_prefix, Deadline(group.timeout_s))
        except BaseException as error:
            raise group.fail(error, request.error_prefix) from None
        plan = backend.prepare(call)
        if not isinstance(plan, plans.MpiPlan):
            return None
        # An operation of ours runs NumPy, which cannot read GPU memory.
        is_ours = isinstance(plan, plans.Reduction) and not plan.mpi_op.is_predefined
        return None if is_ours else plan


def _can_pass(request: Request) -> bool:
    if request.collective.native not in PASSED or request.splits is not None or request.timeout_s is not None:
        return False
    return request.group.size() > 1 and isinstance(request.op, (ReduceOp, str, type(None)))
