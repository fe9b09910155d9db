"""What a backend is made of, for those who write one; `meshdist.Backend.register_backend` makes it known.

An `Engine` carries out the calls of one group. It has `send` and `recv`, and every collective runs over them; or it has
methods named as the collectives that it does by itself, each of which takes a `Call` and returns a `Plan`; or both.
`Wrapper` is an engine around another one, which `make_engine` makes.
"""

from meshdist.backends.base import Backend as Engine
from meshdist.backends.base import BackendOptions, Incoming, Plan
from meshdist.backends.registry import make_engine
from meshdist.backends.wrapping import Wrapper
from meshdist.call import Call, num_bytes
from meshdist.waiting import Waitable

__all__ = ["BackendOptions", "Call", "Engine", "Incoming", "Plan", "Waitable", "Wrapper", "make_engine", "num_bytes"]
