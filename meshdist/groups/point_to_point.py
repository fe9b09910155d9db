"""Point-to-point calls of one group, sync and async."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from sys import _getframe
from typing import Any
from weakref import WeakValueDictionary

from meshdist import core
from meshdist.arrays.device_types import device_type_of
from meshdist.arrays.host import Array, dtype_of_objects, labelled_dtype, pack
from meshdist.arrays.plain_numbers import plain_number
from meshdist.backends.base import Backend
from meshdist.core import Record
from meshdist.errors import DistBackendError, DistError, DistTimeoutError
from meshdist.groups.message_exchanges import Exchanges, known_receive, known_send
from meshdist.groups.tags_and_probes import MessageGroup
from meshdist.groups.unposted_messages import (
    AnnouncedSends,
    AnnouncedWork,
    Deferred,
    DeferredObjects,
    DeferredReceives,
    DeferredWork,
    Facts,
    Guarded,
    MessageQueue,
    PersistentRequest,
    message_steps,
)
from meshdist.groups.watched_messages import WatchedMessages
from meshdist.runtime.device_calls import DeviceCalls, Parcel
from meshdist.runtime.flight_recorder import clock, users
from meshdist.runtime.hooks import EXCHANGE_CALLS, MESSAGE_CALLS, CallObserver
from meshdist.runtime.job import Job
from meshdist.runtime.object_messages import ObjectMessage, ObjectsWork, async_calls
from meshdist.runtime.plan_cache import remember
from meshdist.runtime.progress import Progress
from meshdist.runtime.waiting import Incoming, Waitable
from meshdist.runtime.work import ReceiptWork, Work, done_work

# How long a group that is closed waits for the messages that it is to receive.
_LAST_MESSAGES_S = 5.0
# Up to here an `irecv` takes a message that has come already.
_LONG_BYTES = 2 << 20
_RECEIVE_OBJECTS = "irecv_object_list(src=info.source, tag=info.tag)"
_RECEIVE_OBJECT = "recv_object(src=info.source, tag=info.tag)"


class PointToPoint(Exchanges):
    """Sends and receives for one group. Ranks are those in the group.

    Messages are not ordered with collectives, nor with messages of other ranks or tags. So there is one queue of sends
    for each destination, and one queue of receives for each source and tag.
    """

    def __init__(self, group: MessageGroup, progress: Progress) -> None:
        super().__init__(group)
        self._group = group
        self._progress = progress
        self._queues: WeakValueDictionary[Any, MessageQueue] = WeakValueDictionary()
        self._closing = False
        # Requests whose arguments have been checked, by peer, tag, dtype and shape; emptied when the group ends.
        self._sends: dict[Any, PersistentRequest] = {}
        self._receives: dict[Any, PersistentRequest] = {}
        self.deferral = DeferredReceives(self._take_deferred, self._post_deferred, lambda: group.calls, progress)
        self.deferred = self.deferral.works
        self.announcing = AnnouncedSends(self._post_announced, self.deferral)
        # Checked peers: global rank -> rank in the group.
        self._peers: dict[int, int] = {}

    @property
    def outstanding(self) -> int:
        unposted = len(self.deferred) + len(self.announcing.works)
        return unposted + sum(len(queue.jobs) for queue in list(self._queues.values()))

    def watch(self, *observers: CallObserver) -> None:
        watched = WatchedMessages(observers, self._group)
        for names, watch in ((EXCHANGE_CALLS, watched.exchange), (MESSAGE_CALLS, watched.message)):
            for name in names:
                # An instance attribute hides the method of the class: messages without observers pay nothing.
                self.__dict__.pop(name, None)
                if observers:
                    setattr(self, name, watch(name, getattr(self, name)))

    def unobserved(self, name: str) -> Callable[..., Any]:
        """Return the function `name` without hooks, for a part of a call that the hooks have seen already."""
        function: Callable[..., Any] = getattr(type(self), name).__get__(self)
        return function

    def has_tags(self, array: Any) -> bool:
        """Return whether messages with this array have tags; NCCL's have none, and arrive in the order of the sends."""
        calls = None if device_type_of(array) == "cpu" else self._group.device_calls("has_tags")
        return calls is None or calls.has_tags

    def peer(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        """Return the peer of a message; see `ProcessGroup.root`."""
        if group_rank is None and type(rank := plain_number(rank)) is int and rank in self._peers:
            return self._peers[rank]
        group = self._group
        peer = group.root(of, name, rank, group_rank)
        self._peers[group.ranks[peer]] = peer
        return peer

    def send(self, tensor: Any, dst: int, tag: int, of: str = "send", *, is_size_exchange: bool = False) -> None:
        """Send a message, an array or an ObjectMessage, to rank `dst` and wait until `tensor` may be changed.

        The user called the function `of`; with `is_size_exchange`, which observers see, another message follows.
        """
        requests = self._sends
        request = known_send(requests, tensor, dst, tag) if of == "send" else None
        if request is not None and request.fast_path is not None and self._try_fast_path(request, tensor):
            return
        kind = self.known.objects_like(of, tensor, dst, tag)
        if kind is not None and self._try_fast_path(kind, tensor.array):
            return
        group = self._group
        error_prefix = group.error_prefix(of)
        backend = self._backend_for(error_prefix, tensor)
        if backend.device_calls is not None:
            backend.device_calls.send(self._parcel(backend.device_calls, error_prefix, of, tensor, dst, tag))
            return
        given = tensor if request is not None else self._given(error_prefix, tensor, tag)
        array = pack(given)
        if dst == self._rank and not self._own(backend).awaits(tag):
            isend, irecv = async_calls(tensor)
            raise ValueError(
                f"{error_prefix}: dst is this rank, {dst}, which has posted no receive with tag {tag}, so the rank"
                f" would wait for itself; post one with {irecv} first, or call {isend}, which buffers the message"
            )
        record = self.begin_record(of, array, dst, tag, sends=True)
        try:
            backend.wait(self._post_send(backend, array, dst, tag), error_prefix)
        except BaseException as error:
            raise group.fail(error, error_prefix, record) from None
        record.completed = clock()
        if request is not None:
            self._note(request, tensor)
        elif given is tensor and of == "send" and dst != self._rank:
            self._keep_request(requests, of, tensor, array, dst, tag, backend.fast_send, sends=True)
        elif type(tensor) is ObjectMessage:
            self.known.sent_objects(record.facts, backend.fast_send, tensor, self.send)

    def recv(self, tensor: Any, src: int | None, tag: int, of: str = "recv", *, is_size_exchange: bool = False) -> int:
        """Receive a message from rank `src`, or from any rank if it is None; return the sender. See `send`."""
        if self.deferred:
            self.deferral.post_all()
        requests = self._receives
        request = known_receive(requests, tensor, src, tag) if of == "recv" else None
        if request is not None and request.fast_path is not None and self._try_fast_path(request, tensor):
            assert src is not None
            return src
        kind = self.known.objects_like(of, tensor, src, tag)
        if kind is not None and self._try_fast_path(kind, room := kind.room()):
            tensor.take(room)
            assert src is not None
            return src
        group = self._group
        error_prefix = group.error_prefix(of)
        backend = self._backend_for(error_prefix, tensor)
        if backend.device_calls is not None:
            return backend.device_calls.recv(self._parcel(backend.device_calls, error_prefix, of, tensor, src, tag))
        array, packed = self._room(error_prefix, tensor, tag, request)
        src = self._only_source(src)
        if src == self._rank and not self._own(backend).probe(tag).ready():
            isend, irecv = async_calls(tensor)
            raise ValueError(
                f"{error_prefix}: src is this rank, {src}, which has sent itself no message with tag {tag}, so the rank"
                f" would wait for itself; call {isend} before it, or {irecv}"
            )
        record = self.begin_record(of, packed, src, tag, sends=False)
        try:
            incoming = self._post_recv(backend, packed, src, tag)
            backend.wait(incoming, error_prefix)
        except BaseException as error:
            raise group.fail(error, error_prefix, record) from None
        record.completed = clock()
        if type(tensor) is ObjectMessage:
            self._take_objects(tensor, incoming, record, backend)
            if tensor.given is not None or tensor.is_single:  # the core can fill the user's list, or return the object
                self.known.note_receive(record.facts, tensor.given)
        elif packed is not array:
            array[...] = packed
        elif src is None and packed is tensor and of == "recv":
            self.known.received(record.facts, backend, tensor, incoming.source)
            self.known.note_receive(record.facts, tensor)
        if request is None and array is tensor and src is not None and src != self._rank and of == "recv":
            self._keep_request(requests, of, tensor, packed, src, tag, backend.fast_recv, sends=False)
        return incoming.source

    def isend(self, tensor: Any, dst: int, tag: int, of: str = "isend", label: str = "") -> Work:
        """Begin to send a message, an array or an ObjectMessage, for the user's function `of`.

        With a label, it does not fit receives with another one.
        """
        group, requests = self._group, self._isends[of]
        request = known_send(requests, tensor, dst, tag, label)
        if request is not None and request.fast_path is not None and self._try_fast_path(request, tensor):
            return done_work(group.error_prefix(of), None)
        error_prefix = group.error_prefix(of)
        kind = self.known.objects_like(of, tensor, dst, tag)
        if kind is not None and self._try_fast_path(kind, tensor.array):
            return done_work(error_prefix, None)
        backend = self._backend_for(error_prefix, tensor)
        calls = backend.device_calls
        if calls is not None:
            return self._in_batch(calls).isend(self._parcel(calls, error_prefix, of, tensor, dst, tag))
        array = tensor if request is not None else self._given(error_prefix, tensor, tag)
        packed = pack(array)
        work = Work(error_prefix, None)
        record = self.begin_record(of, array, dst, tag, sends=True)
        post = partial(self._post_send, backend, packed, dst, tag, label)
        self._begin(work, error_prefix, ("to", dst), post, None, record)
        if packed is tensor and not work._is_done:  # else the array is free
            work._expect_wait(record, group.calls.forgotten)
        if request is not None:
            self._note(request, tensor)
        elif array is tensor and dst != self._rank:
            self._keep_request(requests, of, tensor, packed, dst, tag, backend.fast_isend, sends=True, label=label)
        elif type(tensor) is ObjectMessage:
            self.known.sent_objects(record.facts, backend.fast_isend, tensor, self.isend)
        return work

    def irecv(self, tensor: Any, src: int | None, tag: int, of: str = "irecv", label: str = "") -> Work:
        """Begin to receive a message, for the user's function `of`; see `isend`."""
        group, requests = self._group, self._ireceives[of]
        request = known_receive(requests, tensor, src, tag, label)
        if request is not None and request.fast_path is not None and self.deferral.takes(request, tensor):
            return self._defer(request, tensor)
        error_prefix = group.error_prefix(of)
        kind = self.known.objects_like(of, tensor, src, tag)
        if kind is not None and self.deferral.takes(kind, room := kind.room()):
            record = self.begin_record(of, tensor.array, src, tag, sends=False)
            deferred = DeferredObjects(error_prefix, tensor, room, kind, record)
            return self.deferral.add(deferred, group.calls.forgotten)
        self.deferral.post_all()
        backend = self._backend_for(error_prefix, tensor)
        calls = backend.device_calls
        if calls is not None:
            return self._in_batch(calls).irecv(self._parcel(calls, error_prefix, of, tensor, src, tag))
        array, packed = self._room(error_prefix, tensor, tag, request)
        src = self._only_source(src)
        work = (ObjectsWork if type(tensor) is ObjectMessage else ReceiptWork)(error_prefix, tensor)
        record = self.begin_record(of, packed, src, tag, sends=False)
        facts: Facts = record.facts

        def arrive(incoming: Incoming) -> None:
            work.source = group.ranks[incoming.source]
            if type(tensor) is ObjectMessage:
                self._take_objects(tensor, incoming, record, backend)
            elif packed is not array:
                array[...] = packed
            elif src is None and not label:
                self.known.received(record.facts, backend, tensor, incoming.source)

        post = partial(self._post_recv, backend, packed, src, tag, label)
        is_long = packed.nbytes > _LONG_BYTES
        self._begin(work, error_prefix, ("from", src, tag), post, arrive, record, is_long=is_long)
        work._expect_wait(record, group.calls.forgotten)
        # There is no fast path until the first message has come.
        is_new = request is None or request.fast_path is None
        if is_new and array is tensor and src is not None and src != self._rank:
            self._keep_request(requests, of, tensor, packed, src, tag, backend.fast_recv, sends=False, label=label)
        elif type(tensor) is ObjectMessage:
            self.known.note_receive(facts, None, PersistentRequest(facts, None, -1))
        elif packed is tensor and src is None and not label:
            self.known.note_receive(facts, tensor, PersistentRequest(facts, None, -1))
        return work

    def forget_requests(self) -> None:
        """Make the next message of each kind check the group and choose its backend again."""
        self._sends, self._receives = {}, {}
        self._isends, self._ireceives, self._exchanges = defaultdict(dict), defaultdict(dict), {}
        self.known.forget()
        self.post_deferred()

    def disown(self, error: DistError) -> None:
        """In a forked child: fail the messages that are not posted yet."""
        self.deferral.disown(error)
        self.announcing.disown(error)

    def post_deferred(self) -> None:
        self.deferral.post_all()
        self.announcing.post_all()

    def drain(self) -> None:
        """Wait for the messages in progress; receives that get no message in time fail."""
        self.deferral.is_closed = True
        self.post_deferred()
        works = self._progress.take_up(list(self._queues.values()))
        try:
            for work in works:
                # A receive may have no matching send. Sends have the group's timeout; ranks that wait for each other to
                # receive find that out, as in any wait.
                if isinstance(work, ReceiptWork):
                    work.await_done(_LAST_MESSAGES_S, "draining a group")
                elif (queue := work.queue) is None:
                    work.await_done(None, "draining a group")
                else:
                    queue.await_done(work, "draining a group")
        except DistTimeoutError:
            self._closing = True
            for work in works:
                work.await_done(None, "draining a group")

    def check(self, error_prefix: str) -> None:
        """Raise if the messages in progress must fail: the group is broken, or closed."""
        self._group.check_usable(error_prefix)
        if self._closing:
            raise DistError("the group was destroyed before the message arrived", error_prefix=error_prefix)

    def _defer(self, request: PersistentRequest, tensor: Array) -> Work:
        calls, facts = self._group.calls, request.facts
        calls.num_messages += 1
        record = self._recorder.begin(facts, calls.num_messages)
        self._note(request, tensor)
        work = DeferredWork(self._group.error_prefix(facts[0]), tensor, request, record)
        return self.deferral.add(work, calls.forgotten)

    def _take_deferred(self, work: Deferred) -> bool:
        try:
            if not work.take():
                return False
            work.source = work.request.source
            work.record.facts = work.request.facts  # with the number of objects that have come
            work.record.completed = clock()
            work.complete(None)
        except BaseException as error:
            work.complete(self._group.fail(error, self._group.error_prefix(work.request.facts[0]), work.record))
            raise
        return True

    def _post_deferred(self, work: Deferred) -> None:
        of, _, _, _, _, src, tag, _, _ = work.request.facts
        group, error_prefix = self._group, self._group.error_prefix(of)
        try:
            backend = group.usable_backend(error_prefix, work.awaited)
        except (DistError, ValueError) as error:
            self._recorder.end(work.record, error)
            work.complete(error)
            return

        array, room = work.awaited, pack(work.awaited, keep=False)

        def arrive(incoming: Incoming) -> None:
            work.source = group.ranks[incoming.source]
            if isinstance(work, DeferredObjects):
                self._take_objects(work.message, incoming, work.record, backend)
            elif room is not array:
                array[...] = room
            elif src is None:
                self.known.received(work.record.facts, backend, array, incoming.source)

        post = partial(self._post_recv, backend, room, src, tag, work.request.label)
        self._begin(work, error_prefix, ("from", src, tag), post, arrive, work.record)

    def _post_announced(self, work: AnnouncedWork) -> None:
        of, _, _, _, _, dst, _, _, _ = work.request.facts
        ring: core.Ring = work.request.fast_path  # type: ignore[assignment]

        def post() -> Waitable:
            request: Waitable = ring.follow(work.sent, work.word)
            work._release()
            return request

        self._begin(work, self._group.error_prefix(of), ("to", dst), post, None, work.record)

    def _try_fast_path(self, request: PersistentRequest, tensor: Array) -> bool:
        # Send or receive by the fast path if possible, with the same record as `begin_record` makes.
        try:
            if not request.move(tensor):
                return False
        except BaseException as error:
            raise self._group.fail(error, self._group.error_prefix(request.facts[0])) from None
        # The callers are the method, the flat function and usually the user's code: if it is the code of last time, the
        # search by `users` is not needed.
        try:
            frame = _getframe(3)
        except ValueError:  # the flat function is the thread's target
            frame = _getframe(2)
        code = frame.f_code
        if code is not request.caller:
            frame = users(frame)
            request.caller = code = frame.f_code
        calls = self._group.calls
        calls.num_messages = sequence = calls.num_messages + 1
        now = clock()
        record = Record(request.facts, sequence, now, now, code, frame.f_lasti)
        record.completed = now
        self._recorder.keep(record)
        self._note(request, tensor)
        return True

    def _note(self, request: PersistentRequest, tensor: Array) -> None:
        note, is_swapped = self._group.calls.note, tensor.dtype != request.facts[3]
        if note is not None and isinstance(request.fast_path, core.Ring) and not is_swapped:
            name, sends = request.facts[0], request.facts[-1]
            sent, received = (tensor, None) if sends else (None, tensor)
            kind = () if name in ("send", "recv") else (request,)
            note(request.fast_path, request.facts, self._group.error_prefix(name), sent, received, False, *kind)

    def _keep_request(
        self,
        requests: dict[Any, PersistentRequest],
        of: str,
        tensor: Array,
        array: Array,
        peer: int,
        tag: int,
        fast: Any,
        *,
        sends: bool,
        label: str = "",
    ) -> None:
        # The caller passes the dict that it used: if the group was closed meanwhile, the group has another one.
        if array.dtype.isnative:  # other byte orders are swapped at each call
            request = self._request(of, array, peer, tag, fast, sends=sends, label=label)
            remember(requests, (peer, tag, array.dtype, array.shape, label), request)
            self._note(request, tensor)

    def _request(
        self, of: str, array: Array, peer: int, tag: int, fast: Any, *, sends: bool, label: str = ""
    ) -> PersistentRequest:
        fast_path = fast(peer, tag, labelled_dtype(array.dtype, label) if label else array.dtype, array.shape)
        facts = self._facts(of, array, peer, tag, sends=sends)
        return PersistentRequest(facts, fast_path, self._group.ranks[peer], label)

    def _begin(
        self, work: Work, error_prefix: str, key: Any, post: Any, arrive: Any, record: Record, *, is_long: bool = False
    ) -> None:
        # A long message is copied in `wait`: the program may have to send one first, which the peer waits for.
        group = self._group
        try:
            waitable: Waitable = post()
            queue = self._queues.get(key)
            is_done = (queue is None or not queue.jobs) and not is_long and waitable.ready()
        except DistError as error:
            work.complete(group.fail(error, error_prefix, record))
            return
        except BaseException as error:
            raise group.fail(error, error_prefix, record) from None
        if is_done:
            if arrive is not None:
                arrive(waitable)
            record.completed = clock()
            work.complete(None)
            return
        if queue is None:
            queue = self._queues[key] = MessageQueue(self._progress, self.deferral)
        steps = partial(message_steps, Guarded(waitable, partial(self.check, error_prefix)), waitable, arrive)
        try:
            self._progress.submit(queue, Job(steps, work, group.timeout_s, error_prefix, group.fail, record))
        except DistError as error:
            raise group.fail(error, error_prefix, record) from None

    def _backend_for(self, error_prefix: str, tensor: Any) -> Backend:
        array = tensor.array if type(tensor) is ObjectMessage else tensor
        return self._group.usable_backend(error_prefix, array)

    def _given(self, error_prefix: str, tensor: Any, tag: int) -> Array:
        if type(tensor) is not ObjectMessage:
            return self._array(error_prefix, tensor, tag)
        is_single = tensor.is_single or (tensor.given is None and tensor.array.dtype == dtype_of_objects(1))
        self._check_tag(error_prefix, tag, _RECEIVE_OBJECT if is_single else _RECEIVE_OBJECTS)
        return tensor.array

    def _room(self, error_prefix: str, tensor: Any, tag: int, request: PersistentRequest | None) -> tuple[Array, Array]:
        """Return the array to receive, and what it is received into: itself, if it is plain."""
        if request is not None:
            return tensor, pack(tensor, keep=False)
        if type(tensor) is not ObjectMessage:
            return self._output(error_prefix, tensor, tag)
        array = self._given(error_prefix, tensor, tag)
        return array, array

    def _take_objects(self, message: ObjectMessage, incoming: Incoming, record: Record, backend: Backend) -> None:
        facts = of, group, label, _, _, *rest = record.facts
        came = incoming.pickle
        if came is None:
            error_prefix = self._group.error_prefix(of)
            raise DistBackendError("the backend does not receive lists of objects", error_prefix=error_prefix)
        message.take(came)
        record.facts = of, group, label, came.dtype, came.shape, *rest
        self.known.received_objects(facts, backend, incoming.source, came)

    def _parcel(
        self, calls: DeviceCalls, error_prefix: str, of: str, tensor: Any, peer: int | None, tag: int
    ) -> Parcel:
        self._check_tag(error_prefix, tag)
        group, peer = self._group, self._only_source(peer)
        if peer == self._rank and not calls.sends_to_itself:
            raise ValueError(
                f"{error_prefix}: the other side must be another rank, not this one, global rank {group.ranks[peer]};"
                " on this backend, arrays on a GPU are not sent to oneself"
            )
        return Parcel(self._group, error_prefix, of, tensor, peer, tag)
