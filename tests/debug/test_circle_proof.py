"""The proof that ranks wait for each other by itself: simulated ranks, at any speed and in any order of events."""

from __future__ import annotations

import random
from collections import Counter, deque
from functools import partial
from itertools import combinations

import numpy as np
import pytest

from meshdist.backends.gloo.match import GlooMatchQueue, GlooProbe, GlooRecvRequest
from meshdist.backends.p2p.requests import UnexpectedMessage, arrive, post
from meshdist.debug.blocked_rank import BlockedRank, endless_wait
from meshdist.runtime.message_counts import Carried, all_quiet, between, decode, encode

SIZE = 3


class Simulated:
    """A rank that sends and receives as over TCP: long messages are announced, asked for, and then sent."""

    def __init__(self, rank, program, channels, ranks):
        self.ranks = ranks
        self.rank = rank
        self.program = deque(program)
        self.channels = channels
        self.number = 0
        self.wait = None  # what it waits for: ("recv" or "data" or "long", the other rank or None for any, the tag)
        self.unexpected = []
        # Long messages by the other rank and the tag: how many have been begun, and asked for or read.
        self.begun, self.taken = Counter(), Counter()
        self.sends = []  # those in progress, each as the other rank, the tag and its number
        self.unwritten = {other: deque() for other in range(SIZE)}  # frames that wait for room in shared memory
        self.sent, self.received = Counter(), Counter()
        self.seen, self.confirmed = {}, {}

    @property
    def awaits(self):
        if self.wait is None or self.wait[0] == "data":
            return ()
        return (self.wait[1],) if self.wait[1] is not None else tuple({*range(SIZE)} - {self.rank})

    def receives_from(self, other):
        return self.wait is not None and self.wait[0] == "recv" and self.wait[1] in (other, None)

    def reads(self, other):
        return self.wait is not None  # a rank in no call reads nothing

    def read_all(self):
        """Read what has arrived, unless it is counted."""

    def carried(self):
        others = self.sent.keys() | self.received.keys()
        return {"wire": {other: Carried(self.sent[other], self.received[other]) for other in others}}

    def post(self, other, *frame):
        self.sent[other] += 1
        self.channels[self.rank, other].append(frame)

    def blocked(self):
        words = {} if self.carried() else {"sends_in" if self.wait[0] == "long" else "reads_in": ("world",)}
        words["from_any"] = self.wait[1] is None
        words["sends_to"] = tuple(dst for dst, tag, number in self.sends[1:] if self.taken[dst, tag] < number)
        return BlockedRank(self.rank, self.number, self.awaits, "call", dict(self.confirmed), **words)

    def take_unexpected(self, source, tag):
        """Return a message that is there, after the first of the source or, if that is None, of any; else None."""
        there = [each for each in self.unexpected if source in (each[0], None) and each[2] == tag]
        if there:
            self.unexpected.remove(there[0])
        return there[0] if there else None

    def block(self, *wait):
        self.number += 1
        self.wait, self.seen, self.confirmed = wait, {}, {}

    def begin_send(self, other, tag):
        self.post(other, "long", tag)

    def begin_sends(self, others, tag):
        """Begin a long message to each of `others`, and wait for one after the other."""
        for other in others:
            self.begun[other, tag] += 1
            self.sends.append((other, tag, self.begun[other, tag]))
            self.begin_send(other, tag)
        self.await_sends()

    def await_sends(self):
        """Wait for the first send in progress; in no call between two of them."""
        self.wait = None
        if self.sends and self.taken[self.sends[0][:2]] >= self.sends[0][2]:
            self.sends.pop(0)
        if self.sends:
            self.program.appendleft(("await", None, None))

    def note_taken(self, other, tag):
        """Note that a long message was asked for, or read."""
        self.taken[other, tag] += 1
        if self.wait == ("long", other, tag) and self.taken[other, tag] >= self.sends[0][2]:
            self.await_sends()

    def goes_on_sending(self, what, other, tag):
        """Send, or wait for the next send in progress, if that is the call."""
        if what == "eager":
            self.post(other, what, tag)
        elif what == "long":
            self.begin_sends(other, tag)
        elif what == "await" and self.taken[self.sends[0][:2]] >= self.sends[0][2]:
            self.await_sends()
        elif what == "await":
            self.block("long", *self.sends[0][:2])
        return what != "recv"

    def go_on(self):
        what, other, tag = self.program.popleft()
        if self.goes_on_sending(what, other, tag):
            return
        if message := self.take_unexpected(other, tag):
            if message[1] == "long":
                self.block("data", message[0], tag)
                self.post(message[0], "ask", tag)
        else:
            self.block("recv", other, tag)
            for each in [each for each in self.unexpected if self.receives_from(each[0]) and each[1] == "long"]:
                self.unexpected.remove(each)
                self.post(each[0], "ask", each[2])

    def take(self, other, what, tag):
        self.received[other] += 1
        if what == "ask":
            self.post(other, "data", tag)
            self.note_taken(other, tag)
        elif what == "long" and self.receives_from(other):
            if self.wait[2] == tag:
                self.wait = "data", other, tag
            self.post(other, "ask", tag)  # else it is in the way of what is awaited
        elif what == "long":
            self.unexpected.append((other, "long", tag))
        elif self.wait == ("data", other, tag) or (self.receives_from(other) and self.wait[2] == tag):
            self.wait = None
        else:
            self.unexpected.append((other, "eager", tag))


