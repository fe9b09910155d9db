"""Connection: sends and receives frames over one socket, without blocking."""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeAlias

from meshdist.backends.gloo.tcp.frames import HEADER_BYTES, FrameError, Header, follows, unpack
from meshdist.runtime.departure import Departure, PeerExit
from meshdist.security.credentials import TlsError
from meshdist.store.keepalive import SilenceMonitor, silence
from meshdist.system.platform import ioctl, tcp_info

# Size of the staging buffer for headers: a small message arrives with its header in one read.
STAGING_BYTES = 64 << 10
# Up to this size header and bytes are joined, which is faster than passing two buffers to the kernel.
_JOINED_BYTES = 4 << 10
# Reads or writes in a row before other connections are served.
_MOST_STEPS = 16
_NOTHING = memoryview(b"")
# SO_LINGER: on, for no time.
_LINGER_NOT = struct.pack("ii", 1, 0)
# Linux: the number of bytes that the peer's kernel has not acknowledged.
_TIOCOUTQ = 0x5411


# Where the bytes of a frame go (None: discard them), and what to call when they have arrived.
Place: TypeAlias = "tuple[memoryview | None, Callable[[], None] | None]"


class Sink(Protocol):
    """Receives the frames of a connection."""

    def take(self, header: Header, connection: Connection) -> Place:
        """Return where the bytes behind a header go, and what to call when they have arrived.

        After `connection.hold()` the result is ignored, and the frame is offered again later.
        """

    def on_closed(self, connection: Connection) -> None:
        """Called when a connection has ended."""


class Outgoing:
    """Bytes being sent; `on_done` is called when the kernel has them all, by whichever thread writes."""

    __slots__ = ("_pieces", "done", "num_bytes", "on_done")

    def __init__(self, header: bytes, data: memoryview) -> None:
        self.done = False
        self.num_bytes = len(header) + len(data)
        self.on_done: Callable[[], None] | None = None
        self._pieces = [memoryview(header), data] if len(data) else [memoryview(header)]

    def write(self, sock: socket.socket) -> bool:
        """Write as much as the kernel takes; return True when all is written; raise OSError if it takes nothing."""
        pieces = self._pieces
        if len(pieces) == 1:
            sent = sock.send(pieces[0])
        elif sys.platform == "win32" or len(pieces[1]) <= _JOINED_BYTES:
            pieces[:] = [memoryview(b"".join(pieces))]
            sent = sock.send(pieces[0])
        else:
            sent = sock.sendmsg(pieces)
        while pieces and sent >= len(pieces[0]):
            sent -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][sent:]
            return False
        self.done = True
        if self.on_done is not None:
            self.on_done()
        return True


