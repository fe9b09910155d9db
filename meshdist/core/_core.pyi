"""The types of the compiled module; see the C files beside it."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")

INTERFACE: int
COMPILER: str
LINES_BYTES: int

class Function:
    func: Callable[..., Any]
    tag_place: int
    def __init__(self, func: Callable[..., Any], *, is_bound: bool = False) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class Calls:
    num_calls: int
    num_messages: int
    num_waits: int
    is_open: bool
    words: str
    forgotten: list[Any]
    note: Callable[..., None] | None  # run, facts, prefix, send, recv, apart, kind if the call is async, go_on
    def __init__(
        self,
        queue: Any,
        deferral: Any,
        announcing: Any,
        keep: Callable[[Any], None],
        fail: Callable[..., None],
        make_job: Callable[[Any], Any],
    ) -> None: ...
    def forget(self) -> None: ...

class TryLock:
    def acquire(self, blocking: bool, /) -> bool: ...
    def release(self) -> None: ...
    def locked(self) -> bool: ...

class DeferringLock:
    def __init__(self, main_thread: int) -> None: ...
    def acquire(self, blocking: bool = True, /) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *exc_info: object) -> None: ...

class Record:
    facts: Any
    sequence: int
    created: int
    started: int
    completed: int
    code: CodeType
    instruction: int
    error: str | None
    peer: Any
    def __init__(
        self, facts: Any, sequence: int, created: int, started: int, code: CodeType, instruction: int, /
    ) -> None: ...

class Handle:
    _callbacks: list[Callable[[], object]]
    _error: BaseException | None
    _error_prefix: str
    _is_done: bool
    _observer: Any
    _value: Any
    _was_awaited: bool
    queue: Any
    record: Record
    forgotten: list[Any] | None
    kind: Any
    source: int
    sent: Any
    has_begun: bool
    word: int
    phase: int
    def _wait(self, timeout: Any = None) -> bool: ...
    def _release(self) -> None: ...
    def _objects(self) -> list[Any]: ...
    def job(self) -> Any: ...

class Barrier:
    step: int
    phase: int
    fewest_spins: int
    def attach(self, words: memoryview, mine: int, posts: Sequence[int], bells: Sequence[int], calls: int) -> None: ...
    def put(self, place: Any, data: Any) -> None: ...

class Step:
    # Returns None where NumPy has to reduce.
    def __init__(
        self,
        barrier: Any,
        fingerprint: int,
        wait: Callable[[int], None],
        # For whom the rank waits, how far the slots of two phases are apart, the call in words.
        early: tuple[tuple[int, int, bool, bool], int, bytes],
        keeps: Any,
        num_sent: int,
        num_received: int,
        puts: Sequence[Sequence[tuple[int, int, int, int]]],
        takes: Sequence[Sequence[tuple[int, int, int, int]]],
        kept: Sequence[tuple[int, int, int, int, int]],
        op: str = "",
        kind: str = "",
        itemsize: int = 0,
        num_rows: int = 0,
        rows: Sequence[Sequence[int]] | None = None,
        count: int = 0,
        totals: tuple[int, int] = (0, 0),
        agreed: bytes = b"",
        sizes: int = 0,
        tables: tuple[int, int] = (0, 0),
        own: tuple[int, int, int] = (-1, 0, 0),
        is_second: bool = False,
        yields: bool = False,
        streams: bool = False,
    ) -> None: ...
    # True if the call was carried out; False if nothing was done; None if nothing was taken. Arrays that are moved, not
    # reduced, may lie in rows at equal distances.
    def __call__(self, send: Any, recv: Any) -> bool | None: ...
    # The same in two parts, the step and the rest, where ranks wait for all others.
    def begin(self, send: Any, recv: Any) -> bool | None: ...
    def finish(self, send: Any, recv: Any, phase: int = ...) -> None: ...
    # Calls that put from the least to the most bytes are carried out in the same way, through these slots.
    def set_alike(
        self,
        num_bytes: int,
        bounds: tuple[int, int],
        slots: tuple[int, int, int],  # the begin, the end, the size of each
        form: tuple[tuple[str, str], tuple[str, str], bool, int],
        hasher: Callable[[bytes], Any],
    ) -> None: ...
    # The exchange finds what to take in the table; so does one of other numbers of rows.
    def set_splits(
        self,
        rank: int,
        num_ranks: int,
        row_bytes: int,
        limit_bytes: int,
        most_bytes: int,
        slots: tuple[int, int, int],  # those of the first rank in each phase, the size of each
    ) -> None: ...

class Chunks:
    def __init__(
        self,
        runs: Sequence[tuple[Step, Step | None, int]],  # so many chunks of the same steps
        chunk_bytes: int,
        num_arrays: tuple[int, int],
    ) -> None: ...
    # True if the call was carried out; False if nothing was done; None if the ranks' sizes are not those agreed.
    def __call__(self, send: Any, recv: Any) -> bool | None: ...
    # The same in two parts: the first step, and the rest.
    def begin(self, send: Any, recv: Any) -> bool | None: ...
    def finish(self, send: Any, recv: Any) -> bool: ...

class SingleCopy:
    # Returns None for too many arrays, or where NumPy has to reduce.
    def __init__(
        self,
        barrier: Any,
        fingerprint: int,
        wait: Callable[[int], None],
        check: Callable[[], None],
        refuse: Callable[[int, str, int], None],
        keeps: Any,
        place: tuple[int, int],
        num_arrays: tuple[int, int],
        gives: Sequence[tuple[int, int, int]],
        takes: Sequence[tuple[int, int, int]],
        written: float,
        streams: bool,
        reads_outputs: bool,
        tables: tuple[int, int],
        pids: Sequence[int],
        reduced: tuple[str, str, int, bool, tuple[int, int], int] | None,
        agreed: bytes,
    ) -> None: ...
    # True if the call was carried out; False if nothing was done.
    def __call__(self, send: Any, recv: Any) -> bool: ...
    # The same in two parts: the first step, and the rest.
    def begin(self, send: Any, recv: Any) -> bool: ...
    def finish(self, send: Any, recv: Any) -> bool: ...

class Countdown:
    left: int
    def __init__(self, left: int) -> None: ...

class Chosen:
    # `plan` has `next_calls` and `go_on`.
    def __init__(self, plan: Any, rest: Callable[[Any, Any], object]) -> None: ...
    def __call__(self, send: Any, recv: Any) -> object: ...

class Stream:
    def __init__(self, memory: memoryview, ring: tuple[int, int], words: tuple[int, int, int]) -> None: ...
    def fill(self, data: Any, written: int, free_to: int, polls: bool) -> int: ...
    def drain(self, target: Any, there: int, polls: bool) -> int: ...

class Ring:
    def __init__(
        self,
        receives: bool,
        memory: memoryview,
        ring: tuple[int, int],
        words: tuple[int, int, int, int, int, int, int, int],
        unit: int,
        start: bytes,
        locked: Callable[[], bool],
        queues: tuple[Any, ...],
        keys: tuple[Any, ...],
        owner: Any,
        nones: tuple[str, ...],
        wake: Callable[[], object],
        announced: set[Any],
        pid: int,
        eager_bytes: int,
        most_bytes: int,
        is_async: bool,
        shares_cores: bool,
    ) -> None: ...
    def __call__(self, array: Any) -> bool: ...
    def follow(self, array: Any, number: int) -> Any: ...

class Inbox:
    senders: list[int]
    def __init__(
        self,
        num_senders: int,
        *,
        info: type[tuple[Any, ...]] = ...,
        dtypes: Any = ...,
        tag: int = -1,
        waits: bool = True,
        of_objects: bool = False,
        is_single: bool = False,
    ) -> None: ...
    def add(self, ring: Ring, rank: int, global_rank: int, /) -> None: ...

class Exchange:
    def __init__(
        self,
        calls: Any,
        prefix: str,
        sends: tuple[tuple[Ring, Any], ...],
        receives: tuple[tuple[Ring, Any], ...],
        rest: Callable[[int, int, Any, Any], None],
        follow: Callable[[int, int, Any], None],
    ) -> None: ...
    def __call__(self, sends: Any, receives: Any, /) -> None: ...

class ObjectSender:
    def __init__(
        self,
        ring: Ring,
        tag: int,
        most_bytes: int,
        rest: Callable[[bytes, int], Any],
        is_async: bool,
        is_single: bool,
    ) -> None: ...

def copy_around_caches(to: Any, from_: Any, /) -> None: ...
def read_memory(pid: int, address: int, own_address: int, num_bytes: int, /) -> int: ...
def write_memory(pid: int, address: int, own_address: int, num_bytes: int, /) -> int: ...
def poll_any(works: list[Any], /) -> int: ...
def configure(array: Any, is_ours: Callable[[str], bool], integer: type, empty: Callable[..., Any], /) -> None: ...
def configure_objects(
    dtype_of: Callable[[int], Any],
    dumps: Callable[[Any], bytes],
    loads: Callable[[bytes], Any],
    unpickle: Callable[[bytes, str, Exception], Any],
    /,
) -> None: ...
def handles(
    work: type,
    planned: type,
    deferred: type,
    objects: type,
    announced: type,
    done: type,
    wait: Callable[..., bool],
    result: Callable[..., list[Any]],
    most_deferred: int,
    long_bytes: int,
) -> None: ...
def compare_by_identity(kind: type[T]) -> type[T]: ...
def explain_type_errors(function: Callable[[Callable[..., Any], TypeError], object]) -> None: ...
def world_changed() -> None: ...
def use_many_worlds(slots: ContextVar[Any], /) -> None: ...
