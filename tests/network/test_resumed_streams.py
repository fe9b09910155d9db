"""A connection whose socket breaks at any moment: on new ones, each byte comes once, and from unchanged memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshdist.backends.gloo.tcp import connection as module
from meshdist.backends.gloo.tcp.connection import Connection
from meshdist.backends.gloo.tcp.frames import EAGER, HEADER_BYTES, pack
from meshdist.backends.gloo.tcp.outgoing import Outgoing
from meshdist.runtime.departure import Departure, PeerExit

ROOM_BYTES = 30_000
SIZES = st.one_of(st.integers(0, 100), st.integers(4000, 5000), st.integers(20_000, 70_000))
STEPS = st.one_of(
    st.tuples(st.just("send"), SIZES),
    st.tuples(st.just("deliver"), st.integers(1, 40_000)),
    st.tuples(st.just("reuse"), st.just(0)),
    st.tuples(st.just("break"), st.integers(0, 1)),
)


class Way:
    """One direction of a connection: what the peer's kernel has not acknowledged is lost when it breaks."""

    def __init__(self):
        self.unacknowledged, self.arrived, self.is_broken = bytearray(), bytearray(), False

    def deliver(self, count):
        self.arrived += self.unacknowledged[:count]
        del self.unacknowledged[:count]


class End:
    """A socket of which the test is the network."""

    def __init__(self, out, into):
        self._out, self._into = out, into

    def send(self, data):
        if self._out.is_broken:
            raise ConnectionResetError
        room = ROOM_BYTES - len(self._out.unacknowledged)
        if not room:
            raise BlockingIOError
        self._out.unacknowledged += data[:room]
        return min(room, len(data))

    def sendmsg(self, pieces):
        return self.send(b"".join(pieces))

    def recv_into(self, place):
        count = min(len(place), len(self._into.arrived))
        if not count:
            raise ConnectionResetError if self._into.is_broken else BlockingIOError
        place[:count] = self._into.arrived[:count]
        del self._into.arrived[:count]
        return count

    def num_unacknowledged(self):
        return len(self._out.unacknowledged)

    def setsockopt(self, *_):
        pass

    def close(self):
        pass


class Arrivals:
    def __init__(self):
        self.frames = []

    def take(self, header, connection):
        data = bytearray(header[4])
        return memoryview(data), lambda: self.frames.append((header[5], bytes(data)))

    def on_closed(self, connection):
        raise AssertionError(connection.ended)


class Stream:
    """Two connections, of which the first sends."""

    def __init__(self):
        self.arrivals, self.broken = Arrivals(), []
        self.ways = Way(), Way()
        ends = End(*self.ways), End(*reversed(self.ways))
        self.sender, self.receiver = (
            Connection(end, self.arrivals, watch_nothing, lambda each, how: self.broken.append(each)) for end in ends
        )

    def break_and_resume(self, is_noticed):
        """Break both ways; without `is_noticed`, the receiver learns of it from the sender's claim."""
        for way in self.ways:
            way.is_broken = True
            way.unacknowledged.clear() if is_noticed else None
        self.sender.read()
        if is_noticed:
            self.receiver.read()
        self.receiver.give_up_socket()
        self.ways = Way(), Way()
        offsets = self.receiver.num_received, self.sender.num_received
        ends = End(*self.ways), End(*reversed(self.ways))
        for each, end, offset in zip((self.sender, self.receiver), ends, offsets, strict=True):
            assert each.can_resume_at(offset)
            each.resume_on(end, watch_nothing, offset)

    def advance(self, count):
        self.ways[0].deliver(count)
        self.receiver.read()
        self.sender.write()


def watch_nothing(reads, writes):
    pass


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setattr(module, "counter_of_unacknowledged", lambda sock: sock.num_unacknowledged)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(STEPS, max_size=25))
def test_every_byte_comes_once_whenever_sockets_break(network, steps):
    stream, expected, unfinished = Stream(), [], []
    for number, (kind, argument) in enumerate(steps):
        if kind == "send":
            data = bytearray(itertools.islice(itertools.cycle(range(number, 251)), argument))
            expected.append((number, bytes(data)))
            outgoing = Outgoing(pack(EAGER, 1, 2, num_bytes=argument, number=number), memoryview(data))
            stream.sender.send(outgoing)
            unfinished.append((outgoing, data))
        elif kind == "deliver":
            stream.advance(argument)
        elif kind == "break":
            stream.break_and_resume(bool(argument))
        else:  # the sender changes what it may change
            for outgoing, data in unfinished:
                if outgoing.done:
                    data[:] = bytes(len(data))
    while len(stream.arrivals.frames) < len(expected):
        stream.advance(ROOM_BYTES)
    assert stream.arrivals.frames == expected
    assert all(outgoing.done for outgoing, _ in unfinished)


def test_what_is_no_longer_kept_or_was_never_sent_cannot_be_asked_for(network):
    stream = Stream()
    for number in range(40):
        stream.sender.send(Outgoing(pack(EAGER, 1, 2, num_bytes=20_000, number=number), memoryview(bytes(20_000))))
        stream.advance(ROOM_BYTES)
    assert stream.sender.can_resume_at(40 * (20_000 + HEADER_BYTES))
    assert not stream.sender.can_resume_at(40 * (20_000 + HEADER_BYTES) + 1)
    assert not stream.sender.can_resume_at(0)


def test_a_connection_without_anybody_to_make_it_again_ends(network):
    ended = []
    way = Way()
    sink = Arrivals()
    sink.on_closed = lambda connection: ended.append(connection.ended)
    connection = Connection(End(Way(), way), sink, watch_nothing)
    way.is_broken = True
    connection.read()
    assert ended == [Departure(PeerExit.RESET)]
