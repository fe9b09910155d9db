"""Waiting: the one loop that all blocking calls of all backends use.

A thread waits for a `Waitable` and sleeps on a `Doorbell` until a peer rings it. It arms the waitable with its bell,
checks once more, and sleeps. A peer that sets its flag before it sees the arming does not ring; therefore the first
sleep is short, and a lost ring costs a millisecond. By the second sleep the arming is visible to all peers; that sleep
is bounded only to notice the death of a peer and Ctrl-C.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from meshdist.errors import DistError, DistTimeoutError
from meshdist.system.deadline import Deadline
from meshdist.system.platform import let_others_run

if TYPE_CHECKING:
    import numpy as np

    from meshdist.arrays.host import Array

FIRST_POLL_INTERVAL_S = 0.001
LONGEST_POLL_INTERVAL_S = 0.08


class Doorbell(ABC):
    """Wakes one thread of a rank when a peer rings it."""

    number: int  # identifies the doorbell among those of its rank; at least 1, since 0 means that no thread sleeps

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Sleep until the bell rings, or return at once if it has rung since the last wait; return False on timeout."""

    @abstractmethod
    def ring(self) -> None:
        """Wake the thread that sleeps on this bell, or end its next wait at once."""

    @abstractmethod
    def close(self) -> None: ...


class EventDoorbell(Doorbell):
    """A doorbell between the threads of one process."""

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
    """A condition that a rank waits for: peers that arrive, a message, space in a buffer.

    Attributes:
        spin_s: How long to spin, yielding the processor, before sleeping.
    """

    spin_s = 0.001

    @abstractmethod
    def ready(self) -> bool:
        """Return True once the condition holds; make the progress that is possible without blocking."""

    @abstractmethod
    def check(self) -> None:
        """Raise a DistError if it can never become ready: a dead peer, calls that disagree."""

    @abstractmethod
    def arm(self, bell: Doorbell) -> None:
        """Ask the peers to ring `bell`."""

    @abstractmethod
    def disarm(self, bell: Doorbell) -> None: ...

    @abstractmethod
    def missing(self) -> str:
        """Return the missing ranks, or what else is waited for, for the message of a timeout."""

    def instead(self) -> str:
        """Return what has come instead of what is waited for, for messages; empty if nothing has, or it is unknown."""
        return ""

    def full_buffer(self) -> str:
        """Return which buffer is full, for a message that would be done with room in it; empty for any other wait."""
        return ""

    def awaits(self) -> Collection[int]:
        """Return the global ranks that all have to do something, in a call of theirs, before it can be ready.

        It returns none if that is unknown, or if something may go on in the background. What the ranks do must be seen
        by the next `ready`, or, as long as it may be under way, be counted in `Peers.traffic`. See `debug.deadlock`.
        """
        return ()

    def awaits_any(self) -> Collection[int]:
        """Return all global ranks of which any one may make it ready, by a message, where that takes only one of them.

        Nothing else makes it ready. Otherwise as `awaits`, of which one of the two returns none.
        """
        return ()

    def present(self) -> Collection[int]:
        """Return the global ranks that are known to have made the call that is waited for; none if that is unknown."""
        return ()

    def sends_to(self) -> Collection[int]:
        """Return the global ranks, besides the awaited ones, to which messages of this rank wait for room in memory.

        They are written meanwhile, which may end waits of these ranks that read them.
        """
        return ()

    def sends_in(self) -> str:
        """Return the name of the group in which the awaited rank has to read messages of this one; empty if none."""
        return ""

    def reads_in(self) -> str:
        """Return the name of the group in which this wait reads all messages of the awaited ranks; empty if none.

        A send to this rank ends by that, whatever its tag. What both sides count in `Peers.traffic` is not meant.
        """
        return ""

    def poll_interval_s(self) -> float:
        """Return the longest time to sleep between two checks; short if no peer rings."""
        return LONGEST_POLL_INTERVAL_S


class WithoutBell(Waitable):
    """A condition that is looked for again and again, since no peer rings a doorbell for it."""

    def arm(self, bell: Doorbell) -> None:
        return

    def disarm(self, bell: Doorbell) -> None:
        return


