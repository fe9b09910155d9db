"""How threads sleep until one of several waits may go on."""

from __future__ import annotations

from meshdist.runtime.waiting import wait_any


class Silent:
    """A wait of which nothing comes."""

    def __init__(self):
        self.is_armed = False

    def arm(self, bell):
        self.is_armed = True

    def disarm(self, bell):
        self.is_armed = False

    def ready(self):
        return False

    def poll_interval_s(self):
        return 60.0


class Failing(Silent):
    def arm(self, bell):
        raise FileNotFoundError("what a rank has left that is gone")


class Bell:
    def wait(self, timeout_s):
        raise AssertionError("it sleeps beside a wait that has failed")


def test_a_wait_that_cannot_be_armed_ends_the_sleep_and_not_the_thread():
    others = [Silent(), Silent()]
    wait_any([others[0], Failing(), others[1]], Bell(), 60.0)
    assert not any(other.is_armed for other in others)
