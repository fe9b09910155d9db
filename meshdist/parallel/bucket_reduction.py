"""The reduction of one bucket, by a communication hook or by one all_reduce, with what the ranks say of the step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import GeneratorType
from typing import Any, Protocol, TypeAlias

from meshdist.arrays.reduce_op import ReduceOp
from meshdist.collectives.all_reduce import all_reduce
from meshdist.parallel.gradient_buckets import GradBucket, check_not_complex
from meshdist.runtime.work import Work


class Waits(Protocol):
    """A Work, a Future, or what has their `wait`."""

    def wait(self) -> Any: ...


Rounds: TypeAlias = "Generator[Any, None, Any]"
Hook: TypeAlias = "Callable[[GradBucket], Waits | Rounds | Any]"


def hook_name(hook: Hook | None) -> str:
    """Return the name of a hook in logs and messages."""
    return "none" if hook is None else str(getattr(hook, "__name__", None) or type(hook).__name__)


class DirectReduction:
    """One all_reduce of the bucket. An element after the gradients carries whether a rank has found a fault.

    So ranks learn of a fault without a call of its own. A reduction that was not started is a sync call of `advance`,
    for a bucket with nothing left to be hidden behind: an async call takes longer. Other ranks see no difference.
    """

    def __init__(self, bucket: GradBucket, flat: Any) -> None:
        self._group = bucket.group
        self._flat = flat
        self._work: Work | None = None
        self.has_fault = False

    def start(self, has_fault: bool) -> None:
        """Begin; `has_fault` says whether this rank has found a fault in the step."""
        self._tell(has_fault)
        self._work = all_reduce(self._flat, ReduceOp.AVG, self._group, True)

    def advance(self, has_fault: bool) -> bool:
        """Wait; return whether there is more to do."""
        if self._work is None:
            self._tell(has_fault)
            all_reduce(self._flat, ReduceOp.AVG, self._group)
        else:
            work, self._work = self._work, None
            work.wait()
        self.has_fault = bool(self._flat[-1].item() != 0)
        return False

    def _tell(self, has_fault: bool) -> None:
        if has_fault or self.has_fault:  # else it is zero
            self._flat[-1:] = 1 if has_fault else 0


class HookedReduction:
    """A reduction by a hook, whose result becomes the content of the bucket."""

    has_fault = False  # the reducer asks in a call of its own

    def __init__(self, bucket: GradBucket, hook: Hook) -> None:
        self._bucket = bucket
        self._hook = hook
        self._rounds: Any = None
        self._pending: Any = None

    def start(self, has_fault: bool) -> None:
        """Call the hook; it may return a Work, a Future, a generator of them, or the result."""
        begun = self._hook(self._bucket)
        self._rounds = None
        if isinstance(begun, GeneratorType):
            self._rounds = begun
            self._resume()
        else:
            self._pending = begun

    def advance(self, has_fault: bool) -> bool:
        """Wait for the round that is under way, and begin the next; return whether there is more to do."""
        result = result_of(self._pending)
        if self._rounds is not None:
            self._resume()
            return True
        self._pending = None
        self._keep(result)
        return False

    def _resume(self) -> None:
        try:
            self._pending = next(self._rounds)
        except StopIteration as end:
            self._rounds, self._pending = None, end.value

    def _keep(self, result: Any) -> None:
        buffer = self._bucket.buffer()
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        if result is None or result is buffer:
            return
        what = f"{self._bucket.group.error_prefix('GradientReducer')}: hook {hook_name(self._hook)}"
        if getattr(result, "size", None) != buffer.size:
            raise ValueError(
                f"{what} must return the {buffer.size} elements of bucket {self._bucket.index()}, or a Work or Future"
                f" of them, got {result!r:.80}"
            )
        check_not_complex(result, buffer, f"{what}: the result")
        buffer[...] = result.reshape(-1)


def real_buffer(bucket: GradBucket, of: str) -> Any:
    """Return the buffer of a bucket whose gradients the hook `of` compresses.

    Raises:
        TypeError: They are complex.
    """
    buffer = bucket.buffer()
    if buffer.dtype.kind == "c":
        raise TypeError(
            f"{bucket.group.error_prefix(of)}: gradients of {buffer.dtype} cannot be compressed; make a reducer without"
            " this hook for them"
        )
    return buffer


def result_of(pending: Any) -> Any:
    """Wait for what a hook returned, or yielded, and return its result."""
    if hasattr(pending, "result"):  # a Work
        return pending.result()
    return pending.wait() if hasattr(pending, "wait") else pending