class Incoming(Waitable):
    """A posted receive.

    Attributes:
        source: The sender, as a rank of the group, once it is ready.
        pickle: What came, once it is ready, if the receive is one of a list of objects; empty in a dry run. None of
            backends that do not receive such messages.
    """

    source: int
    pickle: Array | None = None


class Found(NamedTuple):
    """A message that a probe found.

    Attributes:
        source: Its sender, as a rank of the group.
        dtype: None if it is not known, and of a list of objects.
        num_objects: The length of a list of objects; None of an array.
    """

    source: int
    tag: int
    num_bytes: int
    dtype: np.dtype[Any] | None = None
    num_objects: int | None = None


class Probe(Incoming):
    """A wait for a message that is not received."""

    @abstractmethod
    def found(self) -> Found:
        """Return the message, once it is ready."""


class Wrapped(Waitable):
    """Delegates to another waitable; subclasses add to it."""

    def __init__(self, waitable: Waitable) -> None:
        self.spin_s = waitable.spin_s
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

    def instead(self) -> str:
        return self.waitable.instead()

    def full_buffer(self) -> str:
        return self.waitable.full_buffer()

    def awaits(self) -> Collection[int]:
        return self.waitable.awaits()

    def awaits_any(self) -> Collection[int]:
        return self.waitable.awaits_any()

    def present(self) -> Collection[int]:
        return self.waitable.present()

    def sends_to(self) -> Collection[int]:
        return self.waitable.sends_to()

    def sends_in(self) -> str:
        return self.waitable.sends_in()

    def reads_in(self) -> str:
        return self.waitable.reads_in()

    def poll_interval_s(self) -> float:
        return self.waitable.poll_interval_s()


class Watch(Protocol):
    """The diagnosis of one long wait."""

    def hang_report(self) -> str:
        """Return which rank waits for which, to end the message of a timeout; empty if that is unknown."""

    def give_up(self, error: DistError) -> DistError | None:
        """Keep the state of this rank for peers that ask later, since the wait ends with `error`.

        Return the error to raise instead, if the ranks wait for each other; otherwise None.
        """

    def end(self) -> None: ...


class WaitObserver(Protocol):
    """Diagnoses long waits."""

    def look(self, wait: Watch | None, error_prefix: str, deadline: Deadline, waitable: Waitable) -> Watch | None:
        """Observe a wait, repeatedly; return None while it is short, then the Watch to pass from then on.

        Raises:
            DistBackendError: The ranks are in a deadlock.
        """

    def leave(self) -> None:
        """Note that the thread that has waited for async calls goes on."""

    def interrupt(self, waitable: Waitable) -> None:
        """Note which ranks `waitable` lacks, as Ctrl-C ends the wait for it."""


# The least timeout whose error explains who waits for whom, even if this rank has not run since it began to wait: then
# it is looked into at the deadline. Shorter ones end on time.
EXPLAINED_FROM_S = 1.0
# Until the first of these times it may still be proven that ranks wait for each other, which says it all.
_SHORTEST_GRACE_S, _LONGEST_GRACE_S = 3.0, 30.0


def grace_s(timeout_s: float) -> float:
    """Return how long a call may wait before it is diagnosed as a hang."""
    return min(_LONGEST_GRACE_S, max(timeout_s / 10, min(_SHORTEST_GRACE_S, timeout_s / 2)))


def is_ready(waitable: Waitable) -> bool:
    """Return `waitable.ready()`; raise if it can never become ready."""
    if waitable.ready():
        return True
    try:
        waitable.check()
    except DistError:
        # A peer that has ended may have sent its last message just before.
        if waitable.ready():
            return True
        raise
    return False


def spin(waitable: Waitable) -> bool:
    """Check `waitable` for its `spin_s`, yielding the processor in between; return True once it is ready.

    Most peers arrive sooner than a sleeping thread wakes up. Without the yields, a peer on the same core could not
    arrive at all. The spin is bounded by time, since on a busy machine one yield may take milliseconds.
    """
    end = monotonic() + waitable.spin_s
    while not waitable.ready():
        let_others_run()
        if monotonic() > end:
            return False
    return True


def spin_for(look: Callable[[], bool | None], spin_s: float, spins: int = 0) -> bool:
    """Call `look` until it returns True or False, and return that; False if it returns None for `spin_s`.

    Like `spin`, without a Waitable; the first `spins` calls do not yield.
    """
    end = 0.0
    while (found := look()) is None:
        spins -= 1
        if spins < 0:
            end = end or monotonic() + spin_s
            let_others_run()
            if monotonic() > end:
                return False
    return found


