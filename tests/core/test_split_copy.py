"""A long message is copied by its receiver and its sender at once: completely, and never after the receive."""

import ctypes
import gc
import os
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from until import until
from worlds import needs_linux

import meshdist as dist

pytestmark = [pytest.mark.timeout(60), needs_linux]
joint_copy = pytest.importorskip("meshdist.backends.gloo.shm.split_copy", reason="backend gloo is not to be had here")
KIB, MIB = 1 << 10, 1 << 20


class Here:
    """The memory of the other side, which is this process: copies to and from addresses."""

    def __init__(self):
        self.written = 0

    def read(self, address, into):
        into[...] = self.at(address, into.size)

    def try_write(self, address, data):
        self.at(address, data.size)[...] = data
        self.written += data.size
        return True

    def at(self, address, size):
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class Refused(Here):
    def try_write(self, address, data):
        return False


class Held(Here):
    """Writes only once it is let."""

    def __init__(self):
        super().__init__()
        self.began, self.resume = threading.Event(), threading.Event()

    def try_write(self, address, data):
        self.began.set()
        assert self.resume.wait(30)
        return super().try_write(address, data)


@pytest.fixture(scope="module")
def sides():
    from meshdist.backends.gloo.shm import channel
    from meshdist.backends.gloo.shm.segment import create

    segment = create(channel.CHANNEL_BYTES, [os.getpid()])
    yield channel.Channel(segment, channel.SENDER), channel.Channel(segment, channel.RECEIVER)
    segment.seal()


def both_parts(sides, number, data, target, sender_memory):
    from meshdist.backends.gloo.shm.channel import RTS_CMA, Header

    header = Header(RTS_CMA, 0, data.size, b"uint8", data.ctypes.data, number)
    writing = joint_copy.SplitWrite(sides[0], sender_memory, header, data)
    return writing, lambda: joint_copy.SplitRead(sides[1], Here(), header, target)


def write_on(writing):
    """Write on as a sender does that waits; return whether there was anything to write."""
    begun = writing.write_piece()
    while begun and writing.write_piece():
        pass
    return begun


@pytest.fixture
def quick_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_whoever_comes_first_all_of_it_is_copied_and_nothing_is_written_later(sides, quick_switches):
    by_sender = 0
    for number in range(1, 300):
        data = np.random.default_rng(number).integers(0, 256, 64 * KIB * (number % 9) + number, np.uint8)
        target, memory = np.zeros(data.size, np.uint8), Here()
        writing, begin_reading = both_parts(sides, number, data, target, memory)
        is_taken = threading.Event()

        def send(writing=writing, is_taken=is_taken):
            while not is_taken.is_set():
                write_on(writing)

        sender = threading.Thread(target=send)
        sender.start()
        reading = begin_reading()
        while not reading.read_on():
            pass
        assert np.array_equal(target, data), f"message {number} of {data.size} bytes"
        target[:] = 0  # it is the user's again
        is_taken.set()
        sender.join()
        assert not write_on(writing)
        assert not target.any(), f"message {number} was written into after it had been received"
        by_sender += memory.written
    assert by_sender


class Meanwhile:
    """Words of a channel; something happens right after one of them has been looked at for the first time."""

    def __init__(self, words, index, happens):
        self.words, self.index, self.happens = words, index, happens

    def __getitem__(self, index):
        word = self.words[index]
        if index == self.index and self.happens is not None:
            happens, self.happens = self.happens, None
            happens()
        return word

    def __setitem__(self, index, word):
        self.words[index] = word


def test_a_sender_that_is_about_to_write_when_all_has_been_read_does_not(sides):
    from meshdist.backends.gloo.shm.channel import ROOM

    data, target, memory = np.ones(MIB, np.uint8), np.zeros(MIB, np.uint8), Here()
    writing, begin_reading = both_parts(sides, 3, data, target, memory)
    reading, has_all = begin_reading(), []
    writing._words = Meanwhile(writing._words, ROOM, lambda: has_all.append(reading.read_on()))
    assert not write_on(writing)
    assert has_all == [True]
    assert memory.written == 0
    assert target.all()


