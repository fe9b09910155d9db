"""Connection: sends and receives frames, without blocking, over a socket that may be replaced by another.

The bytes of each direction are numbered, from the first frame on. If the socket is reset, both ends tell each other on
a new one how many bytes they have received, and send from there on: first, from their `Retention`, what the kernel may
have lost. A frame that was half read goes on into the same place.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeAlias

from meshdist.backends.gloo.tcp.frames import HEADER_BYTES, FrameError, Header, follows, unpack
from meshdist.backends.gloo.tcp.outgoing import Outgoing, Repetition
from meshdist.backends.gloo.tcp.retention import RECORD_BYTES, Retention
from meshdist.runtime.departure import Departure, PeerExit
from meshdist.security.credentials import TlsError
from meshdist.store import keepalive
from meshdist.store.keepalive import SilenceMonitor, probe_often, silence
from meshdist.system.deferring_lock import Lock, deferring_lock
from meshdist.system.tcp_socket import counter_of_unacknowledged, tcp_info

# Size of the staging buffer for headers: a small message arrives with its header in one read.
STAGING_BYTES = 64 << 10
# Reads or writes in a row before other connections are served.
_MOST_STEPS = 16
_NOTHING = memoryview(b"")
# SO_LINGER: on, for no time.
_LINGER_NOT = struct.pack("ii", 1, 0)


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


class Connection:
    """One authenticated, non-blocking socket; its frames go to `sink`.

    `lock` is held during all calls. `watch` is called with (reads, writes) when the events to poll the socket for
    change. With `on_broken`, a reset does not end the connection: that is called, and then `resume_on` with a new
    socket, or `end`.
    """

    def __init__(
        self,
        sock: socket.socket,
        sink: Sink,
        watch: Callable[[bool, bool], None],
        on_broken: Callable[[Connection, Departure], None] | None = None,
        lock: Lock | None = None,
        *,
        has_other_ways: bool = False,
    ) -> None:
        self.ended: Departure | None = None  # how the connection has ended; None while it is open
        self.is_open = True  # False once it has ended, or while it has no socket
        self.is_closed = False  # the peer has closed the socket, but not all frames are parsed: it cannot be held
        self.num_received = 0
        self._sink = sink
        self._on_broken = on_broken
        self._has_other_ways = has_other_ways  # to the peer's host, on other networks
        self._composition = memoryview(bytearray(STAGING_BYTES))
        self._begin = self._end = 0
        # Of the frame being read: the rest of its place, its group, and what to call at its end.
        self._left = _NOTHING
        self._group = 0
        self._then: Callable[[], None] | None = None
        self.is_held = False  # no frames are parsed for now; see `hold`
        self._num_lost = 0  # while there is no socket, what the last one may not have delivered
        self._retention = Retention(lock or deferring_lock(), self._num_unacknowledged)
        self._out: deque[Outgoing] = deque()
        self.num_sent = 0  # bytes handed to `send`, written or not
        self._use(sock, watch)

    @property
    def num_handled(self) -> int:
        """How many bytes have been received and handled, or copied to the place of their frame."""
        return self.num_received - (self._end - self._begin)

    def _use(self, sock: socket.socket, watch: Callable[[bool, bool], None]) -> None:
        self.sock = sock
        self._watch = watch
        self._recv_into: Callable[[memoryview], int] = sock.recv_into
        # Of a TLS socket: takes what has been read and is not yet decrypted, which polling does not report.
        self._take_into: Callable[[memoryview], int] | None = getattr(sock, "take_into", None)
        self._num_in_kernel = counter_of_unacknowledged(sock)
        self._write_failure: Departure | None = None
        self._silence = SilenceMonitor(sock, is_brief=self._has_other_ways)
        if self._has_other_ways:
            probe_often(sock)

    @property
    def has_unsent(self) -> bool:
        return bool(self._out)

    def send(self, outgoing: Outgoing) -> None:
        self.num_sent += outgoing.size
        self._out.append(outgoing)
        if len(self._out) == 1:
            self.write()

    def send_at_once(self, frame: bytes) -> bool:
        """Send unless something waits for room or there is none; return whether it was sent or queued."""
        if self._out or not self.is_open:
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
            self._out.append(Outgoing(frame, _NOTHING, sent))
            self._watch(not self.is_held, True)
        else:
            self._retention.keep(frame)
        return True

    def write(self) -> None:
        if not self.is_open:
            return
        out, steps, retention = self._out, _MOST_STEPS, self._retention
        try:
            while out and steps and out[0].write(self.sock, retention):
                out.popleft()
                steps -= 1
        except BlockingIOError:
            pass  # the socket is polled for room
        except OSError as error:
            # Frames that the peer sent before are still readable; reading reports the end.
            self._write_failure = self._write_failure or _departure_of(error)
            if self._on_broken is None:
                out.clear()
        self._watch(not self.is_held, bool(out) and self._write_failure is None)

    def read(self) -> None:
        if not self.is_open:
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
            while not self.is_held and self.is_open and self._take_into is not None:
                self._read_some(self._take_into)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)

    def read_frame(self, header: bytes, num_bytes: int) -> memoryview | None:
        """Read once; return the bytes behind `header` if just that frame came; raise BlockingIOError if nothing did."""
        if self._end or self._left or self.is_held or not self.is_open:
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
            self._close(_CLOSED)
            return None
        self.num_received += count
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
        if self.is_open:
            self._watch(False, bool(self._out))

    def resume(self) -> None:
        if self.is_held and self.ended is None:
            self.is_held = False
            if self.is_open:
                self._watch(True, bool(self._out))
            self._take_frames()
            self.drain()

    def discard(self, group: int) -> None:
        if self._left and self._group == group:
            self._left, self._then = memoryview(bytearray(len(self._left))), None

    def all_arrived(self) -> bool:
        return self.is_open and not self._out and not self._num_in_kernel()

    def give_up_socket(self) -> None:
        """Give up the socket for another: read what it has, and reset it, since the process goes on."""
        if self.is_open:
            self._empty()
        if self.is_open:
            reset_on_close(self.sock)
            self._close_socket()

    def can_resume_at(self, offset: int) -> bool:
        """Return whether the peer, which has received so many bytes, can be sent the rest."""
        last = self._retention.end + (self._out[0].sent if self._out and not self._is_repeating() else 0)
        return offset <= last and (offset > self._retention.end or self._retention.since(offset) is not None)

    def resume_on(self, sock: socket.socket, watch: Callable[[bool, bool], None], offset: int) -> None:
        """Go on over a new socket; the peer has received the bytes before `offset`."""
        assert self.ended is None
        assert not self.is_open
        if self._is_repeating():
            self._out.popleft()
        if self._out:
            self._out[0].rewind(max(offset - self._retention.end, 0))
        lost = self._retention.since(offset) if offset < self._retention.end else b""
        assert lost is not None
        if lost:
            self._out.appendleft(Repetition(lost, _NOTHING))
        self._use(sock, watch)
        self.is_open, self.is_closed = True, False
        self.write()
        self.drain()

    def shut(self) -> None:
        with suppress(OSError):  # shut down explicitly, as a forked child may hold a copy; the peer may be gone
            self.sock.shutdown(socket.SHUT_RDWR)
        self.end(Departure(PeerExit.LOST, detail="closed here"))

    def is_silent(self) -> bool:
        """Return True if the peer's host has not answered for too long; asked by threads that wait, and read."""
        if self.is_held:
            self._silence.restart()
        return not self.is_held and self.is_open and self._silence.is_silent()

    def leave_silent(self) -> None:
        """Give up the socket because the peer's host is silent: for one on another network, if there is one."""
        how = Departure(PeerExit.SILENT, detail=silence() + _between(self.sock))
        if self._on_broken is not None and self._has_other_ways:
            self.give_up_socket()
            if self.ended is None:
                self._on_broken(self, how)
        else:
            self.give_up(how)

    def silent_s(self, how: Departure) -> float:
        """Return for how long the peer's host had been silent when the socket broke."""
        if how.exit is PeerExit.SILENT and not self._has_other_ways:
            return keepalive.KEEP_ALIVE.silence_s
        return self._silence.silent_s

    def give_up(self, how: Departure) -> None:
        """End the connection with a reset: the peer must not take it for the end of this process."""
        if self.is_open:
            reset_on_close(self.sock)
        self.end(how)

    def end(self, how: Departure) -> None:
        if self.ended is None:
            self.ended = how
            self._out.clear()
            if self.is_open:
                self._close_socket()
            self._sink.on_closed(self)

    def _close_socket(self) -> None:
        self._num_lost = self._num_unacknowledged()
        self.is_open = False
        self._watch(False, False)
        self.sock.close()

    def _close(self, how: Departure) -> None:
        """End the connection as the kernel has reported, or what is left of it without its socket."""
        if how == _CLOSED and self._write_failure is not None:
            how = self._write_failure
        if how == _CLOSED or self._on_broken is None:
            self.end(how)
        else:
            self._break(how)

    def _break(self, how: Departure) -> None:
        assert self._on_broken is not None
        reset_on_close(self.sock)
        self._close_socket()
        self._on_broken(self, how)

    def _empty(self) -> None:
        """Read all that the socket has."""
        self.is_closed = True
        self.resume()
        try:
            while self.is_open:
                self._read_some(self._recv_into)
        except TlsError as error:
            self._fail(error)
        except OSError:  # also that there is no more
            return

    def _is_repeating(self) -> bool:
        return bool(self._out) and isinstance(self._out[0], Repetition)

    def _num_unacknowledged(self) -> int:
        """Return how many bytes of the completed frames the peer may not have, at most."""
        if not self.is_open:
            return self._num_lost
        count = self._num_in_kernel()
        if self._take_into is not None:
            count += RECORD_BYTES
        if self._out:
            first = self._out[0]
            count = count + first.size - first.sent if self._is_repeating() else max(count - first.sent, 0)
        return count

    def _fail(self, error: OSError) -> None:
        if isinstance(error, TlsError):
            self.give_up(Departure(PeerExit.LOST, detail=str(error)))
        else:
            self._close(_departure_of(error))

    def _read_some(self, recv_into: Callable[[memoryview], int]) -> bool:
        left = self._left
        if left:
            count = recv_into(left)
            if not count:
                self._close(_CLOSED)
                return False
            self.num_received += count
            self._left = left[count:]
            if not self._left:
                then, self._left, self._then = self._then, _NOTHING, None  # which would keep the memory of the frame
                if then is not None:
                    then()
            return True
        count = recv_into(self._composition[self._end :])
        if not count:
            self._close(_CLOSED)
            return False
        self.num_received += count
        self._end += count
        is_full = self._end == STAGING_BYTES
        self._take_frames()
        return self.is_open and (is_full or bool(self._left))

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
        return Departure(PeerExit.SILENT, detail=silence())
    return Departure(PeerExit.LOST, detail=error.strerror or str(error))


def _between(sock: socket.socket) -> str:
    """Return the addresses of both ends, for messages."""
    try:
        return f", on the link from {sock.getsockname()[0]} to {sock.getpeername()[0]}"
    except OSError:  # it has ended
        return ""


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
