"""NCCL: the calls of it that backend `nccl` makes, and no others.

They are those of CuPy's binding. What that lacks, and a few functions more, come through ctypes from the same library:
reductions with a factor, the orderly end of a communicator, and what NCCL says of its last error.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from meshdist.errors import DistBackendError

ID_BYTES = 128
HOW_TO_INSTALL = "`pip install 'meshdist[cuda]'` brings CuPy and NCCL (cupy-cuda12x and nvidia-nccl-cu12)"

# ncclDataType_t
INT8, UINT8, INT32, UINT32, INT64, UINT64 = 0, 1, 2, 3, 4, 5
FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 = 6, 7, 8, 9, 10, 11
# ncclRedOp_t
SUM, PROD, MAX, MIN, AVG = 0, 1, 2, 3, 4
# ncclScalarResidence_t: the factor is read before the call returns.
_HOST_IMMEDIATE = 1

# ncclResult_t
IN_PROGRESS = 7
_RESULTS = {
    1: "unhandled CUDA error",
    2: "system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote error: another rank has failed, or the network has",
    IN_PROGRESS: "an operation is in progress",
    8: "timeout",
}


class Communicator(Protocol):
    """One rank's end of a communicator. Arrays and streams are addresses, counts are of elements."""

    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int, /) -> None:
        """Enqueue ncclAllReduce."""

    def reduce(self, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int, /) -> None:
        """Enqueue ncclReduce."""

    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int, /) -> None:
        """Enqueue ncclBroadcast."""

    def reduce_scatter(self, send: int, recv: int, recv_count: int, dtype: int, op: int, stream: int, /) -> None:
        """Enqueue ncclReduceScatter."""

    def all_gather(self, send: int, recv: int, send_count: int, dtype: int, stream: int, /) -> None:
        """Enqueue ncclAllGather."""

    def send(self, array: int, count: int, dtype: int, peer: int, stream: int, /) -> None:
        """Enqueue ncclSend."""

    def recv(self, array: int, count: int, dtype: int, peer: int, stream: int, /) -> None:
        """Enqueue ncclRecv."""

    def premul_sum(self, factor: bytes, dtype: int) -> int:
        """Return an op that sums what each rank has multiplied by its factor; to be given back."""

    def drop_op(self, op: int) -> None:
        """Give an op of `premul_sum` back; calls that were enqueued with it are not touched."""

    def check_async_error(self) -> None:
        """Raise what `Library.failure` reads where NCCL has failed since the last call."""

    def finalize(self) -> None:
        """Let the communicator come to rest once what was enqueued is done; may wait for the other ranks."""

    def destroy(self) -> None:
        """End a communicator that has come to rest."""

    def abort(self) -> None:
        """End the communicator at once, and what it has enqueued."""


class Library(Protocol):
    """NCCL, as the backend uses it."""

    def version(self) -> int:
        """Return the version as NCCL counts: 2.27.3 is 22703."""

    def unique_id(self) -> bytes:
        """Return what the ranks of a new communicator have in common."""

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Return this rank's end of a communicator on the current device; waits for all ranks."""

    def group_start(self) -> None:
        """Begin a group: what is enqueued until `group_end` becomes one operation."""

    def group_end(self) -> None:
        """End a group."""

    def failure(self, error: BaseException, communicator: Communicator | None = None) -> BaseException:
        """Return a DistBackendError with NCCL's words, for what its calls raise; any other error as it is."""


class CupyLibrary:
    """NCCL by way of CuPy.

    Raises:
        DistBackendError: CuPy or NCCL is not there; says what to install.
    """

    def __init__(self) -> None:
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            raise DistBackendError(f"backend 'nccl': CuPy cannot be imported ({error}); {HOW_TO_INSTALL}") from None
        if not getattr(nccl, "available", False) or not hasattr(nccl, "get_unique_id"):
            raise DistBackendError(f"backend 'nccl': CuPy finds no NCCL library; {HOW_TO_INSTALL}")
        self._nccl = nccl
        self._supplement = Supplement()
        self.group_start = nccl.groupStart
        self.group_end = nccl.groupEnd

    def version(self) -> int:
        """Return the version as NCCL counts: 2.27.3 is 22703."""
        return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        """Return what the ranks of a new communicator have in common."""
        return bytes(number & 0xFF for number in self._nccl.get_unique_id())

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Return this rank's end of a communicator on the current device; waits for all ranks."""
        make = self._nccl.NcclCommunicator
        try:
            made = make(size, unique_id, rank)
        except TypeError:
            # Earlier versions of CuPy 14 want a tuple of numbers, as C's signed char has them.
            made = make(size, tuple(number - 256 if number > 127 else number for number in unique_id), rank)
        return CupyCommunicator(made, self._supplement)

    def failure(self, error: BaseException, communicator: Communicator | None = None) -> BaseException:
        """Return a DistBackendError with NCCL's words, for what its calls raise; any other error as it is."""
        if isinstance(error, self._nccl.NcclError):
            return DistBackendError(self._supplement.explain(int(error.status)))
        # CuPy has no name for the newer codes, and fails as it looks for one.
        if type(error) is KeyError and len(error.args) == 1 and error.args[0] in _RESULTS:
            return DistBackendError(self._supplement.explain(error.args[0]))
        return error


