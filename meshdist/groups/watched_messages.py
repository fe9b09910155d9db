"""WatchedMessages: the functions of a group's messages with observers, which see an exchange as one call."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from meshdist.groups.tags_and_probes import MessageGroup
from meshdist.runtime.hooks import CallInfo, CallObserver, notify_around, notify_at_the_end, parts_of
from meshdist.runtime.object_messages import ObjectMessage


class WatchedMessages:
    """Makes functions that notify the observers, of those of `MESSAGE_CALLS` and `EXCHANGE_CALLS`."""

    def __init__(self, observers: tuple[CallObserver, ...], group: MessageGroup) -> None:
        self._observers = observers
        self._group = group
        self._exchanging: set[int] = set()  # the threads in an exchange, whose messages are parts of it

    def message(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return `method`, the function `name`, with the observers."""

        def begin(
            tensor: Any, peer: int | None, tag: int, of: str = name, label: str = "", *, is_size_exchange: bool = False
        ) -> Any:
            given = (tensor, peer, tag, *((of,) if of != name or label else ()), *((label,) if label else ()))
            options = {"is_size_exchange": True} if is_size_exchange else {}  # isend and irecv have none
            if get_ident() in self._exchanging:
                return method(*given, **options)
            send, recv = (tensor, None) if "send" in name else (None, tensor)
            info = CallInfo(self._group, of, None, send, recv, peer, is_size_exchange=is_size_exchange)
            notify = notify_at_the_end if type(tensor) is ObjectMessage and name == "irecv" else notify_around
            return notify(self._observers, info, lambda: method(*given, **options))

        return begin

    def exchange(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return `method`, the function `name` that makes several messages, with the observers."""

        def exchange(*args: Any) -> Any:
            of, parts = parts_of(name, args)
            messages = [
                CallInfo(self._group, "isend", None, part.array, None, part.peer)
                if part.is_send
                else CallInfo(self._group, "irecv", None, None, part.array, part.peer)
                for part in parts
            ]
            sent = [part.array for part in parts if part.is_send]
            received = [part.array for part in parts if not part.is_send]
            info = CallInfo(self._group, of, None, sent, received, messages=tuple(messages))

            def make() -> Any:
                self._exchanging.add(get_ident())
                try:
                    return method(*args)
                finally:
                    self._exchanging.discard(get_ident())

            return notify_around(self._observers, info, make)

        return exchange
