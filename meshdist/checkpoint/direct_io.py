"""Direct reads and writes of large blocks: between the disk and huge pages of memory, past the system's page cache.

The page cache costs a copy, the making of its pages, and small requests to the disk: a request has a limited number of
segments, and reading ahead starts anew with single pages at each block of a rank. A huge page is one segment. The next
span is read, and the one before is written, in a thread.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from meshdist.checkpoint.file_access import (
    SPAN_BYTES,
    Bytes,
    CachedFile,
    is_in_memory,
    read_all,
    read_at,
    write_all,
    write_at,
)

# What offsets, lengths and addresses of direct transfers are multiples of, on all disks.
ALIGNED_BYTES = 4096
# Shorter spans go through the page cache.
LEAST_BYTES = 1 << 20
# How much to copy before it is summed up: in the cache of a core.
PART_BYTES = 512 << 10
_HUGE_PAGE_BYTES = 2 << 20
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


class HugePages:
    """Two spans of memory, each used again and again; made when they are needed."""

    def __init__(self) -> None:
        self._spans: list[Bytes] = []

    def spans(self) -> list[Bytes]:
        """Return both."""
        if not self._spans:
            whole = new_memory(2 * SPAN_BYTES + _HUGE_PAGE_BYTES)
            start = -whole.ctypes.data % _HUGE_PAGE_BYTES
            self._spans = [whole[at : at + SPAN_BYTES] for at in (start, start + SPAN_BYTES)]
        return self._spans


class DirectFile(CachedFile):
    """A file whose large blocks are transferred directly where its file system can, unless they are in the page cache.

    Args:
        fd: Its descriptor, for reading or for writing, which stays open.
        path: Its name.
        buffers: Memory, which one file uses at a time.
    """

    def __init__(self, fd: int, path: Path, buffers: HugePages) -> None:
        super().__init__(fd)
        self._path = path
        self._buffers = buffers
        self._direct: int | None = None
        self._is_direct = sys.platform == "linux" and not is_in_memory(path)
        self._task: _Task | None = None
        # What `write` has kept: bytes `_first` to `_stop` of the first span of memory, which lies at `_begin`.
        self._begin = self._first = self._stop = 0

    def fill(self, out: Bytes, offset: int) -> Iterator[Bytes]:
        """Fill `out` with the bytes at `offset`, and yield its parts in order, each when it is read.

        Raises:
            EOFError: The file ends before.
        """
        if out.size < LEAST_BYTES or is_cached(self.fd, offset, out.size) or not self._open(os.O_RDONLY):
            yield from super().fill(out, offset)
            return
        begin = offset - offset % ALIGNED_BYTES
        places = range(begin, offset + out.size, SPAN_BYTES)
        spans = self._buffers.spans()
        tasks = [self._read(spans[0], begin, offset + out.size)]
        try:
            for number, place in enumerate(places):
                count = tasks.pop().result()
                if number + 1 < len(places):
                    tasks.append(self._read(spans[(number + 1) % 2], places[number + 1], offset + out.size))
                yield from self._take(spans[number % 2][:count], place, out, offset)
        finally:
            for task in tasks:
                task.join()

    def _read(self, span: Bytes, place: int, stop: int) -> _Task:
        wanted = min(SPAN_BYTES, -(-(stop - place) // ALIGNED_BYTES) * ALIGNED_BYTES)
        return _Task(lambda: self._read_some(span[:wanted], place))

    def _read_some(self, span: Bytes, place: int) -> int:
        """Return how much was read; 0 where the file system cannot do it directly."""
        try:
            return read_at(self._direct or 0, memoryview(cast("Any", span)), place)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_direct = False
            return 0

    def _take(self, span: Bytes, place: int, out: Bytes, offset: int) -> Iterator[Bytes]:
        """Copy a span that was read at `place` to where it belongs; read what is missing of it through the cache."""
        begin, stop = max(place, offset), min(place + SPAN_BYTES, offset + out.size)
        for at in range(begin, stop, PART_BYTES):
            part = out[at - offset : min(at + PART_BYTES, stop) - offset]
            source = span[at - place : at - place + part.size]
            part[: source.size] = source
            if source.size < part.size:
                read_all(self.fd, part[source.size :], at + source.size)
            yield part

    def write(self, data: Bytes, offset: int) -> None:
        """Write bytes, soon or when `flush` is called; the caller may change them afterwards."""
        continues = self._stop > self._first and offset == self._begin + self._stop
        if not continues:
            if data.size < LEAST_BYTES or not self._open(os.O_WRONLY):
                super().write(data, offset)
                return
            self._send()
            self._begin = offset - offset % ALIGNED_BYTES
            self._first = self._stop = offset % ALIGNED_BYTES
        while data.size:
            part = data[: SPAN_BYTES - self._stop]
            self._buffers.spans()[0][self._stop : self._stop + part.size] = part
            self._stop += part.size
            data = data[part.size :]
            if self._stop == SPAN_BYTES:
                self._send()

    def flush(self) -> None:
        """Hand all bytes to the system that `write` has kept."""
        self._send()
        self._wait()

    def close(self) -> None:
        """Give up what the object has opened itself, and bytes that were not flushed."""
        if self._task is not None:
            self._task.join()
        if self._direct is not None:
            os.close(self._direct)
        self._task = self._direct = None

    def _send(self) -> None:
        """Begin to write what was kept, when what came before it is written."""
        self._wait()
        spans, first, stop, begin = self._buffers.spans(), self._first, self._stop, self._begin
        if stop > first:
            span = spans[0]
            self._task = _Task(lambda: self._write_span(span, first, stop, begin))
            spans.reverse()
        self._begin, self._first, self._stop = begin + stop, 0, 0

    def _wait(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.result()

    def _write_span(self, span: Bytes, first: int, stop: int, begin: int) -> int:
        """Write a span; the parts of pages at its ends, which others write as well, through the page cache."""
        start = -(-first // ALIGNED_BYTES) * ALIGNED_BYTES
        end = max(start, stop - stop % ALIGNED_BYTES)
        done = start
        while done < end and self._is_direct and done % ALIGNED_BYTES == 0:
            try:
                done += write_at(self._direct or 0, memoryview(cast("Any", span[done:end])), begin + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False
        write_all(self.fd, span[first : min(start, stop)], begin + first)
        write_all(self.fd, span[done:stop], begin + done)
        return stop - first

    def _open(self, mode: int) -> bool:
        """Open the file for direct transfers; return False where its file system has none."""
        if self._direct is None and self._is_direct:
            try:
                self._direct = os.open(self._path, mode | _O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False
        return self._is_direct


class _Task:
    """A call in a thread."""

    def __init__(self, call: Callable[[], int]) -> None:
        self._call = call
        self._result = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="meshdist-checkpoint-io")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # raised by `result`
            self._error = error

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def result(self) -> int:
        """Wait for what the call returns; raise what it raises."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


if sys.platform == "linux":

    def new_memory(nbytes: int) -> Bytes:
        """Return new memory, of huge pages if the system has them: it is several times as fast to use first."""
        # Not the default, which is shared memory: that has no huge pages unless the system is set up for it.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)

    def is_cached(fd: int, offset: int, nbytes: int) -> bool:
        """Return whether most of a part of a file is in the page cache, where reading directly would not find it.

        Where the system does not tell that of files of others, it says so of all.
        """
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = min(offset + nbytes, os.fstat(fd).st_size) - begin
        if length <= 0:
            return True
        try:
            opened = mmap.mmap(fd, length, prot=mmap.PROT_READ, offset=begin)
        except OSError:  # a file system whose files cannot be mapped
            return True
        with opened as mapped:
            states = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            address = np.frombuffer(mapped, np.uint8).ctypes.data
            if ctypes.CDLL(None).mincore(
                ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_void_p(states.ctypes.data)
            ):
                return False
            return bool((states & 1).mean() > 0.5)
else:

    def new_memory(nbytes: int) -> Bytes:
        """Return new memory."""
        return np.empty(nbytes, np.uint8)

    def is_cached(fd: int, offset: int, nbytes: int) -> bool:
        """Return that it may be: there are no direct transfers here."""
        return True