class Connection:
    """One authenticated, non-blocking socket; its frames go to `sink`.

    `watch` is called with (reads, writes) when the events to poll the socket for change.
    """

    def __init__(self, sock: socket.socket, sink: Sink, watch: Callable[[bool, bool], None]) -> None:
        self.ended: Departure | None = None  # how the connection has ended; None while it is open
        self.is_closed = False  # the peer has closed the socket, but not all frames are parsed: it cannot be held
        self.sock = sock
        self._sink = sink
        self._watch = watch
        self._recv_into: Callable[[memoryview], int] = sock.recv_into
        # Of a TLS socket: takes what has been read and is not yet decrypted, which polling does not report.
        self._take_into: Callable[[memoryview], int] | None = getattr(sock, "take_into", None)
        self._composition = memoryview(bytearray(STAGING_BYTES))
        self._begin = self._end = 0
        # Of the frame being read: the rest of its place, its group, and what to call at its end.
        self._left = _NOTHING
        self._group = 0
        self._then: Callable[[], None] | None = None
        self.is_held = False  # no frames are parsed for now; see `hold`
        self._write_failure: Departure | None = None
        self._silence = SilenceMonitor(sock)
        self._out: deque[Outgoing] = deque()
        self.num_sent = 0  # bytes handed to `send`, written or not
        self._num_read = 0

    @property
    def num_handled(self) -> int:
        """How many bytes have been read and handled, or copied to the place of their frame."""
        return self._num_read - (self._end - self._begin)

    @property
    def has_unsent(self) -> bool:
        return bool(self._out)

    def send(self, outgoing: Outgoing) -> None:
        self.num_sent += outgoing.num_bytes
        self._out.append(outgoing)
        if len(self._out) == 1:
            self.write()

    def send_at_once(self, frame: bytes) -> bool:
        """Send unless something waits for room or there is none; return whether it was sent or queued."""
        if self._out or self.ended is not None:
            return False
        try:
            sent = self.sock.send(frame)
        except BlockingIOError:
            if self._take_into is None:
                return False
            sent = 0  # TLS has encrypted it: it must come next
        except OSError as error:  # reading reports the end
            self._write_failure = self._write_failure or _departure_of(error)
            return False
        self.num_sent += len(frame)
        if sent < len(frame):
            self._out.append(Outgoing(frame[sent:], _NOTHING))
            self._watch(not self.is_held, True)
        return True

    def write(self) -> None:
        out, steps = self._out, _MOST_STEPS
        try:
            while out and steps and out[0].write(self.sock):
                out.popleft()
                steps -= 1
        except BlockingIOError:
            pass  # the socket is polled for room
        except OSError as error:
            # Frames that the peer sent before are still readable; reading reports the end.
            out.clear()
            self._write_failure = self._write_failure or _departure_of(error)
        self._watch(not self.is_held, bool(out))

    def read(self) -> None:
        if self.ended is not None:
            return
        if self.is_held:
            # A held socket is polled only for its end. What is left is little, and tells how the peer ended.
            self.is_closed = True
            self.resume()
        try:
            for _ in range(_MOST_STEPS):
                if self.is_held or not self._read_some(self._recv_into):
                    break
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)
        self.drain()

    def drain(self) -> None:
        """Take what a TLS socket has read."""
        if self._take_into is None:
            return
        try:
            while not self.is_held and self.ended is None:
                self._read_some(self._take_into)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)

    def read_frame(self, header: bytes, num_bytes: int) -> memoryview | None:
        """Read once; return the bytes behind `header` if just that frame came; raise BlockingIOError if nothing did."""
        if self._end or self._left or self.is_held or self.ended is not None:
            return None
        composition, end = self._composition, HEADER_BYTES + num_bytes
        try:
            count = self._recv_into(composition)
        except BlockingIOError:
            raise
        except OSError as error:
            self._fail(error)
            return None
        if not count:
            self.end(_CLOSED)
            return None
        self._num_read += count
        frame = None
        if count >= end and composition[:HEADER_BYTES] == header:
            frame = composition[HEADER_BYTES:end]
            if count == end and self._take_into is None:
                return frame
            # More frames may follow: copy this one, and parse the rest.
            frame, self._begin = memoryview(bytes(frame)), end
        self._end = count
        self._take_frames()
        self.drain()
        return frame

    def hold(self) -> None:
        """Stop parsing: the current frame and those behind it wait."""
        self.is_held = True
        self._watch(False, bool(self._out))

    def resume(self) -> None:
        if self.is_held and self.ended is None:
            self.is_held = False
            self._watch(True, bool(self._out))
            self._take_frames()
            self.drain()

    def discard(self, group: int) -> None:
        if self._left and self._group == group:
            self._left, self._then = memoryview(bytearray(len(self._left))), None

    def all_arrived(self) -> bool:
        return not self._out and not any(ioctl(self.sock.fileno(), _TIOCOUTQ, bytes(4)))

    def shut(self) -> None:
        with suppress(OSError):  # shut down explicitly, as a forked child may hold a copy; the peer may be gone
            self.sock.shutdown(socket.SHUT_RDWR)
        self.end(Departure(PeerExit.LOST, detail="closed here"))

    def is_silent(self) -> bool:
        """Return True if the peer's host has not answered for too long; asked by threads that wait, and read."""
        if self.is_held:
            self._silence.restart()
        return not self.is_held and self._silence.is_silent()

    def give_up(self, how: Departure) -> None:
        """End the connection with a reset: the peer must not take it for the end of this process."""
        if self.ended is None:
            reset_on_close(self.sock)
            self.end(how)

    def end(self, how: Departure) -> None:
        if self.ended is None:
            self.ended = (how == _CLOSED and self._write_failure) or how
            self._out.clear()
            self._watch(False, False)
            self.sock.close()
            self._sink.on_closed(self)

    def _fail(self, error: OSError) -> None:
        if isinstance(error, TlsError):
            self.give_up(Departure(PeerExit.LOST, detail=str(error)))
        else:
            self.end(_departure_of(error))

    def _read_some(self, recv_into: Callable[[memoryview], int]) -> bool:
        left = self._left
        if left:
            count = recv_into(left)
            if not count:
                self.end(_CLOSED)
                return False
            self._num_read += count
            self._left = left[count:]
            if not self._left and self._then is not None:
                self._then()
            return True
        count = recv_into(self._composition[self._end :])
        if not count:
            self.end(_CLOSED)
            return False
        self._num_read += count
        self._end += count
        is_full = self._end == STAGING_BYTES
        self._take_frames()
        return self.ended is None and (is_full or bool(self._left))

    def _take_frames(self) -> None:
        try:
            self._parse()
        except FrameError as error:
            self.give_up(Departure(PeerExit.LOST, detail=f"it sent {error}"))

    def _parse(self) -> None:
        composition, begin, end = self._composition, self._begin, self._end
        while end - begin >= HEADER_BYTES:
            header = unpack(composition, begin)
            size = follows(header)
            try:
                place, then = self._sink.take(header, self)
                if place is None and size and not self.is_held:
                    place = memoryview(bytearray(size))
            except (MemoryError, OverflowError):
                raise FrameError(f"a frame of {size} bytes, more than this process has memory for") from None
            if self.is_held or self.ended is not None:
                break
            begin += HEADER_BYTES
            if size:
                assert place is not None
                there = min(size, end - begin)
                place[:there] = composition[begin : begin + there]
                begin += there
                if there < size:
                    self._left, self._group, self._then = place[there:], header[2], then
                    break
            if then is not None:
                then()
        if begin == end:
            begin = end = 0
        elif begin:
            composition[: end - begin] = bytes(composition[begin:end])
            begin, end = 0, end - begin
        self._begin, self._end = begin, end


