"""Where shrunk worlds are in a store: each in a part of that of the world that it came of, where all can find it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from meshdist.peers import Card, Peers
from meshdist.store import PrefixStore, Store

_KEPT = "kept"
_PART = "shrunk"


def shrunk_store(store: Store, keep: Sequence[int]) -> Store:
    """Return the store of a world that is shrunk to some of its ranks; they stand there for those who look for it.

    Args:
        store: That of the world that is shrunk.
        keep: The ranks that stay, by their numbers before, in their new order.

    Raises:
        DistError: The store is gone.
    """
    part = PrefixStore(_PART, store)
    part.set(_KEPT, json.dumps(list(keep)))
    return part


def worlds_in(store: Store, card: Card) -> list[tuple[Store, Peers]]:
    """Return the world in a store, and those that it was shrunk to one after the other, each with its processes.

    Args:
        store: That of the first of these worlds.
        card: This process's own.

    Raises:
        DistError: The store is gone.
    """
    found = [(store, Peers(store, card, int(store.get("world_size"))))]
    while True:
        world, peers = found[-1]
        part = PrefixStore(_PART, world)
        if not part.check([_KEPT]):
            return found
        found.append((part, peers.renumbered(json.loads(part.get(_KEPT)), part)))
