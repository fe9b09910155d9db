"""Simulated ranks that send and receive, and prove that they wait for each other, at any speed and in any order."""

from __future__ import annotations

import random
from collections import Counter, deque
from functools import partial
from itertools import combinations

from meshdist.debug.blocked_rank import ANY, BlockedRank, endless_wait
from meshdist.debug.blocked_wait import awaited_ranks
from meshdist.runtime.message_counts import Carried, all_quiet, between, decode, encode

SIZE = 3
WORLD = "world"


class Message:
    """A message on its way; of a long one, `send` is the call, and `taken_by` the receive that its bytes go to."""

    def __init__(self, source, tag, send=None):
        self.source, self.tag, self.send = source, tag, send
        self.taken_by = None
        self.is_announced = send is not None  # nobody has asked for its bytes
        self.is_here = send is None


class Send:
    """A send that waits for its receiver: done once the message is asked for, or read."""

    def __init__(self, dst, tag):
        self.dst, self.tag = dst, tag
        self.is_done = False
        self.queue = "to", dst

    def awaits(self):
        return [] if self.is_done else [self.dst]

    def awaits_any(self):
        return []


class Receive:
    """A posted receive from one of `sources`."""

    def __init__(self, sources, tag):
        self.sources, self.tag = tuple(sources), tag
        self.message = None
        self.queue = "from", self.sources, tag

    @property
    def is_done(self):
        return self.message is not None and self.message.is_here

    def _missing(self):
        return () if self.message else self.sources

    def awaits(self):
        return self._missing() if len(self.sources) == 1 else ()

    def awaits_any(self):
        return self._missing() if len(self.sources) > 1 else ()

    def reads(self, source):
        return self.message is None and source in self.sources

    def takes(self, message):
        return self.reads(message.source) and message.tag == self.tag


