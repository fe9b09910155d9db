"""Recording: when the calls of one rank begin and end, at the least cost that Python allows."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from sys import _getframe
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np

from meshdist.arrays import as_array
from meshdist.debug.flight_recorder import place_of, users
from meshdist.errors import DistError
from meshdist.profiler.nvtx import Ranges, nvtx_ranges
from meshdist.work import ReceiptWork, Work

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective
    from meshdist.process_group import ProcessGroup


# Of a message from any rank that has not come: no rank.
_ANY = -1
# The kinds of Work that say when they are done.
_SETTLED = (Work, ReceiptWork)
_NBYTES = attrgetter("nbytes")


class SyncCall(NamedTuple):
    """A call that came back when it was done. In the recording it is a plain tuple of these, which costs less.

    Attributes:
        name: What was called; of the first part of a call of objects, with " (sizes)".
        begin_ns, end_ns: By `perf_counter_ns`.
        nbytes: The longer of what this rank gave and what it got.
        code, instruction: Where the user made the call.
        peer: Of a message, the other side as a rank of the group, -1 for any; None for a collective.
        tag: Of a message.
        failed: It raised a DistError.
        was_async: It was async, and done before the caller could go on.
    """

    name: str
    begin_ns: int
    end_ns: int
    nbytes: int
    code: CodeType
    instruction: int
    peer: int | None = None
    tag: int = 0
    failed: bool = False
    was_async: bool = False


class AsyncCall:
    """A call that was begun, and goes on; the observer of its Work.

    Attributes:
        call: How it was begun; its end is when the caller could go on.
        end_ns: When it was done; None as long as it is not.
        blocked_ns: For how long the caller waited for it.
        source: Of an irecv, from whom it came, as a global rank; None before it has.
        failed: It ended with an error.
    """

    # Here, and not in each of them: nearly all stay as they are.
    end_ns: int | None = None
    blocked_ns = 0
    source: int | None = None
    failed = False

    def __init__(self, call: tuple[Any, ...], work: Work) -> None:
        self.call = call
        self._work: Work | None = work

    def blocked(self, nanoseconds: int) -> None:
        """Note that somebody waited."""
        self.blocked_ns += nanoseconds

    def done(self) -> None:
        """Note that it is done."""
        self.end_ns = perf_counter_ns()
        work, self._work = self._work, None  # which has the arrays
        if work is not None and work.exception() is not None:
            self.failed = True
        elif type(work) is ReceiptWork:
            self.source = work.source


class GroupRecording:
    """The calls of one group.

    Attributes:
        name: Its name, the same on all its ranks and of no other group.
        ranks: Its global ranks.
        calls: The calls in the order in which they were made, sync ones in that in which they ended.
        num_dropped: How many there was no room for.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = ref(group)
        self._label = group.label
        self.name = group.name
        self.ranks = group.ranks
        self.calls: list[Any] = []
        self.num_dropped = 0

    @property
    def label(self) -> str:
        """What messages call the group: a mesh may give it another label later."""
        group = self._group()
        if group is not None:
            self._label = group.label
        return self._label


class Recording:
    """The calls of one rank, by group; stands around the calls of every group of its world.

    Args:
        limit: How many calls of each group are kept, from the first on.
    """

    def __init__(self, limit: int) -> None:
        self.groups: dict[str, GroupRecording] = {}
        self._limit = limit
        self._ranges = nvtx_ranges()

    def around_submit(self, group: ProcessGroup, submit: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called instead of `submit`, with its arguments, for every collective of a group."""
        recorded = _recorded_submit(self._of(group), submit, self._limit)
        return recorded if self._ranges is None else _ranged(self._ranges, group, recorded)

    def around_message(self, group: ProcessGroup, name: str, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called instead of `begin`, the function `name` of a group's messages."""
        return _recorded_message(self._of(group), name, begin, self._limit)

    def _of(self, group: ProcessGroup) -> GroupRecording:
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
        # As `_users_frame`, which would be a call more.
        try:
            frame = _getframe(2)
        except ValueError:
            frame = _getframe(1)
        code = frame.f_code
        if code is not caller:
            frame = users(frame)
            caller = code = frame.f_code
        name = _name(collective) if collective.is_prelude else collective.name
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
    caller: CodeType | None = None

    def recorded(tensor: Any, peer: int | None, tag: int, of: str = name, *, is_prelude: bool = False) -> Any:
        nonlocal caller
        shown = f"{of} (sizes)" if is_prelude else of
        other = _ANY if peer is None else peer
        begin_ns = now()
        try:
            if of == name:
                result = begin(tensor, peer, tag)
            else:
                result = begin(tensor, peer, tag, of, is_prelude=is_prelude)
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
            # Who receives from any gets to know from whom. A Work of a device goes on, and this rank need not hear of
            # its end.
            keep((*call, result if name == "recv" else other, tag))
        elif other >= 0 and result.is_success():
            keep((*call, other, tag, False, True))
        else:
            keep(_followed((*call, other, tag), result))
        return result

    return recorded


def _users_frame(last: CodeType | None) -> FrameType:
    """Return the frame of the user's code, for which three above is looked at first: where it was `last` time."""
    try:
        frame = _getframe(3)
    except ValueError:  # a thread began with the call itself
        frame = _getframe(2)
    return frame if frame.f_code is last else users(frame)


def _failed_call(name: str, begin_ns: int, nbytes: int, peer: int | None = None, tag: int = 0) -> SyncCall:
    return SyncCall(name, begin_ns, perf_counter_ns(), nbytes, *place_of(users(_getframe(2))), peer, tag, failed=True)


def _followed(call: tuple[Any, ...], work: Work) -> AsyncCall:
    followed = AsyncCall(call, work)
    work.observe(followed)
    return followed


def _ranged(ranges: Ranges, group: ProcessGroup, recorded: Callable[..., Any]) -> Callable[..., Any]:
    def ranged(collective: Collective[..., Any], *args: Any, **kwargs: Any) -> Any:
        ranges.open(f"{_name(collective)} {group.label}")
        try:
            return recorded(collective, *args, **kwargs)
        finally:
            ranges.close()

    return ranged


def _name(collective: Collective[..., Any]) -> str:
    return f"{collective.name} (sizes)" if collective.is_prelude else collective.name


def _size(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        try:
            return sum(map(_NBYTES, value))
        except AttributeError:
            return sum(map(_size, value))
    if value is None:
        return 0
    return int(value.nbytes if hasattr(value, "nbytes") else as_array(value, "tensor").nbytes)
