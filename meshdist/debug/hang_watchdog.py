"""HangWatchdog: watches the long waits of a rank, and finds out who waits for whom.

A rank that has waited for a tenth of its timeout, at least 3 s and 30 s at most, starts a thread, which ends with the
wait. The thread publishes the state of this rank, as in all ranks in a long wait, and asks the ranks that do not wait.
The lowest waiting rank builds the graph, logs a warning, and publishes its finding. It warns again each time the wait
has lasted twice as long, in a line if the cause is still the same. A rank whose timeout expires adds the finding to its
error, and publishes its last state: the others wait on, and may ask when it is gone. Before the first long wait there
is no thread, no connection, and no key in the store.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from meshdist.debug.dump import GAVE_UP, MOST_OLD_S, RECORDS_SENT, TIMED_OUT, rank_state
from meshdist.errors import DistError, DistTimeoutError
from meshdist.runtime.flight_recorder import facts_in
from meshdist.runtime.waiting import grace_s
from meshdist.store.brief_requests import brief
from meshdist.system.deadline import Deadline
from meshdist.system.platform import start_thread

if TYPE_CHECKING:
    from meshdist.debug.blocked_wait import BlockedWait
    from meshdist.debug.deadlock import DeadlockDetector
    from meshdist.debug.states import RankSnapshot
    from meshdist.groups.world import World
    from meshdist.runtime.waiting import Waitable, Watch

_MOST_CHARACTERS = 3000
# A finding that is older says so: its ages are then too small.
_OLD_S = 0.2
_REFRESH_S = 0.8 * MOST_OLD_S  # a busy rank may be late
_SETTLE_S = 0.3
_MOST_WAITS_FOR_LEADER = 10
# From when on it is looked for ranks that wait for each other.
_DETECTS_FROM_S = 1.0
# Logged at debug level INFO.
_SLOW_S = 1.0
_LONGEST_BUDGET_S = 1.0
# For the first finding; on a busy machine, loading what it needs may take seconds, which do not count.
_FIRST_BUDGET_S = 5.0
_MOST_LOADING_S = 5.0
# How long a rank that a signal ends asks the store for the missing ranks.
_LAST_LOOK_S = 0.1


class Finding(NamedTuple):
    """The finding about long waits."""

    text: str = ""  # lines on who waits for whom; empty without a finding
    has_cycle: bool = False  # whether ranks wait for each other
    time_s: float = 0.0  # when the ranks were in these states, in seconds since 1970, by the clock of the leader

    def __bool__(self) -> bool:
        return bool(self.text)

    def told(self, now_s: float) -> str:
        """Return the lines under their heading, which gives the age of an old finding; empty without a finding."""
        if not self:
            return ""
        # As in reports, since the clocks of hosts differ and may jump.
        age_s = min(max(0.0, now_s - self.time_s), MOST_OLD_S)
        when = f", as of {age_s:.1f} s ago" if age_s >= _OLD_S else ""
        return f"  who is waiting for whom{when}:\n{self.text}"


class StateExchange(Protocol):
    """How one rank exchanges its state with the others."""

    def publish(self, state: dict[str, Any], *, waits: bool) -> None:
        """Show the state of this rank to the others; `waits` if it stays the same until `retract`."""

    def retract(self, *, keeps_state: bool = False) -> None:
        """Withdraw this rank's report, and its state unless that is its last, kept for ranks that ask later."""

    def gather(self, budget_s: float) -> tuple[dict[int, RankSnapshot], dict[int, str]]:
        """Return the states of ranks that answer in time, and what is known of those that are gone or silent.

        A rank that is gone since its wait failed is in both.
        """
        ...

    def stopped(self) -> dict[int, str]:
        """Describe the ranks stopped by a signal, as far as this host shows it without asking any rank."""
        return {}

    def harmless_threads(self) -> Collection[int]:
        """Return the ids of the threads of other ranks, and of those that wait for the ranks to end."""
        return ()

    def leader(self) -> int | None:
        """Return the lowest waiting rank, which reports for all; None without one."""

    def report(self, found: Finding) -> None:
        """Publish the leader's finding for the other ranks."""

    def reported(self) -> Finding:
        """Return the leader's finding."""
        ...


