"""When two ranks may connect for messages, and what has to wait for that.

`ncclCommInitRank` waits for everything that runs on the GPU, since it calls `cudaFree`. If an operation of NCCL runs
there that waits for the other rank, and that rank waits for the communicator, neither ends. So two ranks create the
communicators of their messages when nothing of NCCL runs on either, and launch nothing until it is done:

- A rank whose messages wait for a connection holds its collectives back (`Admission`): the peer may have to connect
  before it can take part in them. If all ranks of a collective have come to it, none has to connect before, and it is
  launched. The ranks tell through the group's store how far they have come, once a rank holds back (`Arrivals`).
- The two ranks agree through the world's store (`PairAgreement`). The one with the higher number offers to connect, and
  withdraws the offer after a moment; the lower one accepts it. Both have closed the gate before, with nothing in
  flight, and a gate is closed for one pair at a time: so two ranks that have agreed wait for no third.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from meshdist.backends.group_setup import check_there
from meshdist.errors import DistError, DistTimeoutError
from meshdist.runtime.departure import LeftOut
from meshdist.runtime.peer_monitor import PeerMonitor
from meshdist.runtime.waiting import WithoutBell
from meshdist.store import PrefixStore
from meshdist.store.brief_requests import brief
from meshdist.system.deadline import Deadline

if TYPE_CHECKING:
    from meshdist.backends.backend_options import BackendOptions

_SHARED = "nccl/launches"
# How long an offer stands, and how long the gate is open before the next one: other pairs want their turn.
_OFFER_S, _LONGEST_PAUSE_S = 20e-3, 10e-3
_POLL_INTERVAL_S = 2e-3
_HOLDING = "holding"
# From this age of an operation on, and again whenever it has doubled, up to the second, look whether a rank holds it.
_FIRST_LOOK_S, _LONGEST_LOOK_S = 50e-3, 1.0
# The same where no operation is in flight, but some were launched that no other rank may have come to.
_LONGEST_IDLE_LOOK_S = 5.0
# How long a look may take: the process that hosts the store may be stopped.
_LOOK_S = 0.5


class Launches(Protocol):
    """The operations of one communicator."""

    def is_quiet(self) -> bool:
        """Return whether no operation is in flight."""


class LaunchGate:
    """The launches of one rank, in all its groups.

    Attributes:
        num_connecting: How many pairs of ranks with messages are not connected yet.
        is_closed: Whether launches have to wait.
    """

    def __init__(self) -> None:
        self.num_connecting = 0
        self.is_closed = False
        self._changed = threading.Condition()
        self._watched: list[Launches] = []

    @classmethod
    def of(cls, options: BackendOptions) -> LaunchGate:
        """Return the gate of this rank."""
        gate: LaunchGate = options.shared_resources.setdefault(_SHARED, cls())
        return gate

    def watch(self, launches: Launches) -> None:
        with self._changed:
            self._watched.append(launches)

    def forget(self, launches: Launches) -> None:
        with self._changed:
            self._watched.remove(launches)

    def begin_connecting(self) -> None:
        with self._changed:
            self.num_connecting += 1

    def end_connecting(self) -> None:
        with self._changed:
            self.num_connecting -= 1

    def try_close(self) -> bool:
        """Close the gate if it is open and no operation is in flight; return whether it was closed by this call."""
        with self._changed:
            if self.is_closed:
                return False
            # Before the look: a thread that launches registers its operation first, and then reads this.
            self.is_closed = True
            if all(launches.is_quiet() for launches in self._watched):
                return True
            self._open()
            return False

    def open(self) -> None:
        with self._changed:
            self._open()

    def pass_through(self, check: Callable[[], None], timeout_s: float) -> None:
        """Wait until the gate is open; `check` raises if that is in vain.

        Raises:
            DistTimeoutError: The pair of ranks that has closed it takes longer to connect.
        """
        deadline = Deadline(timeout_s)
        with self._changed:
            while not self._changed.wait_for(lambda: not self.is_closed, deadline.slice_s(_LONGEST_LOOK_S / 10)):
                check()
                if deadline.expired():
                    raise DistTimeoutError(
                        f"timed out after {timeout_s:g} s: this rank and another are connecting for their messages,"
                        " and nothing may be launched before they have connected"
                    )

    def close(self) -> None:
        """The end of the world: nothing has to be released."""

    def _open(self) -> None:
        self.is_closed = False
        self._changed.notify_all()


class Arrivals:
    """How many collectives of a group each rank has come to, as far as the ranks have told through the group's store.

    They tell only if a rank holds a collective back, and when they leave.
    """

    def __init__(self, options: BackendOptions) -> None:
        self._options = options
        self._store = PrefixStore("nccl/arrived", options.store)
        self._telling = threading.Lock()
        self._told = 0
        self._seen = 0  # the number of the last look
        self._interval_s = _LONGEST_LOOK_S
        self._next_s = self._next_long_s = 0.0  # when to look again: at all, and if an operation runs for long

    def tell(self, number: int, *, holds: bool = False) -> None:
        """Tell that this rank has come to collective `number`; with `holds`, also ask the others how far they are."""
        with self._telling:
            # The number in the store never falls: a rank may have told a later one meanwhile, and tells it only once.
            self._told = max(self._told, number)
            keys, values = [str(self._options.rank)], [str(self._told)]
            if holds:
                keys.append(_HOLDING)
                values.append("1")
            self._store.multi_set(keys, values)

    def have_told(self, rank: int, number: int) -> bool:
        """Return whether a rank has told that it has come to collective `number`."""
        key = str(rank)
        return self._store.check([key]) and int(self._store.get(key)) >= number

    def look(self, number: int, age_s: float) -> float:
        """Tell `number`, that of the last collective launched, if a rank holds back; return when to look again, in s.

        `age_s` is the age of the first operation in flight, 0 if there is none. Such a rank may have completed its part
        of a collective that others hold back: the root of a broadcast waits for nobody.
        """
        if number <= self._told:
            return _LONGEST_IDLE_LOOK_S
        now_s = time.monotonic()
        if number != self._seen:
            self._seen, self._interval_s = number, _LONGEST_LOOK_S
            self._next_s = min(self._next_s, now_s + _LONGEST_LOOK_S)
        if now_s >= self._next_s or (age_s >= _FIRST_LOOK_S and now_s >= self._next_long_s):
            self._next_long_s = now_s + min(max(age_s, _FIRST_LOOK_S), _LONGEST_LOOK_S)
            self._next_s = now_s + self._interval_s
            self._interval_s = min(2 * self._interval_s, _LONGEST_IDLE_LOOK_S)
            # A store that is gone fails the calls that need it; this one does not.
            with suppress(DistError), brief(_LOOK_S):
                if self._store.check([_HOLDING]):
                    self.tell(number)
        return self._next_s - now_s


class Admission(WithoutBell):
    """Wait until collective `number` of a group may be launched: all pairs are connected, or all ranks have come to it.

    `check` raises if the backend has given up.
    """

    def __init__(
        self, gate: LaunchGate, options: BackendOptions, arrivals: Arrivals, number: int, check: Callable[[], None]
    ) -> None:
        self._gate, self._options, self._arrivals = gate, options, arrivals
        self._number, self._check = number, check
        self._absent = [rank for rank in range(len(options.ranks)) if rank != options.rank]
        self._monitor = PeerMonitor()
        self._has_told = False

    def ready(self) -> bool:
        if not self._gate.num_connecting:
            return True
        if not self._has_told:
            self._has_told = True
            self._arrivals.tell(self._number, holds=True)
        self._absent = [rank for rank in self._absent if not self._arrivals.have_told(rank, self._number)]
        return not self._absent

    def check(self) -> None:
        self._check()
        for rank in self._monitor.turn(self._absent) if self._monitor.is_due() else ():
            check_there(self._options, rank, LeftOut.MEETING)

    def missing(self) -> str:
        ranks = ", ".join(map(self._options.call, self._absent))
        return f"the connections of earlier messages, or {ranks} in this call"

    def poll_interval_s(self) -> float:
        return 5e-3


class PairAgreement(WithoutBell):
    """Wait until this rank and `peer`, a rank of the group, are both ready to connect; then both gates are closed.

    `check` raises if the backend has given up.
    """

    def __init__(self, gate: LaunchGate, options: BackendOptions, peer: int, check: Callable[[], None]) -> None:
        self._gate, self._options, self._peer, self._check = gate, options, peer, check
        mine, other = options.ranks[options.rank], options.ranks[peer]
        low, high = sorted((mine, other))
        self._offer, self._accepted = f"{options.name}:{low}-{high}", f"{options.name}:{low}-{high} accepted"
        self._offers = options.rank > peer
        self._key = f"nccl/offers/{mine if self._offers else other}"
        self._offered_s: float | None = None
        self._has_closed = False
        self._pause_until_s = 0.0
        self._monitor = PeerMonitor()
        self._is_agreed = False

    def ready(self) -> bool:
        if not self._is_agreed:
            self._is_agreed = self._has_been_accepted() if self._offers else self._accepts()
        return self._is_agreed

    def leave(self) -> None:
        """Withdraw an offer, and open the gate if this has closed it."""
        try:
            if not self._is_agreed and self._offered_s is not None:
                with suppress(DistError):  # the store is gone, and with it the offer
                    self._withdraw()
        finally:
            self._open()

    def _close(self) -> bool:
        self._has_closed = self._gate.try_close()
        return self._has_closed

    def _open(self) -> None:
        if self._has_closed:
            self._has_closed = False
            self._gate.open()

    def _accepts(self) -> bool:
        store = self._options.world_store
        if not store.check([self._key]) or store.get(self._key).decode() != self._offer or not self._close():
            return False
        if store.compare_set(self._key, self._offer, self._accepted).decode() == self._accepted:
            return True
        self._open()
        return False

    def _has_been_accepted(self) -> bool:
        now_s = time.monotonic()
        if self._offered_s is None:
            if now_s >= self._pause_until_s and self._close():
                self._offered_s = now_s
                self._options.world_store.set(self._key, self._offer)
            return False
        if self._options.world_store.get(self._key).decode() != self._accepted:
            if now_s - self._offered_s < _OFFER_S:
                return False
            if self._withdraw():
                self._offered_s = None
                self._pause_until_s = now_s + random.uniform(0, _LONGEST_PAUSE_S)
                self._open()
                return False
        return True

    def _withdraw(self) -> bool:
        return self._options.world_store.compare_set(self._key, self._offer, "none").decode() == "none"

    def check(self) -> None:
        self._check()
        if self._monitor.is_due():
            check_there(self._options, self._peer, LeftOut.COMMUNICATOR)

    def missing(self) -> str:
        return f"{self._options.call(self._peer)}, to send to this rank or to receive from it"

    def awaits(self) -> Collection[int]:
        return [self._options.ranks[self._peer]]

    def poll_interval_s(self) -> float:
        return _POLL_INTERVAL_S
