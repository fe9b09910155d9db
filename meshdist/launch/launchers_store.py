"""The store of the launchers: how they wait in it, leave it, and tell each other that they are gone.

A launcher is known by its number: how many came before it. Its keys are `card/<number>`, what it starts;
`seat/<number>`, with which start of the ranks it begins, or why it does not; and `done/<number>`, once it has left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from meshdist.errors import DistStoreError
from meshdist.launch.interrupts import Interrupts
from meshdist.store import Store
from meshdist.system.deadline import Deadline

_SLICE_S = 0.25


class SignalledError(Exception):
    """A signal to the launcher ended a wait."""


class JobEndedError(Exception):
    """The job has ended before this launcher got a place in it; `status` is that of the job."""

    def __init__(self, status: int) -> None:
        super().__init__("the job has ended before this host got a place in it")
        self.status = status


def await_key(store: Store, key: str, interrupts: Interrupts, deadline: Deadline) -> None:
    await_all(store, [key], interrupts, deadline)


def await_all(store: Store, keys: Sequence[str], interrupts: Interrupts, deadline: Deadline) -> None:
    """Wait until all `keys` are in the store.

    Raises:
        SignalledError: A signal came.
        DistStoreError: Some keys were missing at the deadline.
        DistNetworkError: The store is gone.
    """
    while True:
        try:
            store.wait(keys, deadline.slice_s(_SLICE_S))
            return
        except DistStoreError:
            if interrupts.pending():
                raise SignalledError from None
            if deadline.expired():
                raise


def arrived(store: Store) -> list[int]:
    """Return the launchers that have come, those that have left again among them."""
    return [number for number in range(store.add("num_launchers", 0)) if store.check([f"card/{number}"])]


def has_left(store: Store, number: int) -> bool:
    return store.check([_done_key(number)])


def sign_off(store: Store, number: int) -> None:
    """Report that launcher `number` needs the store no longer."""
    store.set(_done_key(number), "")


def last_will(number: int) -> dict[str, str]:
    """Return the keys to set in the store if launcher `number` disconnects before `sign_off`."""
    return {_done_key(number): ""}


def await_sign_offs(store: Store, numbers: Sequence[int], timeout_s: float) -> None:
    """Keep the store until these launchers have signed off or disconnected, or until the deadline."""
    with contextlib.suppress(DistStoreError):
        store.wait([_done_key(number) for number in numbers], timeout_s)


def seat_key(number: int) -> str:
    return f"seat/{number}"


def ranks_secret(launchers_secret: bytes, nonce: str, start: int) -> str:
    """Return the secret of one start of the ranks, derived from the launchers' own, so that it is not sent."""
    import hmac  # with OpenSSL

    return hmac.digest(launchers_secret, f"ranks of {nonce}, start {start}".encode(), "sha256").hex()


def _done_key(number: int) -> str:
    return f"done/{number}"
