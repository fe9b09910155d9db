"""The compiled core: calls of few bytes that were made before, sync and async, without Python on their way; optional.

`MESHDIST_CORE` chooses: `auto` (the default) takes the core where it was built, `python` does without, `require` raises
where it is missing. What it does is written in Python as well, which is the reference: the flag barrier, the plans of
one step and of chunks, the fast path of messages, `ProcessGroup.submit`, and the progress of async calls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

VARIABLE = "MESHDIST_CORE"
"""Whether to use the compiled core: auto, python or require."""

_CHOICES = ("auto", "python", "require")
# What this package and the module expect of each other; the same number stands in module.c.
_INTERFACE = 41

T = TypeVar("T")


class PlainCalls:
    """The numbers of a group's calls; what `Calls` is without the core.

    Attributes:
        num_calls, num_messages: How many collectives, and sends and receives, this rank has called.
        num_waits: How many threads wait in the core, where they take the messages of deferred receives.
        is_open: Whether the group has no hooks.
        words: What the ranks compare in the calls of now besides their arrays; see `CallHooks.comparing`.
        forgotten: How many works were dropped that the user has not asked, and the record of the first, or None.
        note: None: nothing learns what carried a call out.
    """

    note: Callable[..., None] | None = None

    def __init__(self, queue: Any, deferral: Any, announcing: Any, keep: Any, fail: Any, make_job: Any) -> None:
        self.num_calls = self.num_messages = self.num_waits = 0
        self.is_open = True
        self.words = ""
        self.forgotten: list[Any] = [0, None]

    def forget(self) -> None:
        return


class PlainRecord:
    """What the flight recorder keeps of a call; what `Record` is without the core.

    Attributes:
        facts: What all calls like it have in common; see `flight_recorder.facts_in`.
        sequence: The number of the call in its group.
        created, started, completed: When it was, by `flight_recorder.clock`; 0 for not yet.
        code, instruction: Where the user's code made the call.
        error: In words, if it failed; else None.
        peer: The end of the peer that caused the error, or None.
    """

    __slots__ = ("code", "completed", "created", "error", "facts", "instruction", "peer", "sequence", "started")

    def __init__(self, facts: Any, sequence: int, created: int, started: int, code: CodeType, instruction: int) -> None:
        self.facts, self.sequence = facts, sequence
        self.created, self.started, self.completed = created, started, 0
        self.code, self.instruction = code, instruction
        self.error: str | None = None
        self.peer: Any = None


class PlainHandle:
    """What a Work consists of; what `Handle` is without the core, which has the same and more.

    Attributes:
        forgotten: That of the group's Calls, until the user asks whether the call is done; None if that need not be.
    """

    __slots__ = (
        "_callbacks", "_error", "_error_prefix", "_is_done", "_observer", "_value", "_was_awaited", "forgotten", "kind",
        "queue", "record", "source",
    )  # fmt: skip

    forgotten: list[Any] | None
    record: Any

    def __del__(self) -> None:
        try:
            forgotten = self.forgotten
        except AttributeError:  # it was not made
            return
        if forgotten is not None:
            count, first = forgotten
            is_older = first is None or self.record.created < first.created
            forgotten[:] = count + 1, self.record if is_older else first


class PlainCountdown:
    """A number that several calls count down."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


def _choice() -> str:
    return os.environ.get(VARIABLE) or "auto"


def _problem_of_choice() -> str:
    return "" if _choice() in _CHOICES else f"{VARIABLE} must be one of {', '.join(_CHOICES)}, got {_choice()!r}"


def _load() -> tuple[Any, str]:
    # The module, and in words why there is none.
    if problem := _problem_of_choice():  # raised by what starts a world
        return None, problem
    if _choice() == "python":
        return None, f"{VARIABLE}=python"
    try:
        module: Any = import_module("meshdist.core._core")
    except ImportError as error:
        why = "it was not built" if isinstance(error, ModuleNotFoundError) else f"it cannot be loaded: {error}"
    else:
        if module.INTERFACE == _INTERFACE:
            return module, ""
        why = "it was built from another version; install meshdist again"
    return None, why


module, missing = _load()
"""The module, or None; then `missing` says why."""


def check_choice() -> None:
    """Check that `MESHDIST_CORE` has one of its values, and that its choice is there.

    Raises:
        ValueError: It has another value.
        ImportError: It is `require`, and there is no core.
    """
    if problem := _problem_of_choice():
        raise ValueError(problem)
    if module is None and _choice() == "require":
        raise ImportError(f"{VARIABLE}=require, but there is no compiled core: {missing}")


def status() -> str:
    """Return in words whether the core is used."""
    return f"not used: {missing}" if module is None else f"used ({module.COMPILER})"


if TYPE_CHECKING:
    from meshdist.core._core import (
        Barrier,
        Calls,
        Chosen,
        Chunks,
        Countdown,
        DeferringLock,
        Exchange,
        Function,
        Handle,
        Inbox,
        ObjectSender,
        Record,
        Ring,
        SingleCopy,
        Step,
        Stream,
        TryLock,
    )
elif module is None:
    Function, Calls, Barrier, Ring, Step = partial, PlainCalls, None, None, None
    Chunks, Stream, SingleCopy, Inbox, ObjectSender, Exchange = None, None, None, None, None, None
    Handle, TryLock, Record = PlainHandle, threading.Lock, PlainRecord
    Chosen, Countdown, DeferringLock = None, PlainCountdown, None
else:
    Function, Calls, Barrier, Ring, Step = module.Function, module.Calls, module.Barrier, module.Ring, module.Step
    Handle, TryLock, Stream, SingleCopy = module.Handle, module.TryLock, module.Stream, module.SingleCopy
    Record, Chosen, Countdown = module.Record, module.Chosen, module.Countdown
    DeferringLock = module.DeferringLock
    Inbox, ObjectSender, Exchange, Chunks = module.Inbox, module.ObjectSender, module.Exchange, module.Chunks


def compare_by_identity(kind: type[T]) -> type[T]:
    """Let arguments of a type be told by identity where a call is compared with an earlier one; a decorator."""
    return kind if module is None else module.compare_by_identity(kind)


def explain_type_errors(explain: Callable[[Callable[..., Any], TypeError], object]) -> None:
    """Have `explain(function, error)` add to the message of a TypeError of a Function; nothing without the core."""
    if module is not None:
        module.explain_type_errors(explain)


def world_changed() -> None:
    """Functions without a group run over another one from now on."""
    if module is not None:
        module.world_changed()


def begin_sleep() -> None:
    """This rank sleeps until it waits the next time; see `spread_ranks`."""
    if module is not None:
        module.begin_sleep()


def use_many_worlds(slots: ContextVar[Any]) -> None:
    """Threads may have worlds of their own from now on; `slots` has what tells them apart."""
    if module is not None:
        module.use_many_worlds(slots)


__all__ = [
    "Barrier",
    "Calls",
    "Chosen",
    "Chunks",
    "Countdown",
    "DeferringLock",
    "Exchange",
    "Function",
    "Handle",
    "Inbox",
    "ObjectSender",
    "Record",
    "Ring",
    "SingleCopy",
    "Step",
    "Stream",
    "TryLock",
    "begin_sleep",
    "compare_by_identity",
    "explain_type_errors",
    "missing",
    "module",
    "status",
    "use_many_worlds",
    "world_changed",
]


def __dir__() -> list[str]:
    return sorted(__all__)
