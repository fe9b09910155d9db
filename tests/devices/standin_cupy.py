"""A stand-in for CuPy, on machines without a GPU: streams, events and arrays in "device memory", which is the host's.

What is enqueued on a stream is done later, in the order of the stream and behind the events that it waits for, and what
is held back stays undone: so a test sees whether anybody waits for the device who should not. Every access to memory is
compared with those before it. Two of them of which one writes, and that no event or wait of the host puts in order, are
a race; so is memory that is given back to the pool of its stream while another stream still uses it. Both are found
whatever the order in which things happened to be done.

It stands for what CuPy's documentation says of the functions that meshdist calls, and for nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

WAIT_S = 20.0
byte_bounds = getattr(np.lib, "array_utils", np).byte_bounds  # NumPy 2 has it there


class RaceError(AssertionError):
    """Two accesses to memory that nothing puts in order."""


class Op:
    """Something enqueued on a stream. It is done when it is the stream's first, and `ready`."""

    def __init__(self, run: Callable[[], None] = lambda: None, ready: Callable[[], bool] = lambda: True) -> None:
        self.run, self.ready = run, ready
        self.is_done = False
        self.clock: dict[int, int] = {}


class Access:
    def __init__(self, low: int, high: int, writes: bool, stream: int, tick: int, what: str) -> None:
        self.low, self.high, self.writes, self.stream, self.tick, self.what = low, high, writes, stream, tick, what


