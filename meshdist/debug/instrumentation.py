"""What is injected into a world to observe it: its hang watchdog, the loggers of its calls, the dumps of its faults."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshdist.debug.debug_level import DebugLevel, get_debug_level
from meshdist.debug.dump import BY_CALL, dump_fault, rank_state
from meshdist.debug.hang_watchdog import HangWatchdog, StateExchange, watchdog_of

if TYPE_CHECKING:
    from meshdist.debug.states import RankSnapshot
    from meshdist.groups.world import World
    from meshdist.runtime.hooks import CallObserver

# A variable of ranks whose launcher shows who waits for whom after Ctrl-C; see `launch.worker`.
_OF_LAUNCHERS = "MESHDIST_ERROR_FILE"


class WorldInstrumentation:
    """Implements `groups.world.Instrumentation`, also for the worlds that shrinking makes.

    `make_exchange` makes a rank's StateExchange; by default, one that uses the store.
    """

    def __init__(self, make_exchange: Callable[[], StateExchange] | None = None) -> None:
        self._make_exchange = make_exchange

    def observer(self, world: World) -> HangWatchdog:
        return HangWatchdog(world, self._make_exchange or (lambda: _by_store(world)))

    def logs_calls(self) -> bool:
        return get_debug_level() is DebugLevel.DETAIL

    def loggers(self, world: World) -> tuple[CallObserver, ...]:
        from meshdist.debug.call_order import CallLog, CallOrder

        return CallLog(world.log), CallOrder(world.store, world.hook_registry.groups)

    def note_fault(self, world: World, reason: str) -> None:
        """Dump the flight recorder of a rank whose call failed, if the environment asks for it."""
        dump_fault(world, reason)

    def note_interrupt(self, world: World) -> None:
        """Print what a rank was doing when Ctrl-C interrupted its call, unless its launcher reports on all ranks."""
        from meshdist.debug.hang_report import in_words

        if not launcher_reports():
            words, *_ = in_words(own_state(world), missing=watchdog_of(world).take_missing())
            # In one piece, as launchers may mix what ranks write.
            print(f"meshdist rank {world.rank}: interrupted; {words}\n", file=sys.stderr, end="", flush=True)


def launcher_reports() -> bool:
    """Return whether the launcher of this rank shows who waits for whom when the job is interrupted."""
    return _OF_LAUNCHERS in os.environ


def own_state(world: World) -> RankSnapshot:
    """Return what this rank does, in the form in which the states of others are read."""
    from meshdist.debug.states import parse_state

    return parse_state(rank_state(world, BY_CALL), "here")


def _by_store(world: World) -> StateExchange:
    from meshdist.debug.state_exchange import StoreStateExchange

    return StoreStateExchange(world.store, world.peers, world.rank)
