"""Assign numbers and ranks to the hosts of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class NodeCard(NamedTuple):
    """The description of a host that its launcher puts into the store."""

    host: str
    num_ranks: int  # number of ranks it starts
    # As given to the launcher: the number of hosts, the number of this one (None for any), and the job's name.
    num_nodes: int
    node: int | None = None
    run_id: str | None = None
    version: str = ""  # its version of meshdist
    least_nodes: int | None = None  # the fewest hosts of an elastic job, of which `num_nodes` is the most

    @property
    def nnodes(self) -> str:
        """The numbers of hosts as --nnodes has them."""
        return str(self.num_nodes) if self.least_nodes is None else f"{self.least_nodes}:{self.num_nodes}"

    def encode(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def decode(cls, text: bytes) -> NodeCard:
        return cls(**json.loads(text))


class Plan(NamedTuple):
    """The agreement of the launchers on one start of the ranks. A launcher is known by how many came before it."""

    launchers: Sequence[int] = ()  # the launcher of each host, by the number of the host
    num_ranks: Sequence[int] = ()  # number of ranks on each host, by its number
    hosts: Sequence[str] = ()  # the names of the hosts, by number
    run_id: str = ""
    nonce: str = ""  # tells this run from others with the same secret
    max_restarts: int = 0  # how often all ranks are restarted after a failure
    num_failed_starts: int = 0  # how often they were
    leader: int = 0  # the launcher that keeps the stores
    problem: str = ""  # why there is no job, empty if there is one

    @property
    def world_size(self) -> int:
        return sum(self.num_ranks)

    def first_rank(self, node: int) -> int:
        """Return the first rank of a host; the others of that host follow."""
        return sum(self.num_ranks[:node])

    def encode(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def decode(cls, text: bytes) -> Plan:
        return cls(**json.loads(text))


def check_card(card: NodeCard, mine: NodeCard) -> None:
    """Check that the launchers of `card` and `mine` were given the same job.

    Raises:
        ValueError: They were not; the message names the difference.
    """
    for name, option in (("nnodes", "--nnodes"), ("run_id", "--rdzv-id"), ("version", "the version of meshdist")):
        theirs, ours = getattr(card, name), getattr(mine, name)
        if theirs != ours:
            raise ValueError(f"the hosts disagree on {option}: {mine.host} has {ours}, {card.host} has {theirs}")
    if card.node is not None and not 0 <= card.node < mine.num_nodes:
        raise ValueError(f"--node-rank on {card.host} must be 0 to {mine.num_nodes - 1}, got {card.node}")


def order_launchers(cards: Mapping[int, NodeCard], before: Sequence[int], leader: int, most: int) -> list[int]:
    """Return the launchers of at most `most` hosts of an elastic job, in the order of the hosts' numbers.

    Those of the start `before` have precedence, then those that came first. Hosts are ordered by the numbers that the
    user gave, which need not be without gaps; hosts without one keep their order, and new ones follow.
    """
    place = {launcher: number for number, launcher in enumerate(before)}
    known = [leader, *(launcher for launcher in before if launcher != leader and launcher in cards)]
    chosen = [*known, *sorted(set(cards) - set(known))][:most]

    def order(launcher: int) -> tuple[float, int, bool, int]:
        given = cards[launcher].node
        return float("inf") if given is None else given, place.get(launcher, most), launcher != leader, launcher

    return sorted(chosen, key=order)


def number_nodes(cards: Sequence[NodeCard], leader: int) -> list[int]:
    """Return the number of each host, for cards in order of arrival.

    Numbers that the user gave are kept. The leader, which keeps the store, gets the lowest free number, so that rank 0
    is beside the store; the others follow in order of arrival.

    Raises:
        ValueError: Two were given the same number.
    """
    given: dict[int, int] = {}
    for index, card in enumerate(cards):
        if card.node is not None and given.setdefault(card.node, index) != index:
            first = cards[given[card.node]].host
            raise ValueError(f"two launchers were given --node-rank {card.node}, on {first} and on {card.host}")
    free = iter([node for node in range(len(cards)) if node not in given])
    order = sorted(range(len(cards)), key=lambda index: (index != leader, index))
    assigned = {index: next(free) for index in order if cards[index].node is None}
    return [assigned.get(index, card.node if card.node is not None else -1) for index, card in enumerate(cards)]
