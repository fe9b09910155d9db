"""Requests to a TCPStore that may not take long.

The deadline of a request is that of its call, and in a block under `brief` that of the block, if this ends earlier. A
call that fails since a peer cannot be reached leaves a record in the store, which may be behind the same cut. Waiting
until that is noticed as well would double the time until the caller gets the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from meshdist.system.deadline import Deadline

_bound: ContextVar[Deadline | None] = ContextVar("meshdist_store_bound", default=None)
# So that a request can still be sent, which the server carries out without a client that waits.
_LEAST_S = 0.05


@contextmanager
def brief(timeout_s: float) -> Iterator[None]:
    """Let the calls of a TCPStore in this block take at most `timeout_s` altogether; then they raise DistStoreError."""
    token = _bound.set(Deadline(timeout_s))
    try:
        yield
    finally:
        _bound.reset(token)


def bounded(deadline: Deadline) -> Deadline:
    """Return the deadline of a request, which is that of the block if this ends earlier."""
    bound = _bound.get()
    if bound is None or bound.end_s > deadline.end_s:
        return deadline
    return Deadline(max(bound.remaining_s(), _LEAST_S))
