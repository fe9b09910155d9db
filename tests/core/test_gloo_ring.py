"""The ring of a channel: what is written comes out, whole and in order, whatever the sizes."""

import os
import sys
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdist.errors import DistBackendError
from meshdist.runtime.departure import Departure, PeerExit

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
channel = pytest.importorskip("meshdist.backends.gloo.shm.channel", reason="backend gloo is not to be had here")
LONGEST = 64 << 10


def both_sides():
    from meshdist.backends.gloo.shm.segment import create

    segment = create(channel.CHANNEL_BYTES, [os.getpid()])
    sides = channel.Channel(segment, channel.SENDER), channel.Channel(segment, channel.RECEIVER)
    segment.seal()
    return sides


sizes = st.one_of(st.integers(0, 200), st.integers(LONGEST - 200, LONGEST), st.integers(0, 3 * channel.RING_BYTES))


class Writer:
    """Writes messages one after another, as far as there is room."""

    def __init__(self, side, messages):
        self.side = side
        self.left = deque(messages)
        self.coming = None

    def resume(self):
        while self.left or self.coming is not None:
            if self.coming is None:
                number, data = self.left[0]
                if not self.side.announce(channel.Header(channel.RTS, number % 5, data.size, b"uint8", 0, number)):
                    return
                self.left.popleft()
                self.coming = data, 0
            data, written = self.coming
            written = self.side.fill(data, written)
            self.coming = None if written == data.size else (data, written)
            if self.coming is not None:
                return


class Reader:
    """Reads messages one after another, as far as they are there."""

    def __init__(self, side):
        self.side = side
        self.read = []
        self.coming = None

    def resume(self, most):
        for _ in range(most):
            if self.coming is None:
                header = self.side.peek()
                if header is None:
                    return
                self.side.drop()
                self.coming = header, np.zeros(header.num_bytes, np.uint8), 0
            header, target, there = self.coming
            there = self.side.drain(target, there)
            self.coming = header, target, there
            if there < target.size:
                return
            self.read.append((header, target))
            self.coming = None


