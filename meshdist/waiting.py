"""Waiting: the one loop that every blocking call of every backend ends up in.

A `Waitable` says whether it is ready; a `Doorbell` is what a thread sleeps on until a peer rings. The sleeper arms
the waitable with its bell, looks once more, and sleeps. A peer that stores its flag before the sleeper's arming is
visible to it can miss the bell; so the first nap is short, and what is lost is a millisecond. By the second nap the
arming is visible everywhere, and naps are only cut to notice the death of a peer and Ctrl-C.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from meshdist.deadline import Deadline
from meshdist.errors import DistError, DistTimeoutError
from meshdist.systems import let_others_run

if TYPE_CHECKING:
    from meshdist.debug.vigil import Vigil, Watch

FIRST_NAP_S = 0.001
LONGEST_NAP_S = 0.08


class Doorbell(ABC):
    """What one thread of a rank sleeps on; peers ring it.

    Attributes:
        number: Tells the doorbells of one rank apart; at least 1, since 0 means that nobody sleeps.
    """

    number: int

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Sleep until the bell rings, or has rung since the last wait; return False once `timeout_s` have passed."""

    @abstractmethod
    def ring(self) -> None:
        """Wake the thread that sleeps on this bell, or its next wait."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the bell holds."""


class EventDoorbell(Doorbell):
    """A doorbell between the threads of one process.

    Example:
        >>> bell = EventDoorbell(1)
        >>> bell.ring()
        >>> bell.wait(60.0)  # has rung: returns at once
        True
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._event = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        rang = self._event.wait(timeout_s)
        self._event.clear()
        return rang

    def ring(self) -> None:
        self._event.set()

    def close(self) -> None:
        self._event.set()


class Waitable(ABC):
    """Something a rank waits for: peers that arrive, a message, room in a buffer.

    Attributes:
        looking_s: How long it pays to look, letting others run in between, before sleeping.
    """

    looking_s = 0.001

    @abstractmethod
    def ready(self) -> bool:
        """Return True once there is nothing to wait for; move the matter on where this side can."""

    @abstractmethod
    def check(self) -> None:
        """Raise a DistError where it can never become ready: a dead peer, calls that disagree."""

    @abstractmethod
    def arm(self, bell: Doorbell) -> None:
        """Ask those waited for to ring `bell`."""

    @abstractmethod
    def disarm(self, bell: Doorbell) -> None:
        """Take back `arm`."""

    @abstractmethod
    def missing(self) -> str:
        """Return who or what is waited for, for the message of a timeout."""

    def nap_s(self) -> float:
        """Return how long to sleep at most until the next look; short where nobody rings."""
        return LONGEST_NAP_S


class Wrapped(Waitable):
    """Stands for another waitable; what derives from it adds to what that one does."""

    def __init__(self, waitable: Waitable) -> None:
        self.looking_s = waitable.looking_s
        self.waitable = waitable

    def ready(self) -> bool:
        return self.waitable.ready()

    def check(self) -> None:
        self.waitable.check()

    def arm(self, bell: Doorbell) -> None:
        self.waitable.arm(bell)

    def disarm(self, bell: Doorbell) -> None:
        self.waitable.disarm(bell)

    def missing(self) -> str:
        return self.waitable.missing()

    def nap_s(self) -> float:
        return self.waitable.nap_s()


def is_ready(waitable: Waitable) -> bool:
    """Return `waitable.ready()`; where it is not, raise if it can never be."""
    if waitable.ready():
        return True
    try:
        waitable.check()
    except DistError:
        # What looked like a peer's end may have come right after its last word.
        if waitable.ready():
            return True
        raise
    return False


def look_a_while(waitable: Waitable) -> bool:
    """Look at `waitable` for its `looking_s`, letting others run in between; return True once it is ready.

    Waking up takes longer than most peers do. Spinning instead would keep a peer from coming that is on the same core.
    It goes by the clock: on a busy machine, to let others run may take milliseconds.
    """
    end = monotonic() + waitable.looking_s
    while not waitable.ready():
        let_others_run()
        if monotonic() > end:
            return False
    return True


def look_for(look: Callable[[], bool | None], looking_s: float, spins: int = 0) -> bool:
    """Call `look` until it returns True or False, and return that; False once it has found nothing for `looking_s`.

    As `look_a_while`, for what is looked for without a Waitable; the first `spins` times in a row.
    """
    end = 0.0
    while (found := look()) is None:
        spins -= 1
        if spins < 0:
            end = end or monotonic() + looking_s
            let_others_run()
            if monotonic() > end:
                return False
    return found


def wait_until(waitable: Waitable, bell: Doorbell, deadline: Deadline, where: str, vigil: Vigil | None = None) -> None:
    """Block until `waitable` is ready; have `vigil` look after a wait that lasts long.

    Raises:
        DistTimeoutError: Not ready at the deadline; the message says where, and who is missing.
        DistError: What `waitable.check` raises.
    """
    nap_s, armed = FIRST_NAP_S, False
    watch: Watch | None = None
    try:
        while not is_ready(waitable):
            if deadline.expired():
                raise timed_out(where, deadline.timeout_s, waitable, watch)
            if vigil is not None:
                watch = vigil.look(watch, where, deadline, waitable)
            # Every time: looking may have found a new place to sleep at, such as a channel that a peer has made.
            waitable.arm(bell)
            armed = True
            if waitable.ready():
                return
            bell.wait(deadline.slice_s(min(nap_s, waitable.nap_s())))
            nap_s = LONGEST_NAP_S
    except DistError as error:
        if watch is not None:
            watch.give_up(error)
        raise
    finally:
        if armed:
            waitable.disarm(bell)
        if watch is not None:
            watch.end()


def timed_out(where: str, timeout_s: float, waitable: Waitable, watch: Watch | None) -> DistTimeoutError:
    """Return the error of a wait whose time is over."""
    missing = waitable.missing()  # now: while the story is found out, others may give up as well
    story = "" if watch is None else watch.story()
    return DistTimeoutError(f"{where}: timed out after {timeout_s:g} s waiting for {missing}{story}")


def _has_news(waitable: Waitable) -> bool:
    try:
        return waitable.ready()
    except Exception:  # it belongs to whoever waits for this one, and comes again when they look
        return True


def wait_any(waitables: Sequence[Waitable], bell: Doorbell, longest_s: float) -> None:
    """Sleep until one of `waitables` may have become ready, until the bell rings, or for `longest_s` and a bit."""
    for waitable in waitables:
        waitable.arm(bell)
    try:
        # The first nap is short for the sake of a peer that did not see the arming; without peers there is none.
        for nap_s in (FIRST_NAP_S, longest_s) if waitables else (longest_s,):
            if any(map(_has_news, waitables)):
                return
            if bell.wait(min(nap_s, *(waitable.nap_s() for waitable in waitables), longest_s)):
                return
    finally:
        for waitable in waitables:
            waitable.disarm(bell)


class Doorbells:
    """The doorbells of one rank: each thread that waits gets one of its own, at its first wait.

    Threads that end give their number back, so a rank has as many bells as threads that ever waited at once.

    Attributes:
        base: What peers in other processes need to ring them; empty where there are none.
    """

    base = ""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._made: dict[threading.Thread, Doorbell] = {}

    def mine(self) -> Doorbell:
        """Return the calling thread's doorbell."""
        bell: Doorbell | None = getattr(self._local, "bell", None)
        if bell is None:
            bell = self._local.bell = self._adopt(threading.current_thread())
        return bell

    def make(self, number: int) -> Doorbell:
        """Return a new doorbell; a subclass makes those that other processes can ring."""
        return EventDoorbell(number)

    def close(self) -> None:
        """Close all."""
        with self._lock:
            for bell in self._made.values():
                bell.close()
            self._made.clear()

    def _adopt(self, thread: threading.Thread) -> Doorbell:
        with self._lock:
            ended = next((owner for owner in self._made if not owner.is_alive()), None)
            bell = self._made.pop(ended) if ended is not None else self.make(len(self._made) + 1)
            self._made[thread] = bell
            return bell