def wait_until(
    waitable: Waitable, bell: Doorbell, deadline: Deadline, error_prefix: str, observer: WaitObserver | None = None
) -> None:
    """Block until `waitable` is ready; `observer` diagnoses a long wait.

    Raises:
        DistTimeoutError: It was not ready at the deadline; the message names the call and the missing ranks.
        DistError: Raised by `waitable.check`.
    """
    poll_interval_s, armed = FIRST_POLL_INTERVAL_S, False
    watch: Watch | None = None
    try:
        while not is_ready(waitable):
            missing = waitable.missing() if deadline.expired() else None
            if observer is not None and (missing is None or deadline.timeout_s >= EXPLAINED_FROM_S):
                watch = observer.look(watch, error_prefix, deadline, waitable)
            if missing is not None:
                if waitable.ready():  # the look may have taken its time
                    return
                raise timed_out(error_prefix, deadline.timeout_s, missing, watch)
            # Arm before every sleep: the check may have found a new source to wake from, such as a peer's new channel.
            waitable.arm(bell)
            armed = True
            if waitable.ready():
                return
            bell.wait(deadline.slice_s(min(poll_interval_s, waitable.poll_interval_s())))
            poll_interval_s = LONGEST_POLL_INTERVAL_S
    except DistError as error:
        instead = None if watch is None else watch.give_up(error)
        if instead is not None:
            raise instead from None
        raise
    except KeyboardInterrupt:
        if observer is not None:
            observer.interrupt(waitable)
        raise
    finally:
        if armed:
            waitable.disarm(bell)
        if watch is not None:
            watch.end()


def timed_out(error_prefix: str, timeout_s: float, missing: str, watch: Watch | None) -> DistTimeoutError:
    """Return the error of a wait; `missing` is of before the report, as other ranks may give up while that is made."""
    hang_report = "" if watch is None else watch.hang_report()
    return DistTimeoutError(
        f"timed out after {timeout_s:g} s waiting for {missing}", error_prefix=error_prefix, hang_report=hang_report
    )


def has_news(waitable: Waitable) -> bool:
    """Return whether `waitable` is ready, or raises."""
    try:
        return waitable.ready()
    except Exception:  # it is raised again where the waitable's own caller checks it
        return True


def _is_armed(waitable: Waitable, bell: Doorbell) -> bool:
    """Arm `waitable`; return False if it raises."""
    try:
        waitable.arm(bell)
    except Exception:  # it is raised again where the waitable's own caller checks it
        return False
    return True


def wait_any(waitables: Sequence[Waitable], bell: Doorbell, longest_s: float) -> None:
    """Sleep until one of `waitables` may be ready or the bell rings, at most for about `longest_s`."""
    armed: list[Waitable] = []
    try:
        for waitable in waitables:
            armed.append(waitable)
            if not _is_armed(waitable, bell):
                return
        # The first sleep is short in case a peer did not see the arming; without peers that ring it is not needed.
        has_peers = not all(isinstance(waitable, WithoutBell) for waitable in waitables)
        for poll_interval_s in (FIRST_POLL_INTERVAL_S, longest_s) if has_peers else (longest_s,):
            if any(map(has_news, waitables)):
                return
            if bell.wait(min(poll_interval_s, *(waitable.poll_interval_s() for waitable in waitables), longest_s)):
                return
    finally:
        for waitable in armed:
            waitable.disarm(bell)


class Doorbells:
    """The doorbells of one rank: each thread gets its own at its first wait.

    The bells of ended threads are reused, so a rank has at most as many bells as threads that waited at the same time.
    """

    base = ""  # the prefix of the addresses for peers in other processes; empty if peers are threads

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._made: dict[threading.Thread, Doorbell] = {}

    def mine(self) -> Doorbell:
        bell: Doorbell | None = getattr(self._local, "bell", None)
        if bell is None:
            bell = self._local.bell = self._adopt(threading.current_thread())
        return bell

    def make(self, number: int) -> Doorbell:
        """Return a new doorbell; overridden to make those that other processes can ring."""
        return EventDoorbell(number)

    def close(self) -> None:
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
