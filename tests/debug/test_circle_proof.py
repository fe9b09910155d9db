"""The proof that ranks wait for each other by itself: simulated ranks, at any speed and in any order of events."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from simulated_ranks import RankInSharedMemory, SimulatedRank, Simulation, closed_sets, expected

from meshdist.backends.gloo.match import GlooMatchQueue, GlooProbe, GlooRecvRequest
from meshdist.backends.p2p.requests import UnexpectedMessage, arrive, post
from meshdist.debug.blocked_rank import BlockedRank, endless_wait
from meshdist.runtime.message_counts import Carried, all_quiet, between


@pytest.mark.parametrize("kind", [SimulatedRank, RankInSharedMemory])
@pytest.mark.parametrize("block", [0, 1, 2, 18])  # the last one fails if a wait_any looks at one of its calls only
def test_all_ranks_that_wait_for_each_other_are_found_and_no_other(block, kind):
    kinds = Counter()
    for seed in range(1000 * block, 1000 * (block + 1)):
        simulation = Simulation(seed, kind)
        simulation.run()
        ranks = [simulation.ranks[rank] for rank in simulation.endless()]
        assert simulation.found <= {(rank.rank, number) for rank in ranks for number in rank.numbers}, seed
        assert simulation.found >= {(rank.rank, rank.number) for rank in ranks}, seed
        kinds += Counter(
            {
                "from any": any(len(rank.wait) == 1 and rank.awaited()[1] for rank in ranks),
                "from none": bool(ranks) and not any(rank.awaited()[1] for rank in ranks),
                "in wait_any": any(len(rank.heads()) > 1 for rank in ranks),
                "in wait_any with a send": any(len({type(call) for call in rank.heads()}) > 1 for rank in ranks),
                "with others": any(rank.others() for rank in ranks),
                "behind another": any(not {*rank.wait} & {*rank.heads()} for rank in ranks),
            }
        )
    assert len(kinds) == 6  # else there was nothing to prove
    assert min(kinds.values()) > 3, kinds


def random_waits(choose):
    """Return who awaits whom in a world of up to six ranks, of which some are in no call."""
    ranks = range(choose([2, 3, 4, 5, 6]))
    waits = {}
    for rank in ranks:
        others = [other for other in ranks if other != rank]
        awaited = {choose(others) for _ in range(choose([0, 1, 1, 1, 2, 3]))}
        from_any = len(awaited) > 1 and choose([True, False])
        waits[rank] = (set(others) if from_any and choose([True, False]) else awaited), from_any
    return waits


@pytest.mark.parametrize("block", range(4))
def test_the_closed_sets_of_random_worlds_are_found(block):
    choose = random.Random(block).choice
    found_any = 0
    for _ in range(600):
        waits = random_waits(choose)
        blocked = {
            rank: BlockedRank(rank, 1, tuple(awaited), "call", dict.fromkeys(awaited, 1), from_any=from_any)
            for rank, (awaited, from_any) in waits.items()
            if awaited
        }
        closed = closed_sets(waits)
        largest = set().union(*closed)
        for rank in blocked:
            found, awaited = {one.rank for one in endless_wait(rank, blocked)}, expected(rank, waits, largest)
            assert bool(found) == bool(awaited), waits
            assert found <= awaited, waits  # of several circles it is one
            assert not found or found in closed, waits
            found_any += any(waits[one][1] for one in found)
    assert found_any > 100


@pytest.mark.parametrize("block", range(2))
def test_what_is_not_confirmed_sets_ranks_free(block):
    """Leave out confirmations at random, or have read of earlier waits."""
    choose = random.Random(block).choice
    for _ in range(600):
        waits = random_waits(choose)
        confirmed = {
            rank: {one: number for one in awaited if (number := choose([1, 1, 1, 1, 0, None])) is not None}
            for rank, (awaited, _) in waits.items()
        }
        blocked = {
            rank: BlockedRank(rank, 1, tuple(awaited), "call", confirmed[rank], from_any=from_any)
            for rank, (awaited, from_any) in waits.items()
            if awaited
        }
        known = {
            rank: {one for one in awaited if confirmed[rank].get(one) == 1} for rank, (awaited, _) in waits.items()
        }
        known = {
            # From any: as long as one is not confirmed, it may send.
            rank: (set() if from_any and known[rank] != awaited else known[rank], from_any)
            for rank, (awaited, from_any) in waits.items()
        }
        closed = closed_sets(known)
        largest = set().union(*closed)
        for rank in blocked:
            found = {one.rank for one in endless_wait(rank, blocked)}
            assert not found or found in closed, (waits, confirmed)
            assert bool(found) == bool(expected(rank, known, largest)), (waits, confirmed)


@pytest.mark.parametrize(
    ("reader", "ends"),
    [
        (BlockedRank(1, 1, (0,), "recv", reads_in=(("world", 0),)), True),
        (BlockedRank(1, 1, (0,), "recv in another group", reads_in=(("row", 0),)), False),
        (BlockedRank(1, 1, (2,), "recv from another rank", reads_in=(("world", 2),)), False),
        (BlockedRank(1, 1, (0,), "send", sends_in=(("world", 0),)), False),
        (BlockedRank(1, 1, (0,), "barrier"), False),
        (BlockedRank(1, 1, (), "cell", has_ended=True), False),
    ],
    ids=lambda one: one.call if isinstance(one, BlockedRank) else "",
)
def test_which_waits_read_the_message_of_a_send(reader, ends):
    assert reader.may_end(BlockedRank(0, 1, (1,), "send", sends_in=(("world", 1),))) == ends
    assert not reader.may_end(BlockedRank(0, 1, (1,), "barrier"))


@pytest.mark.parametrize(
    ("other", "ends"),
    [
        (BlockedRank(1, 1, (0,), "recv", reads_in=(("world", 0),)), True),
        (BlockedRank(2, 1, (0,), "recv of a rank that it does not send to", reads_in=(("world", 0),)), False),
        (BlockedRank(1, 1, (0,), "send", sends_in=(("world", 0),)), False),
        (BlockedRank(1, 1, (0,), "recv over TCP, where both sides count"), False),
    ],
    ids=lambda one: one.call if isinstance(one, BlockedRank) else "",
)
def test_which_waits_the_other_sends_of_a_rank_end(other, ends):
    writer = BlockedRank(0, 1, (2,), "isend", sends_in=(("world", 2),), sends_to=(1,))
    assert writer.may_end(other) == ends
    assert BlockedRank.decode(writer.encode().encode()) == writer
    # An older version reads no record with a field that it does not know.
    assert "sends_to" in writer.encode()
    assert "sends_to" not in other.encode()


def test_what_is_under_way_between_two_ranks():
    assert all_quiet({}, {})
    assert all_quiet({"tcp": Carried(5, 7)}, {"tcp": Carried(7, 5)})
    assert not all_quiet({"tcp": Carried(5, 7)}, {"tcp": Carried(8, 5)})  # not here yet
    assert not all_quiet({"tcp": Carried(6, 7)}, {"tcp": Carried(7, 5)})  # the other may still answer it
    assert all_quiet({"tcp": Carried(6, 7)}, {"tcp": Carried(7, 5, is_held=True)})  # not while it waits
    assert not all_quiet({}, {"tcp": Carried(1, 0)})


class Sources:
    """A gloo Receiver from some ranks."""

    description = "any rank"
    spin_s = 0.0
    connect_error = reads_in = ""

    def __init__(self, *ranks):
        self.awaited = ranks


@pytest.mark.parametrize("sources", [(1,), (1, 2)])
@pytest.mark.parametrize("is_probe", [False, True])
def test_a_receive_whose_message_was_read_by_the_count_of_what_has_arrived_awaits_nobody(sources, is_probe):
    queue = GlooMatchQueue()
    if is_probe:
        request = GlooProbe(None, 0, queue, Sources(*sources), None)
    else:
        request = GlooRecvRequest(np.empty(1, np.uint8), b"uint8", None, 0, queue, Sources(*sources))
        post(request)
    assert (request.awaits() or request.awaits_any()) == sources
    assert bool(request.awaits()) == (len(sources) == 1)
    message = UnexpectedMessage(queue, 1, 0, 1, b"uint8")
    message.allocate()
    message.arrived()
    arrive(message)
    assert not request.awaits()
    assert not request.awaits_any()


def test_only_the_traffic_of_its_group_ends_a_wait():
    traffic = {"tcp": {1: Carried(1)}, "group rows by mpi": {1: Carried(2)}, "group columns": {1: Carried(3)}}
    assert between(traffic, 1, ["rows"]) == {"tcp": Carried(1), "group rows by mpi": Carried(2)}
    assert between(traffic, 2, ["rows"]) == {}