class Machine:
    """The GPUs of this process.

    Attributes:
        num_devices: How many there are.
        races: What was found where no exception could be raised.
        host_waits: How often the host has waited for the device.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.num_devices = 2
        self.races: list[str] = []
        self.host_waits = 0
        self.streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self.nulls: dict[int, Stream] = {}  # by device
        self.busy: dict[int, Stream] = {}  # those that have something to do
        self.users = 0  # of the installed stand-in
        self.numbers = itertools.count(1)
        # What the host knows to be done, by stream.
        self.host: dict[int, int] = {}
        self.accesses: list[Access] = []
        self.live: dict[int, int] = {}  # allocations: address to bytes
        self.freed: deque[tuple] = deque()
        self.local = threading.local()
        # Looks at the first operations of all streams together, as those of collectives must be.
        self.together: list[Callable[[list[Op]], list[Op]]] = []

    def enqueue(self, stream: Stream, op: Op, reads: list = (), writes: list = (), what: str = "a kernel") -> Op:
        with self.changed:
            self.take_freed()
            merge(stream.clock, self.host)
            tick = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
            for ranges, is_write in ((reads, False), (writes, True)):
                for low, nbytes in ranges:
                    if nbytes:
                        self.check(low, low + nbytes, is_write, stream.clock, what)
                        self.forget(low, low + nbytes, stream.number, is_write)
                        self.accesses.append(Access(low, low + nbytes, is_write, stream.number, tick, what))
            op.clock = dict(stream.clock)
            stream.ops.append(op)
            self.busy[stream.number] = stream
            self.advance()
        return op

    def check(self, low: int, high: int, writes: bool, clock: dict[int, int], what: str) -> None:
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

    def learn(self, clock: dict[int, int]) -> None:
        with self.changed:
            merge(self.host, clock)

    def allocate(self, owner: object, room: np.ndarray, stream: Stream | None) -> None:
        with self.changed:
            self.take_freed()
            self.live[room.ctypes.data] = room.nbytes
        held = room if owner is not room else None
        weakref.finalize(owner, self.free, room.ctypes.data, room.nbytes, stream, held).atexit = False

    def free(self, address: int, nbytes: int, stream: Stream | None, room: np.ndarray | None) -> None:
        # Called wherever Python collects garbage: what is changed here is looked at by nobody in that moment.
        clock = dict(self.host)
        if stream is not None:
            merge(clock, stream.clock)  # who gets the memory next uses it behind what the stream has now
        self.freed.append((address, nbytes, stream, room, clock))

    def take_freed(self) -> None:
        while self.freed:
            address, nbytes, stream, room, clock = self.freed.popleft()
            if stream is not None and stream.ops:
                # What is enqueued there already may use it: the pool does not give it to anybody before that is done.
                stream.ops.append(Op(lambda room=room: None))
            try:
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


def merge(clock: dict[int, int], other: dict[int, int]) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


MACHINE = Machine()


# ---- cupy.cuda


class Stream:
    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority=None, device=None
    ) -> None:
        self.device_id = MACHINE.device() if device is None else device
        self.non_blocking, self.priority = non_blocking, priority
        self.number = -1 - self.device_id if null else next(MACHINE.numbers)
        self.ptr = 0 if null else self.number
        self.ops: deque[Op] = deque()
        self.clock: dict[int, int] = {}
        self._before: list[Stream | None] = []
        with MACHINE.changed:
            MACHINE.streams[self.number] = self

    def __enter__(self) -> Stream:
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
        MACHINE.chosen()[self.device_id] = self
        return self

    def wait_event(self, event: Event) -> None:
        marker = event.marker
        if marker is not None:
            with MACHINE.changed:
                merge(self.clock, marker.clock)
                MACHINE.enqueue(self, Op(ready=lambda: marker.is_done))

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    @property
    def done(self) -> bool:
        return not self.ops

    def synchronize(self) -> None:
        clock = dict(self.clock)
        MACHINE.wait(lambda: not self.ops)
        MACHINE.learn(clock)


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.marker: Op | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.marker = MACHINE.enqueue(stream or MACHINE.current(MACHINE.device()), Op())

    @property
    def done(self) -> bool:
        if self.marker is None:
            return True
        if self.marker.is_done:
            MACHINE.learn(self.marker.clock)
        return self.marker.is_done

    def synchronize(self) -> None:
        marker = self.marker
        if marker is not None:
            MACHINE.wait(lambda: marker.is_done)
            MACHINE.learn(marker.clock)


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


def get_current_stream(device_id: int = -1) -> Stream:
    return MACHINE.current(MACHINE.device() if device_id == -1 else device_id)


def alloc_pinned_memory(size: int) -> np.ndarray:
    room = np.empty(size, np.uint8)
    MACHINE.allocate(room, room, None)
    return room


def memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    assert kind in (1, 2, 3)
    assert kind == 2 or MACHINE.is_live(dst, size)
    assert kind == 1 or MACHINE.is_live(src, size)
    MACHINE.enqueue(
        MACHINE.stream_at(stream),
        Op(lambda: ctypes.memmove(dst, src, size)),
        reads=[(src, size)],
        writes=[(dst, size)],
        what=f"a copy of {size} bytes",
    )


runtime = types.SimpleNamespace(
    memcpyHostToDevice=1,
    memcpyDeviceToHost=2,
    memcpyDeviceToDevice=3,
    memcpyAsync=memcpy_async,
    getDevice=MACHINE.device,
    getDeviceCount=lambda: MACHINE.num_devices,
    deviceGetPCIBusId=lambda device: f"0000:{device:02X}:00.0",
)


# ---- cupy


class Memory:
    """An allocation: the arrays that lie in it keep it."""


class ndarray:
    """An array in "device memory". The host sees its elements through `get` alone."""

    def __init__(self, shape, dtype=float, host=None, owner=None, device=None) -> None:
        self.device = types.SimpleNamespace(id=MACHINE.device() if device is None else device)
        if host is None:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            owner, room = Memory(), np.empty(max(1, nbytes), np.uint8)
            MACHINE.allocate(owner, room, MACHINE.current(self.device.id))
            host = room[:nbytes].view(np.dtype(dtype)).reshape(shape)
        self._host, self._owner = host, owner
        self.dtype, self.shape, self.strides = host.dtype, host.shape, host.strides
        self.size, self.ndim, self.nbytes, self.itemsize = host.size, host.ndim, host.nbytes, host.itemsize
        self.flags = types.SimpleNamespace(c_contiguous=host.flags.c_contiguous)
        self.data = types.SimpleNamespace(ptr=host.ctypes.data if host.size else 0)

    def __array__(self, *given: object) -> None:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.id

    @property
    def __cuda_array_interface__(self) -> dict:
        return {**self._host.__array_interface__, "stream": None}

    def __len__(self) -> int:
        return len(self._host)

    def span(self) -> list[tuple[int, int]]:
        low, high = byte_bounds(self._host) if self.size else (0, 0)
        return [(low, high - low)]

    def seen_as(self, host: np.ndarray) -> ndarray:
        return ndarray(None, None, host, self._owner, self.device.id)

    def __getitem__(self, place) -> ndarray:
        found = self._host[place]
        return self.seen_as(found if isinstance(found, np.ndarray) else self._host[place, ...])

    def __setitem__(self, place, value) -> None:
        part = self[place]
        given = [value] if isinstance(value, ndarray) else []
        values = value._host if given else value
        kernel(lambda: part._host.__setitem__(..., values), given, [part], "an assignment")

    def reshape(self, *shape) -> ndarray:
        view = self._host.reshape(*shape)
        assert view.base is not None
        assert not self.size or np.shares_memory(view, self._host), "a reshape that copies"
        return self.seen_as(view)

    def view(self, dtype) -> ndarray:
        return self.seen_as(self._host.view(dtype))

    def astype(self, dtype, copy: bool = True) -> ndarray:
        return made(lambda: self._host.astype(dtype), self.shape, dtype, [self])

    def copy(self) -> ndarray:
        return made(lambda: self._host, self.shape, self.dtype, [self])

    def get(self) -> np.ndarray:
        stream = MACHINE.current(self.device.id)
        found: list[np.ndarray] = []
        kernel(lambda: found.append(self._host.copy()), [self], [], "a read by the host", stream)
        stream.synchronize()
        return found[0]

    def item(self):
        return self.get().item()

    def tolist(self):
        return self.get().tolist()


def kernel(run, reads, writes, what: str = "a kernel", stream: Stream | None = None) -> None:
    arrays = [*reads, *writes]
    stream = stream or MACHINE.current(arrays[0].device.id)
    spans = [[span for array in group for span in array.span()] for group in (reads, writes)]
    MACHINE.enqueue(stream, Op(run), *spans, what)


def made(compute, shape, dtype, reads: list[ndarray], what: str = "a kernel") -> ndarray:
    array = ndarray(shape, dtype, device=reads[0].device.id if reads else None)
    kernel(lambda: array._host.__setitem__(..., compute()), reads, [array], what)
    return array


def asarray(value, dtype=None) -> ndarray:
    if isinstance(value, ndarray):
        return value
    if hasattr(type(value), "__cuda_array_interface__"):
        holder = types.SimpleNamespace(__array_interface__=value.__cuda_array_interface__)
        return ndarray(None, None, np.asarray(holder), value, 0)
    host = np.array(value, dtype)
    return made(lambda: host, host.shape, host.dtype, [], "a copy from the host")


def ascontiguousarray(array: ndarray) -> ndarray:
    return array if array.flags.c_contiguous else array.copy()


def elementwise(ufunc: np.ufunc):
    def call(one, other, out: ndarray | None = None) -> ndarray:
        given = [array for array in (one, other) if isinstance(array, ndarray)]
        hosts = [array._host if isinstance(array, ndarray) else array for array in (one, other)]
        if out is None:
            return made(lambda: ufunc(*hosts), given[0].shape, given[0].dtype, given)
        kernel(lambda: ufunc(*hosts, out=out._host), given, [out])
        return out

    return call


def from_dlpack(value) -> ndarray:
    raise BufferError("the stand-in takes no DLPack")


def module() -> types.ModuleType:
    """Return the stand-in as a module, to be put into `sys.modules` as `cupy`."""
    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    cuda.__dict__.update(
        Stream=Stream,
        Event=Event,
        Device=Device,
        get_current_stream=get_current_stream,
        alloc_pinned_memory=alloc_pinned_memory,
        runtime=runtime,
    )
    names = ["add", "multiply", "minimum", "maximum", "bitwise_and", "bitwise_or", "bitwise_xor"]
    cupy.__dict__.update(
        {name: elementwise(getattr(np, name)) for name in names},
        cuda=cuda,
        ndarray=ndarray,
        empty=lambda shape, dtype=float: ndarray(shape, dtype),
        zeros=lambda shape, dtype=float: asarray(np.zeros(shape, dtype)),
        ones=lambda shape, dtype=float: asarray(np.ones(shape, dtype)),
        array=asarray,
        asarray=asarray,
        ascontiguousarray=ascontiguousarray,
        asnumpy=lambda array: array.get(),
        from_dlpack=from_dlpack,
    )
    return cupy


@contextlib.contextmanager
def installed() -> Iterator[types.ModuleType]:
    """Have `import cupy` find the stand-in in this process until the block ends, for all threads that want it."""
    with MACHINE.changed:
        MACHINE.users += 1
        if MACHINE.users == 1:
            cupy = module()
            sys.modules.update({"cupy": cupy, "cupy.cuda": cupy.cuda})
    try:
        yield sys.modules["cupy"]
    finally:
        with MACHINE.changed:
            MACHINE.users -= 1
            if MACHINE.users == 0:
                del sys.modules["cupy"], sys.modules["cupy.cuda"]