class SimulatedRank:
    """A rank that sends and receives as over TCP: long messages are announced, asked for, and then sent."""

    def __init__(self, rank, program, channels, ranks):
        self.rank, self.ranks, self.channels = rank, ranks, channels
        self.program = deque(program)
        self.calls = []  # those in progress, in their order
        self.handles = []  # the async calls that the program has not waited for
        self.wait = ()  # it ends as soon as one of these calls does
        self.number = 0
        # What makes a wait another one: the calls whose ends end it, and the others in progress. If only these change,
        # the wait goes on, and its earlier `numbers` are of the same.
        self.counted = [], []
        self.numbers = []
        self.unexpected = []
        self.unwritten = {other: deque() for other in range(SIZE)}  # frames that wait for room in shared memory
        self.sent, self.received = Counter(), Counter()
        self.seen, self.confirmed = {}, {}

    # ---- What it tells the others

    def heads(self):
        """Return the calls of which one ends before the wait does: those of a queue are carried out in their order."""
        queues = dict.fromkeys(call.queue for call in self.wait)
        return [next(call for call in self.calls if call.queue == queue) for queue in queues]

    def others(self):
        heads = self.heads()
        return [call for call in self.calls if call not in heads]

    def awaited(self):
        """Return the ranks that the wait is for, and whether any of them may end it."""
        return awaited_ranks(self.heads()) if self.wait else ((), False)

    def blocked(self):
        ranks, from_any = self.awaited()
        receives = [call for call in self.others() if isinstance(call, Receive)]
        sources = {src if len(call.sources) == 1 else ANY for call in receives for src in call.sources}
        return BlockedRank(
            self.rank,
            self.number,
            ranks,
            "call",
            dict(self.confirmed),
            sends_to=tuple(call.dst for call in self.others() if isinstance(call, Send)),
            posted=tuple((WORLD, src) for src in sources),
            from_any=from_any,
            **self.words(),
        )

    def words(self):
        return {}  # both sides count

    def carried(self):
        others = self.sent.keys() | self.received.keys()
        return {"wire": {other: Carried(self.sent[other], self.received[other]) for other in others}}

    # ---- What it does

    def reads(self, other):
        return bool(self.calls)  # a rank that has no call in progress reads nothing

    def look_again(self):
        """Read what has arrived for the awaited calls, unless it is counted."""

    def put(self, other, what, message):
        self.sent[other] += 1
        self.channels[self.rank, other].append((what, message))

    def begin_send(self, call):
        self.put(call.dst, "message", Message(self.rank, call.tag, call))

    def begin_receive(self, call):
        there = [message for message in self.unexpected if call.takes(message)]
        if there:
            self.match(call, there[0])
            return
        for message in self.unexpected:
            if call.reads(message.source):
                self.ask_for(message)

    def match(self, call, message):
        if message in self.unexpected:
            self.unexpected.remove(message)
        call.message = message
        self.ask_for(message)

    def ask_for(self, message):
        if message.is_announced:
            message.is_announced = False
            self.put(message.source, "ask", message)

    def take(self, other, what, message):
        """Handle what has arrived from another rank."""
        self.received[other] += 1
        if what == "ask":
            message.send.is_done = True
            self.put(other, "bytes", message)
        elif what == "bytes":
            message.is_here = True
        else:
            self.arrive(message)
        self.settle()

    def arrive(self, message):
        call = next((call for call in self.calls if isinstance(call, Receive) and call.takes(message)), None)
        if call is not None:
            self.match(call, message)
            return
        self.unexpected.append(message)
        if any(isinstance(call, Receive) and call.reads(message.source) for call in self.calls):
            self.ask_for(message)  # it is in the way of what is awaited

    def settle(self):
        """Note which calls have ended, and what this rank waits for now."""
        for call in list(self.calls):
            if call.is_done and not any(one.queue == call.queue for one in self.calls[: self.calls.index(call)]):
                self.calls.remove(call)
        if any(call not in self.calls for call in self.wait):
            self.handles = [call for call in self.handles if call in self.calls or call not in self.wait]
            self.wait = ()
        counted = self.heads(), self.others()
        if counted != self.counted:
            self.number += 1
            self.numbers = [*(self.numbers if counted[0] == self.counted[0] else []), self.number]
            self.counted, self.seen, self.confirmed = counted, {}, {}

    def begin(self, call):
        self.calls.append(call)
        if isinstance(call, Send):
            self.begin_send(call)
        else:
            self.begin_receive(call)
        return call

    def go_on(self):
        """Make the next call of the program."""
        what, peers, tag = self.program.popleft()
        if what == "eager":
            self.send_eager(*peers, tag)
        elif what in ("send", "recv"):
            kind = Send if what == "send" else Receive
            self.wait = (self.begin(kind(*peers, tag) if kind is Send else kind(peers, tag)),)
        elif what in ("isend", "irecv"):
            kind = Send if what == "isend" else Receive
            self.handles.append(self.begin(kind(*peers, tag) if kind is Send else kind(peers, tag)))
        elif self.handles and what == "wait":
            self.wait = (self.handles.pop(tag % len(self.handles)),)
        elif self.handles:
            self.wait = tuple(self.handles)
        self.settle()

    def send_eager(self, dst, tag):
        self.put(dst, "message", Message(self.rank, tag))


class RankInSharedMemory(SimulatedRank):
    """A rank whose long sends end as they are read, and whose receives read all that their sources send."""

    def words(self):
        heads = self.heads()
        return {
            "sends_in": tuple((WORLD, dst) for call in heads if isinstance(call, Send) for dst in call.awaits()),
            "reads_in": tuple(
                (WORLD, src)
                for call in heads
                if isinstance(call, Receive)
                for src in (*call.awaits(), *call.awaits_any())
            ),
        }

    def carried(self):
        return {}

    def reads(self, other):
        return any(isinstance(call, Receive) and call.reads(other) for call in self.calls)

    def look_again(self):
        for call in self.heads():
            for other in range(SIZE):
                frames = self.channels[other, self.rank]
                while isinstance(call, Receive) and call.reads(other) and frames:
                    self.take(other, *frames.popleft())

    def begin_send(self, call):
        self.unwritten[call.dst].append(Message(self.rank, call.tag, call))

    def send_eager(self, dst, tag):
        while self.unwritten[dst]:
            self.write(dst)
        super().send_eager(dst, tag)

    def write(self, other):
        self.put(other, "message", self.unwritten[other].popleft())

    def ask_for(self, message):
        """Do nothing: what is in the channel has its bytes."""

    def arrive(self, message):
        message.is_here = True
        if message.send is not None:
            message.send.is_done = True
            self.ranks[message.source].settle()
        super().arrive(message)


