"""Mail: the messages of one group, each brought together with the receipt that asks for it."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array, as_bytes, describe_array
from meshdist.backends.base import Express, Incoming
from meshdist.backends.matching import DtypeNames, Matching, eager_bytes
from meshdist.backends.mpi.express import express_from, express_to
from meshdist.backends.mpi.library import Polled, Requests
from meshdist.backends.mpi.post_office import FAILED, LONG, MOST_EAGER_BYTES, WHOLE, Letter, PostOffice
from meshdist.deadline import Deadline
from meshdist.errors import DistBackendError
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.mpi.backend import MpiBackend

_LOOK_S = 0.1
_DELIVERY_S = 5.0
_MOST_WORDS = 1500
_NOTHING = np.empty(0, np.uint8)


class Mail:
    """The messages of one rank in its group.

    Args:
        backend: The engine of the group.
        office: Where they come and go.
        token: What the group is known by there.
        places: The group's ranks by their numbers in MPI.

    Attributes:
        failure: What another rank failed with, once it has said so.
        office: See above.
        token: See above.
        session: The MPI library.
        matching: The messages and receipts without a partner.
    """

    def __init__(self, backend: MpiBackend, office: PostOffice, token: int, places: dict[int, int]) -> None:
        self.failure: str | None = None
        self.office = office
        self._backend = backend
        self.token = token
        self._places = places
        self._addresses = list(places)
        self._names = DtypeNames()
        self._eager_bytes = min(eager_bytes(), MOST_EAGER_BYTES)
        self.matching: Matching[Parcel, Receipt] = Matching()
        self._sent = Sent(self)
        self.session = backend.session
        self._lock = backend.session.lock
        office.open_box(token, self)

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        """Post a message."""
        self.office.poll()
        if self.failure is not None:
            raise DistBackendError(self.failure, peer_failed=True)
        data, name, address = as_bytes(array), self._names[array.dtype], self._addresses[dst]
        if data.size > self._eager_bytes:
            return Dispatch(self, self.office.send_long(self.token, address, tag, data, name), dst)
        self.office.send(self.token, address, WHOLE, tag, data, name)
        return self._sent

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        """Post the receipt of a message, from one rank or from any."""
        receipt = Receipt(self, array, self._names[array.dtype], src)
        with self._lock:
            parcel = self.matching.ask(receipt, src, tag)
            if parcel is not None:
                receipt.take(parcel)
            else:
                # Who waits for one message lets the senders of others go on.
                for other in self.matching.kept(src):
                    other.pull(self.office)
        return receipt

    def express_to(self, dst: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Express | None:
        """Return what sends messages of a kind; None where they are too long for that."""
        if not self._is_short(dtype, shape):
            return None
        return express_to(self, self._addresses[dst], tag, dtype, shape, self._names[dtype])

    def express_from(self, src: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Express | None:
        """Return what receives messages of a kind; None where they are too long for that."""
        if not self._is_short(dtype, shape):
            return None
        return express_from(self, self._addresses[src], tag, dtype, shape, self._names[dtype])

    def take(self, letter: Letter) -> None:
        """Take a letter; called with the lock held."""
        src = self._places[letter.source]
        if letter.kind == FAILED:
            words = bytes(letter.data).decode(errors="replace")
            self.failure = self.failure or f"{self._backend.options.call(src)} has failed: {words}"
            return
        parcel = Parcel(src, letter)
        receipt = self.matching.come(src, letter.tag)
        if receipt is not None:
            receipt.take(parcel)
            return
        if letter.kind == WHOLE:
            letter.data = letter.data.copy()
        elif self.matching.asks(src):
            parcel.pull(self.office)
        self.matching.keep(parcel, src, letter.tag)

    def fail(self, reason: str) -> None:
        """Tell all ranks of the group that this one gives up."""
        words = np.frombuffer(reason.encode()[:_MOST_WORDS], np.uint8)
        for place, address in enumerate(self._addresses):
            if place != self._backend.rank:
                self.office.send(self.token, address, FAILED, 0, words, b"")

    def close(self) -> None:
        """Let what was sent be taken by MPI, and take nothing more."""
        deadline, pause = Deadline(_DELIVERY_S), threading.Event()
        while not self.office.all_sent(self.token) and not deadline.expired():
            pause.wait(0.001)
        self.office.close_box(self.token)

    def look(self, places: list[int]) -> None:
        """Raise DistBackendError if a message of these ranks, or to them, can never come."""
        self.office.poll()
        self._backend.look()
        gone = [self._backend.options.gone(place) for place in places]
        if None not in gone:
            raise DistBackendError(f"{self._backend.options.call(places[0])} {gone[0]}", peer_failed=True)

    def call(self, rank: int) -> str:
        """Return what messages call a rank of the group."""
        return self._backend.options.call(rank)

    def _is_short(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
        return math.prod(shape) * dtype.itemsize <= self._eager_bytes

    def others(self) -> list[int]:
        """Return all ranks of the group but this one."""
        return [place for place in range(len(self._addresses)) if place != self._backend.rank]


class Parcel:
    """A message that has come, or is announced."""

    def __init__(self, source: int, letter: Letter) -> None:
        self.source = source
        self.letter = letter
        self.pulled: Requests | None = None

    def pull(self, office: PostOffice) -> None:
        """Receive the bytes of a long message though nobody asks for it yet."""
        if self.letter.kind == LONG and self.pulled is None:
            self.letter.data = np.empty(self.letter.num_bytes, np.uint8)
            self.pulled = office.fetch(self.letter, self.letter.data)


class _Watched(Polled):
    """Something that comes to nothing when the ranks at the other end go away."""

    def __init__(self, mail: Mail, places: list[int]) -> None:
        super().__init__()
        self.mail = mail
        self._places = places
        self._next_look_s = 0.0

    def check(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_look_s or self.mail.failure is not None:
            self._next_look_s = now_s + _LOOK_S
            self.mail.look(self._places)


class Sent(Polled):
    """Messages that are copied: to be waited for only where very many are."""

    def __init__(self, mail: Mail) -> None:
        super().__init__()
        self._mail = mail

    def ready(self) -> bool:
        return self._mail.office.has_room()

    def check(self) -> None:
        if self._mail.failure is not None:
            raise DistBackendError(self._mail.failure, peer_failed=True)

    def missing(self) -> str:
        return "the other ranks to receive messages"


class Dispatch(_Watched):
    """A long message on its way out."""

    def __init__(self, mail: Mail, requests: Requests, dst: int) -> None:
        super().__init__(mail, [dst])
        self._requests: Requests | None = requests
        self._dst = dst

    def ready(self) -> bool:
        self.mail.office.poll()
        if self._requests is not None and self._requests.done():
            self._requests = None
        return self._requests is None

    def missing(self) -> str:
        return f"{self.mail.call(self._dst)} to receive a message"


class Receipt(_Watched, Incoming):
    """A message that is asked for."""

    def __init__(self, mail: Mail, array: Array, dtype_name: bytes, wanted: int | None) -> None:
        super().__init__(mail, mail.others() if wanted is None else [wanted])
        self.source = -1
        self._array = array
        self._dtype_name = dtype_name
        self._wanted = wanted
        self._parcel: Parcel | None = None
        self._requests: Requests | None = None
        self._done = False
        self._error: DistBackendError | None = None

    def take(self, parcel: Parcel) -> None:
        """Take a message; whoever brought the two together does it, with the lock held."""
        letter, self.source = parcel.letter, parcel.source
        if letter.num_bytes != self._array.nbytes or letter.dtype != self._dtype_name:
            name = letter.dtype.rstrip(b"\0").decode()
            self._error = DistBackendError(
                f"the message from {self.mail.call(self.source)} is {letter.num_bytes} bytes of {name},"
                f" the array to receive it is {describe_array(self._array)}, {self._array.nbytes} bytes"
            )
        elif letter.kind == WHOLE:
            as_bytes(self._array)[...] = letter.data
            self._done = True
        elif parcel.pulled is None:
            self._requests = self.mail.office.fetch(letter, as_bytes(self._array))
        else:
            self._parcel, self._requests = parcel, parcel.pulled

    def ready(self) -> bool:
        if self._done:
            return True
        if self._requests is None:
            self.mail.office.poll()
        if self._error is not None:
            raise self._error
        if self._requests is not None and self._requests.done():
            self._requests = None
            if self._parcel is not None:
                as_bytes(self._array)[...] = self._parcel.letter.data
            self._done = True
        return self._done

    def missing(self) -> str:
        return "a message from " + ("any rank" if self._wanted is None else self.mail.call(self._wanted))
