"""The ring of a channel: what is written comes out, whole and in order, whatever the sizes."""

import os
import sys
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
channel = pytest.importorskip("meshdist.backends.gloo.channel", reason="backend gloo is not to be had here")
LONGEST = 64 << 10


def both_sides():
    from meshdist.backends.gloo.segment import create

    segment = create(channel.CHANNEL_BYTES, [os.getpid()])
    sides = channel.Channel(segment, channel.SENDER), channel.Channel(segment, channel.RECEIVER)
    segment.seal()
    return sides


sizes = st.one_of(st.integers(0, 200), st.integers(LONGEST - 200, LONGEST), st.integers(0, LONGEST))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(sizes, st.integers(0, 4)), max_size=120))
def test_entries_come_out_as_they_went_in(steps):
    """Each step writes one entry, if there is room, and then reads up to so many."""
    sender, receiver = both_sides()
    waiting, number = deque(), 0

    def read():
        entry = receiver.peek()
        if entry is None:
            assert not waiting
            return
        header, payload = entry
        expected = waiting.popleft()
        assert (header[1], header[2], header[4]) == (expected % 5, payload.size, expected)
        assert (payload == expected % 251).all()
        receiver.drop(payload)

    for size, num_reads in steps:
        payload = np.full(size, number % 251, np.uint8)
        header = (channel.WHOLE, number % 5, size, 0, number, b"uint8")
        if sender.write(header, payload):
            waiting.append(number)
            number += 1
        else:
            assert waiting, "there is always room in an empty ring"
        for _ in range(num_reads):
            read()
    while waiting:
        read()
    assert receiver.peek() is None


def test_a_full_ring_refuses_and_has_room_again():
    sender, receiver = both_sides()
    payload = np.zeros(LONGEST, np.uint8)
    header = (channel.WHOLE, 0, LONGEST, 0, 0, b"uint8")
    count = 0
    while sender.write(header, payload):
        count += 1
    assert count >= 3
    for _ in range(50):
        receiver.drop(receiver.peek()[1])
        assert sender.write(header, payload)
        assert not sender.write(header, payload)


def test_each_side_says_how_it_ended_to_the_other():
    sender, receiver = both_sides()
    assert (sender.state(), receiver.state()) == ((0, ""), (0, ""))
    sender.say(1, "the sender's word")
    receiver.say(2, "ü" * 2000)
    assert receiver.state() == (1, "the sender's word")
    state, text = sender.state()
    assert state == 2
    assert text.startswith("üüü")


def test_each_side_sees_where_the_other_sleeps():
    sender, receiver = both_sides()
    sender.sleep_on(3)
    sender.sleep_on(1)
    receiver.sleep_on(5)
    assert (receiver.sleepers(), sender.sleepers()) == (0b101, 0b10000)
    sender.wake_up(3)
    assert receiver.sleepers() == 0b1
