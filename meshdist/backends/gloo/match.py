"""The match queue of gloo's transports: posted receives, and sends that wait for room."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from meshdist.arrays.host import Array
from meshdist.backends.p2p.match_queue import MatchQueue
from meshdist.backends.p2p.requests import NO_ARRAY, NO_TAG, Probing, RecvRequest, UnexpectedMessage
from meshdist.errors import DistBackendError
from meshdist.runtime.waiting import Doorbell


class Sleepable(Protocol):
    """Something that rings a bell when a message has arrived or room has become free."""

    def arm(self, bell: Doorbell) -> bool:
        """Ask for `bell` to be rung; return False, without effect, if there is no channel yet."""

    def disarm(self, bell: Doorbell) -> None: ...


class PendingSends(Sleepable, Protocol):
    """Sends to one rank that wait for room."""

    @property
    def global_rank(self) -> int: ...

    def advance(self) -> None:
        """Write as much as there is room for."""


class GlooMatchQueue(MatchQueue[UnexpectedMessage, "GlooRecvRequest"]):
    """A match queue, and what is on its way."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())
        # This rank's sends that wait for room: every wait advances them, as the peer may need them first.
        self.pending: set[PendingSends] = set()
        # This rank's sends whose receivers copy them, or have not begun to.
        self.announced: set[object] = set()
        self.arriving: set[Receiver] = set()  # the receivers that have read a part of a message
        self.probed: list[int | None] = []  # the sources of the probes that are looking now, None for any
        # Returns the source and the tag of the next message of each rank, and reads none.
        self.look_around: Callable[[], Collection[tuple[int, int]]] = tuple

    @property
    def awaits_messages(self) -> bool:
        """Whether a receive is posted, or a message is arriving."""
        return bool(self.arriving or self.containers[0])

    def sends_besides(self, sends: PendingSends | None = None) -> list[int]:
        """Return the global ranks to which other messages than those of `sends` wait for room."""
        return [other.global_rank for other in tuple(self.pending) if other is not sends]

    def progress_sends(self) -> None:
        for sends in tuple(self.pending):
            sends.advance()


class Receiver(Protocol):
    """Receives from one rank, or from any.

    Attributes:
        description: The rank in error messages.
        spin_s: How long to poll before sleeping.
        connect_error: Why there is no connection, appended to errors; empty if there is one or none is needed.
        awaited: The global ranks of which one must send; what they have sent is found by the next `move`, or counted in
            `Peers.traffic`. Empty if it is unknown which have begun to.
        reads_in: As of a Waitable.
    """

    description: str
    spin_s: float

    @property
    def connect_error(self) -> str: ...

    @property
    def awaited(self) -> Sequence[int]: ...

    @property
    def reads_in(self) -> str: ...

    def move(self, request: GlooRecvRequest) -> None:
        """Read until `request` has its message, or nothing more is available."""

    def check(self) -> None:
        """Raise DistBackendError if no more messages can arrive."""

    def poll_now(self) -> None:
        """Have the next `move` ask the store for new channels, without the usual pause."""

    def receivers(self) -> Sequence[Sleepable]:
        """Return the receivers of single ranks whose bells the request arms."""


class ProbedReceiver(Receiver, Protocol):
    """A receiver that a probe may ask."""

    def look(self, tag: int | None) -> UnexpectedMessage | None:
        """Return the next message, and leave it, if it has the tag, any if None, and no receive for it is posted."""


class GlooRecvRequest(RecvRequest):
    """A posted receive; `receiver` delivers the message. See `RecvRequest` for the rest."""

    queue: GlooMatchQueue

    def __init__(
        self, array: Array, dtype_name: bytes, wanted: int | None, tag: int, queue: GlooMatchQueue, receiver: Receiver
    ) -> None:
        super().__init__(array, dtype_name, wanted, tag, queue)
        self.spin_s = receiver.spin_s
        self._receiver = receiver
        self._armed: list[Sleepable] = []

    def progress(self) -> None:
        self.queue.progress_sends()
        self._receiver.move(self)

    def check(self) -> None:
        try:
            self._receiver.check()
        except DistBackendError as error:
            self._receiver.move(self)  # the peer may have sent the message right before it left
            if self.done:
                return
            self.add_instead(error)
            raise

    def arm(self, bell: Doorbell) -> None:
        self._bell = bell
        if not self.done:
            # A channel found only after this point would not know about the sleeping thread.
            self._receiver.poll_now()
            self._receiver.move(self)
        places = (*self._receiver.receivers(), *self.queue.pending)
        self._armed = [place for place in places if place.arm(bell)]

    def disarm(self, bell: Doorbell) -> None:
        self._bell = None
        for place in self._armed:
            place.disarm(bell)

    def source_words(self) -> str:
        return self._receiver.description

    def awaits(self) -> Sequence[int]:
        return sources if len(sources := self._sources()) == 1 else ()

    def awaits_any(self) -> Sequence[int]:
        return sources if len(sources := self._sources()) > 1 else ()

    def _sources(self) -> Sequence[int]:
        """Return the ranks of which one must send; none if its message has come, or something is under way."""
        # A message that another thread reads, or that is read to count what has arrived, may have ended it.
        is_moving = self.done or self.message is not None or self.queue.arriving
        return () if is_moving else self._receiver.awaited

    def sends_to(self) -> list[int]:
        return self.queue.sends_besides()

    def reads_in(self) -> str:
        return self._receiver.reads_in

    def arrived(self) -> Collection[tuple[int, int]]:
        return self.queue.look_around()

    def other_tags(self) -> str:
        return f"{super().other_tags()}{self._receiver.connect_error}"


class GlooProbe(Probing, GlooRecvRequest):
    """A probe; `resume` reads messages that are held back until they are awaited."""

    def __init__(
        self,
        wanted: int | None,
        tag: int | None,
        queue: GlooMatchQueue,
        receiver: ProbedReceiver,
        resume: Callable[[int | None], None] | None,
    ) -> None:
        self.wanted_tag = tag
        super().__init__(*NO_ARRAY, wanted, NO_TAG if tag is None else tag, queue, receiver)
        self._resume = resume
        self._look_in = receiver

    def progress(self) -> None:
        self.message = self._look_in.look(self.wanted_tag)
        if self.message is not None:
            self.source = self.message.source
            return
        if self._resume is None:
            super().progress()
            return
        self.queue.probed.append(self.wanted)
        try:
            self._resume(self.wanted)
            super().progress()
        finally:
            self.queue.probed.remove(self.wanted)
