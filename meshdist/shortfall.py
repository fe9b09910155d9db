"""Shortfall: who did not come to a meeting of ranks, in words."""

from __future__ import annotations

from collections.abc import Sequence

from meshdist.handshake import SECRET_VARIABLE
from meshdist.store import FileStore, PrefixStore, Store, TCPStore

_NAMED = 20


def shortfall(store: Store, world_size: int, missing: Sequence[int], when: str) -> str:
    """Return how many ranks came, which did not, and what to look at, for the message of a wait that was in vain.

    Args:
        store: Where they were to meet.
        world_size: The number of ranks.
        missing: Those that did not come; none where all came, but some gave up before the others were there.
        when: Until when, as in "within 2 s".

    Example:
        >>> from meshdist.store import HashStore
        >>> shortfall(HashStore(), 4, [1], "within 2 s")
        '3 of 4 ranks joined within 2 s; rank 1 is missing: was it started with this store?'
    """
    if not missing:
        return f"all {world_size} ranks came {when}, but not at one time: some gave up before the others were there"
    listed = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
    came = f"{world_size - len(missing)} of {world_size} ranks joined {when}"
    place = _place(store)
    if len(missing) == 1:
        return f"{came}; rank {listed} is missing: was it started with {place}?"
    return f"{came}; ranks {listed} are missing: were they started with {place}?"


def _place(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return f"this address and {SECRET_VARIABLE}"
    return "this file" if isinstance(store, FileStore) else "this store"
