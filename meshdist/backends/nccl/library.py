"""NCCL: whether it is installed, and the functions that the backend uses.

Most are those of CuPy's binding; the others use ctypes on the same library: reductions with a factor, the orderly end
of a communicator, and the text of the last error.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from meshdist.errors import DistBackendError

if TYPE_CHECKING:
    from pathlib import Path

ID_BYTES = 128
HOW_TO_INSTALL = "`pip install cupy-cuda12x nvidia-nccl-cu12` installs CuPy and NCCL"

# ncclDataType_t
INT8, UINT8, INT32, UINT32, INT64, UINT64 = 0, 1, 2, 3, 4, 5
FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 = 6, 7, 8, 9, 10, 11
# ncclRedOp_t
SUM, PROD, MAX, MIN, AVG = 0, 1, 2, 3, 4
# ncclScalarResidence_t: the call reads the factor before it returns.
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
    """One rank's communicator. Arrays and streams are addresses, counts are of elements."""

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
        """Return a new op that sums what each rank has multiplied by its factor; `drop_op` frees it."""

    def drop_op(self, op: int) -> None:
        """Free an op of `premul_sum`; calls enqueued with it are unaffected."""

    def check_async_error(self) -> None:
        """Raise an error for `Library.failure` if NCCL has failed since the last call."""

    def finalize(self) -> None:
        """Let the communicator finish what was enqueued; may wait for the other ranks."""

    def destroy(self) -> None:
        """Free a finalized communicator."""

    def abort(self) -> None:
        """Abort the communicator and its operations at once."""


class Library(Protocol):
    """NCCL, as the backend uses it."""

    def version(self) -> int:
        """Return the version as NCCL counts: 2.27.3 is 22703."""

    def unique_id(self) -> bytes:
        """Return the id that identifies a new communicator to its ranks."""

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Return a new communicator on the current device; blocks until all ranks call it."""

    def group_start(self) -> None:
        """Begin a group: what is enqueued until `group_end` becomes one operation."""

    def group_end(self) -> None:
        """End a group."""

    def failure(self, error: BaseException, communicator: Communicator | None = None) -> BaseException:
        """Return an error of NCCL as DistBackendError with NCCL's text, any other as it is."""


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
        return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        return bytes(number & 0xFF for number in self._nccl.get_unique_id())

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        make = self._nccl.NcclCommunicator
        try:
            made = make(size, unique_id, rank)
        except TypeError:
            # Early versions of CuPy 14 want a tuple of signed numbers, as C's char.
            made = make(size, tuple(number - 256 if number > 127 else number for number in unique_id), rank)
        return CupyCommunicator(made, self._supplement)

    def failure(self, error: BaseException, communicator: Communicator | None = None) -> BaseException:
        if isinstance(error, self._nccl.NcclError):
            return DistBackendError(self._supplement.explain(int(error.status)))
        # CuPy raises KeyError for newer result codes.
        if type(error) is KeyError and len(error.args) == 1 and error.args[0] in _RESULTS:
            return DistBackendError(self._supplement.explain(error.args[0]))
        return error


class CupyCommunicator:
    """A communicator of CuPy; the bound methods are CuPy's own, to save a call."""

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
        return self._supplement.premul_sum(factor, dtype, self._made.comm)

    def drop_op(self, op: int) -> None:
        self._supplement.drop_op(op, self._made.comm)

    def finalize(self) -> None:
        if self._made.comm:
            self._supplement.finalize(self._made.comm)

    def destroy(self) -> None:
        self._made.destroy()


class Supplement:
    """Functions that CuPy's binding lacks, from the NCCL that CuPy has loaded; `comm` is CuPy's address."""

    def __init__(self) -> None:
        try:
            # By this name the loader finds the library that is already loaded, wherever it came from.
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
        op = ctypes.c_int(-1)
        room = ctypes.create_string_buffer(factor, len(factor))
        self._check(self._library.ncclRedOpCreatePreMulSum(ctypes.byref(op), room, dtype, _HOST_IMMEDIATE, comm))
        return op.value

    def drop_op(self, op: int, comm: int) -> None:
        self._check(self._library.ncclRedOpDestroy(op, comm))

    def finalize(self, comm: int) -> None:
        self._check(self._library.ncclCommFinalize(comm))

    def explain(self, code: int) -> str:
        """Return NCCL's texts of a result code and of its last error."""
        text = (self._library.ncclGetErrorString(code) or b"").decode(errors="replace")
        last = (self._library.ncclGetLastError(None) or b"").decode(errors="replace").strip()
        words = _RESULTS.get(code, f"result {code}")
        return f"NCCL says: {text or words}{f'; its last error: {last}' if last else ''}"

    def _check(self, result: int) -> None:
        if result not in (0, IN_PROGRESS):
            raise DistBackendError(self.explain(result))


_INSTALL = "`pip install cupy-cuda12x` installs it (cupy-cuda13x for CUDA 13)"
_INSTALL_NCCL = "`pip install nvidia-nccl-cu12` installs it (nvidia-nccl-cu13 for CUDA 13)"
_SYSTEM = (
    "/usr/lib/*-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/cuda*/lib64",
    "/opt/cuda/lib64",
)


def no_nccl() -> str | None:
    """Return what is missing for NCCL on this host, and how to get it; None if nothing is."""
    from meshdist.system.platform import num_gpus

    if "cupy" not in sys.modules and find_spec("cupy") is None:
        return f"CuPy is not installed; {_INSTALL}"
    if num_gpus() == 0:
        return (
            "this process sees no CUDA GPU: install NVIDIA's driver, or see whether CUDA_VISIBLE_DEVICES, or the"
            " container, hides the GPUs"
        )
    return None if _has_library() else f"the NCCL library is not installed; {_INSTALL_NCCL}"


def _has_library() -> bool:
    # Where pip installs it; otherwise where CuPy or the system's loader look.
    try:
        if find_spec("nvidia.nccl") is not None:
            return True
    except ModuleNotFoundError:  # there is no package `nvidia`
        return any(_libraries())
    return any(_libraries())


def _libraries() -> Iterator[Path]:
    from pathlib import Path  # only needed with CuPy

    given = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    roots = [Path(os.environ[name]) for name in ("CONDA_PREFIX", "CUDA_PATH", "CUDA_HOME") if name in os.environ]
    folders = [Path(folder) for folder in given if folder]
    folders += [root / part for root in roots for part in ("lib", "lib64")]
    for pattern in _SYSTEM:
        folders += Path("/").glob(pattern[1:])
    for folder in folders:
        yield from folder.glob("libnccl.so*")
