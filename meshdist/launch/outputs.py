"""Send the ranks' output through, into files, or both with the rank before each line."""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import IO, NamedTuple

STDOUT, STDERR = 1, 2
_NAMES = {STDOUT: "stdout", STDERR: "stderr"}
_LONGEST_LINE_BYTES = 1 << 16
_FLUSH_S = 1.0


class Streams(NamedTuple):
    """Which of stdout (1) and stderr (2) of which ranks of this host."""

    others: int = 0  # the sum of the stream numbers, for ranks that are not listed
    by_local_rank: tuple[tuple[int, int], ...] = ()  # (local rank, sum of stream numbers) for the others

    def of(self, local_rank: int) -> int:
        """Return the sum of the stream numbers for one rank."""
        return dict(self.by_local_rank).get(local_rank, self.others)


def parse_streams(text: str) -> Streams:
    """Return the streams of "3" (both streams of all ranks) or "0:1,1:2" (stdout of local rank 0, stderr of 1).

    Raises:
        ValueError: The text has another form.
    """
    if text in ("0", "1", "2", "3"):
        return Streams(int(text))
    pairs = [part.partition(":") for part in text.split(",")]
    if not all(rank.isdecimal() and streams in ("0", "1", "2", "3") for rank, _, streams in pairs):
        raise ValueError(
            f"expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or LOCAL_RANK:NUMBER,..., got {text!r}"
        )
    return Streams(0, tuple((int(rank), int(streams)) for rank, _, streams in pairs))


class Routing(NamedTuple):
    """Destination of the ranks' output."""

    directory: str | None = None  # directory of the files, if any
    redirects: Streams = Streams()  # the streams that go into files alone
    # The streams shown with the rank before each line; written to files too if there is a directory.
    tee: Streams = Streams()

    def path(self, rank: int, stream: int, num_restarts: int) -> str:
        """Return the file of one stream of one rank; each restart has its own files."""
        restart = f".restart{num_restarts}" if num_restarts else ""
        return os.path.join(self.directory or "", f"rank{rank}{restart}.{_NAMES[stream]}.log")

    def is_in_file(self, local_rank: int, stream: int) -> bool:
        return self.directory is not None and bool((self.redirects.of(local_rank) | self.tee.of(local_rank)) & stream)


Screen = Callable[[int, Sequence[bytes]], None]
"""Shows lines of a rank."""


class Outputs:
    """The files and pipes of one start of the ranks; a thread forwards the output from pipes.

    A `screen` takes all output of all ranks, instead of stdout and stderr.
    """

    def __init__(self, routing: Routing, num_restarts: int, screen: Screen | None = None) -> None:
        self._routing = routing
        self._screen = screen
        self._num_restarts = num_restarts
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        if routing.directory is not None:
            os.makedirs(routing.directory, exist_ok=True)

    def open(self, rank: int, local_rank: int, stream: int, stack: contextlib.ExitStack) -> IO[bytes] | int | None:
        """Return the file or descriptor for one stream of a rank to be started; `stack` closes it afterwards."""
        file: IO[bytes] | None = None
        if self._routing.is_in_file(local_rank, stream):
            file = open(self._routing.path(rank, stream, self._num_restarts), "wb", buffering=0)  # noqa: SIM115
        if self._screen is None and not self._routing.tee.of(local_rank) & stream:
            return file if file is None else stack.enter_context(file)
        read_fd, write_fd = os.pipe()
        stack.callback(os.close, write_fd)
        show = partial(_print, rank, stream) if self._screen is None else partial(self._screen, rank)
        self._selector.register(read_fd, selectors.EVENT_READ, _Tee(show, file))
        return write_fd

    def start(self) -> None:
        """Start the forwarding thread, after all ranks: forks must not have it."""
        if len(self._selector.get_map()) > 1:
            self._thread = threading.Thread(target=self._forward, name="meshrun-output", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Forward the rest, and close everything."""
        os.write(self._wake_write, b"\0")
        if self._thread is not None:
            # Do not wait for the end of a pipe: a process that a rank left behind may hold it open.
            self._thread.join(_FLUSH_S)
        if self._thread is None or not self._thread.is_alive():
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    self._end(key)
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def __enter__(self) -> Outputs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _forward(self) -> None:
        is_closing = False
        while len(self._selector.get_map()) > 1:
            ready = [key for key, _ in self._selector.select(0.0 if is_closing else None)]
            is_closing = is_closing or any(key.data is None for key in ready)
            pipes = [key for key in ready if key.data is not None]
            if is_closing and not pipes:
                return
            for key in pipes:
                data = os.read(key.fd, _LONGEST_LINE_BYTES)
                if data:
                    key.data.take(data)
                else:
                    self._end(key)

    def _end(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fd)
        os.close(key.fd)
        key.data.close()


class _Tee:
    """Forwards one stream of one rank in whole lines."""

    def __init__(self, show: Callable[[Sequence[bytes]], None], file: IO[bytes] | None) -> None:
        self._show = show
        self._file = file
        self._part = b""

    def take(self, data: bytes) -> None:
        if self._file is not None:
            try:
                self._file.write(data)
            except OSError as error:  # the ranks continue, and their output is still forwarded
                self._show([f"cannot write {self._file.name}, stopped writing it: {error}".encode()])
                self._file.close()
                self._file = None
        *lines, self._part = (self._part + data).split(b"\n")
        if len(self._part) > _LONGEST_LINE_BYTES:
            lines.append(self._part)
            self._part = b""
        self._show(lines)

    def close(self) -> None:
        if self._part:
            self._show([self._part])
        if self._file is not None:
            self._file.close()


def _print(rank: int, stream: int, lines: Sequence[bytes]) -> None:
    """Print lines with the rank before each, to the launcher's own stdout or stderr."""
    text = b"".join(b"[rank%d] %s\n" % (rank, line) for line in lines)
    console_fd = (sys.stdout if stream == STDOUT else sys.stderr).fileno()
    with contextlib.suppress(OSError):  # stdout or stderr may be closed; the ranks continue
        while text:
            text = text[os.write(console_fd, text) :]