@settings(max_examples=30)
@given(size=st.integers(1, 600 * KIB))
def test_without_the_sender_the_receiver_reads_all(sides, size):
    data, target = np.arange(size).astype(np.uint8), np.zeros(size, np.uint8)
    _, begin_reading = both_parts(sides, 1000 + size, data, target, Here())
    assert begin_reading().read_on()
    assert np.array_equal(target, data)


def test_a_sender_that_may_not_write_leaves_it_to_the_receiver(sides):
    data, target = np.arange(MIB).astype(np.uint8), np.zeros(MIB, np.uint8)
    writing, begin_reading = both_parts(sides, 1, data, target, Refused())
    reading = begin_reading()
    assert not write_on(writing)
    assert reading.read_on()
    assert np.array_equal(target, data)


def test_a_receiver_that_gives_up_knows_when_the_sender_no_longer_writes(sides):
    data, target, memory = np.ones(MIB, np.uint8), np.zeros(MIB, np.uint8), Held()
    writing, begin_reading = both_parts(sides, 2, data, target, memory)
    reading = begin_reading()
    sender = threading.Thread(target=write_on, args=(writing,))
    sender.start()
    assert memory.began.wait(30)
    reading.revoke()
    assert not reading.is_quiet()
    memory.resume.set()
    sender.join()
    assert reading.is_quiet()
    assert memory.written < MIB // 2
    assert not write_on(writing)


def there_and_back(sizes):
    rank, wrong = dist.get_rank(), []
    for size in sizes:
        x = np.arange(size, dtype=np.int64) * (3 if rank == 0 else 0)
        sent = x.copy()
        if rank == 0:
            dist.send(x, 1)
            x[:] = 0
            dist.recv(x, 1)
        else:
            dist.recv(x, 0)
            dist.send(x, 0)
        if not np.array_equal(x, np.arange(size) * 3) or (rank == 0 and not np.array_equal(x, sent)):
            wrong.append(size)
    return wrong


LENGTHS = [MIB // 2 - 1, MIB // 2, MIB // 2 + 1, 5 * MIB // 8 + 3, MIB + 7, 2 * MIB]


@pytest.mark.parametrize("ways", ["gloo", "gloo-slots"])
def test_long_messages_come_whole(worlds, ways):
    assert worlds.world(ways, 2).run(there_and_back, LENGTHS) == [[], []]


def with_a_slow_sender():
    from meshdist.backends.gloo.shm.single_copy import Memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "_copy", slow_to_write(Memory._copy, 0.05))  # longer than one looks before one sleeps
        return there_and_back(LENGTHS[-2:])


def slow_to_write(copy, seconds):
    def copied(memory, call, address, array, verb):
        if verb == "write":
            time.sleep(seconds)
        copy(memory, call, address, array, verb)

    return copied


def test_a_receiver_waits_for_a_sender_that_is_slow_to_write_its_part(worlds):
    assert worlds.world("gloo", 2).run(with_a_slow_sender) == [[], []]


def many_at_once():
    rank, size = dist.get_rank(), 3
    arrays = {other: np.full(MIB + other, 10 * rank + other, np.int64) for other in range(size) if other != rank}
    taken = {other: np.zeros(MIB + rank, np.int64) for other in arrays}
    works = [dist.irecv(taken[other], other) for other in taken]
    works += [dist.isend(arrays[other], other) for other in arrays]
    for work in works:
        work.wait()
    return all((taken[other] == 10 * other + rank).all() for other in taken)


def test_long_messages_between_all_at_once(worlds):
    assert worlds.world("gloo", 3).run(many_at_once) == [True] * 3