# Without a BYE, only the end of a process closes a connection in order: ranks that give one up reset it.
_CLOSED = Departure(PeerExit.DIED)


def _departure_of(error: OSError) -> Departure:
    if isinstance(error, BrokenPipeError):  # a reset after the end
        return _CLOSED
    if isinstance(error, ConnectionError):
        return Departure(PeerExit.RESET)
    if error.errno == errno.ETIMEDOUT:
        return silent()
    return Departure(PeerExit.LOST, detail=error.strerror or str(error))


def silent() -> Departure:
    return Departure(PeerExit.SILENT, detail=silence())


def reset_on_close(sock: socket.socket) -> None:
    """Have the kernel reset the connection when the socket is closed, in place of an orderly end."""
    with suppress(OSError):  # the connection has ended
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)


# Up to this round-trip time few bytes in flight keep the line busy. With more, what one side has copied has left the
# cache before the other side copies it, which takes up to twice the processor time (measured between namespaces of one
# machine).
NEAR_US = 100
NEAR_BYTES = 256 << 10

# Offset of the shortest round trip in Linux' tcp_info, in microseconds.
_MIN_RTT = 148


def tune_send_buffer(sock: socket.socket) -> None:
    """Limit the bytes in flight to a near peer; for others the kernel tunes the buffer itself."""
    round_trip_us = tcp_info(sock, _MIN_RTT)
    if round_trip_us is not None and round_trip_us < NEAR_US:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BYTES)
