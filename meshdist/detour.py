"""Detour: another way for the calls of one group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from meshdist.messages import Watcher

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective
    from meshdist.process_group import ProcessGroup

MessageTaker: TypeAlias = "Callable[[str, Callable[..., Any]], Callable[..., Any]]"
MESSAGE_CALLS = ("send", "recv", "isend", "irecv")


class Detour:
    """Leads the calls of a group to somebody else, or past somebody who looks at them.

    It puts a `submit` into the instance, which is found before the method of the class: calls that take no detour have
    nothing to look at.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._taker: Callable[..., Any] | None = None
        self._message_taker: MessageTaker | None = None
        self._watcher: Watcher | None = None

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

    def watch(self, watcher: Watcher | None) -> None:
        """Tell `watcher` of every call before it is made: where, what is sent, and what is received. None ends that.

        Calls that are watched compare the shapes of their arrays.
        """
        self._watcher = watcher
        self._group.compare_shapes(watcher is not None)
        self._lead()

    def _lead(self) -> None:
        self._group.__dict__.pop("submit", None)
        if self._taker is not None:
            self._group.submit = self._taker  # type: ignore[method-assign]
        elif self._watcher is not None:
            self._group.submit = self._past_watcher(self._watcher)  # type: ignore[method-assign]
        messages = self._group.messages
        messages.watch(self._watcher)  # which takes away what was put there
        if self._message_taker is not None:
            for name in MESSAGE_CALLS:
                setattr(messages, name, self._message_taker(name, getattr(messages, name)))

    def _past_watcher(self, watcher: Watcher) -> Callable[..., Any]:
        submit, where = self._group.submit, self._group.where

        def watched(collective: Collective[..., Any], send: Any, recv: Any, *rest: Any, **others: Any) -> Any:
            watcher(where(collective.name), send, recv)
            return submit(collective, send, recv, *rest, **others)

        return watched
