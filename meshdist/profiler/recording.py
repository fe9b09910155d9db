"""Recording: the begin and end of the calls of one rank, at minimal cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from sys import _getframe
from threading import get_ident
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import ref

import numpy as np

from meshdist.arrays.host import as_array
from meshdist.errors import DistError
from meshdist.groups.unposted_messages import DeferredWork
from meshdist.runtime.flight_recorder import place_of, users
from meshdist.runtime.hooks import parts_of
from meshdist.runtime.object_messages import ObjectsWork
from meshdist.runtime.work import ReceiptWork, Work

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective
    from meshdist.runtime.interfaces import Group


class Ranges(NamedTuple):
    """Functions that open a nested range of the calling thread by name, and close the last one."""

    open: Callable[[str], object]
    close: Callable[[], object]


def nvtx_ranges() -> Ranges | None:
    cupy: Any = sys.modules.get("cupy")
    if cupy is None:
        return None
    nvtx = cupy.cuda.nvtx
    return Ranges(nvtx.RangePush, nvtx.RangePop)


# The peer of an unmatched receive from any rank.
_ANY = -1
# The kinds of Work that report completion.
_SETTLED = (Work, ReceiptWork, ObjectsWork, DeferredWork)
_NBYTES = attrgetter("nbytes")


class PartSeen(NamedTuple):
    """A message of a call that consists of several."""

    is_send: bool
    peer: int  # as a rank of the group, -1 for any
    tag: int
    nbytes: int


class SyncCall(NamedTuple):
    """A call that returned when complete. Recordings hold plain tuples of these fields, which cost less."""

    name: str  # the function; with " (sizes)" for the size exchange of a call of objects
    begin_ns: int  # by `perf_counter_ns`
    end_ns: int  # likewise
    nbytes: int  # the larger of input and output
    code: CodeType  # of the user's code, as the instruction: the place of the call
    instruction: int
    peer: int | None = None  # for a message, the other side as a rank of the group, -1 for any; None for a collective
    tag: int = 0
    failed: bool = False  # the call raised a DistError
    was_async: bool = False  # the call was async, and complete on return
    parts: tuple[PartSeen, ...] = ()  # the messages of an exchange


class AsyncCall:
    """A pending call; the observer of its Work."""

    # Class attributes: most instances keep these defaults.
    end_ns: int | None = None  # the completion; None while pending
    blocked_ns = 0  # the time for which the caller waited
    source: int | None = None  # the global rank that an irecv received from; None before
    failed = False

    def __init__(self, call: tuple[Any, ...], work: Work) -> None:
        self.call = call  # the fields of SyncCall; its end is the return to the caller
        self._work: Work | None = work

    def blocked(self, nanoseconds: int) -> None:
        self.blocked_ns += nanoseconds

    def done(self) -> None:
        self.end_ns = perf_counter_ns()
        work, self._work = self._work, None  # releases the arrays
        if work is not None and work.exception() is not None:
            self.failed = True
        elif isinstance(work, ReceiptWork):
            self.source = work.source
            if isinstance(work, ObjectsWork):  # its size was not known before
                self.call = (*self.call[:3], work.message.nbytes, *self.call[4:])


class GroupRecording:
    """The calls of one group."""

    def __init__(self, group: Group) -> None:
        self._group = ref(group)
        self._label = group.label
        self.name = group.name  # the unique name of the group, equal on all its ranks
        self.ranks = group.ranks  # global ranks
        self.begins_with_set_up = not group.has_backend  # in the first call
        self.calls: list[Any] = []  # the calls in order of their start; sync calls in order of their end
        self.num_dropped = 0  # the number of calls beyond the limit
        self.exchanging: set[int] = set()  # the threads in an exchange, whose messages are parts of it

    @property
    def label(self) -> str:
        """The label of the group in messages; a mesh may change it later."""
        group = self._group()
        if group is not None:
            self._label = group.label
        return self._label


class Recording:
    """The calls of one rank by group, at most `limit` each; wraps the calls of every group of its world."""

    def __init__(self, limit: int) -> None:
        self.groups: dict[str, GroupRecording] = {}
        self._limit = limit
        self._ranges = nvtx_ranges()

    def around_submit(self, group: Group, submit: Callable[..., Any]) -> Callable[..., Any]:
        recorded = _recorded_submit(self._of(group), submit, self._limit)
        return recorded if self._ranges is None else _ranged(self._ranges, group, recorded)

    def around_message(self, group: Group, name: str, begin: Callable[..., Any]) -> Callable[..., Any]:
        return _recorded_message(self._of(group), name, begin, self._limit)

    def around_exchange(self, group: Group, name: str, exchange: Callable[..., Any]) -> Callable[..., Any]:
        return _recorded_exchange(self._of(group), name, exchange, self._limit)

    def _of(self, group: Group) -> GroupRecording:
        found = self.groups.get(group.name)
        if found is None:
            found = self.groups[group.name] = GroupRecording(group)
        return found


def _recorded_submit(recording: GroupRecording, submit: Callable[..., Any], limit: int) -> Callable[..., Any]:
    calls, keep, now, array = recording.calls, recording.calls.append, perf_counter_ns, np.ndarray
    caller: CodeType | None = None

    def recorded(
        collective: Collective[..., Any],
        send: Any,
        recv: Any,
        op: Any = None,
        root: int | None = None,
        async_op: bool = False,
        splits: Any = None,
        timeout_s: float | None = None,
    ) -> Any:
        nonlocal caller
        begin_ns = now()
        try:
            result = submit(collective, send, recv, op, root, async_op, splits, timeout_s)
        except DistError:
            keep(_failed_call(_name(collective), begin_ns, max(_size(send), _size(recv))))
            raise
        end_ns = now()
        if len(calls) >= limit:
            recording.num_dropped += 1
            return result
        nbytes = send.nbytes if type(send) is array else _size(send)
        if recv is not send:
            taken = recv.nbytes if type(recv) is array else _size(recv)
            nbytes = taken if taken > nbytes else nbytes
        # Inlined `_users_frame`, to save a call.
        try:
            frame = _getframe(2)
        except ValueError:
            frame = _getframe(1)
        code = frame.f_code
        if code is not caller:
            frame = users(frame)
            caller = code = frame.f_code
        name = _name(collective) if collective.is_size_exchange else collective.name
        call = name, begin_ns, end_ns, nbytes, code, frame.f_lasti
        if not async_op or type(result) not in _SETTLED:
            keep(call)
        elif result.is_success():
            keep((*call, None, 0, False, True))
        else:
            keep(_followed(call, result))
        return result

    return recorded


def _recorded_message(
    recording: GroupRecording, name: str, begin: Callable[..., Any], limit: int
) -> Callable[..., Any]:
    calls, keep, now, array = recording.calls, recording.calls.append, perf_counter_ns, np.ndarray
    exchanging, caller = recording.exchanging, cast("CodeType | None", None)

    def recorded(
        tensor: Any, peer: int | None, tag: int, of: str = name, label: str = "", *, is_size_exchange: bool = False
    ) -> Any:
        nonlocal caller
        if exchanging and get_ident() in exchanging:
            return begin(tensor, peer, tag, of, label)
        shown = f"{of} (sizes)" if is_size_exchange else of
        other = _ANY if peer is None else peer
        begin_ns = now()
        try:
            if of == name:
                result = begin(tensor, peer, tag)
            elif is_size_exchange:
                result = begin(tensor, peer, tag, of, is_size_exchange=True)
            else:
                result = begin(tensor, peer, tag, of)
        except DistError:
            keep(_failed_call(shown, begin_ns, _size(tensor), other, tag))
            raise
        end_ns = now()
        if len(calls) >= limit:
            recording.num_dropped += 1
            return result
        nbytes = tensor.nbytes if type(tensor) is array else _size(tensor)
        frame = _users_frame(caller)
        caller = frame.f_code
        call = shown, begin_ns, end_ns, nbytes, caller, frame.f_lasti
        if type(result) not in _SETTLED:
            # A receive from any rank returns its source. A Work of a device may complete later, without notice.
            keep((*call, result if name == "recv" else other, tag))
        elif other >= 0 and result.is_success():
            keep((*call, other, tag, False, True))
        else:
            keep(_followed((*call, other, tag), result))
        return result

    return recorded


def _recorded_exchange(
    recording: GroupRecording, name: str, exchange: Callable[..., Any], limit: int
) -> Callable[..., Any]:
    """Record a call that consists of messages as one call, under the name of the function that the user called."""
    calls, keep, now, exchanging = recording.calls, recording.calls.append, perf_counter_ns, recording.exchanging

    def recorded(*args: Any) -> Any:
        thread, begin_ns = get_ident(), now()
        exchanging.add(thread)
        try:
            result = exchange(*args)
        except DistError:
            of, parts = _parts_seen(name, args)
            keep(_failed_call(of, begin_ns, _larger_side(parts))._replace(parts=tuple(parts)))
            raise
        finally:
            exchanging.discard(thread)
        end_ns = now()
        if len(calls) >= limit:
            recording.num_dropped += 1
            return result
        of, parts = _parts_seen(name, args)
        found = tuple(part if part.peer != _ANY else part._replace(peer=result) for part in parts)
        place = place_of(users(_getframe(1)))
        keep(SyncCall(of, begin_ns, end_ns, _larger_side(parts), *place, parts=found))
        return result

    return recorded


def _larger_side(parts: Sequence[PartSeen]) -> int:
    return max(sum(part.nbytes for part in parts if part.is_send == is_send) for is_send in (True, False))


def _parts_seen(exchange: str, args: Sequence[Any]) -> tuple[str, list[PartSeen]]:
    of, parts = parts_of(exchange, args)
    return of, [
        PartSeen(part.is_send, _ANY if part.peer is None else part.peer, part.tag, _size(part.array)) for part in parts
    ]


def _users_frame(last: CodeType | None) -> FrameType:
    """Return the frame of the user's code; the third frame above is tried first, if its code is `last`."""
    try:
        frame = _getframe(3)
    except ValueError:  # the call is the outermost frame of a thread
        frame = _getframe(2)
    return frame if frame.f_code is last else users(frame)


def _failed_call(name: str, begin_ns: int, nbytes: int, peer: int | None = None, tag: int = 0) -> SyncCall:
    return SyncCall(name, begin_ns, perf_counter_ns(), nbytes, *place_of(users(_getframe(2))), peer, tag, failed=True)


def _followed(call: tuple[Any, ...], work: Work) -> AsyncCall:
    followed = AsyncCall(call, work)
    work.observe(followed)
    return followed


def _ranged(ranges: Ranges, group: Group, recorded: Callable[..., Any]) -> Callable[..., Any]:
    def ranged(collective: Collective[..., Any], *args: Any, **kwargs: Any) -> Any:
        ranges.open(f"{_name(collective)} {group.label}")
        try:
            return recorded(collective, *args, **kwargs)
        finally:
            ranges.close()

    return ranged


def _name(collective: Collective[..., Any]) -> str:
    return f"{collective.name} (sizes)" if collective.is_size_exchange else collective.name


def _size(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        try:
            return sum(map(_NBYTES, value))
        except AttributeError:
            return sum(map(_size, value))
    if value is None:
        return 0
    return int(value.nbytes if hasattr(value, "nbytes") else as_array(value, "tensor").nbytes)