class LongWait:
    """One wait that may last long; the watchdog's thread watches it once it `is_long`."""

    def __init__(self, watchdog: HangWatchdog, error_prefix: str, deadline: Deadline, missing: str) -> None:
        self.error_prefix = error_prefix
        self.timeout_s = deadline.timeout_s
        self.is_long = False
        self.warned_s = 0.0  # how long it had lasted at the last warning about it
        self.present: Collection[int] = ()  # the ranks known to have made the call, as of the last look
        self.instead = ""  # what had come instead of what is waited for, when it became long
        self._deadline = deadline
        self._missing = missing
        self._watchdog = watchdog
        self.blocked: BlockedWait | None = None  # what the detector of deadlocks keeps of it
        self.waitable: Waitable | None = None  # what it is for, until its end

    def due_in_s(self) -> float:
        """Return after how long it is time for another warning about this wait."""
        return max(0.0, 2 * self.warned_s - self.lasts_s)

    @property
    def lasts_s(self) -> float:
        return self._deadline.timeout_s - self._deadline.remaining_s()

    def hang_report(self) -> str:
        """Return lines on who waits for whom; empty if unknown."""
        return self._watchdog.hang_report(self._budget_s)

    def give_up(self, error: DistError) -> DistError | None:
        """Publish the last state of this rank for ranks that ask later, as the wait ends with `error`.

        A rank in a cycle may first notice that the next one has given up and gone: its error describes the cycle too.
        In a proven deadlock, which the others raise, that error is returned.
        """
        deadlock = None
        if self.blocked is not None:  # it also says that the wait has ended, however it fails
            deadlock = self.blocked.proven(_LONGEST_BUDGET_S if error.peer_failed else self._budget_s)
        if not self.is_long:
            return deadlock
        if deadlock is None and error.peer_failed and not error.hang_report and self._watchdog.latest.has_cycle:
            error.add(hang_report=self.hang_report())
        self._watchdog.publish_last(self._budget_s, has_timed_out=isinstance(error, DistTimeoutError))
        return deadlock

    @property
    def _budget_s(self) -> float:
        return min(_LONGEST_BUDGET_S, self.timeout_s / 10)

    def end(self) -> None:
        """Stop watching."""
        self.waitable = None  # release the arrays of the call
        if self.blocked is not None:
            self.blocked.end()
        if self.is_long:
            self._watchdog.end(self)
        if self._missing and self.lasts_s >= _SLOW_S:
            self._watchdog.log_slow(self, self._missing)


