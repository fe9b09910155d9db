"""Shared memory between processes of a host: made by one, found by the others.

It is anonymous (memfd), found through `/proc/<pid>/fd`, so nothing is left behind however the processes end, and the
size of /dev/shm does not matter. Where there is no memfd (before Linux 3.17, and on macOS), or a peer may not look into
this process, it is a file with a random name that is removed as soon as all have mapped it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshdist.errors import DistBackendError
from meshdist.limits import limit_of
from meshdist.systems import CLOSE_ON_EXEC

# Since Linux 5.14: back the pages now, or say that there is no memory (later it would be SIGBUS).
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10  # on Linux and macOS


class Segment:
    """Shared memory that this process made or found.

    Attributes:
        memory: The mapping, an object with the buffer protocol. It ends with the last array that shows it.
        place: Where peers find it, while the maker keeps it open.

    Args:
        fd: An open descriptor of it.
        num_bytes: Its size.
        place: See above.
        is_file: `place` is a file, to be removed when the segment is sealed.
    """

    def __init__(self, fd: int, num_bytes: int, place: str, *, is_file: bool = False) -> None:
        # Also where this is dropped unsealed, as it was to no use: without memory behind it, say.
        self._give_back = weakref.finalize(self, _give_back, fd, place if is_file else None, os.getpid())
        self.memory = map_for_good(fd, 0, num_bytes)
        self.place = place

    @property
    def is_anonymous(self) -> bool:
        """Whether it is no file, and so takes nothing of /dev/shm."""
        return self.place.startswith("/proc/")

    def reserve(self, offset: int, num_bytes: int) -> None:
        """Make sure that there is memory behind a part of the mapping.

        Raises:
            DistBackendError: There is not enough.
        """
        begin = offset - offset % mmap.PAGESIZE
        problem = populate(self.memory, begin, offset + num_bytes - begin)
        if problem not in (0, errno.EINVAL):
            raise _no_memory(num_bytes, problem)

    def seal(self) -> None:
        """Make it unreachable for others: all who need it have mapped it."""
        self._give_back()


def _give_back(fd: int, file: str | None, owner: int) -> None:
    os.close(fd)
    if file is not None and os.getpid() == owner:  # a process that was forked has no say in the matter
        Path(file).unlink(missing_ok=True)


def create(num_bytes: int, peer_pids: Sequence[int]) -> Segment:
    """Make a segment of `num_bytes` zeros that the processes `peer_pids` can find.

    Raises:
        DistBackendError: There is not enough memory.
    """
    fd = anonymous_file("meshdist") if all(map(_may_look_into, peer_pids)) else None
    if fd is not None:
        place = f"/proc/{os.getpid()}/fd/{fd}"
        segment = Segment(fd, num_bytes, place)
    else:
        import tempfile

        fd, place = tempfile.mkstemp(prefix="meshdist-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        segment = Segment(fd, num_bytes, place, is_file=True)
    try:
        os.ftruncate(fd, num_bytes)
    except OSError as error:
        segment.seal()
        raise _no_memory(num_bytes, error.errno or 0) from error
    # macOS has neither of the two: on a full disk, the first write ends the process there.
    if sys.platform == "linux" and populate(segment.memory, 0, mmap.PAGESIZE) == errno.EINVAL:
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            segment.seal()
            raise _no_memory(num_bytes, error.errno or 0) from error
    return segment


def find(place: str, num_bytes: int, *, only_reader: bool = False) -> Segment:
    """Map the segment that a peer made; with `only_reader`, nobody has to find it any more.

    Raises:
        DistBackendError: This process may not open it.
    """
    try:
        fd = os.open(place, os.O_RDWR | CLOSE_ON_EXEC)
    except OSError as error:
        raise DistBackendError(
            f"cannot open the shared memory {place} of a peer on this host: {error}{limit_of(error)}"
        ) from error
    segment = Segment(fd, num_bytes, place, is_file=only_reader and not place.startswith("/proc/"))
    segment.seal()
    return segment


def anonymous_file(name: str) -> int | None:
    """Return a descriptor of a new file in memory; None where the system has none, or a sandbox refuses it."""
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        try:
            return os.memfd_create(name, os.MFD_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                raise
    return None


def _may_look_into(pid: int) -> bool:
    # If this process may look into the other's descriptors, the other may look into this one's: the same user. One that
    # has died will not look.
    return os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK) or not os.path.exists(f"/proc/{pid}")


def map_shared(fd: int, begin: int, num_bytes: int) -> tuple[Any, int]:
    """Map a part of a file; whoever calls this unmaps it.

    Returns:
        An object with the buffer protocol, and its address.

    Raises:
        DistBackendError: The kernel has no room for it.
    """
    address = _map(fd, begin, num_bytes, None, 0)
    return (ctypes.c_ubyte * num_bytes).from_address(address), address


def map_for_good(fd: int, begin: int, num_bytes: int) -> Any:
    """Like `map_shared`, and unmap it when the last array that shows it has died.

    It takes the place of a mapping that has an object, which unmaps whatever is there: without Python code, which might
    be interrupted, and without a descriptor for each, which mmap.mmap would keep of a file until Python 3.13.
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
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    address: int = libc.mmap(at, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | flags, fd, begin)
    if address == _MAP_FAILED:
        raise _no_memory(num_bytes, ctypes.get_errno())
    return address


def populate(memory: Any, begin: int, num_bytes: int) -> int:
    """Put pages behind a part of a mapping; return an error number, 0 where they are there."""
    if sys.platform != "linux":
        return errno.EINVAL
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(ctypes.addressof(memory) + begin)
    return ctypes.get_errno() if libc.madvise(address, ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE) else 0


def _no_memory(num_bytes: int, problem: int) -> DistBackendError:
    # Where a file has no room for a page, the kernel says that the address is bad.
    why = "the file system of its file is full (/dev/shm)" if problem == errno.EFAULT else os.strerror(problem)
    return DistBackendError(f"no {num_bytes} bytes of shared memory to be had: {why}")
