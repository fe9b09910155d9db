"""Access to the memory of a peer on the same host: one copy by the kernel (process_vm_readv and process_vm_writev).

C. Yeoh: "Cross memory attach", Linux 3.2 (2012). It needs the right to trace the peer: the same user, and if the Yama
security module restricts tracing to ancestors, the peer's consent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from meshdist import core
from meshdist.arrays.host import Array
from meshdist.errors import DistBackendError
from meshdist.system.deadline import Deadline
from meshdist.system.env_flags import SINGLE_COPY, switch

if TYPE_CHECKING:
    from meshdist.backends.backend_options import BackendOptions

_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS, _NO_PROCESS = -1, 0
# The consent of the world, among the resources that its groups share.
_CONSENT = "consent to single copies"
# The most that the kernel moves in one call.
_LARGEST_COPY = 0x7FFFF000
# How long a rank whose call has failed waits for peers that write into its arrays.
_SETTLE_S = 1.0


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def address_of(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def may_copy() -> bool:
    """Return False if the user forbids it: `MESHDIST_SINGLE_COPY=0`."""
    return switch(SINGLE_COPY) is not False


class PeerConsent:
    """Lets processes of the same user access this one's memory until it is closed, if Yama asks for consent.

    Yama keeps one consent for the whole process, so it lasts as long as the world: another group may need it at any
    time. Without Yama all processes of the same user have this access anyway.
    """

    def __init__(self) -> None:
        self._is_given = may_copy() and _yama_asks()
        if self._is_given:
            _set_ptracer(_ANY_PROCESS)

    def close(self) -> None:
        """Withdraw the consent."""
        if self._is_given:
            _set_ptracer(_NO_PROCESS)


def allow_peers(options: BackendOptions) -> None:
    """Give the ranks of a group access to this rank's memory, until the world ends."""
    if _CONSENT not in options.shared_resources:
        options.shared_resources[_CONSENT] = PeerConsent()


def _yama_asks() -> bool:
    with suppress(FileNotFoundError), open("/proc/sys/kernel/yama/ptrace_scope") as scope:
        return scope.read().strip() == "1"
    return False


def _set_ptracer(pid: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_long(pid), 0, 0, 0)


class _SystemCall:
    """Copies from or to the memory of a process, as functions of the core do."""

    def __init__(self, name: str) -> None:
        self._call: Any = None
        if sys.platform == "linux":
            self._call = ctypes.CDLL(None, use_errno=True)[name]
            self._call.restype = ctypes.c_ssize_t
        self._local, self._remote = _Span(), _Span()
        self._spans = ctypes.byref(self._local), 1, ctypes.byref(self._remote), 1, 0

    def __call__(self, pid: int, address: int, own_address: int, num_bytes: int) -> int:
        """Return 0, or the number of an error."""
        if self._call is None:
            return errno.ENOSYS
        self._remote.base, self._local.base, left = address, own_address, num_bytes
        while left:
            self._local.length = self._remote.length = min(left, _LARGEST_COPY)
            copied = self._call(pid, *self._spans)
            if copied <= 0:
                return ctypes.get_errno() or errno.EIO
            left -= copied
            self._local.base += copied
            self._remote.base += copied
        return 0


def await_writers(is_quiet: Callable[[], bool], arrays: Iterable[Array | None]) -> None:
    """After a call has failed: wait until no peer writes into its arrays any more, which the user may then free.

    If a peer does not finish, as it was stopped, the arrays are never freed: it would write into the same addresses
    when it continues.
    """
    pause, deadline = threading.Event(), Deadline(_SETTLE_S)
    while not is_quiet():
        if deadline.expired():
            for array in arrays:
                if array is not None:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))
            return
        pause.wait(0.001)


class Memory:
    def __init__(self, pid: int, description: str) -> None:
        self.pid = pid
        self._description = description
        self._reads: Callable[..., int]
        self._writes: Callable[..., int]
        if core.module is None:
            self._reads, self._writes = _SystemCall("process_vm_readv"), _SystemCall("process_vm_writev")
        else:
            self._reads, self._writes = core.module.read_memory, core.module.write_memory

    def read(self, address: int, into: Array) -> None:
        """Copy from `address` in the process into a contiguous array; raise DistBackendError if that fails."""
        self._copy(self._reads, address, into, "read")

    def write(self, address: int, data: Array) -> None:
        """Copy a contiguous array to `address` in the process; raise DistBackendError if that fails."""
        self._copy(self._writes, address, data, "write")

    def try_read(self, address: int, into: Array) -> bool:
        return self._tried(self.read, address, into)

    def try_write(self, address: int, data: Array) -> bool:
        return self._tried(self.write, address, data)

    def refused(self, verb: str, error_number: int) -> DistBackendError:
        reason = os.strerror(error_number)
        return DistBackendError(f"cannot {verb} the memory of {self._description}: {reason}", peer_failed=True)

    def _tried(self, copy: Callable[[int, Array], None], address: int, array: Array) -> bool:
        try:
            copy(address, array)
        except DistBackendError:
            return False
        return True

    def _copy(self, call: Callable[..., int], address: int, array: Array, verb: str) -> None:
        if error := call(self.pid, address, address_of(array), array.nbytes):
            raise self.refused(verb, error)
