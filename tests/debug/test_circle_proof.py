"""The proof of a circle by itself: simulated ranks with messages under way, at any speed and in any order of events."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

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
        self.wait = None  # what it waits for: ("recv" or "data" or "long", the other rank, the tag)
        self.unexpected = []
        self.sent, self.received = Counter(), Counter()
        self.seen, self.confirmed = {}, {}

    @property
    def awaits(self):
        return () if self.wait is None or self.wait[0] == "data" else (self.wait[1],)

    def reads(self, other):
        return self.wait is not None  # a rank in no call reads nothing

    def read_all(self):
        """Read what has arrived, unless it is counted."""

    def carried(self):
        return {"wire": {other: Carried(self.sent[other], self.received[other]) for other in range(SIZE)}}

    def post(self, other, *frame):
        self.sent[other] += 1
        self.channels[self.rank, other].append(frame)

    def blocked(self):
        words = {} if self.carried() else {"sends_in" if self.wait[0] == "long" else "reads_in": "world"}
        return BlockedRank(self.rank, self.number, self.awaits, "call", dict(self.confirmed), **words)

    def block(self, *wait):
        self.number += 1
        self.wait, self.seen, self.confirmed = wait, {}, {}

    def go_on(self):
        what, other, tag = self.program.popleft()
        if what != "recv":
            self.post(other, what, tag)
            if what == "long":
                self.block("long", other, tag)
        elif (other, "eager", tag) in self.unexpected:
            self.unexpected.remove((other, "eager", tag))
        elif (other, "long", tag) in self.unexpected:
            self.unexpected.remove((other, "long", tag))
            self.block("data", other, tag)
            self.post(other, "ask", tag)
        else:
            self.block("recv", other, tag)
            for each in [each for each in self.unexpected if each[:2] == (other, "long")]:
                self.unexpected.remove(each)
                self.post(other, "ask", each[2])

    def take(self, other, what, tag):
        self.received[other] += 1
        if what == "ask":
            self.post(other, "data", tag)
            if self.wait == ("long", other, tag):
                self.wait = None
        elif what == "long" and self.wait == ("recv", other, tag):
            self.wait = "data", other, tag
            self.post(other, "ask", tag)
        elif what == "long" and self.wait is not None and self.wait[:2] == ("recv", other):
            self.post(other, "ask", tag)  # it is in the way of what is awaited
        elif what == "long":
            self.unexpected.append((other, "long", tag))
        elif self.wait in (("recv", other, tag), ("data", other, tag)):
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
        return self.wait is not None and self.wait[:2] == ("recv", other)

    def go_on(self):
        what, other, tag = self.program.popleft()
        if what != "recv":
            self.post(other, what, tag)
            if what == "long":
                self.block("long", other, tag)
        elif (other, tag) in self.unexpected:
            self.unexpected.remove((other, tag))
        else:
            self.block("recv", other, tag)

    def take(self, other, what, tag):
        if what == "long":
            self.ranks[other].wait = None
        if self.wait == ("recv", other, tag):
            self.wait = None
        else:
            self.unexpected.append((other, tag))


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
        kinds = ["eager", "long", "recv", "recv"]
        choose = self.random.choice
        return [(choose(kinds), choose(others), choose([0, 1])) for _ in range(self.random.randint(1, 4))]

    def steps(self):
        steps = [rank.go_on for rank in self.ranks if rank.wait is None and rank.program]
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
            here, there = between(mine.carried(), other, ""), between(decode(counted), mine.rank, "")
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

    def circles(self):
        """Return the waits of ranks that wait for each other in a circle, once nothing moves."""
        circles = set()
        for rank in self.ranks:
            path = [rank]
            while path[-1].awaits and len(path) <= SIZE:
                path.append(self.ranks[path[-1].awaits[0]])
                if path[-1] is rank:
                    circles |= {(one.rank, one.number) for one in path}
                    break
        return circles


@pytest.mark.parametrize("kind", [Simulated, SimulatedInSharedMemory])
@pytest.mark.parametrize("block", range(4))
def test_all_circles_are_found_and_nothing_else(block, kind):
    num_circles = 0
    for seed in range(1000 * block, 1000 * block + 250):
        simulation = Simulation(seed, kind)
        simulation.run()
        circles = simulation.circles()
        assert simulation.found == circles, seed
        num_circles += bool(circles)
    assert num_circles > 25  # else there was nothing to prove


@pytest.mark.parametrize(
    ("reader", "ends"),
    [
        (BlockedRank(1, 1, (0,), "recv", reads_in="world"), True),
        (BlockedRank(1, 1, (0,), "recv in another group", reads_in="row"), False),
        (BlockedRank(1, 1, (2,), "recv from another rank", reads_in="world"), False),
        (BlockedRank(1, 1, (0,), "send", sends_in="world"), False),
        (BlockedRank(1, 1, (0,), "barrier"), False),
        (BlockedRank(1, 1, (), "cell", has_ended=True), False),
    ],
    ids=lambda one: one.call if isinstance(one, BlockedRank) else "",
)
def test_which_waits_read_the_message_of_a_send(reader, ends):
    assert reader.may_end(BlockedRank(0, 1, (1,), "send", sends_in="world")) == ends
    assert not reader.may_end(BlockedRank(0, 1, (1,), "barrier"))


def test_what_is_under_way_between_two_ranks():
    assert all_quiet({}, {})
    assert all_quiet({"tcp": Carried(5, 7)}, {"tcp": Carried(7, 5)})
    assert not all_quiet({"tcp": Carried(5, 7)}, {"tcp": Carried(8, 5)})  # not here yet
    assert not all_quiet({"tcp": Carried(6, 7)}, {"tcp": Carried(7, 5)})  # the other may still answer it
    assert all_quiet({"tcp": Carried(6, 7)}, {"tcp": Carried(7, 5, is_held=True)})  # not while it waits
    assert not all_quiet({}, {"tcp": Carried(1, 0)})


def test_only_the_traffic_of_its_group_ends_a_wait():
    traffic = {"tcp": {1: Carried(1)}, "group rows by mpi": {1: Carried(2)}, "group columns": {1: Carried(3)}}
    assert between(traffic, 1, "rows") == {"tcp": Carried(1), "group rows by mpi": Carried(2)}
    assert between(traffic, 2, "rows") == {}
