"""PostOffice: all messages between this process and others, for all groups.

They go over one communicator of all ranks, so two ranks of a group can talk though the others never come. A message
begins with a header, which says for which group it is; up to the eager limit its bytes come right behind it, in the
same send, from a copy. A longer one follows by itself, from the sender's array into the receiver's.
"""

from __future__ import annotations

import atexit
import struct
from collections import deque
from typing import Any, Protocol

import numpy as np

from meshdist.arrays import Array
from meshdist.backends.mpi.library import Requests, Session

# For which group, what it is, tag, bytes, number, name of the dtype.
_HEADER = struct.Struct("=Qqqqq16s")
HEADER_BYTES = _HEADER.size
WHOLE, LONG, FAILED = 1, 2, 3
MOST_EAGER_BYTES = 256 << 10
_MAIL_TAG, _FIRST_LONG_TAG = 2, 16
# MPI before version 4 counts in 32 bits.
_PIECE_BYTES = 1 << 30
# Copies that wait to be sent; beyond it, who sends waits.
_MOST_COPIED_BYTES = 16 << 20


def header_of(token: int, kind: int, tag: int, num_bytes: int, dtype: bytes, number: int = 0) -> bytes:
    """Return what a letter begins with."""
    return _HEADER.pack(token, kind, tag, num_bytes, number, dtype)


class Letter:
    """What has come: a header and, where they came with it, the bytes."""

    __slots__ = ("data", "dtype", "kind", "num_bytes", "number", "source", "tag")

    def __init__(self, source: int, header: tuple[Any, ...], data: Array) -> None:
        self.source = source
        _, self.kind, self.tag, self.num_bytes, self.number, self.dtype = header
        self.data = data


class Box(Protocol):
    """Where the letters to one group go."""

    def take(self, letter: Letter) -> None:
        """Take a letter, whose bytes are of use only now."""


