"""Requests of all backends: posted receives, unexpected messages, posted sends, and probes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from meshdist.arrays.host import Array, as_bytes, describe_array, dtype_of_objects
from meshdist.backends.p2p.eager_messages import (
    ANY_OBJECTS,
    OBJECTS,
    dtype_named,
    fits,
    label_of_name,
    number_of_objects,
    text_of,
)
from meshdist.backends.p2p.match_queue import MatchQueue
from meshdist.errors import DistBackendError
from meshdist.runtime.departure import failure_of
from meshdist.runtime.flight_recorder import tag_text
from meshdist.runtime.waiting import Doorbell, Found, Incoming, Probe, Waitable
from meshdist.system.plurals import counted


class RecvRequest(Incoming):
    """A posted receive from the rank `wanted`, None for any; `message` is set while it arrives, `done` at the end.

    That of a list of objects, as the dtype tells, gets a `pickle` as long as the message; its own array stays empty.
    """

    def __init__(
        self, array: Array, dtype_name: bytes, wanted: int | None, tag: int, queue: MatchQueue[Any, Any]
    ) -> None:
        self.done = False
        self.source = -1
        self.wanted = wanted
        self.tag = tag
        self.queue = queue
        self.message: UnexpectedMessage | None = None
        self._array = array
        self._dtype_name = dtype_name
        self._error: DistBackendError | None = None
        self._bell: Doorbell | None = None

    def target(self, source: int, num_bytes: int, dtype: bytes) -> Array | None:
        """Return the bytes of the array for a message; None if it does not fit, which completes with an error."""
        self.source = source
        if num_bytes == self._array.nbytes and fits(dtype, self._dtype_name):
            return as_bytes(self._array)
        if self._takes_objects(dtype):
            self.pickle = np.empty(num_bytes, dtype_of_objects(number_of_objects(dtype)))
            return as_bytes(self.pickle)
        what, contrast = self._other(num_bytes, dtype)
        tag = tag_text(" with tag ", self.tag) if self.tag > 0 else ""
        self._error = DistBackendError(f"{self.queue.describe(source)} sent {what}{tag}{contrast}")
        self._error.is_misfit = True
        self._error.needs_probe = not dtype.startswith(OBJECTS) and not self._has_place_for(num_bytes, dtype)
        self._error.sent_label = label_of_name(dtype) if self._has_place_for(num_bytes, dtype) else ""
        self.complete()
        return None

    def _takes_objects(self, dtype: bytes) -> bool:
        wanted = self._dtype_name
        return wanted.startswith(OBJECTS) and (dtype == wanted or (wanted == ANY_OBJECTS and dtype.startswith(OBJECTS)))

    def _has_place_for(self, num_bytes: int, dtype: bytes) -> bool:
        return num_bytes == self._array.nbytes and text_of(dtype) == text_of(self._dtype_name)

    def _other(self, num_bytes: int, dtype: bytes) -> tuple[str, str]:
        """Return what came, and the rest of the sentence: it is something else than the array is for."""
        size, sent = counted(num_bytes, "byte"), number_of_objects(dtype)
        if sent is not None and self._dtype_name.startswith(OBJECTS):
            length = counted(number_of_objects(self._dtype_name) or 0, "object")
            any_number = "recv_object_list with an empty list receives any number"
            return counted(sent, "object"), f", but this call receives {length}; {any_number}"
        if sent is not None:
            receive = "recv_object or recv_object_list" if sent == 1 else "recv_object_list"
            return f"a list of {counted(sent, 'object')}", f", not an array; receive it with {receive}"
        if self._dtype_name.startswith(OBJECTS):
            return f"an array ({text_of(dtype)}, {size})", ", not a list of objects; receive it with recv"
        if self._has_place_for(num_bytes, dtype):
            return "an array", " in a call that differs from this one"
        kind, room = dtype_named(dtype), describe_array(self._array)
        if kind is not None and kind.itemsize and num_bytes % kind.itemsize == 0:
            number = num_bytes // kind.itemsize
            if self._array.ndim == 1:
                return f"{kind}[{number}]", f", but the receiving array is {room}"
            elements = f"{counted(number, 'element')} of {kind}"
            has = f"has {self._array.size}: {room}" if number != self._array.size else f"is {room}"
            return elements, f", but the receiving array {has}"
        room_size = counted(self._array.nbytes, "byte")
        return f"{size} of {text_of(dtype)}", f", but the receiving array is {room} ({room_size})"

    def complete(self) -> None:
        """Mark as done, and wake the waiting thread: another one may have made the progress."""
        self.done = True
        self.message = None  # it refers to this request: the memory of both would wait for the garbage collector
        if self._bell is not None:
            self._bell.ring()

    def ready(self) -> bool:
        if not self.done:
            self.progress()
        if self._error is not None:
            raise self._error
        return self.done

    @abstractmethod
    def progress(self) -> None:
        """Receive what has arrived, for this request and for others."""

    def source_words(self) -> str:
        return "any rank" if self.wanted is None else self.queue.describe(self.wanted)

    def instead(self) -> str:
        return "" if self.tag < 0 else self.queue.instead(self.wanted, self.tag, self.arrived())

    def arrived(self) -> Collection[tuple[int, int]]:
        """Return the source and the tag of messages that are there, and which this receive does not read."""
        return ()

    def other_tags(self) -> str:
        """Return the end of an error: the awaited tag, and the messages that are there; empty in collectives."""
        instead = self.instead()
        return "" if self.tag < 0 else f"{tag_text(' with tag ', self.tag)}{'; ' if instead else ''}{instead}"

    def add_instead(self, error: DistBackendError) -> None:
        """Add to the error of sources that have left which messages have come, if any have."""
        failure, instead = failure_of(error), self.instead()
        if instead and failure is not None and failure.departure.exit.is_orderly:
            error.add(self.other_tags())
        elif instead and failure is None and error.peer_failed:  # all that might have sent are gone
            error.add(f"; {instead}")

    def missing(self) -> str:
        return f"a message from {self.source_words()}{self.other_tags()}"


class UnexpectedMessage:
    """A message that arrived before its receive was posted: its bytes, or only their announcement (RTS).

    An announced message is fetched when a receive claims it, or into memory of its own when it is pulled.
    """

    data: Array  # its bytes, complete or still arriving

    def __init__(
        self,
        queue: MatchQueue[Any, Any],
        source: int,
        tag: int,
        num_bytes: int,
        dtype: bytes,
        *,
        is_announced: bool = False,
    ) -> None:
        self.source = source
        self.tag = tag
        self.num_bytes = num_bytes
        self.dtype = dtype
        self.queue = queue
        self.is_coming = not is_announced  # its bytes are complete or arriving
        self._is_complete = False
        self._request: RecvRequest | None = None

    def allocate(self) -> Array:
        self.data = np.empty(self.num_bytes, np.uint8)
        return self.data

    def pull(self) -> None:
        with self.queue.lock:
            is_coming, self.is_coming = self.is_coming, True
        if not is_coming:
            self.fetch(self.allocate(), self.arrived)

    def claim(self, request: RecvRequest) -> None:
        with self.queue.lock:
            is_coming, self.is_coming = self.is_coming, True
            is_complete = self._is_complete
            self._request = request
            if not is_complete:
                request.message = self
        if is_complete:
            self.deliver(request)
        elif not is_coming:
            target = request.target(self.source, self.num_bytes, self.dtype)
            if target is not None:
                self.fetch(target, request.complete)

    def arrived(self) -> None:
        with self.queue.lock:
            self._is_complete = True
            request = self._request
        if request is not None:
            self.deliver(request)

    def deliver(self, request: RecvRequest) -> None:
        target = request.target(self.source, self.num_bytes, self.dtype)
        if target is not None:
            target[...] = self.data
            request.complete()

    def fetch(self, target: Array, then: Callable[[], None]) -> None:
        """Fetch the bytes of an announced message into `target`, then call `then`."""
        raise NotImplementedError

    def progress(self) -> None:
        """Advance the fetch, in transports where nothing else does."""


class SendRequest(Waitable):
    """A posted send, which is done once its array may be changed."""

    done = False

    def ready(self) -> bool:
        return self.done

    @abstractmethod
    def receiver_words(self) -> str: ...

    def missing(self) -> str:
        full_buffer = self.full_buffer()
        return f"{self.receiver_words()} to receive a message{'; ' if full_buffer else ''}{full_buffer}"


def arrive(message: UnexpectedMessage) -> bool:
    """Match an arrived message, or keep it as unexpected; return whether a receive was posted.

    An announced message is fetched at once if another message of its sender is awaited: that one may be behind it.
    """
    queue = message.queue
    with queue.lock:
        request: RecvRequest | None = queue.match(message.source, message.tag)
        if request is None:
            is_in_the_way = not message.is_coming and queue.awaits(message.source)
            queue.add_unexpected(message, message.source, message.tag)
    if request is not None:
        message.claim(request)
    elif is_in_the_way:
        message.pull()
    return request is not None


def post(request: RecvRequest, *, pulls: bool = True) -> bool:
    """Post a receive; return whether its message is here or arriving; if not, `pulls` fetches announced ones."""
    queue = request.queue
    others: Sequence[UnexpectedMessage] = ()
    with queue.lock:
        message: UnexpectedMessage | None = queue.post_recv(request, request.wanted, request.tag)
        if message is None and pulls:
            others = queue.unexpected(request.wanted)
    if message is not None:
        message.claim(request)
        return True
    for other in others:
        other.pull()
    return False


# ---- Probes

# The array, its dtype, and the tag in errors where any will do, of a request that receives nothing.
NO_ARRAY = np.empty(0, np.uint8), b""
NO_TAG = -1


class Probing(RecvRequest, Probe):
    """Makes a probe of a backend's receive request, which comes after it among the base classes.

    It is never posted: it makes the progress of a receive and looks among the unexpected messages.

    Attributes:
        wanted_tag: The tag of the message; None for any.
    """

    wanted_tag: int | None

    @property
    def done(self) -> bool:
        """Whether there is such a message."""
        return self._look() is not None

    @done.setter
    def done(self, value: bool) -> None:
        """Do nothing: only a message ends a probe."""

    def found(self) -> Found:
        message = self._look()
        assert message is not None, "asked once the probe is ready"
        number = number_of_objects(message.dtype)
        dtype = dtype_named(message.dtype) if number is None else None
        return Found(message.source, message.tag, message.num_bytes, dtype, number)

    def _look(self) -> UnexpectedMessage | None:
        if self.message is None:
            with self.queue.lock:
                self.message = self.queue.first(self.wanted, self.wanted_tag)
            if self.message is not None:
                self.source = self.message.source
        return self.message
