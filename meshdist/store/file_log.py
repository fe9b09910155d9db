"""An append-only file of requests, shared by processes under a lock."""

from __future__ import annotations

import os
import stat
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from meshdist.errors import DistStoreError
from meshdist.security.handshake import PROTOCOL
from meshdist.store.table import Op, pack_fields, unpack_fields
from meshdist.system.deadline import Deadline
from meshdist.system.platform import CLOSE_ON_EXEC, user_id


def missing_locks() -> str | None:
    """Return what this system lacks for file locks, None if it has them."""
    try:
        import fcntl  # noqa: F401 - only needed for a store in a file, and not on every system
    except ImportError:
        return f"this system ({sys.platform}) has no fcntl file locks"
    return None


def try_lock(fd: int) -> bool:
    """Try to lock the open file for writing; return whether it succeeded."""
    import fcntl

    try:
        if sys.platform == "linux":
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
        elif sys.platform != "win32":
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int) -> None:
    import fcntl

    if sys.platform == "linux":
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK))
    elif sys.platform != "win32":
        fcntl.flock(fd, fcntl.LOCK_UN)


def _flock(kind: int) -> bytes:
    # struct flock: type, whence, start, length (0 is "to the end"), pid; padded as in C
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)


Record = tuple[Op, list[bytes]]

_KIND = b"meshdist file store "
_MAGIC = b"%s%d\n" % (_KIND, PROTOCOL)
_RECORD = struct.Struct("!QBI")  # bytes of the body, operation, checksum of the body
_OPERATIONS = frozenset(Op)
_FIRST_PAUSE_S = 5e-5
_LONGEST_PAUSE_S = 5e-3
_CLOSE_TIMEOUT_S = 5.0
_OTHERS_MAY_WRITE = 0o022