class PostOffice:
    """The messages of this process.

    Args:
        session: The session.
        comm: A communicator of all ranks, numbered as in MPI.COMM_WORLD.
    """

    def __init__(self, session: Session, comm: Any) -> None:
        self._session = session
        self._comm = comm
        self._byte = session.mpi.BYTE
        self._num_tags = comm.Get_attr(session.mpi.TAG_UB) - _FIRST_LONG_TAG
        self._status = session.mpi.Status()
        self._room = np.empty(HEADER_BYTES + MOST_EAGER_BYTES, np.uint8)
        self._boxes: dict[int, Box] = {}
        # Letters to groups that this rank has not used yet; and those that it has left, whose letters are late.
        self._unclaimed: dict[int, list[Letter]] = {}
        self._left: set[int] = set()
        # Of which group, the request, the copy.
        self._copies: deque[tuple[int, Any, bytes]] = deque()
        self._copied_bytes = 0
        self._numbered = 0
        self._coming: Any = None
        self._listen()
        atexit.register(self._close)

    def open_box(self, token: int, box: Box) -> None:
        """Have the letters to a group go to `box`."""
        with self._session.lock:
            self._left.discard(token)
            self._boxes[token] = box
            for letter in self._unclaimed.pop(token, ()):
                box.take(letter)

    def close_box(self, token: int) -> None:
        """Throw away what still comes for a group."""
        with self._session.lock:
            self._boxes.pop(token, None)
            self._left.add(token)

    def poll(self) -> None:
        """Take what has come."""
        with self._session.lock:
            while self._coming is not None and self._coming.Test(self._status):
                self._take()
            if self._copies:
                self._forget_sent()

    def take_one(self, source: int, header: bytes, into: Array) -> bool | None:
        """Look once; have the bytes of a whole letter go to `into` if it is this one, from this rank, that has come.

        None where nothing has come; False where something else has, which has gone where letters go. With the lock
        held.
        """
        if self._coming is None or not self._coming.Test(self._status):
            return None
        end = HEADER_BYTES + into.size
        if self._status.Get_source() != source or self._room[:HEADER_BYTES].tobytes() != header:
            self._take()
            return False
        into[...] = self._room[HEADER_BYTES:end]
        self._listen()
        return True

    def send_one(self, token: int, dst: int, letter: bytes) -> bool:
        """Send a letter that has been packed, unless many wait to be sent; return whether it is on its way."""
        with self._session.lock:
            if self._copies:
                self._forget_sent()
            if self._copied_bytes > _MOST_COPIED_BYTES:
                return False
            self._post(token, dst, letter)
            return True

    def send(self, token: int, dst: int, kind: int, tag: int, data: Array, dtype: bytes) -> None:
        """Send a letter with its bytes, which are copied."""
        letter = header_of(token, kind, tag, data.size, dtype) + data.tobytes()
        with self._session.lock:
            self._post(token, dst, letter)

    def has_room(self) -> bool:
        """Return whether few copies wait to be sent."""
        self.poll()
        return self._copied_bytes <= _MOST_COPIED_BYTES

    def send_long(self, token: int, dst: int, tag: int, data: Array, dtype: bytes) -> Requests:
        """Announce a letter, and send its bytes; they are done when the other side has them."""
        with self._session.lock:
            number = self._numbered
            self._numbered += 1
            self._post(token, dst, header_of(token, LONG, tag, data.size, dtype, number))
            requests = [self._comm.Issend([piece, self._byte], dst, self._tag(number)) for piece in _pieces(data)]
        return Requests(self._session, requests, data)

    def fetch(self, letter: Letter, into: Array) -> Requests:
        """Receive the bytes of a long letter."""
        with self._session.lock:
            requests = [
                self._comm.Irecv([piece, self._byte], letter.source, self._tag(letter.number))
                for piece in _pieces(into)
            ]
        return Requests(self._session, requests, into)

    def all_sent(self, token: int) -> bool:
        """Return whether no copy for a group waits to be sent."""
        self.poll()
        with self._session.lock:
            return all(request.Test() for group, request, _ in self._copies if group == token)

    def _post(self, token: int, dst: int, letter: bytes) -> None:
        # Few bytes are MPI's at once; what is not has to stay.
        request = self._comm.Isend([letter, self._byte], dst, _MAIL_TAG)
        if not request.Test():
            self._copies.append((token, request, letter))
            self._copied_bytes += len(letter)

    def _take(self) -> None:
        source, length = self._status.Get_source(), self._status.Get_count(self._byte)
        header = _HEADER.unpack_from(self._room.data)
        self._deliver(header[0], Letter(source, header, self._room[HEADER_BYTES:length]))
        self._listen()

    def _tag(self, number: int) -> int:
        # No two messages between the same ranks have one tag, unless as many are on their way as there are tags.
        return _FIRST_LONG_TAG + int(number % self._num_tags)

    def _deliver(self, token: int, letter: Letter) -> None:
        box = self._boxes.get(token)
        if box is not None:
            box.take(letter)
        elif token not in self._left:
            letter.data = letter.data.copy()
            self._unclaimed.setdefault(token, []).append(letter)

    def _listen(self) -> None:
        self._coming = self._comm.Irecv([self._room, self._byte], self._session.mpi.ANY_SOURCE, _MAIL_TAG)

    def _forget_sent(self) -> None:
        while self._copies and self._copies[0][1].Test():
            self._copied_bytes -= len(self._copies.popleft()[2])

    def _close(self) -> None:
        # MPI is finalized when the process ends, and waits for what is not done.
        if self._session.mpi.Is_finalized() or self._coming is None:
            return
        with self._session.lock:
            coming, self._coming = self._coming, None
            coming.Cancel()
            coming.Wait()


def _pieces(data: Array) -> list[Array]:
    return [data[begin : begin + _PIECE_BYTES] for begin in range(0, max(data.size, 1), _PIECE_BYTES)]
