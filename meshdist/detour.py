"""Detour: another way for the calls of one group, and those who watch them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from meshdist.call import Splits
    from meshdist.collectives.definition import Collective
    from meshdist.process_group import ProcessGroup

MessageTaker: TypeAlias = "Callable[[str, Callable[..., Any]], Callable[..., Any]]"
MESSAGE_CALLS = ("send", "recv", "isend", "irecv")


@dataclass(frozen=True)
class Announcement:
    """A call that a group is about to make, as the user made it: nothing of it is checked yet.

    Attributes:
        group: The group.
        name: What is called.
        collective: Its definition; None for a message.
        send: What this rank gives: an array, a list of arrays, or None.
        recv: What it gets, in the same forms.
        root: The source or destination, as a rank of the group; of a message the other side, None for any.
        splits: Rows to and rows from each rank, for an all_to_all_single with split sizes.
        is_prelude: It is the first part of a call that is announced again: of one of objects, their sizes.
    """

    group: ProcessGroup
    name: str
    collective: Collective[..., Any] | None
    send: Any
    recv: Any
    root: int | None = None
    splits: Splits | None = None
    is_prelude: bool = False

    @property
    def where(self) -> str:
        """Name, group and rank, as messages about the call begin."""
        return self.group.where(self.name)


# Told of a call before it is made. What it returns, if anything, is called once the call is made; of an async one, once
# it is on its way. A call that raises was not made.
Watcher: TypeAlias = "Callable[[Announcement], Callable[[], None] | None]"


class Recorder(Protocol):
    """Stands around the calls of groups to time them; unlike a watcher, it gets them as they come, which costs less."""

    def around_submit(self, group: ProcessGroup, submit: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called instead of `submit`, with its arguments, for every collective of a group."""

    def around_message(self, group: ProcessGroup, name: str, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called instead of `begin`, the function `name` of a group's messages."""


class Detour:
    """Leads the calls of a group to somebody else, or past those who look at them.

    It puts a `submit` into the instance, which is found before the method of the class: calls that take no detour have
    nothing to look at.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._taker: Callable[..., Any] | None = None
        self._watchers: tuple[Watcher, ...] = ()
        self._recorders: tuple[Recorder, ...] = ()
        self._message_taker: MessageTaker | None = None

    @contextmanager
    def redirect(self, taker: Callable[..., Any], message_taker: MessageTaker) -> Iterator[None]:
        """Have calls go to `taker`, with the arguments of `submit`, until the block ends.

        Args:
            taker: Takes the collectives.
            message_taker: Is given the name of each function of messages and what carries it out, and returns what is
                called instead.

        Raises:
            ValueError: They go elsewhere already.
        """
        if self._taker is not None:
            raise ValueError(
                f"{self._group!r}: a coalescing_manager of this group is open already; managers do not nest"
            )
        self._taker = taker
        self._message_taker = message_taker
        self._lead()
        try:
            yield
        finally:
            self._taker = self._message_taker = None
            self._lead()

    def watch(self, *watchers: Watcher) -> None:
        """Have these, and nobody else, be told of every call and every message."""
        self._watchers = watchers
        self._lead()

    def record(self, *recorders: Recorder) -> None:
        """Have these, and nobody else, stand around every call and every message."""
        self._recorders = recorders
        self._lead()

    def _lead(self) -> None:
        group = self._group
        group.__dict__.pop("submit", None)
        if self._taker is not None:
            group.submit = self._taker  # type: ignore[method-assign]
        else:
            if self._watchers:
                group.submit = self._past(self._watchers)  # type: ignore[method-assign]
            for recorder in self._recorders:
                group.submit = recorder.around_submit(group, group.submit)  # type: ignore[method-assign]
        messages = group.messages
        messages.watch(*self._watchers)  # which takes away what was put there
        for recorder in self._recorders:
            for name in MESSAGE_CALLS:
                setattr(messages, name, recorder.around_message(group, name, getattr(messages, name)))
        if self._message_taker is not None:
            for name in MESSAGE_CALLS:
                setattr(messages, name, self._message_taker(name, getattr(messages, name)))

    def _past(self, watchers: tuple[Watcher, ...]) -> Callable[..., Any]:
        group, submit = self._group, self._group.submit

        def watched(
            collective: Collective[..., Any],
            send: Any,
            recv: Any,
            op: Any = None,
            root: int | None = None,
            async_op: bool = False,
            splits: Splits | None = None,
            timeout_s: float | None = None,
        ) -> Any:
            announced = Announcement(
                group, collective.name, collective, send, recv, root, splits, collective.is_prelude
            )
            return told(
                watchers, announced, lambda: submit(collective, send, recv, op, root, async_op, splits, timeout_s)
            )

        return watched


def told(watchers: tuple[Watcher, ...], announced: Announcement, make: Callable[[], Any]) -> Any:
    """Return what `make` returns, which makes the call; the watchers are told before and after it."""
    afters = [watcher(announced) for watcher in watchers]
    result = make()
    for after in afters:
        if after is not None:
            after()
    return result
