"""The ranks of a group by host."""

from __future__ import annotations

from meshdist.backends.base import BackendOptions


def hosts_of(options: BackendOptions) -> list[list[int]]:
    """Return the ranks of each host, hosts in the order of their first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, card in enumerate(options.peers.cards(options.ranks)):
        hosts.setdefault(card.host, []).append(rank)
    return list(hosts.values())


def remote_ranks(options: BackendOptions) -> frozenset[int]:
    mine = options.peers.mine.host
    return frozenset(rank for rank, card in enumerate(options.peers.cards(options.ranks)) if card.host != mine)