class RequestLog:
    """An append-only file of requests; every process that replays it gets the same table.

    The lock belongs to the open file, not to the process, so that two stores of one process exclude each other too, and
    closing one keeps the other's lock. It is polled rather than waited for, so that a process stopped while it holds
    the lock makes others time out, not hang; the kernel releases the lock of a dead process.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._read_to = 0
        self._pid = os.getpid()
        self._thread_lock = threading.Lock()
        self._fd: int | None = self._open()

    def _open(self) -> int:
        lack = missing_locks()
        if lack is not None:
            raise self.error(f"{lack}; use a TCPStore, or an init_method of tcp://host:port")
        folder = os.path.dirname(self.path) or "."
        if not os.path.isdir(folder):
            raise self.error(f"the directory {folder} does not exist; create it on every host first")
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | CLOSE_ON_EXEC, 0o600)
        except OSError as error:
            raise self.error(f"it cannot be opened: {error}") from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            refusal = "it is not a regular file; choose another path"
        elif status.st_uid not in (user_id(), 0) and status.st_mode & _OTHERS_MAY_WRITE:
            refusal = f"it belongs to user {status.st_uid} and others may write to it; choose another path"
        else:
            return fd
        os.close(fd)
        raise self.error(refusal)

    def error(self, what: str) -> DistStoreError:
        return DistStoreError(f"FileStore {self.path}: {what}")

    @contextmanager
    def locked(self, deadline: Deadline) -> Iterator[None]:
        """Hold the lock.

        Raises:
            DistStoreError: It was not free until the deadline, or the file is closed, deleted or unusable.
        """
        self._follow_fork()
        if not self._thread_lock.acquire(timeout=deadline.slice_s(3600.0)):
            raise self.error(f"another thread kept it locked for {deadline.timeout_s:g} s")
        try:
            fd = self._fd
            if fd is None:
                raise self.error("it was closed")
            try:
                self._lock(fd, deadline)
                try:
                    yield
                finally:
                    unlock(fd)
            except OSError as error:
                raise self.error(f"it cannot be used: {error}") from error
        finally:
            self._thread_lock.release()

    def _lock(self, fd: int, deadline: Deadline) -> None:
        pause_s = _FIRST_PAUSE_S
        while not try_lock(fd):
            if deadline.expired():
                raise self.error(f"another process kept it locked for {deadline.timeout_s:g} s; is one stopped?")
            time.sleep(deadline.slice_s(pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _follow_fork(self) -> None:
        """In a forked child, reopen the file: the inherited descriptor shares its lock with the parent."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._thread_lock = threading.Lock()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = self._open()

    @property
    def is_deleted(self) -> bool:
        """True if the file has been deleted; call this under the lock."""
        return self._fd is not None and os.fstat(self._fd).st_nlink == 0

    def reopen(self) -> None:
        """Open the file that is now at the path, from its beginning."""
        self.close()
        self._fd = self._open()
        self.rewind()

    def rewind(self) -> None:
        """Make the next `read_new` start at the first record."""
        self._read_to = 0

    def read_new(self) -> list[Record]:
        """Return the records not read yet; call this under the lock.

        Raises:
            DistStoreError: The file is not a store's, or was truncated or deleted.
        """
        fd = self._fd
        assert fd is not None, "locked() has checked it"
        status = os.fstat(fd)
        if status.st_nlink == 0:
            raise self.error("it was deleted while in use")
        if status.st_size < self._read_to:
            raise self.error(f"it was cut to {status.st_size} bytes while in use")
        if status.st_size == 0:
            self._write(fd, _MAGIC)
            return []
        if status.st_size == self._read_to:
            return []
        data = _read(fd, self._read_to, status.st_size)
        return list(self._parse(data))

    def _parse(self, data: bytes) -> Iterator[Record]:
        at = 0
        if self._read_to == 0:
            if data.startswith(_KIND) and not data.startswith(_MAGIC):
                version = data[len(_KIND) :].split(b"\n")[0][:8].decode(errors="replace")
                raise self.error(
                    f"it is of version {version} of meshdist's protocol, this process uses {PROTOCOL}; install the"
                    " same meshdist on all hosts, or choose another path if it is left over"
                )
            if not data.startswith(_MAGIC):
                raise self.error(f"it is not a meshdist file store, it begins with {data[:24]!r}; choose another path")
            at = len(_MAGIC)
        start = self._read_to
        while at < len(data):
            body_at = at + _RECORD.size
            if body_at > len(data):
                raise self._damaged(start + at)
            size, op, checksum = _RECORD.unpack_from(data, at)
            body = data[body_at : body_at + size]
            if len(body) < size or zlib.crc32(body) != checksum or op not in _OPERATIONS:
                raise self._damaged(start + at)
            try:
                fields = unpack_fields(body)
            except ValueError:
                raise self._damaged(start + at) from None
            yield Op(op), fields
            at = body_at + size
        self._read_to = start + at

    def _damaged(self, at: int) -> DistStoreError:
        return self.error(f"its record at byte {at} is cut off or damaged; delete the file and start again")

    def append(self, op: Op, args: list[bytes]) -> None:
        """Add a record; call this under the lock, after reading all records.

        Raises:
            DistStoreError: It could not be written; the file is unchanged.
        """
        assert self._fd is not None, "locked() has checked it"
        body = pack_fields(args)
        self._write(self._fd, _RECORD.pack(len(body), op, zlib.crc32(body)) + body)

    def _write(self, fd: int, data: bytes) -> None:
        if sys.platform == "win32":
            raise AssertionError("__init__ has asked `missing_locks`")
        rest = memoryview(data)
        at = self._read_to
        try:
            while rest:
                written = os.pwrite(fd, rest, at)
                rest = rest[written:]
                at += written
        except OSError as error:
            os.ftruncate(fd, self._read_to)
            raise self.error(f"it cannot be written: {error}") from error
        self._read_to = at

    def delete(self) -> None:
        """Delete the file, if it still exists; call this under the lock."""
        if not self.is_deleted:
            os.unlink(self.path)

    def close(self) -> None:
        """Close the file, after a call of another thread; may be called more than once."""
        # A forked child has no other thread, although its copy of the lock may be held.
        is_locked = self._pid == os.getpid() and self._thread_lock.acquire(timeout=_CLOSE_TIMEOUT_S)
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        if is_locked:
            self._thread_lock.release()


def _read(fd: int, start: int, end: int) -> bytes:
    """Return the bytes of `fd` from `start` to `end`; one read returns at most 2 GiB."""
    if sys.platform == "win32":
        raise AssertionError("__init__ has asked `missing_locks`")
    parts = []
    while start < end:
        part = os.pread(fd, end - start, start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return b"".join(parts)