def where_a_rank_may_not_write():
    from meshdist.backends.gloo.shm.single_copy import Memory

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Memory, "_copy", only_reads(Memory._copy))
        group = dist.new_group()
        count = 5 * MIB // 8
        x = np.full(count, dist.get_rank() + 1.0)
        if dist.get_rank() == 1:
            dist.send(x, 0, group=group)
        else:
            dist.recv(x, 1, group=group)
        found = [float(x[0]), float(x[-1])]
        blocks = [np.zeros(4 * count) for _ in range(2)] if dist.get_rank() == 0 else None
        dist.gather(np.full(4 * count, dist.get_rank() + 5.0), blocks, 0, group=group)
        found += [float(block.mean()) for block in blocks or ()]
        x = np.full(3 * MIB, dist.get_rank() + 7.0)
        dist.broadcast(x, 0, group=group)
        return [*found, float(x.mean())]


def only_reads(copy):
    def copied(memory, call, address, array, verb):
        if verb == "write":
            raise dist.DistBackendError("may not write")
        copy(memory, call, address, array, verb)

    return copied


def test_where_a_rank_may_only_read_others_memory(worlds):
    found = worlds.world("gloo", 2).run(where_a_rank_may_not_write)
    assert found == [[2, 2, 5, 6, 7], [2, 2, 7]]


def a_call_that_fails_while_a_peer_writes():
    from meshdist.backends.gloo.shm.single_copy import Memory

    rank, count = dist.get_rank(), MIB
    with pytest.MonkeyPatch.context() as patch:
        group = dist.new_group()
        group.barrier()
        patch.setattr(Memory, "_copy", (Memory._copy, writes_when_it_has_failed(Memory._copy), fails)[rank])
        blocks = [np.zeros(count) for _ in range(3)] if rank == 0 else None
        with pytest.raises((dist.DistBackendError, RuntimeError)):
            dist.gather(np.full(count, 1.0), blocks, 0, group=group)
        for block in blocks or ():
            block[:] = 0  # the call has failed: they are the user's again
    dist.barrier()
    return sum(float(block.sum()) for block in blocks or ())


def writes_when_it_has_failed(copy):
    def copied(memory, call, address, array, verb):
        if verb == "write" and array.size:
            dist.send(np.zeros(1), 2)
            time.sleep(0.3)
        copy(memory, call, address, array, verb)

    return copied


def fails(memory, call, address, array, verb):
    if verb == "write":
        dist.recv(np.zeros(1), 1)
        raise RuntimeError("cannot write")


def test_once_a_call_has_failed_nobody_writes_into_its_arrays(worlds):
    assert worlds.world("gloo", 3).run(a_call_that_fails_while_a_peer_writes) == [0, 0, 0]


def gather_that_nobody_else_makes():
    group = dist.new_group(timeout=1.0)
    group.barrier()
    kept = None
    if dist.get_rank() == 0:
        blocks = [np.zeros(MIB) for _ in range(2)]
        kept = weakref.ref(blocks[1])
        with pytest.raises(dist.DistTimeoutError):
            dist.gather(np.zeros(MIB), blocks, 0, group=group)
        del blocks
        gc.collect()
    dist.barrier()
    return kept is None or kept() is None


def test_the_arrays_of_a_call_that_nobody_came_to_are_given_back(worlds):
    assert worlds.world("gloo", 2).run(gather_that_nobody_else_makes) == [True, True]


def receive_once_more():
    x, kept = np.zeros(8), None
    for _ in range(2):
        if dist.get_rank() == 0:
            x = np.zeros(8)
            kept = weakref.ref(x)
            dist.irecv(x, 1).wait()
        else:
            dist.isend(x, 0).wait()
    del x
    if kept is not None:
        until(lambda: kept() is None, "the array is given back")
    dist.barrier()


def test_an_array_that_was_received_is_not_kept(worlds):
    worlds.world("gloo", 2).run(receive_once_more)
