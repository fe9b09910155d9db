"""Connection: frames over one socket, both ways, without ever blocking."""

from __future__ import annotations

import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeAlias

from meshdist.backends.gloo.wire.frames import HEADER_BYTES, FrameError, Header, follows, unpack
from meshdist.systems import ioctl

# What is read at a time while headers are looked for: a small message comes along with its header.
STAGING_BYTES = 64 << 10
# Up to here header and bytes are joined, which costs less than to hand the system two pieces.
_JOINED_BYTES = 4 << 10
# After so many reads or writes others have their turn.
_MOST_STEPS = 16
_NOTHING = memoryview(b"")
# Of Linux: how many bytes the peer's system has not confirmed.
_TIOCOUTQ = 0x5411


# Where the bytes of a frame go, None for nowhere; and who wants to know when they are all there.
Place: TypeAlias = "tuple[memoryview | None, Callable[[], None] | None]"


class Sink(Protocol):
    """Where the frames that come go."""

    def take(self, header: Header, connection: Connection) -> Place:
        """Return where the bytes behind a header go, and whom to call when they are there.

        After `connection.hold()` what is returned has no meaning, and the frame comes again later.
        """

    def over(self, connection: Connection) -> None:
        """Learn that a connection has ended."""


class Outgoing:
    """Bytes on their way out.

    Attributes:
        done: The system has them all; their memory may change.
        then: Called when it has; a thread that sleeps until then may be woken by another.
    """

    __slots__ = ("_pieces", "done", "then")

    def __init__(self, header: bytes, data: memoryview) -> None:
        self.done = False
        self.then: Callable[[], None] | None = None
        self._pieces = [memoryview(header), data] if len(data) else [memoryview(header)]

    def write(self, sock: socket.socket) -> bool:
        """Hand the system what it takes; return True when that was all.

        Raises:
            OSError: It takes nothing: now, or any more.
        """
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
        if self.then is not None:
            self.then()
        return True


