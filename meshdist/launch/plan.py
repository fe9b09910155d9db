"""Which host of a job gets which number, and which ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple


class NodeCard(NamedTuple):
    """What the launcher on one host says of it.

    Attributes:
        host: Its name.
        num_ranks: How many ranks it starts.
        num_nodes: How many hosts it was told that there are.
        node: The number that it was told to have, None for any.
        run_id: The job that it was told to join.
        version: The version of meshdist there.

    Example:
        >>> NodeCard.decode(NodeCard("node1", num_ranks=8, num_nodes=2).encode()).host
        'node1'
    """

    host: str
    num_ranks: int
    num_nodes: int
    node: int | None = None
    run_id: str | None = None
    version: str = ""

    def encode(self) -> str:
        """Return the card as it stands in the store."""
        return json.dumps(self._asdict())

    @classmethod
    def decode(cls, text: bytes) -> NodeCard:
        """Return the card that `encode` made `text` of."""
        return cls(**json.loads(text))


class Plan(NamedTuple):
    """What the launchers have agreed on.

    Attributes:
        nodes: The number of each host, in the order in which their launchers came.
        num_ranks: How many ranks each host starts, by its number.
        hosts: The names of the hosts, by number.
        run_id: Names the job.
        nonce: What tells this run from others with the same secret.
        max_restarts: How often failed ranks are started again.
        leader: The number of the host whose launcher keeps the stores.
        problem: Why there is no job instead of all that, empty if there is one.

    Example:
        >>> plan = Plan(nodes=[1, 0], num_ranks=[4, 2], hosts=["b", "a"], run_id="x", nonce="n", max_restarts=0)
        >>> plan.first_rank(1), plan.world_size
        (4, 6)
    """

    nodes: Sequence[int] = ()
    num_ranks: Sequence[int] = ()
    hosts: Sequence[str] = ()
    run_id: str = ""
    nonce: str = ""
    max_restarts: int = 0
    leader: int = 0
    problem: str = ""

    @property
    def world_size(self) -> int:
        """The number of ranks, on all hosts."""
        return sum(self.num_ranks)

    def first_rank(self, node: int) -> int:
        """Return the first rank of a host; the others of that host follow."""
        return sum(self.num_ranks[:node])

    def encode(self) -> str:
        """Return the plan as it stands in the store."""
        return json.dumps(self._asdict())

    @classmethod
    def decode(cls, text: bytes) -> Plan:
        """Return the plan that `encode` made `text` of."""
        return cls(**json.loads(text))


def check_card(card: NodeCard, mine: NodeCard) -> None:
    """Check that the launcher of `card` was told the same job as this one, `mine`.

    Raises:
        ValueError: It was not; says what differs.
    """
    for name, option in (("num_nodes", "--nnodes"), ("run_id", "--rdzv-id"), ("version", "the version of meshdist")):
        theirs, ours = getattr(card, name), getattr(mine, name)
        if theirs != ours:
            raise ValueError(f"the hosts disagree on {option}: {mine.host} says {ours}, {card.host} says {theirs}")
    if card.node is not None and not 0 <= card.node < mine.num_nodes:
        raise ValueError(f"--node-rank on {card.host} must be 0 to {mine.num_nodes - 1}, got {card.node}")


def number_nodes(cards: Sequence[NodeCard], leader: int) -> list[int]:
    """Return the number of each host, `cards` being in the order in which they came.

    Who was told a number has it. The others get those that are left: first the leader, who keeps the store and so has
    rank 0 beside it, then in the order in which they came.

    Raises:
        ValueError: Two were told the same number.

    Example:
        >>> number_nodes([NodeCard("a", 1, 3), NodeCard("b", 1, 3), NodeCard("c", 1, 3, node=1)], leader=1)
        [2, 0, 1]
    """
    told: dict[int, int] = {}
    for index, card in enumerate(cards):
        if card.node is not None and told.setdefault(card.node, index) != index:
            first = cards[told[card.node]].host
            raise ValueError(f"two launchers were given --node-rank {card.node}, on {first} and on {card.host}")
    free = iter([node for node in range(len(cards)) if node not in told])
    order = sorted(range(len(cards)), key=lambda index: (index != leader, index))
    assigned = {index: next(free) for index in order if cards[index].node is None}
    return [assigned.get(index, card.node if card.node is not None else -1) for index, card in enumerate(cards)]
