"""Which ranks of a group share memory with this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshdist.backends.base import BackendOptions


def hosts_of(options: BackendOptions) -> list[list[int]]:
    """Return the ranks of a group by hosts: a list for each host, in the order of the first rank of each."""
    hosts: dict[str, list[int]] = {}
    for rank, card in enumerate(options.peers.cards(options.ranks)):
        hosts.setdefault(card.host, []).append(rank)
    return list(hosts.values())


def ranks_elsewhere(options: BackendOptions) -> frozenset[int]:
    """Return the ranks of a group that are on other hosts."""
    mine = options.peers.mine.host
    return frozenset(rank for rank, card in enumerate(options.peers.cards(options.ranks)) if card.host != mine)
