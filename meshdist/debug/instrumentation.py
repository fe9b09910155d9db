"""What is injected into a world to observe it: its hang watchdog, the loggers of its calls, the dumps of its faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshdist.debug.debug_level import DebugLevel, get_debug_level
from meshdist.debug.dump import dump_fault
from meshdist.debug.hang_watchdog import HangWatchdog, StateExchange

if TYPE_CHECKING:
    from meshdist.groups.world import World
    from meshdist.runtime.hooks import CallObserver


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


def _by_store(world: World) -> StateExchange:
    from meshdist.debug.state_exchange import StoreStateExchange

    return StoreStateExchange(world.store, world.peers, world.rank)
