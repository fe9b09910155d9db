"""attach: what the ranks of a running job are in, asked for from outside by whoever has the job's secret."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshdist.debug.reach import StoreReach
from meshdist.debug.states import RankSeen
from meshdist.debug.story import in_words
from meshdist.errors import DistError, DistNetworkError
from meshdist.handshake import SECRET_VARIABLE, OtherJobError, secret_from_environment
from meshdist.peers import Peers, my_card
from meshdist.secret_file import SECRET_FILE_VARIABLE
from meshdist.shrunk_worlds import worlds_in
from meshdist.store import PrefixStore, Store, TCPStore

_CARD = re.compile(r"(?P<world>(?:.*/)?world/\d+)/card/0")
CONNECT_S = 10.0
_ANSWER_S = 5.0  # on a machine that is busy; those who answer at once cost no more


class Found(NamedTuple):
    """What is known of the ranks of a job.

    Attributes:
        states: Of the ranks that answered, by rank.
        gone: What became of those that are gone.
        world_size: The number of ranks.
        joined_as: The numbers that the ranks of a shrunk world had when they joined, in the order of those that they
            have now; empty where the world was not shrunk.
    """

    states: Mapping[int, RankSeen]
    gone: Mapping[int, str]
    world_size: int
    joined_as: Sequence[int] = ()

    def note(self) -> str:
        """Return what is to be known of the numbers of the ranks; empty where these are as they joined."""
        if not self.joined_as:
            return ""
        numbers = ", ".join(map(str, self.joined_as))
        return f"The world was shrunk: its ranks 0 to {self.world_size - 1} joined as ranks {numbers}.\n"


def attach(address: str, budget_s: float = _ANSWER_S) -> Found:
    """Return what the ranks of a job are in; the job goes on as if nothing had been asked.

    Of a world that was shrunk, that is what is left of it, under the numbers that its ranks have now. Ranks that are to
    stay and have not called `shrink_group` yet are told of as gone, with what they are in.

    Ranks that wait for long have left word in the store. Those that compute are asked by a signal, so they must be on
    this host, and in Python code: what waits for a library that does not come back cannot answer.

    Args:
        address: Of the job's store, "host:port"; MASTER_ADDR and MASTER_PORT of the ranks. The secret comes from the
            environment, as for the ranks.
        budget_s: How long to wait for answers.

    Raises:
        ValueError: `address` is none.
        DistNetworkError: There is no store, or the job has another secret.
        DistError: No world has begun there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"the store's address must be host:port, as in 127.0.0.1:29500, got {address!r}")
    try:
        store = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=CONNECT_S)
    except OtherJobError:
        raise _no_secret(address) from None
    with store:
        world = _latest_world(store, address)
        *before, (last, peers) = worlds_in(world, my_card(""))
        states, gone = StoreReach(last, peers, None).gather(budget_s)
        joined_as = [peers.joined_as(rank) for rank in range(peers.num_ranks)] if before else []
        there = [
            rank for rank in range(peers.num_ranks) if rank in states or peers.farewell_of(rank) or peers.ended(rank)
        ]
        if before and len(there) < peers.num_ranks:
            late = sorted({*range(peers.num_ranks)} - {*there})
            gone = {**gone, **_not_yet_there(before[-1], peers, late, budget_s)}
        return Found(states, gone, peers.num_ranks, joined_as)


def _no_secret(address: str) -> DistNetworkError:
    given = (
        f"{SECRET_VARIABLE} here is not that of" if secret_from_environment() else f"{SECRET_VARIABLE} is missing for"
    )
    return DistNetworkError(
        f"the store at {address} lets nobody in without the job's secret, and {given} the job: give --pid PID of one of"
        f" its ranks on this host, or set {SECRET_VARIABLE} or {SECRET_FILE_VARIABLE} as its ranks have it"
    )


def _not_yet_there(before: tuple[Store, Peers], peers: Peers, late: Sequence[int], budget_s: float) -> dict[int, str]:
    """Return what some ranks of a shrunk world are in that are still in the world before."""
    store, all_peers = before
    joined_as = {peers.joined_as(rank): rank for rank in late}
    rank_now = {
        rank: joined_as[all_peers.joined_as(rank)]
        for rank in range(all_peers.num_ranks)
        if all_peers.joined_as(rank) in joined_as
    }
    found, _ = StoreReach(store, all_peers, None).gather(budget_s, list(rank_now))
    return {
        rank_now[rank]: f"has not come to shrink_group: as rank {rank}, {in_words(state)[0]}"
        for rank, state in found.items()
    }


def _latest_world(store: Store, address: str) -> Store:
    found = [match for key in store.list_keys() if (match := _CARD.fullmatch(key))]
    # Restarts and later worlds come after earlier ones, and have higher numbers.
    names = sorted(
        {match["world"] for match in found}, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]
    )
    if not names:
        raise DistError(f"the store at {address} has no world: no rank has called init_process_group there yet")
    return PrefixStore(names[-1], store)
