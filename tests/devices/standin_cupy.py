"""A stand-in for CuPy, on machines without a GPU: streams, events and arrays in "device memory", which is the host's.

What is enqueued on a stream is done later, in the order of the stream and behind the events that it waits for, and what
is held back stays undone: so a test sees whether anybody waits for the device who should not. Every access to memory is
compared with those before it. Two of them of which one writes, and that no event or wait of the host puts in order, are
a race; so is memory that is given back to the pool of its stream while another stream still uses it. Both are found
whatever the order in which things happened to be done.

It stands for what CuPy's documentation says of the functions that meshdist calls, and for nothing else. NumPy's other
functions are those of standin_numpy.py, which wait for the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Iterator

import numpy as np
from standin_gpu import (
    MACHINE,
    CUDARuntimeError,
    Device,
    Event,
    Op,
    RaceError,
    Stream,
    event_query,
    get_current_stream,
)
from standin_numpy import METHODS, Functions, computed

__all__ = ["MACHINE", "RaceError", "installed", "module"]

# What is enqueued as a kernel, on arrays of one shape and dtype.
KERNELS = ("add", "multiply", "minimum", "maximum", "bitwise_and", "bitwise_or", "bitwise_xor")
byte_bounds = getattr(np.lib, "array_utils", np).byte_bounds  # NumPy 2 has it there


# ---- cupy.cuda


def alloc_pinned_memory(size: int) -> np.ndarray:
    room = np.empty(size, np.uint8)
    MACHINE.allocate(room, room, None)
    return room


def num_copies() -> int:
    """Return how many copies between device and host have been asked for."""
    return MACHINE.num_copies


def memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    assert kind in (1, 2, 3)
    MACHINE.num_copies += kind != 3
    assert kind == 2 or MACHINE.is_live(dst, size)
    assert kind == 1 or MACHINE.is_live(src, size)
    MACHINE.enqueue(
        MACHINE.stream_at(stream),
        Op(lambda: ctypes.memmove(dst, src, size)),
        reads=[(src, size)],
        writes=[(dst, size)],
        what=f"a copy of {size} bytes",
    )


def memcpy_peer_async(dst: int, dst_device: int, src: int, src_device: int, size: int, stream: int) -> None:
    """Copy between two devices, or within one; the stream is of either."""
    assert max(dst_device, src_device) < MACHINE.num_devices
    assert MACHINE.is_live(dst, size)
    memcpy_async(dst, src, size, 3, stream)


runtime = types.SimpleNamespace(
    memcpyHostToDevice=1,
    memcpyDeviceToHost=2,
    memcpyDeviceToDevice=3,
    memcpyAsync=memcpy_async,
    memcpyPeerAsync=memcpy_peer_async,
    eventQuery=event_query,
    CUDARuntimeError=CUDARuntimeError,
    getDevice=MACHINE.device,
    streamIsCapturing=lambda stream: stream in MACHINE.capturing,
    getDeviceCount=lambda: MACHINE.num_devices,
    deviceGetPCIBusId=lambda device: f"0000:{device:02X}:00.0",
)


# ---- cupy


class Memory:
    """An allocation: the arrays that lie in it keep it."""


def get_allocator():
    return getattr(MACHINE.local, "allocator", lambda nbytes: Memory())


@contextlib.contextmanager
def using_allocator(allocator) -> Iterator[None]:
    before = get_allocator()
    MACHINE.local.allocator = allocator
    try:
        yield
    finally:
        MACHINE.local.allocator = before


class Operators(np.lib.mixins.NDArrayOperatorsMixin):
    """NumPy's operators; of what has a higher priority, the other operand's, as CuPy does."""


def deferring(operator):
    def apply(self, other):
        if getattr(other, "__array_priority__", 0) > 100 and not isinstance(other, ndarray):
            return NotImplemented
        return operator(self, other)

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge", "eq", "ne"):
    _operator = f"__{_name}__"
    setattr(Operators, _operator, deferring(getattr(Operators, _operator)))


class ndarray(Operators):
    """An array in "device memory". The host sees its elements through `get` alone."""

    __module__ = "cupy"
    __array_priority__ = 100
    __hash__ = object.__hash__

    def __init__(self, shape, dtype=float, host=None, owner=None, device=None) -> None:
        self.device = types.SimpleNamespace(id=MACHINE.device() if device is None else device)
        if host is None:
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            owner, room = get_allocator()(nbytes), np.empty(max(1, nbytes), np.uint8)
            MACHINE.allocate(owner, room, MACHINE.current(self.device.id))
            host = room[:nbytes].view(np.dtype(dtype)).reshape(shape)
        self._host, self._owner = host, owner
        self.dtype, self.shape, self.strides = host.dtype, host.shape, host.strides
        self.size, self.ndim, self.nbytes, self.itemsize = host.size, host.ndim, host.nbytes, host.itemsize
        self.flags = types.SimpleNamespace(c_contiguous=host.flags.c_contiguous)
        self.data = types.SimpleNamespace(ptr=host.ctypes.data if host.size else 0, device_id=self.device.id)

    def __array__(self, *given: object) -> None:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc, method: str, *given, out: tuple = (), **kwargs) -> ndarray:
        if method == "reduce" and ufunc.__name__ not in ("add", "multiply"):
            raise NotImplementedError(f"`cupy_{ufunc.__name__}.reduce` is not supported yet")
        if method in ("reduce", "reduceat", "outer"):
            return computed(getattr(ufunc, method), given, kwargs, ndarray)
        if method != "__call__":
            return NotImplemented
        if ufunc.__name__ in KERNELS and not kwargs and are_alike([*given, *out]):
            return elementwise(ufunc)(*given, out=out[0] if out else None)
        return computed(ufunc, given, {**kwargs, **({"out": out} if out else {})}, ndarray)

    def __array_function__(self, function, types, args, kwargs):
        return computed(function, args, kwargs, ndarray)

    def __getattr__(self, name: str):
        if name not in METHODS:
            raise AttributeError(f"'ndarray' object has no attribute {name!r}")
        return lambda *args, **kwargs: computed(getattr(np.ndarray, name), (self, *args), kwargs, ndarray)

    def __reduce__(self):
        return asarray, (self.get(),)  # on the current device, where it is unpickled

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    __index__ = __int__

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
        if has_arrays(place):
            return computed(np.ndarray.__getitem__, (self, on_device(place)), {}, ndarray)
        found = self._host[place]
        places = place if isinstance(place, tuple) else (place,)
        return self.seen_as(found if isinstance(found, np.ndarray) else self._host[(*places, ...)])

    def __setitem__(self, place, value) -> None:
        if has_arrays(place):
            computed(np.ndarray.__setitem__, (self, on_device(place), value), {}, ndarray)
            return
        part = self[place]
        given = [value] if isinstance(value, ndarray) else []
        values = value._host if given else value
        kernel(lambda: part._host.__setitem__(..., values), given, [part], "an assignment")

    def reshape(self, *shape, order: str = "C") -> ndarray:
        view = self._host.reshape(*shape, order=order)
        if self.size and not np.shares_memory(view, self._host):
            return computed(np.reshape, (self, view.shape, order), {}, ndarray)
        return self.seen_as(view)

    def view(self, dtype) -> ndarray:
        if dtype is np.ndarray:
            raise ValueError("Unsupported dtype object")
        return self.seen_as(self._host.view(dtype))

    @property
    def T(self) -> ndarray:
        return self.seen_as(self._host.T)

    @property
    def real(self) -> ndarray:
        return self.seen_as(self._host.real)

    @property
    def imag(self) -> ndarray:
        return computed(np.imag, (self,), {}, ndarray)

    def transpose(self, *axes) -> ndarray:
        return self.seen_as(self._host.transpose(*axes))

    def astype(self, dtype, order: str = "K", copy: bool = True) -> ndarray:
        return (
            self
            if not copy and self.dtype == dtype
            else in_order(self, lambda: self._host.astype(dtype), dtype, [self])
        )

    def copy(self, order: str = "C") -> ndarray:
        # It lies on the current device, wherever the array does.
        array = ndarray(self.shape, self.dtype)
        kernel(lambda: array._host.__setitem__(..., self._host), [self], [array])
        return array

    def get(self) -> np.ndarray:
        stream = MACHINE.current(self.device.id)
        found: list[np.ndarray] = []
        kernel(lambda: found.append(self._host.copy()), [self], [], "a read by the host", stream)
        stream.synchronize()
        return found[0]

    def set(self, host: np.ndarray) -> None:
        assert host.shape == self.shape
        assert host.dtype == self.dtype
        self[...] = asarray(host)

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


def has_arrays(place) -> bool:
    """Return whether an index holds arrays."""
    return any(
        isinstance(part, (ndarray, np.ndarray, list)) for part in (place if isinstance(place, tuple) else (place,))
    )


def on_device(place):
    """Return an index with the arrays of NumPy in it copied to the device, as CuPy does."""
    if isinstance(place, tuple):
        return tuple(map(on_device, place))
    return asarray(place) if isinstance(place, np.ndarray) else place


def are_alike(arrays) -> bool:
    return all(isinstance(array, ndarray) and array.dtype == arrays[0].dtype for array in arrays) and (
        len({array.shape for array in arrays}) == 1
    )


def in_order(first: ndarray, compute, dtype, reads: list[ndarray]) -> ndarray:
    """Return what a kernel makes, in the order of its first input: CuPy keeps that of Fortran where it finds it."""
    if first.flags.c_contiguous or not first._host.flags.f_contiguous:
        return made(compute, first.shape, dtype, reads)
    return made(lambda: compute().T, first.shape[::-1], dtype, reads).T


def asarray(value, dtype=None) -> ndarray:
    if isinstance(value, ndarray):
        return value if dtype is None or value.dtype == dtype else value.astype(dtype)
    if hasattr(type(value), "__cuda_array_interface__"):
        holder = types.SimpleNamespace(__array_interface__=value.__cuda_array_interface__)
        return ndarray(None, None, np.asarray(holder), value, 0)
    host = np.array(value, dtype)
    return made(lambda: host, host.shape, host.dtype, [], "a copy from the host")


def elementwise(ufunc: np.ufunc):
    def call(one, other, out: ndarray | None = None) -> ndarray:
        given = [array for array in (one, other) if isinstance(array, ndarray)]
        hosts = [array._host if isinstance(array, ndarray) else array for array in (one, other)]
        if out is None:
            return in_order(given[0], lambda: ufunc(*hosts), given[0].dtype, given)
        kernel(lambda: ufunc(*hosts, out=out._host), given, [out])
        return out

    return call


class Kernel:
    """A function of CuPy's that NumPy has as a ufunc."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self.ufunc = ufunc

    def __call__(self, *given, out=None, **kwargs) -> ndarray:
        first = next(array for array in given if isinstance(array, ndarray))
        return first.__array_ufunc__(self.ufunc, "__call__", *given, out=() if out is None else (out,), **kwargs)

    def at(self, array: ndarray, place, values) -> None:
        if array.dtype.kind not in "iuf" or array.itemsize < 2:
            raise TypeError(f"cupy.{self.ufunc.__name__}.at only supports int32, int64, float16, float32, float64")
        computed(self.ufunc.at, (array, place, values), {}, ndarray)


def from_dlpack(value) -> ndarray:
    raise BufferError("the stand-in takes no DLPack")


def module() -> types.ModuleType:
    """Return the stand-in as a module, to be put into `sys.modules` as `cupy`."""
    cupy, cuda = Functions("cupy", np, ndarray), types.ModuleType("cupy.cuda")
    cuda.__dict__.update(
        Stream=Stream,
        Event=Event,
        Device=Device,
        get_current_stream=get_current_stream,
        alloc_pinned_memory=alloc_pinned_memory,
        get_allocator=get_allocator,
        using_allocator=using_allocator,
        runtime=runtime,
    )
    cupy.__dict__.update(
        {name: Kernel(getattr(np, name)) for name in KERNELS},
        cuda=cuda,
        ndarray=ndarray,
        empty=lambda shape, dtype=float: ndarray(shape, dtype),
        zeros=lambda shape, dtype=float: asarray(np.zeros(shape, dtype)),
        ones=lambda shape, dtype=float: asarray(np.ones(shape, dtype)),
        array=asarray,
        asarray=asarray,
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
