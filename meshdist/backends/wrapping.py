"""Wrapper: an engine that hands every call on to another, to be overridden in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshdist.arrays import Array
from meshdist.backends.base import Backend, BackendOptions, Incoming, Plan
from meshdist.backends.registry import make_engine
from meshdist.call import Call, Signature
from meshdist.deadline import Deadline
from meshdist.device_calls import DeviceCalls
from meshdist.waiting import Waitable


class Wrapper(Backend):
    """An engine around another one.

    Override `prepare` for the collectives, `send` and `recv` for the messages; `register_backend` takes what `around`
    returns.

    Args:
        inner: The engine that carries out the calls.
        options: What the group is, the same that `inner` was made from.
    """

    def __init__(self, inner: Backend, options: BackendOptions) -> None:
        super().__init__(options)
        self.inner = inner
        self.device_calls = inner.device_calls

    @classmethod
    def around(cls, name: str) -> Callable[[BackendOptions, Any], Wrapper]:
        """Return what makes an engine of this class around one of the backend `name`.

        It is what `Backend.register_backend` takes with `extended_api=True`.
        """
        return lambda options, pg_options: cls(make_engine(name, options), options)

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        return self.inner.send(array, dst, tag)

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        return self.inner.recv(array, src, tag)

    def staged_calls(self) -> DeviceCalls:
        return self.inner.staged_calls()

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        return self.inner.check_in(signature)

    def connect(self) -> Iterator[Waitable]:
        return self.inner.connect()

    def require(self, call: Call) -> None:
        self.inner.require(call)

    def prepare(self, call: Call) -> Plan:
        return self.inner.prepare(call)

    def wait(self, waitable: Waitable, where: str, deadline: Deadline | None = None) -> None:
        self.inner.wait(waitable, where, deadline)

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self.inner.close()
