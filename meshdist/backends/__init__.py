"""The interface for writing a backend; `meshdist.Backend.register_backend` registers one.

An `Engine` carries out the calls of one group on one rank. It has `send` and `recv`, over which every collective can
run; or methods named after the collectives that it implements itself, each of which takes a `Call` and returns a
`Plan`; or both. A `Wrapper` forwards to another `Engine`, which `make_engine` creates.
"""

from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.base import Backend as Engine
from meshdist.backends.base import Plan
from meshdist.backends.registry import make_engine
from meshdist.backends.wrapping import Wrapper
from meshdist.runtime.call import Call, num_bytes
from meshdist.runtime.waiting import Incoming, Waitable

__all__ = ["BackendOptions", "Call", "Engine", "Incoming", "Plan", "Waitable", "Wrapper", "make_engine", "num_bytes"]


def __dir__() -> list[str]:
    return sorted(__all__)
