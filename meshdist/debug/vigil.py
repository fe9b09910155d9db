"""Vigil: looks after the waits of a rank that last long, and finds out who waits for whom.

A rank that has waited for a tenth of its timeout, 30 s at most, starts a thread, which ends with the wait. It tells the
other ranks what this one is in, as they all do that wait as long, and asks those that do not wait. The lowest of the
waiting ranks makes a graph of it all, says what it finds in the log, and leaves it for the others; whoever's time is
over puts it into its error, and leaves what it was in itself: the others wait on, and may ask when it is gone. So
nothing of this exists before a rank waits for long: no thread, no connection, no key.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from meshdist.deadline import Deadline
from meshdist.debug.flight_recorder import COMPLETED, SEQUENCE, facts_in
from meshdist.errors import DistError
from meshdist.limits import start_thread

if TYPE_CHECKING:
    from meshdist.debug.reach import Reach
    from meshdist.waiting import Waitable
    from meshdist.world import World

_LONGEST_PATIENCE_S = 30.0
_MOST_CHARACTERS = 3000
_REFRESH_S = 10.0
_SETTLE_S = 0.3
_MOST_PATIENT = 10
# What is logged at debug level INFO.
_SLOW_S = 1.0
_LONGEST_BUDGET_S = 1.0
# As long as nothing was found yet: on a busy machine, loading what it takes may last for seconds.
_FIRST_BUDGET_S = 5.0


def patience_s(timeout_s: float) -> float:
    """Return how long a call may wait before anybody wonders.

    Example:
        >>> patience_s(1800.0), patience_s(60.0), patience_s(0.5)
        (30.0, 6.0, 0.25)
    """
    return min(_LONGEST_PATIENCE_S, max(timeout_s / 10, min(1.0, timeout_s / 2)))


class Watch:
    """One wait that lasts long.

    Attributes:
        where: The call.
        timeout_s: What it has.
        is_kept: Others are told of it.
    """

    def __init__(self, vigil: Vigil, where: str, deadline: Deadline, missing: str) -> None:
        self.where = where
        self.timeout_s = deadline.timeout_s
        self.is_kept = False
        self._deadline = deadline
        self._missing = missing
        self._vigil = vigil

    @property
    def lasts_s(self) -> float:
        """How long the call has taken so far."""
        return self._deadline.timeout_s - self._deadline.remaining_s()

    def story(self) -> str:
        """Return who waits for whom, as the end of the message of a timeout; empty where it cannot be found out."""
        story = self._vigil.story(self._budget_s)
        return f"\n{story}" if story else ""

    def give_up(self, error: DistError) -> None:
        """Leave what this rank was in for those that ask later, as the wait ends with `error`.

        Who waits in a circle may first notice that the next one has given up and gone: it is told of the circle, too.
        """
        if not self.is_kept:
            return
        from meshdist.debug.story import CIRCLE

        if error.peer_failed and "\n" not in str(error) and CIRCLE in self._vigil.latest:
            error.args = (f"{error}{self.story()}",)
        self._vigil.leave_last(self._budget_s)

    @property
    def _budget_s(self) -> float:
        return min(_LONGEST_BUDGET_S, self.timeout_s / 10)

    def end(self) -> None:
        """Say that the wait is over."""
        if self.is_kept:
            self._vigil.end(self)
        if self._missing:
            self._vigil.say_slow(self, self._missing)


class Vigil:
    """Looks after the long waits of one rank.

    Args:
        world: The rank's.
        make_reach: Makes its way to the others, which is loaded when it is needed.
    """

    def __init__(self, world: World, make_reach: Callable[[], Reach]) -> None:
        self.make_reach = make_reach
        self._log = world.log
        self._world = world
        self._lock = threading.Lock()
        self._watches: list[Watch] = []
        self._thread: threading.Thread | None = None
        self._news = threading.Event()
        self._asked = threading.Event()
        self._answered = threading.Event()
        self._story = ""
        self._last: dict[str, Any] | None = None
        self._has_cause = False
        self._leaving = threading.Event()
        self._left = threading.Event()

    @property
    def is_watching(self) -> bool:
        """Whether there is a wait that lasts long."""
        return bool(self._watches)

    def look(self, watch: Watch | None, where: str, deadline: Deadline, waitable: Waitable) -> Watch | None:
        """Look after a wait, again and again; return None while there is nothing to look after.

        Args:
            watch: What was returned before; its `end` must be called.
            where: The call.
            deadline: Of the call.
            waitable: What it waits for.
        """
        patience = patience_s(deadline.timeout_s)
        lasts_s = deadline.timeout_s - deadline.remaining_s()
        if watch is None and lasts_s >= min(_SLOW_S, patience):
            watch = Watch(self, where, deadline, waitable.missing() if self._log.isEnabledFor(logging.INFO) else "")
        if watch is not None and not watch.is_kept and lasts_s >= patience:
            self._begin(watch)
        return watch

    def say_slow(self, watch: Watch, missing: str) -> None:
        """Log that a call has waited for long, and for whom."""
        self._log.info(
            "%s: has waited for %.1f s, for %s", watch.where, watch.lasts_s, missing, extra=self._open_call()
        )

    def _begin(self, watch: Watch) -> None:
        watch.is_kept = True
        with self._lock:
            self._watches.append(watch)
            self._last = None
            if self._thread is None:
                self._news.clear()
                self._story = ""
                name = f"meshdist-vigil-{self._world.rank}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                try:
                    start_thread(self._thread)
                except DistError as error:  # the calls go on without being explained
                    self._thread = None
                    self._log.warning("who waits for whom cannot be found out: %s", error)

    @cached_property
    def reach(self) -> Reach:
        """The way of this rank to the states of the others."""
        return self.make_reach()

    @property
    def latest(self) -> str:
        """What was found last; empty for nothing."""
        return self._story

    @property
    def last(self) -> dict[str, Any] | None:
        """What this rank was in as it gave up a call, as `rank_state` returns it; None if it has waited since."""
        return self._last

    def end(self, watch: Watch) -> None:
        """Look after it no more."""
        with self._lock:
            self._watches.remove(watch)
        self._news.set()

    def story(self, budget_s: float) -> str:
        """Return who waits for whom; what was found before where finding it out anew takes too long."""
        # Who is stopped may be who holds the store, by which ranks tell each other, and it may never answer.
        stopped = {} if self._story else self.reach.stopped()
        budget_s = budget_s if self._story or stopped else min(_FIRST_BUDGET_S, 10 * budget_s)
        self._ask(self._asked, self._answered, budget_s)
        return self._story or "\n".join(f"  rank {rank} {what}" for rank, what in stopped.items())

    def leave_last(self, budget_s: float) -> None:
        """Leave what this rank is in for those that ask later: it gives up, and may be gone then."""
        from meshdist.debug.rank_state import GAVE_UP, rank_state
        from meshdist.debug.reach import RECORDS_SENT

        self._last = rank_state(self._world, GAVE_UP, RECORDS_SENT)
        # Where what it was asked for last still waits, the thread waits for the store, and is not waited for again.
        self._ask(self._leaving, self._left, 0.0 if self._asked.is_set() else budget_s)

    def _ask(self, asked: threading.Event, answered: threading.Event, budget_s: float) -> None:
        if self._thread is None:
            return
        answered.clear()
        asked.set()
        self._news.set()
        answered.wait(budget_s)

    def close(self) -> None:
        """Wait for the thread; there are no waits any more."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._news.set()
            thread.join(_LONGEST_BUDGET_S)

    def _run(self) -> None:
        try:
            first = self._watches[0] if self._watches else None
            refresh_s = _REFRESH_S if first is None else min(_REFRESH_S, patience_s(first.timeout_s))
            # Those who began to wait at once get to know of each other, and that one of them leads.
            self._publish()
            self._news.wait(min(_SETTLE_S, refresh_s / 4))
            self._look(first)
            num_patient = 0
            while self._goes_on():
                rang = self._news.wait(refresh_s if self._story else min(_SETTLE_S, refresh_s))
                self._news.clear()
                if self._answers():
                    continue
                if not rang and not self._story and num_patient < _MOST_PATIENT:
                    num_patient += 1
                    self._story = self.reach.told()  # the leader is still at it
                elif not rang:
                    self._look(None)
            self.reach.retract(keeps_state=self._last is not None)
        except Exception as error:  # the calls go on, whatever goes wrong in explaining them
            # That the store is gone is no news: the calls that wait notice it themselves, where it matters to them.
            level = logging.DEBUG if isinstance(error, DistError) else logging.WARNING
            self._log.log(level, "who waits for whom cannot be found out: %s: %s", type(error).__name__, error)
            with self._lock:
                self._thread = None
            self._answered.set()
            self._left.set()

    def _answers(self) -> bool:
        """Do what this rank asks for as it gives up; return whether that was anything."""
        if self._asked.is_set():
            self._asked.clear()
            self._look(None, is_last_chance=True)
            self._answered.set()
        elif self._leaving.is_set():
            self._leaving.clear()
            if self._last is not None:
                self.reach.publish(self._last, waits=False)
            self._left.set()
        else:
            return False
        return True

    def _goes_on(self) -> bool:
        with self._lock:
            if not self._watches:
                self._thread = None
                return False
            return True

    def _publish(self) -> None:
        from meshdist.debug.rank_state import rank_state
        from meshdist.debug.reach import RECORDS_SENT

        self.reach.publish(rank_state(self._world, "waits for long", RECORDS_SENT), waits=True)

    def _look(self, warned: Watch | None, *, is_last_chance: bool = False) -> None:
        """Find out who waits for whom; the first time, warn of the wait `warned`, unless another rank has."""
        self._publish()
        told = self.reach.told()
        leads = self.reach.leader() == self._world.rank
        if not leads:
            self._story = told or self._story
            if self._story or not is_last_chance:
                return
        self._find_out()
        if leads:
            self.reach.tell(self._story)
        # They may all have come in this very moment.
        if warned is not None and warned in self._watches and not told and self._has_cause:
            self._log.warning(
                "%s: has waited for %.1f s, of %g s at most\n%s",
                *(warned.where, warned.lasts_s, warned.timeout_s, self._story),
                extra=self._open_call(),
            )

    def _find_out(self) -> None:
        from meshdist.debug.story import story
        from meshdist.debug.waits import who_waits

        timeout_s = min((watch.timeout_s for watch in list(self._watches)), default=0.0)
        states, gone = self.reach.gather(min(_LONGEST_BUDGET_S, timeout_s / 10))
        waits = who_waits(states, gone)
        lines = story(waits, self._world.size, now_s=time.time())
        self._story = "\n".join(f"  {line}" for line in ["who waits for whom:", *lines])[:_MOST_CHARACTERS]
        self._has_cause = bool(waits.absent or waits.cycle)

    def _open_call(self) -> dict[str, Any]:
        """Return the group and the number of the call that this rank waits for, for the log."""
        for record in reversed(self._world.recorder.records()):
            if not record[COMPLETED]:
                return {"group": facts_in(record).label, "sequence": record[SEQUENCE]}
        return {}
