"""The last will of a rank: what the store says of it to ranks on other hosts, should it end without a word.

On its own host its process is watched. Elsewhere, who is connected to it learns of its end by that; who is not asks the
store, which notices that a connection of its has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdist.debug.log import RankLog
from meshdist.errors import DistError
from meshdist.farewell import DIED
from meshdist.store import PrefixStore, Store, TCPStore

if TYPE_CHECKING:
    from meshdist.peers import Peers

CUT_OFF = f"{DIED}, or was cut off from the store"

_TIMEOUT_S = 30.0
_log = RankLog()


def leave_will(peers: Peers, store: Store, rank: int) -> None:
    """Have the store say that a rank has died when it ends without leaving the world.

    Does nothing where all ranks are on one host, and where the store is in no process that would notice.

    Args:
        peers: What the rank knows of the others; the will is closed with it, after the rank has left.
        store: The world's store.
        rank: This rank.
    """
    if not peers.are_elsewhere():
        return
    key = f"left/{rank}"
    while isinstance(store, PrefixStore):
        key, store = f"{store.prefix}/{key}", store.underlying_store
    if not isinstance(store, TCPStore) or store.is_master:
        return
    try:
        # A connection of its own, for nothing else: others of the store come and go.
        client = TCPStore(store.host, store.port, timeout=_TIMEOUT_S)
        client.bequeath({key: CUT_OFF})
    except DistError as error:
        _log.warning("ranks on other hosts may learn late of the end of this one: %s", error)
        return
    peers.once("last will", lambda: client)
