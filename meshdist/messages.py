"""Messages: point to point calls of one group, sync and async."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from sys import _getframe
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from meshdist.arrays import Array, as_array, check_dtype, check_writable, pack
from meshdist.backends.base import Express, Incoming
from meshdist.debug.flight_recorder import COMPLETED, Record, clock, users
from meshdist.detour import Announcement, Watcher, told
from meshdist.device_calls import DeviceCalls, Parcel
from meshdist.errors import DistError, DistTimeoutError
from meshdist.plan_key import remember
from meshdist.progress import Job, JobQueue, Progress
from meshdist.waiting import Waitable, Wrapped
from meshdist.work import ReceiptWork, Work

if TYPE_CHECKING:
    from meshdist.process_group import ProcessGroup

# How long a group that is closed waits for messages that were asked for.
_LAST_MESSAGES_S = 5.0
# Backends may send a tag as an integer of 64 bits.
_TAGS = 1 << 63


# What the flight recorder keeps of a message: the function, the group's name and label, dtype, shape, the other side,
# tag and timeout.
Facts: TypeAlias = "tuple[str, str, str, np.dtype[Any], tuple[int, ...], int | None, int, float]"


class Kind:
    """The messages of one tag, dtype and shape to, or from, one rank: nothing is to be said against them.

    Attributes:
        facts: What the flight recorder tells of them.
        express: A short way for them, where there is one.
        caller: The code that sent or received the last one.
    """

    __slots__ = ("caller", "express", "facts")

    def __init__(self, facts: Facts, express: Express | None) -> None:
        self.facts = facts
        self.express = express
        self.caller: CodeType | None = None


class Messages:
    """Sends and receives for one group. Ranks are those in the group.

    Messages keep no order with collectives, and those of other ranks or tags not with each other. So each peer that is
    sent to, and each source and tag that is received, has a queue of its own for what is on its way.

    Attributes:
        num_messages: How many this rank has sent or asked for.
    """

    def __init__(self, group: ProcessGroup, progress: Progress) -> None:
        self._group = group
        self._progress = progress
        self._queues: WeakValueDictionary[Any, JobQueue] = WeakValueDictionary()
        self._closing = False
        self._recorder = group.recorder
        self.num_messages = 0
        # The kinds of messages that have been found right before, while the group can be used: by peer, tag, dtype and
        # shape.
        self._sends: dict[Any, Kind] = {}
        self._receives: dict[Any, Kind] = {}
        # Those whose messages wait for the end of a block; None outside of one.
        self._batches: list[DeviceCalls] | None = None
        # Peers that have been found right before, by their global rank.
        self._peers: dict[int, int] = {}

    @property
    def outstanding(self) -> int:
        """The number of messages on their way, in and out."""
        return sum(len(queue.jobs) for queue in list(self._queues.values()))

    def watch(self, *watchers: Watcher) -> None:
        """Have these, and nobody else, be told of every message."""
        for name in ("send", "recv", "isend", "irecv"):
            # Found in the instance before the method of the class: calls that nobody watches have nothing to look at.
            self.__dict__.pop(name, None)
            if watchers:
                setattr(self, name, _watched(watchers, self._group, name, getattr(self, name)))

    def peer(self, of: str, name: str, rank: int | None, group_rank: int | None) -> int:
        """Return the other side of a message, which is not this rank; see `ProcessGroup.root`."""
        if group_rank is None and type(rank) is int and rank in self._peers:
            return self._peers[rank]
        group = self._group
        peer = group.root(of, name, rank, group_rank)
        if peer == group.rank():
            raise ValueError(
                f"{group.where(of)}: {name} must be another rank, not this one, global rank {group.ranks[peer]}"
            )
        self._peers[group.ranks[peer]] = peer
        return peer

    def send(self, tensor: Any, dst: int, tag: int, of: str = "send", *, is_prelude: bool = False) -> None:
        """Send a message to rank `dst` and wait until `tensor` may be changed.

        Args:
            tensor: What is sent.
            dst: The receiver, as a rank of the group.
            tag: The receiver asks for the same.
            of: The function that the user called.
            is_prelude: Another message of the same call follows; this one is announced as the prelude that it is.
        """
        kind, kinds = None, self._sends
        if type(tensor) is np.ndarray and type(tag) is int and of == "send" and tensor.flags.carray:
            kind = kinds.get((dst, tag, tensor.dtype, tensor.shape))
            if kind is not None and kind.express is not None and self._goes(kind, tensor):
                return
        group = self._group
        where = group.where(of)
        backend = group.usable_backend(where, tensor)
        if backend.device_calls is not None:
            backend.device_calls.send(self._parcel(where, of, tensor, dst, tag))
            return
        array = tensor if kind is not None else pack(self._array(where, tensor, tag))
        record = self.begin_record(of, array, dst, tag)
        try:
            backend.wait(backend.send(array, dst, tag), where)
        except BaseException as error:
            raise group.fail(error, where, record) from None
        record[COMPLETED] = clock()
        if kind is None and array is tensor and of == "send":
            self._learn(kinds, of, tensor, dst, tag, backend.express_to)

    def recv(self, tensor: Any, src: int | None, tag: int, of: str = "recv", *, is_prelude: bool = False) -> int:
        """Receive a message from rank `src`, or from any where it is None; return the sender. See `send`."""
        kind, kinds = None, self._receives
        if type(tensor) is np.ndarray and type(tag) is int and of == "recv" and tensor.flags.carray:
            kind = kinds.get((src, tag, tensor.dtype, tensor.shape))
            if kind is not None and kind.express is not None and src is not None and self._goes(kind, tensor):
                return src
        group = self._group
        where = group.where(of)
        backend = group.usable_backend(where, tensor)
        if backend.device_calls is not None:
            return backend.device_calls.recv(self._parcel(where, of, tensor, src, tag))
        array = packed = tensor
        if kind is None:
            array, packed = self._output(where, tensor, tag)
        if src is None:
            self._check_not_alone(where)
        record = self.begin_record(of, packed, src, tag)
        try:
            receipt = backend.recv(packed, src, tag)
            backend.wait(receipt, where)
        except BaseException as error:
            raise group.fail(error, where, record) from None
        record[COMPLETED] = clock()
        if packed is not array:
            array[...] = packed
        elif kind is None and packed is tensor and src is not None and of == "recv":
            self._learn(kinds, of, tensor, src, tag, backend.express_from)
        return receipt.source

    def isend(self, tensor: Any, dst: int, tag: int) -> Work:
        """Begin to send a message to rank `dst`."""
        group = self._group
        where = group.where("isend")
        backend = group.usable_backend(where, tensor)
        if backend.device_calls is not None:
            return self._in_batch(backend.device_calls).isend(self._parcel(where, "isend", tensor, dst, tag))
        array = self._array(where, tensor, tag)
        work = Work(where, None)
        record = self.begin_record("isend", array, dst, tag)
        self._begin(work, where, ("to", dst), lambda: backend.send(pack(array), dst, tag), None, record)
        return work

    def irecv(self, tensor: Any, src: int | None, tag: int) -> Work:
        """Begin to receive a message from rank `src`, or from any where it is None."""
        group = self._group
        where = group.where("irecv")
        backend = group.usable_backend(where, tensor)
        if backend.device_calls is not None:
            return self._in_batch(backend.device_calls).irecv(self._parcel(where, "irecv", tensor, src, tag))
        array, packed = self._output(where, tensor, tag)
        if src is None:
            self._check_not_alone(where)
        work = ReceiptWork(where, tensor)

        def arrive(receipt: Incoming) -> None:
            work.source = group.ranks[receipt.source]
            if packed is not array:
                array[...] = packed

        record = self.begin_record("irecv", packed, src, tag)
        self._begin(work, where, ("from", src, tag), lambda: backend.recv(packed, src, tag), arrive, record)
        return work

    def forget_kinds(self) -> None:
        """Have the next message ask the group whether it can be used, and by what."""
        self._sends, self._receives = {}, {}

    @contextmanager
    def batched(self, of: str) -> Iterator[None]:
        """Have the messages on arrays in the memory of a GPU that are begun in the block posted together at its end.

        Args:
            of: The function that the user called.
        """
        batches: list[DeviceCalls] = []
        self._batches = batches
        try:
            yield
        except BaseException:
            for calls in batches:
                calls.end_batch(self._group, None)
            raise
        finally:
            self._batches = None
        for calls in batches:
            calls.end_batch(self._group, self._group.where(of))

    def drain(self) -> None:
        """Let the messages that are on their way arrive; those that do not come in time fail."""
        works = self._progress.works(list(self._queues.values()))
        try:
            for work in works:
                # What is sent has the group's timeout; whether somebody is going to send is not known.
                work.await_done(_LAST_MESSAGES_S if isinstance(work, ReceiptWork) else None, "draining a group")
        except DistTimeoutError:
            self._closing = True
            for work in works:
                work.await_done(None, "draining a group")

    def check(self, where: str) -> None:
        """Raise if what is on its way has to be given up: the group is broken, or closed."""
        self._group.check_usable(where)
        if self._closing:
            raise DistError(f"{where}: the group is destroyed, and the message has not come")

    def _goes(self, kind: Kind, tensor: Array) -> bool:
        # Send or receive the short way, if it goes, and keep a record of it, as `begin_record` would make it.
        try:
            if not kind.express(tensor):  # type: ignore[misc]
                return False
        except BaseException as error:
            raise self._group.fail(error, self._group.where(kind.facts[0])) from None
        # Above this function are the method, the flat function and, in most cases, the user's code; which is known to
        # be that if it was last time.
        try:
            frame = _getframe(3)
        except ValueError:  # a thread began with the function itself
            frame = _getframe(2)
        code = frame.f_code
        if code is not kind.caller:
            frame = users(frame)
            kind.caller = code = frame.f_code
        self.num_messages = sequence = self.num_messages + 1
        now = clock()  # it has taken no time
        self._recorder.keep([kind.facts, sequence, now, now, now, code, frame.f_lasti])
        return True

    def _learn(self, kinds: dict[Any, Kind], of: str, array: Array, peer: int, tag: int, express: Any) -> None:
        # Of a plain array that has been sent or received. If the group was closed meanwhile, its kinds are others now.
        if array.dtype.isnative:  # of others the bytes have to be swapped
            kind = Kind(self._facts(of, array, peer, tag), express(peer, tag, array.dtype, array.shape))
            remember(kinds, (peer, tag, array.dtype, array.shape), kind)

    def _facts(self, of: str, array: Array, peer: int | None, tag: int) -> Facts:
        # What is at hand; `facts_in` makes words of it.
        group = self._group
        return of, group.name, group.label, array.dtype, array.shape, peer, tag, group.timeout_s

    def begin_record(self, of: str, array: Array, peer: int | None, tag: int) -> Record:
        """Return the flight recorder's record of a message that is about to be sent or asked for."""
        self.num_messages += 1
        return self._recorder.begin(self._facts(of, array, peer, tag), self.num_messages)

    def _begin(self, work: Work, where: str, key: Any, post: Any, arrive: Any, record: Record) -> None:
        group = self._group
        try:
            waitable: Waitable = post()
            there = key not in self._queues and waitable.ready()
        except DistError as error:
            work.settle(group.fail(error, where, record))
            return
        except BaseException as error:
            raise group.fail(error, where, record) from None
        if there:
            if arrive is not None:
                arrive(waitable)
            record[COMPLETED] = clock()
            work.settle(None)
            return
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = JobQueue(self._progress)
        steps = partial(_steps, _Guarded(waitable, partial(self.check, where)), waitable, arrive)
        try:
            self._progress.submit(queue, Job(steps, work, group.timeout_s, where, group.fail, record))
        except DistError as error:
            raise group.fail(error, where, record) from None

    def _output(self, where: str, tensor: Any, tag: int) -> tuple[Array, Array]:
        array = self._array(where, tensor, tag)
        self._group.named(where, check_writable, array, "tensor")
        return array, pack(array, keep=False)

    def _in_batch(self, calls: DeviceCalls) -> DeviceCalls:
        if self._batches is not None and calls not in self._batches:
            calls.begin_batch()
            self._batches.append(calls)
        return calls

    def _parcel(self, where: str, of: str, tensor: Any, peer: int | None, tag: int) -> Parcel:
        self._check_tag(where, tag)
        if peer is None:
            self._check_not_alone(where)
        return Parcel(self._group, where, of, tensor, peer, tag)

    def _array(self, where: str, tensor: Any, tag: int) -> Array:
        self._check_tag(where, tag)
        array: Array = self._group.named(where, as_array, tensor, "tensor")
        self._group.named(where, check_dtype, array, "tensor")
        return array

    def _check_tag(self, where: str, tag: int) -> None:
        if type(tag) is not int and not isinstance(tag, (int, np.integer)):
            raise TypeError(f"{where}: tag must be an integer, got {tag!r}")
        if tag < 0:
            raise ValueError(f"{where}: tag must not be negative, got {tag}")
        if tag >= _TAGS:
            raise ValueError(f"{where}: tag must be less than 2 ** 63, got {tag}")

    def _check_not_alone(self, where: str) -> None:
        if self._group.size() == 1:
            raise ValueError(f"{where}: there is no other rank in the group to receive from")


class _Guarded(Wrapped):
    """What is waited for, as long as its group is well: another call may break it meanwhile."""

    def __init__(self, waitable: Waitable, check: Any) -> None:
        super().__init__(waitable)
        self._check = check

    def check(self) -> None:
        self._check()
        super().check()


def _steps(guarded: Waitable, waitable: Waitable, arrive: Any) -> Iterator[Waitable]:
    yield guarded
    if arrive is not None:
        arrive(waitable)


def _watched(
    watchers: tuple[Watcher, ...], group: ProcessGroup, name: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    def begin(tensor: Any, peer: int | None, tag: int, of: str = name, *, is_prelude: bool = False) -> Any:
        send, recv = (tensor, None) if "send" in name else (None, tensor)
        announced = Announcement(group, of, None, send, recv, peer, is_prelude=is_prelude)
        return told(watchers, announced, lambda: method(tensor, peer, tag, *named(of)))

    def named(of: str) -> tuple[str, ...]:
        return () if of == name else (of,)

    return begin