class Connection:
    """One socket, proven to lead to a peer.

    Args:
        sock: The socket, not blocking.
        sink: Takes what comes.
        watch: Called with whether the socket is to be watched for reading, and for room to write, when that changes.

    Attributes:
        ended: Why nothing comes or goes any more, None as long as it does; empty where the peer closed it.
        is_held: Nothing is taken for now; see `hold`.
        is_closed: The peer has closed it, though not all that came is read: it cannot be held.
    """

    def __init__(self, sock: socket.socket, sink: Sink, watch: Callable[[bool, bool], None]) -> None:
        self.ended: str | None = None
        self.is_closed = False
        self.sock = sock
        self._sink = sink
        self._watch = watch
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._begin = self._end = 0
        # Of the bytes behind the last header, where those go that are still to come; of which group; and what then.
        self._left = _NOTHING
        self._group = 0
        self._then: Callable[[], None] | None = None
        self.is_held = False
        self._why = ""
        self._out: deque[Outgoing] = deque()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room."""
        return bool(self._out)

    def send(self, outgoing: Outgoing) -> None:
        """Send, behind what waits for room."""
        self._out.append(outgoing)
        if len(self._out) == 1:
            self.write()

    def send_at_once(self, frame: bytes) -> bool:
        """Send, unless something waits for room, or there is none; return whether it is on its way."""
        if self._out or self.ended is not None:
            return False
        try:
            sent = self.sock.send(frame)
        except OSError:  # whoever sends it after this finds out more
            return False
        if sent < len(frame):
            self._out.append(Outgoing(frame[sent:], _NOTHING))
            self._watch(not self.is_held, True)
        return True

    def write(self) -> None:
        """Send what there is room for."""
        out, steps = self._out, _MOST_STEPS
        try:
            while out and steps and out[0].write(self.sock):
                out.popleft()
                steps -= 1
        except BlockingIOError:
            pass  # the socket is watched for room
        except OSError as error:
            # What the peer said before is still there to be read; reading finds the end.
            out.clear()
            self._why = _words(error)
        self._watch(not self.is_held, bool(out))

    def read(self) -> None:
        """Take what has come, at most some."""
        if self.ended is not None:
            return
        if self.is_held:
            # Who holds it hears of nothing but its end: what is left is little, and what became of the peer is in it.
            self.is_closed = True
            self.go_on()
        try:
            for _ in range(_MOST_STEPS):
                if self.is_held or not self._read_some():
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self.end(_words(error))

    def read_frame(self, header: bytes, num_bytes: int) -> memoryview | None:
        """Read once; return the bytes behind `header`, of which there are so many, if that is the frame that has come.

        They are there until the next look. Else None, and what has come has gone where frames go.

        Raises:
            BlockingIOError: Nothing has come.
        """
        if self._end or self._left or self.is_held or self.ended is not None:
            return None
        staging, end = self._staging, HEADER_BYTES + num_bytes
        try:
            count = self.sock.recv_into(staging)
        except BlockingIOError:
            raise
        except OSError as error:
            self.end(_words(error))
            return None
        if not count:
            self.end("")
            return None
        frame = None
        if count >= end and staging[:HEADER_BYTES] == header:
            frame = staging[HEADER_BYTES:end]
            if count == end:
                return frame
            # What came behind it is not for whoever asks for this one.
            frame, self._begin = memoryview(bytes(frame)), end
        self._end = count
        self._take_frames()
        return frame

    def hold(self) -> None:
        """Take nothing for now: the frame whose place is asked for, and those behind it, wait."""
        self.is_held = True
        self._watch(False, bool(self._out))

    def go_on(self) -> None:
        """Take back `hold`."""
        if self.is_held and self.ended is None:
            self.is_held = False
            self._watch(True, bool(self._out))
            self._take_frames()

    def divert(self, group: int) -> None:
        """Have what is still to come of a message to a group go nowhere."""
        if self._left and self._group == group:
            self._left, self._then = memoryview(bytearray(len(self._left))), None

    def all_arrived(self) -> bool:
        """Return whether the peer's system has all that was sent."""
        return not self._out and not any(ioctl(self.sock.fileno(), _TIOCOUTQ, bytes(4)))

    def shut(self) -> None:
        """Close the socket from this side."""
        with suppress(OSError):  # shut down as well, as a forked child may hold a copy; the peer may be gone
            self.sock.shutdown(socket.SHUT_RDWR)
        self.end("closed here")

    def end(self, why: str) -> None:
        """Close the socket."""
        if self.ended is None:
            self.ended = why or self._why
            self._out.clear()
            self._watch(False, False)
            self.sock.close()
            self._sink.over(self)

    def _read_some(self) -> bool:
        """Read once; return whether there may be more."""
        left = self._left
        if left:
            count = self.sock.recv_into(left)
            if not count:
                self.end("")
                return False
            self._left = left[count:]
            if not self._left and self._then is not None:
                self._then()
            return True
        count = self.sock.recv_into(self._staging[self._end :])
        if not count:
            self.end("")
            return False
        self._end += count
        is_full = self._end == STAGING_BYTES
        self._take_frames()
        return self.ended is None and (is_full or bool(self._left))

    def _take_frames(self) -> None:
        try:
            self._parse()
        except FrameError as error:
            self.end(f"it sent {error}")

    def _parse(self) -> None:
        staging, begin, end = self._staging, self._begin, self._end
        while end - begin >= HEADER_BYTES:
            header = unpack(staging, begin)
            size = follows(header)
            try:
                place, then = self._sink.take(header, self)
                if place is None and size and not self.is_held:
                    place = memoryview(bytearray(size))
            except (MemoryError, OverflowError):
                raise FrameError(f"a frame of {size} bytes, which there is no memory for") from None
            if self.is_held or self.ended is not None:
                break
            begin += HEADER_BYTES
            if size:
                assert place is not None
                there = min(size, end - begin)
                place[:there] = staging[begin : begin + there]
                begin += there
                if there < size:
                    self._left, self._group, self._then = place[there:], header[2], then
                    break
            if then is not None:
                then()
        if begin == end:
            begin = end = 0
        elif begin:
            staging[: end - begin] = bytes(staging[begin:end])
            begin, end = 0, end - begin
        self._begin, self._end = begin, end


def _words(error: OSError) -> str:
    # An end that its process, or the system for it, has made needs no more words.
    return "" if isinstance(error, ConnectionError) else error.strerror or str(error)
