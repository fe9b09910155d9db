"""Frames over a connection: whole whatever pieces they come in, and nothing else."""

from __future__ import annotations

import itertools
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from until import until

from meshdist.backends.gloo.tcp.connection import Connection
from meshdist.backends.gloo.tcp.frames import CTS, DATA, EAGER, HEADER_BYTES, LEFT, FrameError, pack, pack_text, unpack
from meshdist.backends.gloo.tcp.outgoing import Outgoing
from meshdist.runtime.departure import Departure, PeerExit, describe

KINDS = st.sampled_from([(EAGER, True), (DATA, True), (CTS, False), (LEFT, True)])
SIZES = st.one_of(st.integers(0, 300), st.integers(60_000, 70_000), st.integers(200_000, 400_000))


class CallRecorder:
    """Takes all frames; holds the connection as often as it is told to."""

    def __init__(self, holds=0):
        self.frames, self.has_ended, self.holds = [], False, holds

    def take(self, header, connection):
        if self.holds:
            self.holds -= 1
            connection.hold()
            return None, None
        data = bytearray(header[4]) if header[0] != CTS else bytearray()
        return memoryview(data), lambda: self.frames.append((header[0], header[5], bytes(data)))

    def on_closed(self, connection):
        self.has_ended = True


def connection_of(sock, recorder):
    sock.setblocking(False)
    return Connection(sock, recorder, lambda reads, writes: None)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@given(st.lists(st.tuples(KINDS, SIZES), max_size=6), st.integers(0, 3))
def test_frames_come_whole_and_in_order(frames, holds):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        recorder = CallRecorder(holds)
        sender, receiver = connection_of(ours, CallRecorder()), connection_of(theirs, recorder)
        expected, outgoings = [], []
        for number, ((kind, carries), size) in enumerate(frames):
            size = min(size, 4096) if kind == LEFT else size
            data = bytes(itertools.islice(itertools.cycle(range(251)), size)) if carries else b""
            outgoings.append(Outgoing(pack(kind, 1, 2, num_bytes=len(data), number=number), memoryview(data)))
            sender.send(outgoings[-1])
            expected.append((kind, number, data))
        while sender.has_unsent or len(recorder.frames) < len(expected):
            sender.write()
            receiver.read()
            receiver.resume()
        assert recorder.frames == expected
        assert all(outgoing.done for outgoing in outgoings)
        sender.shut()
        receiver.read()
        assert receiver.ended == Departure(PeerExit.DIED)
        assert recorder.has_ended


@given(st.lists(st.integers(1, HEADER_BYTES + 20), min_size=1, max_size=8))
def test_any_pieces_will_do(cuts):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        recorder = CallRecorder()
        receiver = connection_of(theirs, recorder)
        header, text = pack_text(LEFT, 3, 4, b"farewell", word=5)
        stream = (header + text) * 3
        for cut in [*cuts, len(stream)]:
            ours.sendall(stream[:cut])
            stream = stream[cut:]
            receiver.read()
        assert recorder.frames == [(LEFT, 5, b"farewell")] * 3


@pytest.mark.parametrize(
    "garbage",
    [
        bytes(HEADER_BYTES),
        b"GET / HTTP/1.1".ljust(HEADER_BYTES),
        pack(EAGER, 0, 0, num_bytes=1 << 57),
        pack(LEFT, 0, 0, num_bytes=1 << 20),
        b"mf\x63" + bytes(HEADER_BYTES),
    ],
    ids=["zeros", "http", "too many bytes", "too long a text", "unknown kind"],
)
def test_what_is_no_frame_ends_the_connection(pair, garbage):
    ours, theirs = pair
    recorder = CallRecorder()
    receiver = connection_of(theirs, recorder)
    with pytest.raises(FrameError):
        unpack(garbage, 0)
    ours.sendall(garbage)
    receiver.read()
    assert "it sent a header" in describe(receiver.ended)
    assert recorder.frames == []
    assert recorder.has_ended


def test_end_is_found_behind_what_was_sent_before(pair):
    ours, theirs = pair
    recorder = CallRecorder()
    receiver = connection_of(theirs, recorder)
    ours.sendall(pack(CTS, 0, 0, number=9))
    ours.close()
    receiver.send(Outgoing(pack(CTS, 0, 0), memoryview(b"")))  # in vain
    receiver.read()
    receiver.read()
    assert recorder.frames == [(CTS, 9, b"")]
    assert receiver.ended == Departure(PeerExit.DIED)


