"""Withdrawal: a rank says in a group's store that it will take no part in it, for those who wait for it there."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from meshdist.backends.base import withdrawn_key
from meshdist.errors import DistError
from meshdist.limits import start_thread

if TYPE_CHECKING:
    from meshdist.backends.base import BackendOptions

# How long it waits for the store to have heard of it: the process that holds the store may be stopped.
_HEARD_S = 0.5


def withdraw(options: BackendOptions, rank: int, what: str) -> None:
    """Say in the store what becomes of this rank; what it said first stands. It takes a moment at most."""

    def tell() -> None:
        # Where there is no store any more, nobody waits either.
        with suppress(DistError):
            options.store.compare_set(withdrawn_key(rank), "", what)

    thread = threading.Thread(target=tell, name="meshdist-withdraw", daemon=True)
    try:
        start_thread(thread)
    except DistError:
        tell()
    else:
        thread.join(_HEARD_S)
