"""Posted receives and unexpected messages, matched without any transport."""

import threading

import numpy as np
import pytest

from meshdist.backends.p2p.match_queue import MatchQueue
from meshdist.backends.p2p.requests import RecvRequest, UnexpectedMessage, arrive, post
from meshdist.errors import DistBackendError

NAME = b"float64".ljust(16, b"\0")


class Recv(RecvRequest):
    def progress(self):
        pass

    def check(self):
        pass

    def arm(self, bell):
        pass

    def disarm(self, bell):
        pass


class Announced(UnexpectedMessage):
    """A message whose bytes come when the test says so."""

    def __init__(self, queue, content, source=1, tag=0):
        super().__init__(queue, source, tag, content.nbytes, NAME, is_announced=True)
        self.content = content
        self.fetches = []

    def fetch(self, target, then):
        self.fetches.append((target, then))

    def come(self):
        (target, then) = self.fetches.pop()
        target[...] = self.content.view(np.uint8)
        then()


@pytest.fixture
def queue():
    return MatchQueue(threading.Lock())


def receive(queue, size=3, source=1, tag=0):
    array = np.zeros(size)
    return array, Recv(array, NAME, source, tag, queue)


def test_an_announced_message_comes_straight_into_the_array_of_its_receive(queue):
    message, (array, request) = Announced(queue, np.arange(3.0)), receive(queue)
    assert not arrive(message)
    assert not message.fetches  # nobody waits for anything of its sender
    assert post(request)
    assert not request.ready()
    message.come()
    assert request.ready()
    assert (request.source, array.tolist(), queue.is_idle) == (1, [0, 1, 2], True)


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_message_in_the_way_is_fetched_before_its_receive_is_posted(queue, comes_first):
    message, (array, request) = Announced(queue, np.arange(3.0)), receive(queue)
    _, other = receive(queue, tag=7)
    assert not post(other)
    assert not arrive(message)
    if comes_first:
        message.come()
    post(request)
    if not comes_first:
        assert not request.ready()
        message.come()
    assert request.ready()
    assert (array.tolist(), message.fetches) == ([0, 1, 2], [])


def test_a_receive_that_is_posted_has_what_is_in_its_way_fetched(queue):
    message = Announced(queue, np.arange(3.0))
    arrive(message)
    assert not post(receive(queue, source=None, tag=7)[1])
    assert message.fetches


def test_a_message_that_does_not_fit_is_told_of_and_not_fetched(queue):
    message, (_, request) = Announced(queue, np.arange(4.0)), receive(queue)
    assert not post(request)
    assert arrive(message)
    words = r"rank 1 sent float64\[4\], but the receiving array is float64\[3\]$"
    with pytest.raises(DistBackendError, match=words):
        request.ready()
    assert not message.fetches


def test_a_receive_of_any_source_and_one_of_the_sender_take_messages_in_their_order(queue):
    _, first = receive(queue, source=None)
    _, second = receive(queue, source=1)
    post(first)
    post(second)
    assert [queue.match(1, 0), queue.match(1, 0), queue.match(1, 0)] == [first, second, None]


def test_the_tags_of_unexpected_messages_are_named(queue):
    for tag in (5, 1, -3):
        arrive(Announced(queue, np.arange(3.0), tag=tag))
    assert (
        receive(queue, tag=2)[1].missing()
        == "a message from rank 1 with tag 2; messages with tags 1, 5 are waiting to be received"
    )
    assert receive(queue, source=2, tag=2)[1].missing() == "a message from rank 2 with tag 2"


def test_a_receive_takes_its_message_whichever_comes_first():
    queue = MatchQueue(threading.Lock())
    assert queue.post_recv("receive", None, tag=7) is None
    assert queue.match(2, tag=7) == "receive"
    assert queue.match(2, tag=7) is None
    queue.add_unexpected("message", 2, tag=7)
    assert queue.post_recv("another receive", 2, tag=7) == "message"