class CupyCommunicator:
    """One rank's end of a communicator, by way of CuPy; its calls are CuPy's own, without one of ours around them."""

    def __init__(self, made: Any, supplement: Supplement) -> None:
        self._made = made
        self._supplement = supplement
        self.all_reduce = made.allReduce
        self.reduce = made.reduce
        self.broadcast = made.broadcast
        self.reduce_scatter = made.reduceScatter
        self.all_gather = made.allGather
        self.send = made.send
        self.recv = made.recv
        self.check_async_error = made.check_async_error
        self.abort = made.abort

    def premul_sum(self, factor: bytes, dtype: int) -> int:
        """Return an op that sums what each rank has multiplied by its factor; to be given back."""
        return self._supplement.premul_sum(factor, dtype, self._made.comm)

    def drop_op(self, op: int) -> None:
        """Give an op of `premul_sum` back; calls that were enqueued with it are not touched."""
        self._supplement.drop_op(op, self._made.comm)

    def finalize(self) -> None:
        """Let the communicator come to rest once what was enqueued is done; may wait for the other ranks."""
        if self._made.comm:
            self._supplement.finalize(self._made.comm)

    def destroy(self) -> None:
        """End a communicator that has come to rest."""
        self._made.destroy()


class Supplement:
    """What CuPy's binding lacks, from the NCCL that CuPy has loaded.

    A communicator is the address that CuPy has for it.
    """

    def __init__(self) -> None:
        try:
            # The loader knows the library that is there already by this name, wherever CuPy has found it.
            library = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise DistBackendError(f"backend 'nccl': NCCL cannot be loaded ({error}); {HOW_TO_INSTALL}") from None
        create = library.ncclRedOpCreatePreMulSum
        create.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        library.ncclRedOpDestroy.argtypes = [ctypes.c_int, ctypes.c_void_p]
        library.ncclCommFinalize.argtypes = [ctypes.c_void_p]
        library.ncclGetLastError.argtypes = [ctypes.c_void_p]
        library.ncclGetLastError.restype = ctypes.c_char_p
        library.ncclGetErrorString.argtypes = [ctypes.c_int]
        library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library = library

    def premul_sum(self, factor: bytes, dtype: int, comm: int) -> int:
        """Return a new op: the sum of what each rank has multiplied by its factor, whose bytes are given."""
        op = ctypes.c_int(-1)
        room = ctypes.create_string_buffer(factor, len(factor))
        self._check(self._library.ncclRedOpCreatePreMulSum(ctypes.byref(op), room, dtype, _HOST_IMMEDIATE, comm))
        return op.value

    def drop_op(self, op: int, comm: int) -> None:
        """Give an op back."""
        self._check(self._library.ncclRedOpDestroy(op, comm))

    def finalize(self, comm: int) -> None:
        """Let a communicator come to rest."""
        self._check(self._library.ncclCommFinalize(comm))

    def explain(self, code: int) -> str:
        """Return what a result of NCCL means, in its own words and those that it has for its last error."""
        text = (self._library.ncclGetErrorString(code) or b"").decode(errors="replace")
        last = (self._library.ncclGetLastError(None) or b"").decode(errors="replace").strip()
        words = _RESULTS.get(code, f"result {code}")
        return f"NCCL says: {text or words}{f'; its last error: {last}' if last else ''}"

    def _check(self, result: int) -> None:
        if result not in (0, IN_PROGRESS):
            raise DistBackendError(self.explain(result))
