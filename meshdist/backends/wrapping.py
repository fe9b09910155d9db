"""Wrapper: a backend that forwards every call to another one, to be overridden in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshdist.arrays.host import Array
from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.base import Backend, Plan
from meshdist.backends.registry import make_engine
from meshdist.errors import DistError
from meshdist.runtime.call import Call, Signature
from meshdist.runtime.device_calls import DeviceCalls
from meshdist.runtime.interfaces import OwnMessages
from meshdist.runtime.waiting import Incoming, Probe, Waitable
from meshdist.system.deadline import Deadline


class Wrapper(Backend):
    """A backend that wraps another one.

    Override `prepare` for the collectives, `send` and `recv` for the messages; `register_backend` takes what `around`
    returns.

    Args:
        inner: The backend that carries out the calls.
        options: The group, as for `inner`.
    """

    def __init__(self, inner: Backend, options: BackendOptions) -> None:
        super().__init__(options)
        self.inner = inner
        self.device_calls = inner.device_calls

    @classmethod
    def around(cls, name: str) -> Callable[[BackendOptions, Any], Wrapper]:
        """Return a function that creates a backend of this class around one of the backend `name`.

        `Backend.register_backend` takes it with `extended_api=True`.
        """
        return lambda options, pg_options: cls(make_engine(name, options), options)

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        return self.inner.send(array, dst, tag)

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        return self.inner.recv(array, src, tag)

    def probe(self, src: int | None, tag: int | None) -> Probe:
        return self.inner.probe(src, tag)

    def own_messages(self) -> OwnMessages | None:
        return self.inner.own_messages()

    def staged_calls(self) -> DeviceCalls:
        return self.inner.staged_calls()

    def check_in(self, signature: Signature) -> Iterator[Waitable]:
        return self.inner.check_in(signature)

    def meet(self, error_prefix: str, timeout_s: float, is_first: bool) -> None:
        self.inner.meet(error_prefix, timeout_s, is_first)

    def connect(self) -> Iterator[Waitable]:
        return self.inner.connect()

    def require(self, call: Call) -> None:
        self.inner.require(call)

    def prepare(self, call: Call) -> Plan:
        return self.inner.prepare(call)

    def wait(self, waitable: Waitable, error_prefix: str, deadline: Deadline | None = None) -> None:
        self.inner.wait(waitable, error_prefix, deadline)

    def give_up(self, error: DistError) -> None:
        if type(self).abort is Wrapper.abort:
            self.inner.give_up(error)
        else:
            self.abort(str(error))

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self.inner.close()
