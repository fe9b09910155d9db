"""Point-to-point messages of a group: through shared memory between ranks of one host, else over TCP.

A message of up to the eager limit is copied into the channel's ring, and its send is done. A longer one goes through
the ring in pieces, and is done when it is received; an `isend` by the core, when it is in the ring, if that has room
for all of it. A still longer one is only announced in the ring: both sides copy it between the arrays, if the receiver
can read the sender's memory (`READS`). The core also announces messages of up to `LONGEST_ANNOUNCED` that their
receivers copy alone: those of a rank that receives as well, and others where that is faster than the ring.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist import core
from meshdist.arrays.host import Array
from meshdist.backends.base import Backend, FastPath
from meshdist.backends.gloo.match import GlooMatchQueue, GlooProbe, GlooRecvRequest, Receiver
from meshdist.backends.gloo.p2p.any_source import AnySource
from meshdist.backends.gloo.published import check_still_there
from meshdist.backends.gloo.shm.channel import LONGEST_WHOLE
from meshdist.backends.gloo.shm.fast_path import LONGEST_ANNOUNCED
from meshdist.backends.gloo.shm.receiver import ShmReceiver
from meshdist.backends.gloo.shm.sender import ShmSender
from meshdist.backends.p2p.eager_messages import MessageKinds
from meshdist.backends.p2p.own_messages import OwnMessages
from meshdist.backends.p2p.requests import post
from meshdist.errors import DistError
from meshdist.runtime.departure import Departure
from meshdist.runtime.waiting import Incoming, Probe, Waitable
from meshdist.store.brief_requests import brief

if TYPE_CHECKING:
    from meshdist.backends.gloo.p2p.remote import RemoteP2P
    from meshdist.backends.gloo.shm.shared_region import SharedRegion
    from meshdist.backends.gloo.tcp.receiver import TcpReceiver
    from meshdist.backends.gloo.tcp.sender import TcpSender

# The longest message that is buffered: a few of them are to have room in the ring.
_LARGEST_ENTRY = LONGEST_WHOLE // 8 - 128
# How long a rank looks at its end for messages that it has not received.
_LOOK_S = 1.0


class P2P:
    """The messages of one rank in its group; `remote` is the part with other hosts, None if there is none."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kinds = MessageKinds(_LARGEST_ENTRY, LONGEST_ANNOUNCED)
        self._senders: dict[int, ShmSender | TcpSender] = {}
        self._opening = threading.Lock()
        self._receivers: dict[int, ShmReceiver | TcpReceiver] = {}
        self._region: SharedRegion | None = None
        self.remote: RemoteP2P | None = None
        elsewhere = backend.options.remote_ranks()
        if elsewhere:  # a group on one host does not load the modules for TCP
            from meshdist.backends.gloo.p2p.remote import RemoteP2P

            self.remote = RemoteP2P(backend, elsewhere)
        self._queue = GlooMatchQueue() if self.remote is None else self.remote.receive_state.queue
        self._queue.describe = backend.options.describe
        self.own = OwnMessages(backend.rank, self._queue)
        self._any_source = AnySource(backend, self._receivers, self._receiver, self._queue)
        self._queue.look_around = self._next_messages
        for rank in () if self.remote is None else self.remote.ranks:
            self._receiver(rank)

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        sender = self._senders.get(dst)
        if sender is None:
            sender = self._sender(dst)
            if tag >= 0:
                check_still_there(self._backend.options, dst)
        return sender.post(array, tag, self._kinds.names[array.dtype], self._kinds.eager_bytes)

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        remote = self.remote
        if src is not None and remote is None:
            receiver: Receiver = self._receivers.get(src) or self._receiver(src)
        else:
            receiver = self._receiver_for(src, tag)
        request = GlooRecvRequest(array, self._kinds.names[array.dtype], src, tag, self._queue, receiver)
        if not post(request, pulls=remote is not None) and remote is not None:
            remote.resume(src)
        return request

    def probe(self, src: int | None, tag: int | None) -> Probe:
        remote = self.remote
        receiver = self._any_source if src is None else self._receivers.get(src) or self._receiver(src)
        return GlooProbe(src, tag, self._queue, receiver, None if remote is None else remote.resume)

    def fast_send(
        self, dst: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...], *, buffers: bool = False
    ) -> FastPath | None:
        sender, kind = self._senders.get(dst), self._kinds.kind(tag, dtype, shape)
        if sender is None or kind is None:
            return None
        if buffers and core.module is not None and isinstance(sender, ShmSender):
            kind = kind._replace(is_async=True)
        return sender.fast_path(kind)

    def fast_recv(self, src: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> FastPath | None:
        receiver, kind = self._receivers.get(src), self._kinds.kind(tag, dtype, shape)
        return None if receiver is None or kind is None else receiver.fast_path(kind)

    def left_over(self) -> list[tuple[int, int]]:
        """Return what `Backend.left_over` does."""
        self._open_channels()
        in_channels = [
            (src, tag)
            for src, receiver in self._receivers.items()
            if isinstance(receiver, ShmReceiver)
            for tag in receiver.unread_tags()
        ]
        return [*self._queue.left_over(), *in_channels]

    def share(self, region: SharedRegion) -> None:
        """From now on, record in the group's shared memory which ranks this one has begun to send to.

        So a rank that has received nothing knows at the end, without a request to the store, that there is nothing.
        """
        self._region = region
        for dst in list(self._senders):
            region.set_mail(dst)

    def fail(self, departure: Departure) -> None:
        self._end(departure)
        if self.remote is not None:
            self.remote.announce(departure)

    def leave(self, departure: Departure) -> None:
        """End the channels; the receiver of a message may still open one, see `deferred_cleanup`."""
        self._end(departure)
        if self.remote is not None:
            self.remote.leave(departure)

    def _receiver_for(self, src: int | None, tag: int) -> Receiver:
        if src is None:
            return self._any_source
        if tag < 0 and self.remote is not None:
            return self.remote.in_collective(src, self._receiver(src))
        return self._receivers.get(src) or self._receiver(src)

    def _sender(self, dst: int) -> ShmSender | TcpSender:
        # Only one sender for each rank: the receiver opens only the first channel.
        with self._opening:
            sender = self._senders.get(dst)
            if sender is None:
                remote = self._remote_of(dst)
                sender = remote.sender(dst) if remote else ShmSender(self._backend, dst, self._queue)
                self._senders[dst] = sender
                # In this order: `share` comes before this, or finds the sender.
                if self._region is not None:
                    self._region.set_mail(dst)
        return sender

    def _receiver(self, src: int) -> ShmReceiver | TcpReceiver:
        with self._queue.lock:
            receiver = self._receivers.get(src)
            if receiver is None:
                remote = self._remote_of(src)
                receiver = remote.receiver(src) if remote else ShmReceiver(self._backend, src, self._queue)
                self._receivers[src] = receiver
        return receiver

    def _open_channels(self) -> None:
        # Of ranks that this one has neither received from nor looked for messages of.
        region, rank = self._region, self._backend.rank
        if region is not None and not region.has_mail(rank):
            return
        if all(other == rank or self._is_open(other) for other in range(self._backend.size)):
            return
        with suppress(DistError), brief(_LOOK_S):  # the store, or a sender with what it has sent, is gone
            for src in self._any_source.all_senders():
                receiver = self._receiver(src)
                if isinstance(receiver, ShmReceiver) and receiver.channel is None:
                    receiver.next_tag()

    def _is_open(self, src: int) -> bool:
        receiver = self._receivers.get(src)
        return receiver is not None and (not isinstance(receiver, ShmReceiver) or receiver.channel is not None)

    def _next_messages(self) -> list[tuple[int, int]]:
        found = []
        with suppress(DistError):  # a rank or the store is gone, which the call reports otherwise
            for src in self._any_source.new_senders():
                self._receiver(src)
            for src, receiver in list(self._receivers.items()):
                tag = receiver.next_tag() if isinstance(receiver, ShmReceiver) else None
                if tag is not None:
                    found.append((src, tag))
        return found

    def _remote_of(self, rank: int) -> RemoteP2P | None:
        return self.remote if self.remote is not None and rank in self.remote.ranks else None

    def _end(self, departure: Departure) -> None:
        for side in (*self._senders.values(), *self._receivers.values()):
            if isinstance(side, (ShmSender, ShmReceiver)):
                side.end(departure)
