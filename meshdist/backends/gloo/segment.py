"""Shared memory between processes of a host: made by one, found by the others.

It is anonymous (memfd), found through `/proc/<pid>/fd`, so nothing is left behind however the processes end, and the
size of /dev/shm does not matter. Where there is no memfd, or a peer may not look into this process, it is a file with
a random name that is removed as soon as all have mapped it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

from meshdist.errors import DistBackendError

# Since Linux 5.14: back the pages now, or say that there is no memory (later it would be SIGBUS).
_MADV_POPULATE_WRITE = 23


class Segment:
    """Shared memory that this process made or found.

    Args:
        memory: The mapping.
        place: Where peers find it, while the maker keeps it open.
        fd: What the maker keeps open until `seal`.
        is_file: `place` is a file, to be removed then.
    """

    def __init__(self, memory: mmap.mmap, place: str, fd: int | None = None, *, is_file: bool = False) -> None:
        self.memory = memory
        self.place = place
        self._fd = fd
        self._is_file = is_file

    def reserve(self, offset: int, num_bytes: int) -> None:
        """Make sure that there is memory behind a part of the mapping.

        Raises:
            DistBackendError: There is not enough.
        """
        begin = offset - offset % mmap.PAGESIZE
        try:
            self.memory.madvise(_MADV_POPULATE_WRITE, begin, offset + num_bytes - begin)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise _no_memory(num_bytes, error) from error

    def seal(self) -> None:
        """Make it unreachable for others: all who need it have mapped it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            if self._is_file:
                os.unlink(self.place)


def create(num_bytes: int, peer_pids: Sequence[int]) -> Segment:
    """Make a segment of `num_bytes` zeros that the processes `peer_pids` can find.

    Raises:
        DistBackendError: There is not enough memory.
    """
    anonymous = hasattr(os, "memfd_create") and all(_may_look_into(pid) for pid in peer_pids)
    if anonymous:
        fd = os.memfd_create("meshdist", os.MFD_CLOEXEC)
        place = f"/proc/{os.getpid()}/fd/{fd}"
    else:
        import tempfile

        fd, place = tempfile.mkstemp(prefix="meshdist-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    os.ftruncate(fd, num_bytes)
    segment = Segment(mmap.mmap(fd, num_bytes), place, fd, is_file=not anonymous)
    if not _populates(segment.memory):
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            segment.seal()
            raise _no_memory(num_bytes, error) from error
    return segment


def find(place: str, num_bytes: int) -> Segment:
    """Map the segment that a peer made.

    Raises:
        DistBackendError: This process may not open it.
    """
    try:
        fd = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise DistBackendError(f"cannot open the shared memory {place} of a peer on this host: {error}") from error
    try:
        return Segment(mmap.mmap(fd, num_bytes), place)
    finally:
        os.close(fd)


def _may_look_into(pid: int) -> bool:
    # If this process may look into the other's descriptors, the other may look into this one's: the same user.
    return os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK)


def _populates(memory: mmap.mmap) -> bool:
    try:
        memory.madvise(_MADV_POPULATE_WRITE, 0, mmap.PAGESIZE)
    except OSError as error:
        return error.errno != errno.EINVAL
    return True


def _no_memory(num_bytes: int, error: OSError) -> DistBackendError:
    return DistBackendError(f"no {num_bytes} bytes of shared memory to be had: {error.strerror or error}")