def test_a_connection_that_is_given_up_does_not_look_like_the_end_of_a_process():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs, _ = listener.accept()
        with theirs:
            giving_up, receiver = connection_of(ours, CallRecorder()), connection_of(theirs, CallRecorder())
            giving_up.give_up(Departure(PeerExit.SILENT))
            until(lambda: receiver.read() or receiver.ended, "the connection has ended")
            assert giving_up.ended == Departure(PeerExit.SILENT)
            assert receiver.ended == Departure(PeerExit.RESET)


def whole(data, number=0):
    return pack(EAGER, 1, 2, num_bytes=len(data), number=number) + data


def one_of(receiver, data):
    """Ask for a whole frame of these bytes."""
    frame = receiver.read_frame(whole(data)[:HEADER_BYTES], len(data))
    return None if frame is None else bytes(frame)


def test_a_frame_that_is_asked_for_is_handed_over_alone(pair):
    ours, theirs = pair
    recorder = CallRecorder()
    receiver = connection_of(theirs, recorder)
    with pytest.raises(BlockingIOError):
        one_of(receiver, b"12345678")
    ours.sendall(whole(b"abcdefgh"))
    assert one_of(receiver, b"12345678") == b"abcdefgh"
    ours.sendall(whole(b"abcdefgh") + whole(b"more", 1) + whole(b"cut off", 2)[:-3])
    assert one_of(receiver, b"12345678") == b"abcdefgh"
    ours.sendall(b"off")
    receiver.read()
    assert recorder.frames == [(EAGER, 1, b"more"), (EAGER, 2, b"cut off")]


@pytest.mark.parametrize(
    "stream",
    [whole(b"87654321", 5) + whole(b"x"), whole(b"longer than that"), pack(CTS, 0, 0, number=9) + whole(b"abcdefgh")],
    ids=["another number", "another size", "another kind"],
)
def test_what_comes_instead_of_the_frame_asked_for_goes_where_frames_go(pair, stream):
    ours, theirs = pair
    expected, recorder = CallRecorder(), CallRecorder()
    ours.sendall(stream)
    connection_of(theirs, expected).read()
    ours.sendall(stream)
    assert one_of(connection_of(theirs, recorder), b"12345678") is None
    assert recorder.frames == expected.frames != []


@pytest.mark.parametrize("cut", [1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 7])
def test_a_frame_that_is_asked_for_and_comes_in_pieces_is_not_lost(pair, cut):
    ours, theirs = pair
    recorder = CallRecorder()
    receiver = connection_of(theirs, recorder)
    stream = whole(b"abcdefgh") + whole(b"12345678")
    ours.sendall(stream[:cut])
    assert one_of(receiver, b"........") is None
    ours.sendall(stream[cut:])
    assert one_of(receiver, b"........") is None
    receiver.read()
    assert recorder.frames == [(EAGER, 0, b"abcdefgh"), (EAGER, 0, b"12345678")]


def test_the_end_is_found_by_who_asks_for_a_frame(pair):
    ours, theirs = pair
    recorder = CallRecorder()
    receiver = connection_of(theirs, recorder)
    ours.sendall(whole(b"abcdefgh") + bytes(HEADER_BYTES))
    ours.close()
    assert one_of(receiver, b"12345678") == b"abcdefgh"
    assert one_of(receiver, b"12345678") is None
    assert "it sent a header" in describe(receiver.ended)
    other, closed = socket.socketpair()
    other.close()
    with closed:
        receiver = connection_of(closed, CallRecorder())
        assert one_of(receiver, b"12345678") is None
        assert receiver.ended == Departure(PeerExit.DIED)


def test_what_is_sent_at_once_keeps_its_place(pair):
    ours, theirs = pair
    recorder = CallRecorder()
    sender, receiver = connection_of(ours, CallRecorder()), connection_of(theirs, recorder)
    sent = 0
    while sender.send_at_once(whole(bytes([sent % 251]) * 4000, sent)):
        sent += 1
    assert sender.send_at_once(whole(b"too early")) is False
    sender.send(Outgoing(pack(EAGER, 1, 2, num_bytes=4, number=sent), memoryview(b"last")))
    while len(recorder.frames) < sent + 1:
        sender.write()
        receiver.read()
    numbers = range(sent)
    assert recorder.frames == [*((EAGER, n, bytes([n % 251]) * 4000) for n in numbers), (EAGER, sent, b"last")]
    receiver.shut()
    sender.read()
    assert sender.send_at_once(whole(b"nobody is there")) is False


def test_a_header_is_unpacked_as_it_was_packed():
    header = pack(EAGER, src=1, group=7, tag=5, num_bytes=8, dtype=b"float64")
    assert len(header) == HEADER_BYTES
    assert unpack(header, 0)[:5] == (EAGER, 1, 7, 5, 8)
    assert issubclass(FrameError, ValueError)
