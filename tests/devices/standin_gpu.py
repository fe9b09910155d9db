"""The GPUs of the stand-in for CuPy: streams and events, and the order that they make; see standin_cupy.py."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

WAIT_S = 20.0

# How many operations of each stream come before, by its number. A clock that others can see is replaced, never changed:
# finalizers, which must not take the lock, read clocks at any moment.
Clock = dict[int, int]


class RaceError(AssertionError):
    """Two accesses to memory that nothing puts in order."""


class Op:
    """Something enqueued on a stream. It is done when it is the stream's first, and `ready`."""

    def __init__(self, run: Callable[[], None] = lambda: None, ready: Callable[[], bool] = lambda: True) -> None:
        self.run, self.ready = run, ready
        self.is_done = False
        self.clock: Clock = {}


class Access:
    def __init__(self, low: int, high: int, writes: bool, stream: int, tick: int, what: str) -> None:
        self.low, self.high, self.writes, self.stream, self.tick, self.what = low, high, writes, stream, tick, what


class Machine:
    """The GPUs of this process.

    Attributes:
        num_devices: How many there are.
        races: What was found where no exception could be raised.
        host_waits: How often the host has waited for the device.
        num_copies: How many copies between host and device were asked for.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.num_devices = 2
        self.races: list[str] = []
        self.host_waits = self.num_copies = 0
        self.streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self.nulls: dict[int, Stream] = {}  # by device
        self.events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
        self.fault = 0  # what CUDA answers from now on: a kernel has done what it must not
        self.busy: dict[int, Stream] = {}  # those that have something to do
        self.users = 0  # of the installed stand-in
        self.numbers = itertools.count(1)
        # What the host knows to be done, by stream.
        self.host: Clock = {}
        self.accesses: list[Access] = []
        self.live: dict[int, int] = {}  # allocations: address to bytes
        self.freed: deque[tuple] = deque()
        self.local = threading.local()
        self.capturing: set[int] = set()  # the addresses of streams that are being captured into a graph
        # Looks at the first operations of all streams together, as those of collectives must be.
        self.together: list[Callable[[list[Op]], list[Op]]] = []

    def enqueue(self, stream: Stream, op: Op, reads: list = (), writes: list = (), what: str = "a kernel") -> Op:
        if stream is NULL:
            stream = self.null(self.device())
        with self.changed:
            self.take_freed()
            clock = merged(stream.clock, self.host)
            tick = clock[stream.number] = clock.get(stream.number, 0) + 1
            stream.clock = clock
            for ranges, is_write in ((reads, False), (writes, True)):
                for low, nbytes in ranges:
                    if nbytes:
                        self.check(low, low + nbytes, is_write, clock, what)
                        self.forget(low, low + nbytes, stream.number, is_write)
                        self.accesses.append(Access(low, low + nbytes, is_write, stream.number, tick, what))
            op.clock = clock
            stream.ops.append(op)
            self.busy[stream.number] = stream
            self.advance()
        return op

    def check(self, low: int, high: int, writes: bool, clock: Clock, what: str) -> None:
        for other in self.accesses:
            overlaps = other.low < high and low < other.high and (writes or other.writes)
            if overlaps and clock.get(other.stream, 0) < other.tick:
                raise RaceError(f"{what} and {other.what} use the same memory, and nothing puts them in order")

    def forget(self, low: int, high: int, stream: int, writes: bool) -> None:
        # Who comes in order behind a write that covers an access is behind that access as well.
        self.accesses = [
            other
            for other in self.accesses
            if not (
                low <= other.low and other.high <= high and (writes or (other.stream == stream and not other.writes))
            )
        ]

    def advance(self) -> None:
        with self.changed:
            while True:
                heads = [stream.ops[0] for stream in self.busy.values()]
                ready = [op for op in heads if op.ready()]
                for choose in self.together:
                    ready += choose(heads)
                if not ready:
                    break
                for op in ready:
                    op.run()
                    op.is_done = True
                for stream in self.busy.values():
                    while stream.ops and stream.ops[0].is_done:
                        stream.ops.popleft()
                self.busy = {number: stream for number, stream in self.busy.items() if stream.ops}
            self.changed.notify_all()

    def wait(self, done: Callable[[], bool]) -> None:
        with self.changed:
            self.host_waits += 1
            if not self.changed.wait_for(done, WAIT_S):
                raise AssertionError("the host waits for the device in vain")

    def learn(self, clock: Clock) -> None:
        with self.changed:
            self.host = merged(self.host, clock)

    def allocate(self, owner: object, room: np.ndarray, stream: Stream | None) -> None:
        with self.changed:
            self.take_freed()
            self.live[room.ctypes.data] = room.nbytes
        held = room if owner is not room else None
        weakref.finalize(owner, self.free, room.ctypes.data, room.nbytes, stream, held).atexit = False

    def free(self, address: int, nbytes: int, stream: Stream | None, room: np.ndarray | None) -> None:
        # Called wherever Python collects garbage: what is changed here is looked at by nobody in that moment.
        clock = self.host
        if stream is not None:
            clock = merged(clock, stream.clock)  # who gets the memory next uses it behind what the stream has now
        # A device that is broken uses no memory any more.
        self.freed.append((address, nbytes, stream, room, None if self.fault else clock))

    def take_freed(self) -> None:
        while self.freed:
            address, nbytes, stream, room, clock = self.freed.popleft()
            if stream is not None and stream.ops:
                # What is enqueued there already may use it: the pool does not give it to anybody before that is done.
                stream.ops.append(Op(lambda room=room: None))
            try:
                if clock is not None:
                    self.check(address, address + nbytes, True, clock, "who gets the memory next")
            except RaceError as race:
                self.races.append(str(race))
            self.accesses = [
                other for other in self.accesses if not (address <= other.low and other.high <= address + nbytes)
            ]
            del self.live[address]

    def is_live(self, address: int, nbytes: int) -> bool:
        with self.changed:
            return any(low <= address and address + nbytes <= low + size for low, size in list(self.live.items()))

    def device(self) -> int:
        return getattr(self.local, "device", 0)

    def current(self, device: int) -> Stream:
        return self.chosen().get(device) or self.null(device)

    def chosen(self) -> dict[int, Stream]:
        if not hasattr(self.local, "chosen"):
            self.local.chosen = {}
        return self.local.chosen

    def null(self, device: int) -> Stream:
        with self.changed:
            if device not in self.nulls:
                self.nulls[device] = Stream(null=True, device=device)
            return self.nulls[device]

    def stream_at(self, address: int) -> Stream:
        return self.null(self.device()) if address == 0 else self.streams[address]

    @contextlib.contextmanager
    def held(self, stream: Stream) -> Iterator[None]:
        """Nothing that is enqueued on the stream is done until the block ends, as behind a kernel that runs long."""
        is_over: list[bool] = []
        self.enqueue(stream, Op(ready=lambda: bool(is_over)), what="a kernel that runs long")
        try:
            yield
        finally:
            is_over.append(True)
            self.advance()


def merged(clock: Clock, other: Clock) -> Clock:
    return {**clock, **{stream: max(clock.get(stream, 0), tick) for stream, tick in other.items()}}


MACHINE = Machine()


class Stream:
    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority=None, device=None
    ) -> None:
        self.device_id = MACHINE.device() if device is None else device
        self.non_blocking, self.priority = non_blocking, priority
        self.number = -1 - self.device_id if null else next(MACHINE.numbers)
        self.ptr = 0 if null else self.number
        self.ops: deque[Op] = deque()
        self.clock: Clock = {}
        self._before: list[Stream | None] = []
        with MACHINE.changed:
            MACHINE.streams[self.number] = self

    def __enter__(self) -> Stream:
        self._check_device()
        self._before.append(MACHINE.chosen().get(self.device_id))
        MACHINE.chosen()[self.device_id] = self
        return self

    def __exit__(self, *exc: object) -> None:
        before = self._before.pop()
        if before is None:
            del MACHINE.chosen()[self.device_id]
        else:
            MACHINE.chosen()[self.device_id] = before

    def use(self) -> Stream:
        self._check_device()
        MACHINE.chosen()[self.device_id] = self
        return self

    def _check_device(self) -> None:
        if self.device_id != MACHINE.device():
            raise RuntimeError("the stream was created on another device than the current one")

    def wait_event(self, event: Event) -> None:
        marker = event.marker
        if marker is not None:
            with MACHINE.changed:
                self.clock = merged(self.clock, marker.clock)
                MACHINE.enqueue(self, Op(ready=lambda: marker.is_done))

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    @property
    def done(self) -> bool:
        return not self.ops

    def synchronize(self) -> None:
        clock = self.clock
        MACHINE.wait(lambda: not self.ops)
        MACHINE.learn(clock)


class NullStream:
    """The one object that CuPy has for the default streams of all devices: what is asked of it, that of the current
    device is asked."""

    ptr, device_id = 0, -1

    def __getattr__(self, name: str) -> object:
        return getattr(MACHINE.null(MACHINE.device()), name)

    def __enter__(self) -> Stream:
        return MACHINE.null(MACHINE.device()).__enter__()

    def __exit__(self, *exc: object) -> None:
        MACHINE.null(MACHINE.device()).__exit__(*exc)


NULL = NullStream()


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.marker: Op | None = None
        self.device_id = MACHINE.device()
        self.ptr = next(MACHINE.numbers)
        with MACHINE.changed:
            MACHINE.events[self.ptr] = self

    def record(self, stream: Stream | NullStream | None = None) -> None:
        stream = stream or MACHINE.current(MACHINE.device())
        where = MACHINE.device() if stream is NULL else stream.device_id
        if where != self.device_id:
            raise RuntimeError("cudaErrorInvalidResourceHandle: an event and a stream of different devices")
        self.marker = MACHINE.enqueue(stream, Op())

    @property
    def done(self) -> bool:
        return event_query(self.ptr) == 0  # as CuPy has it: an error is not seen

    def synchronize(self) -> None:
        marker = self.marker
        if marker is not None:
            MACHINE.wait(lambda: marker.is_done)
            MACHINE.learn(marker.clock)


def event_query(address: int) -> int:
    """Return 0 for an event that is done, 600 for one that is not, anything else for an error, which is not raised."""
    if MACHINE.fault:
        return MACHINE.fault
    marker = MACHINE.events[address].marker
    if marker is None:
        return 0
    if marker.is_done:
        MACHINE.learn(marker.clock)
    return 0 if marker.is_done else 600


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class Device:
    def __init__(self, number: int | None = None) -> None:
        self.id = MACHINE.device() if number is None else int(number)
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(MACHINE.device())
        return self.use()

    def __exit__(self, *exc: object) -> None:
        MACHINE.local.device = self._before.pop()

    def use(self) -> Device:
        if not 0 <= self.id < MACHINE.num_devices:
            raise RuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        MACHINE.local.device = self.id
        return self


def get_current_stream(device_id: int = -1) -> Stream | NullStream:
    return MACHINE.chosen().get(MACHINE.device() if device_id == -1 else device_id) or NULL
