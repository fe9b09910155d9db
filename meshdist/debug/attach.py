"""attach: what the ranks of a running job are in, asked for from outside by whoever has the job's secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from meshdist.debug.reach import StoreReach
from meshdist.debug.states import RankSeen
from meshdist.errors import DistError
from meshdist.peers import Peers, my_card
from meshdist.store import PrefixStore, Store, TCPStore

_CARD = re.compile(r"(?P<world>(?:.*/)?world/\d+)/card/0")
CONNECT_S = 10.0
_ANSWER_S = 2.0


class Found(NamedTuple):
    """What is known of the ranks of a job.

    Attributes:
        states: Of the ranks that answered, by rank.
        gone: What became of those that are gone.
        world_size: The number of ranks.
    """

    states: Mapping[int, RankSeen]
    gone: Mapping[int, str]
    world_size: int


def attach(address: str, budget_s: float = _ANSWER_S) -> Found:
    """Return what the ranks of a job are in; the job goes on as if nothing had been asked.

    Ranks that wait for long have left word in the store. Those that compute are asked by a signal, so they must be on
    this host, and in Python code: what waits for a library that does not come back cannot answer.

    Args:
        address: Of the job's store, "host:port"; MASTER_ADDR and MASTER_PORT of the ranks. The secret comes from the
            environment, as for the ranks.
        budget_s: How long to wait for answers.

    Raises:
        ValueError: `address` is none.
        DistNetworkError: There is no store, or it is of another job.
        DistError: No world has begun there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"the store's address must be host:port, as in 127.0.0.1:29500, got {address!r}")
    with TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=CONNECT_S) as store:
        world = _latest_world(store, address)
        size = int(world.get("world_size"))
        reach = StoreReach(world, Peers(world, my_card(""), size), None)
        states, gone = reach.gather(budget_s)
        return Found(states, gone, size)


def _latest_world(store: Store, address: str) -> Store:
    found = [match for key in store.list_keys() if (match := _CARD.fullmatch(key))]
    # Restarts and later worlds come after earlier ones, and have higher numbers.
    names = sorted(
        {match["world"] for match in found}, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]
    )
    if not names:
        raise DistError(f"the store at {address} has no world: no rank has called init_process_group there yet")
    return PrefixStore(names[-1], store)