class Simulation:
    def __init__(self, seed, kind):
        self.random = random.Random(seed)
        self.channels = {(one, other): deque() for one in range(SIZE) for other in range(SIZE)}
        self.ranks = []
        self.ranks += [kind(rank, self.program(rank), self.channels, self.ranks) for rank in range(SIZE)]
        self.published = {}
        self.found = set()  # the waits that are said to last for ever, by rank and number

    def program(self, rank):
        """Return calls: what, with which ranks, and with which tag, or of which handle."""
        others = [other for other in range(SIZE) if other != rank]
        choose = self.random.choice
        calls = choose([["send", "recv", "recv any"], ["isend", "isend", "irecv", "irecv any", "recv"]])
        names = [choose(["eager", *calls]) for _ in range(choose([1, 2, 3, 4]))]
        for place in range(len(names), 0, -1):
            if names[place - 1][0] == "i" and choose([True, True, False]):
                names.insert(choose(range(place, len(names) + 1)), choose(["wait", "wait_any"]))
        return [
            (name.partition(" ")[0], others if name.endswith(" any") else [choose(others)], choose([0, 1]))
            for name in names
        ]

    def steps(self):
        steps = [rank.go_on for rank in self.ranks if not rank.wait and rank.program]
        for rank in self.ranks:
            steps += [partial(rank.write, other) for other, frames in rank.unwritten.items() if frames]
        for (one, other), frames in self.channels.items():
            if frames and self.ranks[other].reads(one):
                steps.append(lambda one=one, other=other, frames=frames: self.ranks[other].take(one, *frames.popleft()))
        return steps

    def publish(self, mine):
        if mine.awaited()[0]:
            self.published[mine.rank] = mine.blocked(), encode(mine.carried())

    def read(self, mine):
        mine.seen = {other: self.published[other] for other in mine.awaited()[0] if other in self.published}

    def confirm(self, mine):
        seen, number = mine.seen, mine.number
        mine.look_again()
        for other, (blocked, counted) in seen.items() if mine.number == number else ():
            here, there = between(mine.carried(), other, ()), between(decode(counted), mine.rank, ())
            if other in mine.awaited()[0] and all_quiet(here, there) and not blocked.may_end(mine.blocked()):
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

    def waits(self):
        """Return, by rank, the ranks of which one ends its wait, or all, and which; see `closed_sets`.

        A rank waits for a message whose bytes are under way until the sender is in a call again, which is not proven.
        """
        waits = {}
        for rank in self.ranks:
            ends = [set(call.sources if isinstance(call, Receive) else [call.dst]) for call in rank.heads()]
            is_known = not any(isinstance(call, Receive) and call.message for call in rank.heads())
            ranks = set().union(*ends) if is_known else set()
            waits[rank.rank] = ranks, len(ranks) > 1
        return waits

    def endless(self):
        """Return the ranks of the waits that the proof is to find, once nothing moves."""
        waits = self.waits()
        largest = set().union(*closed_sets(waits))
        return {one for rank in waits for one in expected(rank, waits, largest)}


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
    """Return the ranks that wait with `rank` for ever, if it waits for any of several ranks or is among the awaited.

    They are those of the `largest` closed set that are awaited by `rank`, directly or by way of others of the set.
    """
    reached = set()
    if rank in largest:
        reached = waits[rank][0] & largest
        for _ in waits:
            reached = reached.union(*(waits[one][0] & largest for one in reached))
    return reached | {rank} if rank in reached or (reached and waits[rank][1]) else set()
