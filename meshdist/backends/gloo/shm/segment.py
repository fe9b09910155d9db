"""Segment: shared memory between processes of a host, created by one and opened by the others.

It is anonymous (memfd) and opened through `/proc/<pid>/fd`, so nothing is left behind however the processes end, and
the size of /dev/shm does not matter. If there is no memfd (before Linux 3.17, on macOS), or a peer may not access this
process, it is a file with a random name that is removed as soon as all have mapped it.

Fences order the loads and stores in it, as other processors see them. x86-64 keeps the order of loads and the order of
stores; only a store may pass a later load. Other processors keep neither. Aligned 64-bit words are loaded and stored in
one access: CPython copies them by `memcpy` of constant size, which compilers turn into one instruction.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

from meshdist.errors import DistBackendError
from meshdist.system.platform import CLOSE_ON_EXEC, limit_of

# Since Linux 5.14: allocate the pages now, or report that there is no memory (later it would be SIGBUS).
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10  # on Linux and macOS

KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")


class Segment:
    """Shared memory that this process created or opened, through the descriptor `fd`.

    Attributes:
        memory: The mapping, a buffer. It lives as long as an array over it.
        place: Where peers find it, while its creator keeps it open: its path, and its inode number, since later another
            file may have the number of the descriptor. With `is_file`, the file is removed when the segment is sealed.
    """

    def __init__(self, fd: int, num_bytes: int, path: str, *, is_file: bool = False) -> None:
        # Also if the segment is dropped before it is sealed, for instance after `reserve` has failed.
        self._give_back = weakref.finalize(self, _give_back, fd, path if is_file else None, os.getpid())
        self.memory = map_until_unused(fd, 0, num_bytes)
        self.place = f"{path} {os.fstat(fd).st_ino}"

    @property
    def is_anonymous(self) -> bool:
        """Whether it is no file, and so takes no space in /dev/shm."""
        return self.place.startswith("/proc/")

    def reserve(self, offset: int, num_bytes: int) -> None:
        """Allocate the memory behind a part of the mapping; raise DistBackendError if there is not enough."""
        begin = offset - offset % mmap.PAGESIZE
        problem = populate(self.memory, begin, offset + num_bytes - begin)
        if problem not in (0, errno.EINVAL):
            raise _no_memory(num_bytes, problem)

    def seal(self) -> None:
        """Close the descriptor and remove the file: all peers have mapped the memory."""
        self._give_back()


def _give_back(fd: int, file: str | None, owner: int) -> None:
    os.close(fd)
    if file is not None and os.getpid() == owner:  # not in a forked child
        with suppress(FileNotFoundError):
            os.unlink(file)


def create(num_bytes: int, peer_pids: Sequence[int]) -> Segment:
    """Create a segment of `num_bytes` zeros that the processes `peer_pids` can open."""
    fd = anonymous_file("meshdist") if all(map(_may_access, peer_pids)) else None
    if fd is not None:
        segment = Segment(fd, num_bytes, f"/proc/{os.getpid()}/fd/{fd}")
    else:
        import tempfile

        fd, path = tempfile.mkstemp(prefix="meshdist-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        segment = Segment(fd, num_bytes, path, is_file=True)
    try:
        os.ftruncate(fd, num_bytes)
    except OSError as error:
        segment.seal()
        raise _no_memory(num_bytes, error.errno or 0) from error
    # macOS has neither of the two calls: there a full disk ends the process at the first write.
    if sys.platform == "linux" and populate(segment.memory, 0, mmap.PAGESIZE) == errno.EINVAL:
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            segment.seal()
            raise _no_memory(num_bytes, error.errno or 0) from error
    return segment


def find(place: str, num_bytes: int, *, only_reader: bool = False) -> Segment:
    """Map the segment that a peer created; its `only_reader` also removes its file."""
    path, _, inode = place.rpartition(" ")
    try:
        fd = os.open(path, os.O_RDWR | CLOSE_ON_EXEC)
        if os.fstat(fd).st_ino != int(inode):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "the peer has closed it", path)
    except OSError as error:
        raise DistBackendError(
            f"cannot open the shared memory {path} of a peer on this host: {error}{limit_of(error)}"
        ) from error
    segment = Segment(fd, num_bytes, path, is_file=only_reader and not path.startswith("/proc/"))
    segment.seal()
    return segment


def anonymous_file(name: str) -> int | None:
    """Return a descriptor of a new file in memory; None if the system has none, or a sandbox refuses it."""
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        try:
            return os.memfd_create(name, os.MFD_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                raise
    return None


def _may_access(pid: int) -> bool:
    # Access to the peer's descriptors implies the peer's access to this process's: the same user. A dead peer needs
    # none.
    return os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK) or not os.path.exists(f"/proc/{pid}")


def map_shared(fd: int, begin: int, num_bytes: int) -> tuple[Any, int]:
    """Map a part of a file; return a buffer and its address. The caller unmaps it."""
    address = _map(fd, begin, num_bytes, None, 0)
    return (ctypes.c_ubyte * num_bytes).from_address(address), address


def map_until_unused(fd: int, begin: int, num_bytes: int) -> Any:
    """Like `map_shared`, but unmap when the last array over the mapping has died.

    The mapping replaces that of an mmap object, whose deallocation unmaps it: without Python code, which might be
    interrupted, and without a descriptor for each, which mmap.mmap would keep of a file until Python 3.13.
    """
    try:
        placeholder = mmap.mmap(-1, num_bytes)
    except OSError as error:
        raise _no_memory(num_bytes, error.errno or 0) from error
    memory = (ctypes.c_ubyte * num_bytes).from_buffer(placeholder)
    _map(fd, begin, num_bytes, ctypes.addressof(memory), _MAP_FIXED)
    return memory


def _map(fd: int, begin: int, num_bytes: int, at: int | None, flags: int) -> int:
    if sys.platform == "win32":
        raise AssertionError("`check_processes` comes before")
    address: int = _libc().mmap(at, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | flags, fd, begin)
    if address == _MAP_FAILED:
        raise _no_memory(num_bytes, ctypes.get_errno())
    return address


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    return libc


def populate(memory: Any, begin: int, num_bytes: int) -> int:
    if sys.platform != "linux":
        return errno.EINVAL
    address = ctypes.c_void_p(ctypes.addressof(memory) + begin)
    return ctypes.get_errno() if _libc().madvise(address, ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE) else 0


def _no_memory(num_bytes: int, problem: int) -> DistBackendError:
    # If a file has no room for a page, the kernel reports a bad address.
    why = "the file system of its file is full (/dev/shm)" if problem == errno.EFAULT else os.strerror(problem)
    return DistBackendError(f"{num_bytes} bytes of shared memory are not available: {why}")


# ---- Fences


def fence() -> None:
    """Order all earlier loads and stores before all later ones.

    Taking and releasing a lock has acquire and release order: neighbouring accesses may move into the critical section
    but not out of it. So accesses after a second lock cannot pass accesses before a first one.
    """
    for _ in range(2):
        lock = threading.Lock()
        lock.acquire()
        lock.release()


class FencedWords:
    """64-bit words of shared memory that are ordered with all other loads and stores."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __getitem__(self, index: int) -> int:
        word: int = self._words[index]
        fence()
        return word

    def __setitem__(self, index: int, word: int) -> None:
        fence()
        self._words[index] = word


Words: TypeAlias = "memoryview[int] | FencedWords"


def in_order(words: memoryview) -> Words:
    return words if KEEPS_ORDER else FencedWords(words)