class SimulatedInSharedMemory(Simulated):
    """A rank whose long sends end as they are read, and whose receives read all that their source sends."""

    def carried(self):
        return {}

    def read_all(self):
        for other in self.awaits:
            frames = self.channels[other, self.rank]
            while frames and self.reads(other):
                self.take(other, *frames.popleft())

    def reads(self, other):
        return self.receives_from(other)

    def begin_send(self, other, tag):
        self.unwritten[other].append(("long", tag))

    def write(self, other):
        self.post(other, *self.unwritten[other].popleft())

    def go_on(self):
        what, other, tag = self.program.popleft()
        if not self.goes_on_sending(what, other, tag) and not self.take_unexpected(other, tag):
            self.block("recv", other, tag)

    def take(self, other, what, tag):
        if what == "long":
            self.ranks[other].note_taken(self.rank, tag)
        if self.receives_from(other) and self.wait[2] == tag:
            self.wait = None
        else:
            self.unexpected.append((other, what, tag))


class Simulation:
    def __init__(self, seed, kind):
        self.random = random.Random(seed)
        self.channels = {(one, other): deque() for one in range(SIZE) for other in range(SIZE)}
        self.ranks = []
        self.ranks += [kind(rank, self.program(rank), self.channels, self.ranks) for rank in range(SIZE)]
        self.published = {}
        self.found = set()  # the waits that are said to last for ever, by rank and number

    def program(self, rank):
        others = [other for other in range(SIZE) if other != rank]
        choose = self.random.choice
        calls = [
            (choose(["eager", "long", "recv", "recv", "any"]), choose(others)) for _ in range(choose([1, 2, 3, 4]))
        ]
        # Some sends are several at once.
        sends = {"long": lambda other: [other, choose(others)] if choose([True, False]) else [other]}
        calls = [(what, sends[what](other) if what in sends else other) for what, other in calls]
        return [(*(("recv", None) if call[0] == "any" else call), choose([0, 1])) for call in calls]

    def steps(self):
        steps = [rank.go_on for rank in self.ranks if rank.wait is None and rank.program]
        for rank in self.ranks:
            steps += [partial(rank.write, other) for other, frames in rank.unwritten.items() if frames]
        for (one, other), frames in self.channels.items():
            if frames and self.ranks[other].reads(one):
                steps.append(lambda one=one, other=other, frames=frames: self.ranks[other].take(one, *frames.popleft()))
        return steps

    def publish(self, mine):
        if mine.awaits:
            self.published[mine.rank] = mine.blocked(), encode(mine.carried())

    def read(self, mine):
        mine.seen = {other: self.published[other] for other in mine.awaits if other in self.published}

    def confirm(self, mine):
        mine.read_all()
        for other, (blocked, counted) in mine.seen.items():
            here, there = between(mine.carried(), other, ()), between(decode(counted), mine.rank, ())
            if other in mine.awaits and all_quiet(here, there) and not blocked.may_end(mine.blocked()):
                mine.confirmed[other] = blocked.number

    def find(self, mine):
        if mine.rank in self.published:
            path = endless_wait(mine.rank, {rank: blocked for rank, (blocked, _) in self.published.items()})
            self.found |= {(one.rank, one.number) for one in path}

    def look(self):
        self.random.choice([self.publish, self.read, self.confirm, self.find])(self.random.choice(self.ranks))

    def run(self):
        while steps := self.steps():
            self.random.choice(steps)()
            for _ in range(self.random.randint(0, 12)):
                self.look()
            if self.random.random() < 0.2:  # a slow rank: the others look as often as they like
                self.look_at_all()
        self.look_at_all()

    def look_at_all(self):
        for step in (self.publish, self.read, self.confirm, self.publish, self.find):
            for rank in self.ranks:
                step(rank)

    def endless(self):
        """Return the waits that the proof is to find, once nothing moves."""
        waits = {one.rank: (set(one.awaits), one.wait is not None and one.wait[1] is None) for one in self.ranks}
        largest = set().union(*closed_sets(waits))
        return {(one, self.ranks[one].number) for rank in waits for one in expected(rank, waits, largest)}


