"""The waiting loop: polls, sleeps, is woken, and raises at the deadline or when waiting is hopeless."""

import os
import pathlib
import sys
import tempfile
import threading
import time

import pytest

from meshdist.errors import DistBackendError, DistTimeoutError
from meshdist.runtime.doorbells import SocketDoorbells
from meshdist.runtime.waiting import (
    EXPLAINED_FROM_S,
    Doorbells,
    EventDoorbell,
    Waitable,
    WithoutBell,
    grace_s,
    wait_any,
    wait_until,
)
from meshdist.system.deadline import Deadline

pytestmark = pytest.mark.timeout(30)
linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux'")


class Flag(Waitable):
    """Ready once set; rings whoever is armed."""

    def __init__(self, hopeless=None):
        self.bells, self.is_set, self.looks, self.hopeless = [], False, 0, hopeless

    def set(self):
        self.is_set = True
        for bell in list(self.bells):
            bell.ring()

    def ready(self):
        self.looks += 1
        return self.is_set

    def check(self):
        if self.hopeless is not None:
            raise DistBackendError(self.hopeless)

    def arm(self, bell):
        self.bells.append(bell)

    def disarm(self, bell):
        self.bells.clear()

    def missing(self):
        return "somebody who sets the flag"


@pytest.fixture
def directory():
    """A directory with a short path: that of a socket takes at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="md-") as path:
        yield pathlib.Path(path)


@pytest.fixture(params=["event", pytest.param("socket", marks=linux), pytest.param("file", marks=linux)])
def bells(request, directory):
    kinds = {"event": Doorbells, "socket": SocketDoorbells, "file": lambda: SocketDoorbells(str(directory))}
    bells = kinds[request.param]()
    yield bells
    bells.close()
    assert list(directory.iterdir()) == []


def test_nothing_to_wait_for(bells):
    flag = Flag()
    flag.set()
    wait_until(flag, bells.mine(), Deadline(0), "test")
    assert flag.bells == []


def test_a_ring_wakes(bells):
    flag = Flag()
    bell = bells.mine()
    thread = threading.Thread(target=flag.set)
    thread.start()
    wait_until(flag, bell, Deadline(20), "test")
    thread.join()
    assert flag.bells == []  # disarmed


@pytest.mark.parametrize("poll_interval_s", [0.0, 2e-4, 5e-3])
def test_a_ring_is_kept_for_the_next_nap_however_short(bells, poll_interval_s):
    bell = bells.mine()
    assert bell.wait(poll_interval_s) is False
    bell.ring()
    assert bell.wait(poll_interval_s) is True
    assert bell.wait(poll_interval_s) is False


class Slept:
    """A bell that nobody rings, and for how long it is waited for."""

    def __init__(self):
        self.naps_s = []

    def wait(self, longest_s):
        self.naps_s.append(longest_s)
        return False


def test_what_no_peer_rings_for_needs_no_short_sleep_first():
    class Polled(WithoutBell):
        def ready(self):
            return False

        def check(self):
            return

        def missing(self):
            return ""

        def poll_interval_s(self):
            return 0.25

    polled, ringing = Slept(), Slept()
    wait_any([Polled()], polled, 1.0)
    assert polled.naps_s == [0.25]
    wait_any([Polled(), Flag()], ringing, 1.0)  # a peer that did not see the arming does not ring
    assert len(ringing.naps_s) == 2


def test_a_lost_ring_costs_a_nap(bells):
    class Silent(Flag):
        def set(self):
            self.is_set = True

    flag = Silent()
    thread = threading.Thread(target=flag.set)
    thread.start()
    wait_until(flag, bells.mine(), Deadline(20), "test")
    thread.join()


class SlowLook:
    """An observer whose look at the deadline takes so long that the flag is set meanwhile."""

    def __init__(self, flag):
        self.flag, self.num_looks = flag, 0

    def look(self, wait, error_prefix, deadline, waitable):
        self.num_looks += 1
        if deadline.expired():
            self.flag.set()

    def leave(self):
        raise AssertionError("not of async calls")


def test_who_has_come_while_the_wait_is_looked_into_at_its_deadline_is_there(bells):
    flag = Flag()
    wait_until(flag, bells.mine(), Deadline(EXPLAINED_FROM_S), "test", SlowLook(flag))
    assert flag.bells == []


def test_a_short_wait_ends_at_its_deadline_without_another_look(bells):
    flag = Flag()
    with pytest.raises(DistTimeoutError, match="waiting for somebody"):
        wait_until(flag, bells.mine(), Deadline(0.2), "test", SlowLook(flag))


def test_the_deadline_says_where_and_who_is_missing(bells):
    flag, start = Flag(), time.monotonic()
    with pytest.raises(
        DistTimeoutError, match=r"^barrier on 'x': timed out after 0.2 s waiting for somebody who sets the flag"
    ):
        wait_until(flag, bells.mine(), Deadline(0.2), "barrier on 'x'")
    assert 0.2 <= time.monotonic() - start < 10
    assert flag.looks < 20  # it sleeps in between
    assert flag.bells == []


def test_what_can_never_be_is_raised(bells):
    flag = Flag(hopeless="rank 1 has died")
    with pytest.raises(DistBackendError, match="rank 1 has died"):
        wait_until(flag, bells.mine(), Deadline(20), "test")
    assert flag.bells == []


def test_a_last_word_counts_more_than_the_end_of_the_peer(bells):
    class LastWord(Flag):
        def check(self):
            self.is_set = True  # it came between the two looks
            raise DistBackendError("rank 1 has died")

    wait_until(LastWord(), bells.mine(), Deadline(20), "test")


def test_wait_any_returns_when_one_is_ready(bells):
    flags = [Flag(), Flag(), Flag()]
    flags[1].set()
    wait_any(flags, bells.mine(), 20.0)
    assert [flag.bells for flag in flags] == [[], [], []]


def test_a_bell_that_has_rung_does_not_sleep(bells):
    bell = bells.mine()
    bell.ring()
    start = time.monotonic()
    bell.wait(20.0)
    assert time.monotonic() - start < 10


def test_a_bell_may_be_rung_more_often_than_anyone_listens(bells):
    bell = bells.mine()
    for _ in range(5000):
        bell.ring()
    bell.wait(20.0)


def test_every_thread_has_a_bell_and_gives_it_back(bells):
    mine = bells.mine()
    assert bells.mine() is mine
    numbers = []
    for _ in range(5):
        thread = threading.Thread(target=lambda: numbers.append(bells.mine().number))
        thread.start()
        thread.join()
    assert mine.number == 1
    assert set(numbers) == {2}


@linux
def test_socket_bells_are_rung_by_address_and_leave_no_file():
    ours, theirs = SocketDoorbells(), SocketDoorbells()
    bell = theirs.mine()
    ours.ring(theirs.base, bell.number)
    start = time.monotonic()
    bell.wait(20.0)
    assert time.monotonic() - start < 10
    with open("/proc/net/unix") as file:
        assert f"@{theirs.base}-{bell.number}" in file.read()
    theirs.close()
    ours.ring(theirs.base, bell.number)  # nobody there: nothing happens
    with open("/proc/net/unix") as file:
        assert theirs.base not in file.read()
    ours.close()


@linux
def test_socket_bells_may_be_files_which_go_with_them(directory):
    ours, theirs = SocketDoorbells(str(directory)), SocketDoorbells(str(directory))
    bell = theirs.mine()
    assert [str(path) for path in directory.iterdir()] == [f"{theirs.base}-{bell.number}"]
    ours.ring(theirs.base, bell.number)
    assert bell.wait(20.0)
    theirs.close()
    assert list(directory.iterdir()) == []
    ours.ring(theirs.base, bell.number)  # nobody there: nothing happens
    ours.close()


@linux
def test_closed_bells_give_their_descriptors_back():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        bells = SocketDoorbells()
        bells.mine()
        bells.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_event_bells_are_numbered_from_one():
    assert EventDoorbell(1).number == 1


def test_a_long_wait_is_reported_after_a_part_of_its_timeout():
    assert [grace_s(timeout_s) for timeout_s in (1800.0, 60.0, 0.5)] == [30.0, 6.0, 0.25]


def test_an_event_bell_that_has_rung_ends_the_next_wait():
    bell = EventDoorbell(1)
    bell.ring()
    assert bell.wait(60.0)