class HangWatchdog:
    """Watches the long waits of one rank; `make_exchange` makes its StateExchange, which is imported on first use."""

    def __init__(self, world: World, make_exchange: Callable[[], StateExchange]) -> None:
        self.make_exchange = make_exchange
        self.detects_from_s = _DETECTS_FROM_S
        self._log = world.log
        self._world = world
        self._lock = threading.Lock()
        self._watches: list[LongWait] = []
        self._latest: LongWait | None = None  # the last wait that was looked at
        self._interrupted = ""  # the ranks that a wait lacked that Ctrl-C has ended
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._asked = threading.Event()
        self._answered = threading.Event()
        self._found = Finding()
        self._warned_of = ""  # the cause in the last warning
        self._last: dict[str, Any] | None = None
        self._has_cause = False
        self._is_loaded = threading.Event()  # unset while what a finding needs is being loaded
        self._is_loaded.set()
        self._loading_s = 0.0  # how long that took the last time, at most _MOST_LOADING_S
        self._giving_up = threading.Event()
        self._gave_up = threading.Event()

    @property
    def is_watching(self) -> bool:
        return bool(self._watches)

    def look(self, wait: Watch | None, error_prefix: str, deadline: Deadline, waitable: Waitable) -> LongWait | None:
        """Watch a wait; called repeatedly, returns None while the wait is short.

        `wait` is the result of the call before; its `end` must be called.
        """
        watch = cast("LongWait | None", wait)
        grace = grace_s(deadline.timeout_s)
        lasts_s = deadline.timeout_s - deadline.remaining_s()
        if watch is None and lasts_s >= min(_SLOW_S, grace, self.detects_from_s):
            watch = LongWait(
                self, error_prefix, deadline, waitable.missing() if self._log.isEnabledFor(logging.INFO) else ""
            )
        if watch is not None:
            watch.waitable, self._latest = waitable, watch
        if watch is not None and not watch.is_long and lasts_s >= grace:
            watch.instead = waitable.instead()
            self._begin(watch)
        if watch is not None and watch.is_long:
            watch.present = waitable.present()
        if watch is not None and lasts_s >= self.detects_from_s:
            try:
                watch.blocked = self.detector.look(watch.blocked, waitable)
            except DistError:
                if wait is None:  # the caller does not have it yet
                    watch.end()
                raise
        return watch

    def leave(self) -> None:
        if "detector" in vars(self):
            self.detector.leave()

    def interrupt(self, waitable: Waitable) -> None:
        self._interrupted = _missing(waitable)

    def take_missing(self) -> str:
        """Return the ranks that are missing in the wait that a signal ends; empty if that is unknown."""
        missing, self._interrupted = self._interrupted, ""
        waitable = None if self._latest is None else self._latest.waitable
        return missing or ("" if waitable is None else _missing(waitable))

    def log_slow(self, watch: LongWait, missing: str) -> None:
        self._log.info(
            "%s: has been waiting for %.1f s, for %s",
            watch.error_prefix,
            watch.lasts_s,
            missing,
            extra=self._open_call(),
        )

    def _begin(self, watch: LongWait) -> None:
        watch.is_long = True
        with self._lock:
            self._watches.append(watch)
            self._last = None
            if self._thread is None:
                self._wake.clear()
                self._found, self._warned_of, self._loading_s = Finding(), "", 0.0
                name = f"meshdist-watchdog-{self._world.rank}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                try:
                    start_thread(self._thread)
                except DistError as error:  # the calls go on without an explanation
                    self._thread = None
                    self._log.warning("cannot determine which rank waits for which: %s", error)

    @cached_property
    def exchange(self) -> StateExchange:
        return self.make_exchange()

    @cached_property
    def detector(self) -> DeadlockDetector:
        """The detector of ranks that wait for each other."""
        from meshdist.debug.deadlock import DeadlockDetector

        return DeadlockDetector(self._world, self.exchange.harmless_threads())

    @property
    def latest(self) -> Finding:
        return self._found

    @property
    def last(self) -> dict[str, Any] | None:
        """The state of this rank when its last wait failed, as `rank_state` returns it; None if it has waited since."""
        return self._last

    def end(self, watch: LongWait) -> None:
        with self._lock:
            self._watches.remove(watch)
        self._wake.set()

    def hang_report(self, budget_s: float) -> str:
        """Return who waits for whom; the finding before if a new one takes too long."""
        # A stopped rank may host the store, which then never answers.
        stopped = {} if self._found else self.exchange.stopped()
        budget_s = budget_s if self._found or stopped else min(_FIRST_BUDGET_S, 10 * budget_s)
        self._ask(self._asked, self._answered, budget_s)
        # What loading has taken of that time does not count.
        self._is_loaded.wait(_MOST_LOADING_S)
        self._answered.wait(self._loading_s)
        told = self._found.told(time.time())
        return told or "\n".join(f"  rank {rank} {state}" for rank, state in stopped.items())

    def publish_last(self, budget_s: float, *, has_timed_out: bool) -> None:
        """Publish the last state of this rank, which gives up, for ranks that ask when it is gone."""
        self._last = self._state(TIMED_OUT if has_timed_out else GAVE_UP)
        # If the request before is still open, the thread waits for the store: do not wait for it again.
        self._ask(self._giving_up, self._gave_up, 0.0 if self._asked.is_set() else budget_s)

    def _ask(self, asked: threading.Event, answered: threading.Event, budget_s: float) -> None:
        if self._thread is None:
            return
        answered.clear()
        asked.set()
        self._wake.set()
        answered.wait(budget_s)

    def close(self) -> None:
        """Wait for the threads; there are no waits any more."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.set()
            thread.join(_LONGEST_BUDGET_S)
        if "detector" in vars(self):
            self.detector.close(_LONGEST_BUDGET_S)

    def _run(self) -> None:
        try:
            first = self._watches[0] if self._watches else None
            refresh_s = _REFRESH_S if first is None else min(_REFRESH_S, grace_s(first.timeout_s))
            # Ranks that began to wait together publish first, so that they agree on the leader.
            self._publish()
            self._wake.wait(min(_SETTLE_S, refresh_s / 4))
            self._look(first)
            num_waits = 0
            while self._has_waits():
                pause_s = min(refresh_s, math.inf if first is None else first.due_in_s())
                is_woken = self._wake.wait(pause_s if self._found else min(_SETTLE_S, refresh_s))
                self._wake.clear()
                if self._handle_requests():
                    continue
                if not is_woken and not self._found and num_waits < _MOST_WAITS_FOR_LEADER:
                    num_waits += 1
                    self._found = self.exchange.reported()  # the leader is still working
                elif not is_woken:
                    self._look(first if first is not None and not first.due_in_s() else None)
            self.exchange.retract(keeps_state=self._last is not None)
        except Exception as error:  # the calls go on even if their explanation fails
            # A lost store is not worth a warning: waiting calls that need it notice it themselves.
            level = logging.DEBUG if isinstance(error, DistError) else logging.WARNING
            self._log.log(level, "cannot determine which rank waits for which: %s: %s", type(error).__name__, error)
            with self._lock:
                self._thread = None
            for event in (self._is_loaded, self._answered, self._gave_up):
                event.set()

    def _handle_requests(self) -> bool:
        """Handle the requests of a rank that gives up; return whether there was one."""
        was_asked = self._asked.is_set()
        if was_asked:
            self._asked.clear()
            self._look(None, is_last_chance=True)
            self._answered.set()
        # Maybe since: the rank goes on if its answer takes too long.
        gives_up = self._giving_up.is_set()
        if gives_up:
            self._giving_up.clear()
            if self._last is not None:
                self.exchange.publish(self._last, waits=False)
            self._gave_up.set()
        return was_asked or gives_up

    def _has_waits(self) -> bool:
        # Or the last wait has ended, but what it asked for is still to be done.
        with self._lock:
            if not self._watches and not self._giving_up.is_set():
                self._thread = None
                return False
            return True

    def _publish(self) -> None:
        self.exchange.publish(self._state("waits for long"), waits=True)

    def _state(self, reason: str) -> dict[str, Any]:
        """Return the state of this rank, with the ranks present in its call where that is the only one."""
        state, watches = rank_state(self._world, reason, RECORDS_SENT), list(self._watches)
        open_calls = [record for record in state["records"] if record["completed_s"] is None]
        return {**state, "present": sorted(watches[0].present)} if len(watches) == 1 >= len(open_calls) else state

    def _look(self, warned: LongWait | None, *, is_last_chance: bool = False) -> None:
        """Find out who waits for whom; warn about the wait `warned`, the first time unless another rank has."""
        is_first = warned is None or not warned.warned_s
        if warned is not None:
            warned.warned_s = warned.lasts_s
        self._publish()
        reported = self.exchange.reported()
        leads = self.exchange.leader() == self._world.rank
        if not leads:
            self._found = reported or self._found
            if self._found or not is_last_chance:
                return
        self._find_out()
        if leads:
            self.exchange.report(self._found)
        # All ranks may have come at this moment.
        if (
            warned is not None
            and warned in self._watches
            and self._has_cause
            and (leads or not is_first or not reported)
        ):
            self._warn(warned)

    def _warn(self, watch: LongWait) -> None:
        """Warn about a long wait: with all that was found, or if the cause is that of the warning before, with that."""
        cause = self._found.text.partition("\n")[0].strip()
        instead = f"; {watch.instead}" if watch.instead else ""
        told = f": {cause}" if cause == self._warned_of else f"\n{self._found.told(time.time())}"
        self._warned_of = cause
        self._log.warning(
            "%s: has been waiting for %.1f s (timeout: %g s%s)%s",
            *(watch.error_prefix, watch.lasts_s, watch.timeout_s, instead, told),
            extra=self._open_call(),
        )

    def _find_out(self) -> None:
        self._is_loaded.clear()
        begun_s = time.monotonic()
        import networkx  # noqa: F401 - `who_waits` imports it

        from meshdist.debug.hang_report import hang_report
        from meshdist.debug.wait_graph import who_waits

        self._loading_s = min(time.monotonic() - begun_s, _MOST_LOADING_S)
        self._is_loaded.set()
        timeout_s = min((watch.timeout_s for watch in list(self._watches)), default=0.0)
        states, gone = self.exchange.gather(min(_LONGEST_BUDGET_S, timeout_s / 10))
        waits, now_s = who_waits(states, gone), time.time()
        lines = hang_report(waits, self._world.size, now_s=now_s)
        text = "\n".join(f"  {line}" for line in lines)[:_MOST_CHARACTERS]
        self._found = Finding(text, has_cycle=bool(waits.cycle), time_s=now_s)
        self._has_cause = bool(waits.absent or waits.cycle)

    def _open_call(self) -> dict[str, Any]:
        """Return the group and the number of the call that this rank waits for, as fields of a log record."""
        for record in reversed(self._world.recorder.records()):
            if not record.completed:
                return {"group": facts_in(record).label, "sequence": record.sequence}
        return {}


def _missing(waitable: Waitable) -> str:
    with suppress(DistError), brief(_LAST_LOOK_S):  # the store may have gone with its rank
        return waitable.missing()
    return ""


def watchdog_of(world: World) -> HangWatchdog:
    return cast(HangWatchdog, world.observer)