def closed_sets(waits):
    """Return the sets of ranks whose waits only ranks of the set could end, by trying all sets of ranks.

    `waits` has, by rank, the awaited ranks, and whether it takes only one of them. A rank that is in no call, or could
    go on by itself, awaits none.
    """

    def is_closed(ranks):
        return all(
            waits[one][0] and (waits[one][0] <= ranks if waits[one][1] else waits[one][0] & ranks) for one in ranks
        )

    return [
        set(ranks) for size in range(1, len(waits) + 1) for ranks in combinations(waits, size) if is_closed(set(ranks))
    ]


def expected(rank, waits, largest):
    """Return the ranks that wait with `rank` for ever, if it waits for a message from any rank or is among the awaited.

    They are those of the `largest` closed set that are awaited by `rank`, directly or by way of others of the set.
    """
    reached = set()
    if rank in largest:
        reached = waits[rank][0] & largest
        for _ in waits:
            reached = reached.union(*(waits[one][0] & largest for one in reached))
    return reached | {rank} if rank in reached or (reached and waits[rank][1]) else set()


@pytest.mark.parametrize("kind", [Simulated, SimulatedInSharedMemory])
@pytest.mark.parametrize("block", range(4))
def test_all_ranks_that_wait_for_each_other_are_found_and_no_other(block, kind):
    with_any, without = 0, 0
    for seed in range(1000 * block, 1000 * (block + 1)):
        simulation = Simulation(seed, kind)
        simulation.run()
        endless = simulation.endless()
        assert simulation.found == endless, seed
        is_any = any(simulation.ranks[rank].wait[1] is None for rank, _ in endless)
        with_any, without = with_any + (bool(endless) and is_any), without + (bool(endless) and not is_any)
    assert with_any > 10  # else there was nothing to prove
    assert without > 10


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
        (BlockedRank(1, 1, (0,), "recv", reads_in=("world",)), True),
        (BlockedRank(1, 1, (0,), "recv in another group", reads_in=("row",)), False),
        (BlockedRank(1, 1, (2,), "recv from another rank", reads_in=("world",)), False),
        (BlockedRank(1, 1, (0,), "send", sends_in=("world",)), False),
        (BlockedRank(1, 1, (0,), "barrier"), False),
        (BlockedRank(1, 1, (), "cell", has_ended=True), False),
    ],
    ids=lambda one: one.call if isinstance(one, BlockedRank) else "",
)
def test_which_waits_read_the_message_of_a_send(reader, ends):
    assert reader.may_end(BlockedRank(0, 1, (1,), "send", sends_in=("world",))) == ends
    assert not reader.may_end(BlockedRank(0, 1, (1,), "barrier"))


@pytest.mark.parametrize(
    ("other", "ends"),
    [
        (BlockedRank(1, 1, (0,), "recv", reads_in=("world",)), True),
        (BlockedRank(2, 1, (0,), "recv of a rank that it does not send to", reads_in=("world",)), False),
        (BlockedRank(1, 1, (0,), "send", sends_in=("world",)), False),
        (BlockedRank(1, 1, (0,), "recv over TCP, where both sides count"), False),
    ],
    ids=lambda one: one.call if isinstance(one, BlockedRank) else "",
)
def test_which_waits_the_other_sends_of_a_rank_end(other, ends):
    writer = BlockedRank(0, 1, (2,), "isend", sends_in=("world",), sends_to=(1,))
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