@settings(max_examples=60)
@given(st.lists(sizes, max_size=60), st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_messages_come_out_as_they_went_in(lengths, turns):
    """Between any number of reads the writer goes on; messages may be longer than the ring."""
    sender, receiver = both_sides()
    messages = [(number, np.full(length, number % 251, np.uint8)) for number, length in enumerate(lengths)]
    writer, reader = Writer(sender, messages), Reader(receiver)
    for most in turns:
        writer.resume()
        reader.resume(most)
    for _ in range(10 * len(lengths) + 10):
        writer.resume()
        reader.resume(100)
    assert [(header.number, header.tag) for header, _ in reader.read] == [
        (number, number % 5) for number, _ in messages
    ]
    for (_, target), (_, data) in zip(reader.read, messages, strict=True):
        assert (target == data).all()
        assert target.size == data.size
    assert receiver.is_empty()


def test_a_full_ring_refuses_and_has_room_again():
    sender, receiver = both_sides()
    payload = np.arange(LONGEST, dtype=np.uint64).view(np.uint8)[:LONGEST]
    header = channel.Header(channel.EAGER, 0, LONGEST, b"uint8")

    def write():
        return sender.has_room(LONGEST) and sender.announce(header) and sender.fill(payload, 0) == LONGEST

    count = 0
    while write():
        count += 1
    assert count >= 3
    target = np.empty_like(payload)
    for _ in range(50):
        assert receiver.peek() == header._replace(dtype=b"uint8".ljust(16, b"\0"))
        assert receiver.read_whole(target)
        assert (target == payload).all()
        assert write()
        assert not write()


def test_a_message_that_does_not_come_to_its_end_is_not_taken():
    sender, receiver = both_sides()
    data = np.arange(2 * channel.RING_BYTES, dtype=np.uint64).view(np.uint8)[: 2 * channel.RING_BYTES]
    sender.announce(channel.Header(channel.RTS, 0, data.size, b"uint8"))
    written = sender.fill(data, 0)
    assert 0 < written < data.size
    target = np.empty_like(data)
    assert not receiver.read_whole(target)
    receiver.drop()
    there = receiver.drain(target, 0)
    assert there == written
    assert (target[:there] == data[:there]).all()


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "written to its end"])
def test_a_receiver_that_read_the_rest_elsewhere_goes_on_behind_the_message(is_cut):
    sender, receiver = both_sides()
    size = 3 * channel.RING_BYTES // 4 + 7
    data = np.full(2 * size if is_cut else size, 9, np.uint8)
    sender.announce(channel.Header(channel.RTS, 0, data.size, b"uint8", 0, 1))
    written = sender.fill(data, 0)
    receiver.drop()
    there = receiver.drain(np.empty(64 << 10, np.uint8), 0)
    assert not receiver.skip(1, data.size - there)
    if is_cut:
        assert written < data.size
        sender.cut(1)
    else:
        sender.mark_written(1)
    sender.announce(channel.Header(channel.RTS, 5, 3, b"uint8", 0, 2))
    sender.fill(np.array([1, 2, 3], np.uint8), 0)
    sender.mark_written(2)
    assert receiver.skip(1, data.size - there)
    assert receiver.peek().tag == 5
    receiver.drop()
    target = np.zeros(3, np.uint8)
    assert receiver.drain(target, 0) == 3
    assert target.tolist() == [1, 2, 3]
    assert receiver.is_empty()


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "written to its end"])
def test_a_message_whose_rest_was_read_elsewhere_leaves_the_ring_free(is_cut):
    """Small messages are buffered, although the receiver does not come back to the channel before they are sent."""
    sender, receiver = both_sides()
    small = np.arange(100, dtype=np.uint8)
    data = np.zeros(2 * channel.RING_BYTES if is_cut else channel.RING_BYTES - channel.UNIT, np.uint8)
    sender.announce(channel.Header(channel.RTS, 0, data.size, b"uint8", 0, 1))
    receiver.drop()
    written = sender.fill(data, 0)
    assert is_cut or written == data.size
    if not is_cut:
        sender.mark_written(1)
    assert not sender.has_room(100)
    receiver.words[channel.TAKEN] = 1
    if is_cut:
        sender.cut(1)
    for number in range(1000):
        assert sender.has_room(100)
        assert sender.announce(channel.Header(channel.EAGER, number, 100, b"uint8"))
        assert sender.fill(small, 0) == 100
    assert receiver.skip(1, data.size)
    for number in range(1000):
        assert receiver.peek().tag == number
        receiver.drop()
        target = np.zeros(100, np.uint8)
        assert receiver.drain(target, 0) == 100
        assert (target == small).all()
    assert receiver.is_empty()


def test_each_side_says_how_it_ended_to_the_other():
    sender, receiver = both_sides()
    assert sender.others_departure() is receiver.others_departure() is None
    left, gave_up = Departure(PeerExit.LEFT_WORLD), Departure(PeerExit.GAVE_UP, detail="ü" * 2000)
    sender.leave(left)
    sender.leave(gave_up)  # what was said first stands
    receiver.leave(gave_up)
    assert receiver.others_departure() == left
    said = sender.others_departure()
    assert said.exit is PeerExit.GAVE_UP
    assert set(said.detail) == {"ü"}


def test_each_side_sees_where_the_other_sleeps():
    sender, receiver = both_sides()
    sender.sleep_on(3)
    sender.sleep_on(1)
    receiver.sleep_on(5)
    assert (receiver.sleepers(), sender.sleepers()) == (0b101, 0b10000)
    sender.wake_up(3)
    assert receiver.sleepers() == 0b1


def test_other_memory_under_the_number_of_a_closed_descriptor_is_not_taken_for_it():
    from meshdist.backends.gloo.shm.segment import create, find

    closed = create(channel.CHANNEL_BYTES, [os.getpid()])
    closed.seal()
    other = create(channel.CHANNEL_BYTES, [os.getpid()])
    assert other.place.split()[0] == closed.place.split()[0]
    with pytest.raises(DistBackendError, match="shared memory .* of a peer.*the peer has closed it"):
        find(closed.place, channel.CHANNEL_BYTES)
    find(other.place, channel.CHANNEL_BYTES)
    other.seal()
