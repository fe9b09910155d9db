"""Costs of collective algorithms: rounds of messages on the routes between ranks.

`n` is the size of the group. The bytes of a call are those of its larger side on one rank: the array of all_reduce,
broadcast and reduce, the output of all_gather, the input of reduce_scatter and all_to_all, the list on the root of
gather and scatter.

- ring: a chunk travels around the group in n - 1 rounds of 1/n of the bytes; twice for all_reduce. It is optimal in
  bytes (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
- tree: binomial trees for broadcast, reduce, gather and scatter; recursive halving and doubling for all_gather,
  reduce_scatter and all_reduce (Rabenseifner), with shifts of 1, 2, 4, ... as in Bruck's algorithm, so that n may be
  any number; rounds and bytes are the same (Thakur, Rabenseifner and Gropp, "Optimization of collective communication
  operations in MPICH", 2005).
- doubling: all_reduce of all bytes in log2 n rounds, best for small messages (the same paper, 4.5).
- hierarchical: inside each host first or last, and between hosts along the rails, which connect the members of equal
  index in their hosts. Only for groups with the same number of members, at least two, on each of several hosts.

Arithmetic is free in the model; measured curves include it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from meshdist.collectives.registry import dataflow_of, sampled_rounds
from meshdist.topology.contention import NOTHING, Cost, Routes

if TYPE_CHECKING:
    from meshdist.mesh.layout.rank_list import Ranks

Algorithm = Callable[[Routes, "Ranks"], "Cost | None"]


def _shift(routes: Routes, groups: Ranks, distance: int) -> Cost:
    return routes.round(groups, np.roll(groups, -distance, axis=1))


def _distances(size: int) -> list[int]:
    return [1 << power for power in range((size - 1).bit_length())]


def ring_pass(routes: Routes, groups: Ranks) -> Cost:
    """All_gather or reduce_scatter by a ring."""
    size = groups.shape[1]
    return _shift(routes, groups, 1).times(size - 1, 1 / size)


def doubling_pass(routes: Routes, groups: Ranks) -> Cost:
    """All_gather by recursive doubling, or reduce_scatter by recursive halving."""
    size = groups.shape[1]
    cost = NOTHING
    for distance in _distances(size):
        cost = cost.then(_shift(routes, groups, distance).times(1, min(distance, size - distance) / size))
    return cost


def ring_all_reduce(routes: Routes, groups: Ranks) -> Cost:
    return ring_pass(routes, groups).times(2, 1)


def halving_doubling(routes: Routes, groups: Ranks) -> Cost:
    return doubling_pass(routes, groups).times(2, 1)


def recursive_doubling(routes: Routes, groups: Ranks) -> Cost:
    """Exchange all bytes with partners at distances 1, 2, 4, ...; ranks beyond a power of two fold into others."""
    size = groups.shape[1]
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    cost = NOTHING
    if extra:
        folding = routes.round(groups[:, power:], groups[:, :extra])
        cost = folding.then(routes.round(groups[:, :extra], groups[:, power:]))
    core = groups[:, :power]
    for distance in _distances(power):
        cost = cost.then(routes.round(core, core[:, np.arange(power) ^ distance]))
    return cost


def binomial(routes: Routes, groups: Ranks) -> Cost:
    """Broadcast or reduce along a binomial tree."""
    size = groups.shape[1]
    cost = NOTHING
    for distance in _distances(size):
        senders = min(distance, size - distance)
        cost = cost.then(routes.round(groups[:, :senders], groups[:, distance : distance + senders]))
    return cost


def binomial_blocks(routes: Routes, groups: Ranks) -> Cost:
    """Gather or scatter along a binomial tree: each message carries the blocks of a whole subtree."""
    size = groups.shape[1]
    cost = NOTHING
    for distance in _distances(size):
        heads = groups[:, distance :: 2 * distance]
        cost = cost.then(routes.round(groups[:, :: 2 * distance][:, : heads.shape[1]], heads).times(1, distance / size))
    return cost


def scatter_ring(routes: Routes, groups: Ranks) -> Cost:
    """Broadcast as a scatter and an all_gather, reduce as a reduce_scatter and a gather (van de Geijn)."""
    return binomial_blocks(routes, groups).then(ring_pass(routes, groups))


def direct(routes: Routes, groups: Ranks) -> Cost:
    """Gather or scatter with one message between the root and each other rank, one after the other."""
    size = groups.shape[1]
    if size == 1:
        return NOTHING
    others = groups[:, 1:]
    together = routes.round(np.broadcast_to(groups[:, :1], others.shape), others)
    return Cost(together.latency_s * (size - 1), together.s_per_byte / size)


def pairwise(routes: Routes, groups: Ranks) -> Cost:
    """All_to_all by n - 1 exchanges of 1/n of the bytes, each with another partner."""
    size = groups.shape[1]
    if size == 1:
        return NOTHING
    together = routes.everyone_to_everyone(groups)
    return Cost(together.latency_s * (size - 1), together.s_per_byte / size)


def bruck(routes: Routes, groups: Ranks) -> Cost:
    """All_to_all in log2 n rounds of half of the bytes."""
    size = groups.shape[1]
    cost = NOTHING
    for distance in _distances(size):
        moved = sum(1 for block in range(size) if block & distance)
        cost = cost.then(_shift(routes, groups, distance).times(1, moved / size))
    return cost


def dissemination(routes: Routes, groups: Ranks) -> Cost:
    """Barrier: empty messages at distances 1, 2, 4, ..."""
    cost = NOTHING
    for distance in _distances(groups.shape[1]):
        cost = cost.then(_shift(routes, groups, distance).times(1, 0))
    return cost


def to_the_next(routes: Routes, groups: Ranks) -> Cost:
    """Every rank but the last sends to the next one, as the stages of a pipeline do."""
    return routes.round(groups[:, :-1], groups[:, 1:])


def by_hosts(routes: Routes, groups: Ranks) -> tuple[Ranks, Ranks] | None:
    """Return the parts of the groups inside hosts, and their rails, as rows; None if they are not regular.

    Every group must have the same number of members, at least two, on each of its hosts, and at least two hosts.
    """
    num_groups, size = groups.shape
    order = np.argsort(routes.host[groups], axis=1, kind="stable")
    ranks = np.take_along_axis(groups, order, axis=1)
    hosts = routes.host[ranks]
    locals_ = int(np.argmax(hosts[0] != hosts[0, 0])) or size
    if locals_ in (1, size) or size % locals_:
        return None
    blocks = hosts.reshape(num_groups, -1, locals_)
    same = (blocks == blocks[:, :, :1]).all()
    # Two adjacent blocks on one host: it has more members than other hosts.
    if not same or (blocks[:, 1:, 0] == blocks[:, :-1, 0]).any():
        return None
    cut = ranks.reshape(num_groups, -1, locals_)
    return cut.reshape(-1, locals_), np.ascontiguousarray(cut.transpose(0, 2, 1)).reshape(-1, cut.shape[1])


def _hierarchical(before: Algorithm | None, between: Algorithm, after: Algorithm | None, share: bool) -> Algorithm:
    """Return the algorithm that runs `before` inside hosts, `between` along rails, and `after` inside hosts.

    With `share`, a rail moves only the bytes of its members; else all bytes.
    """

    def cost(routes: Routes, groups: Ranks) -> Cost | None:
        cut = by_hosts(routes, groups)
        if cut is None:
            return None
        inside, rails = cut
        total = NOTHING
        for algorithm, rows, part in (
            (before, inside, 1.0),
            (between, rails, 1 / inside.shape[1] if share else 1.0),
            (after, inside, 1.0),
        ):
            found = algorithm(routes, rows) if algorithm is not None else NOTHING
            if found is None:
                return None
            total = total.then(found.times(1, part))
        return total

    return cost


ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = {
    "all_reduce": {
        "ring": ring_all_reduce,
        "tree": halving_doubling,
        "doubling": recursive_doubling,
        "hierarchical": _hierarchical(ring_pass, ring_all_reduce, ring_pass, share=True),
        "hierarchical tree": _hierarchical(doubling_pass, halving_doubling, doubling_pass, share=True),
    },
    "all_gather": {
        "ring": ring_pass,
        "tree": doubling_pass,
        "hierarchical": _hierarchical(None, ring_pass, ring_pass, share=True),
        "hierarchical tree": _hierarchical(None, doubling_pass, doubling_pass, share=True),
    },
    "reduce_scatter": {
        "ring": ring_pass,
        "tree": doubling_pass,
        "hierarchical": _hierarchical(ring_pass, ring_pass, None, share=True),
        "hierarchical tree": _hierarchical(doubling_pass, doubling_pass, None, share=True),
    },
    "broadcast": {
        "ring": scatter_ring,
        "tree": binomial,
        "hierarchical": _hierarchical(binomial_blocks, binomial, ring_pass, share=True),
    },
    "reduce": {
        "ring": scatter_ring,
        "tree": binomial,
        "hierarchical": _hierarchical(ring_pass, binomial, binomial_blocks, share=True),
    },
    "gather": {"direct": direct, "tree": binomial_blocks},
    "scatter": {"direct": direct, "tree": binomial_blocks},
    "all_to_all": {
        "pairwise": pairwise,
        "tree": bruck,
        "hierarchical": _hierarchical(pairwise, pairwise, None, share=False),
    },
    "barrier": {"tree": dissemination},
    "send": {"direct": to_the_next},
}


def algorithms_of(name: str) -> Mapping[str, Algorithm]:
    """Return the algorithms of a name from `collective_name`; without any, the collective's default algorithm."""
    return ALGORITHMS.get(name) or {"default": partial(as_written, name)}


def as_written(name: str, routes: Routes, groups: Ranks) -> Cost:
    """Return the cost of a collective's default algorithm, traced on its first rank; all ranks behave alike.

    Messages between two waits are sequential, unless a rank sends and receives at the same time.
    """
    size = groups.shape[1]
    if size == 1:
        return NOTHING
    rounds, sample_bytes = sampled_rounds(name, size)
    found: Counter[tuple[int, int]] = Counter()
    for messages in rounds:
        sent = [message for message in messages if message.is_sent]
        found.update((message.distance, message.nbytes) for message in sent or messages)
    ways: Mapping[int, Cost] = {distance: _shift(routes, groups, distance) for distance in {way for way, _ in found}}
    total = NOTHING
    for (distance, nbytes), times in found.items():
        total = total.then(ways[distance].times(times, nbytes / sample_bytes))
    return total


def collective_name(name: str) -> str:
    moved = dataflow_of(name).name
    return moved if moved in ALGORITHMS else name
