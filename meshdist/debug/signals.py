"""Signals: a rank that computes is asked what it does by SIGURG, and by SIGUSR1 where people ask.

SIGURG, as it does nothing where nobody listens and no program uses it for anything else; SIGUSR1 only where the script
has no handler. Both interrupt the main thread wherever it is in Python code. It starts a thread that looks at it from
outside: what was interrupted may hold locks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from meshdist.debug.flight_recorder import DIRECTORY_VARIABLE
from meshdist.debug.frozen import StackFile
from meshdist.errors import DistError

if TYPE_CHECKING:
    from meshdist.current import WorldSlot
    from meshdist.world import World

_LAST_S = 1.0


class SignalWatch:
    """Answers to signals for the world in a slot, until it is closed.

    Args:
        slot: Holds the world.
    """

    def __init__(self, slot: WorldSlot) -> None:
        self._slot = slot
        self._pid = os.getpid()
        # Of each signal, the handler before and ours.
        self._handlers: dict[int, tuple[Any, Any]] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._stack_file: StackFile | None = None
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers, and none other is interrupted
        if sys.platform == "win32":
            return  # where there are none
        for number, answer in ((signal.SIGURG, publish), (signal.SIGUSR1, show)):
            # None: something that is no Python code listens, such as faulthandler.
            if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
                handler = self._handler(answer)
                self._handlers[number] = signal.signal(number, handler), handler
        if signal.SIGURG in self._handlers:
            with suppress(OSError, AttributeError):  # where there is no such memory, ranks that are frozen stay silent
                self._stack_file = StackFile(signal.SIGURG)

    def close(self) -> None:
        """Answer no more."""
        if self._stack_file is not None and self._pid == os.getpid():
            self._stack_file.close()
            self._stack_file = None
        if threading.current_thread() is threading.main_thread():
            for number, (before, ours) in self._handlers.items():
                if signal.getsignal(number) is ours:  # the script may have set one of its own since
                    signal.signal(number, before)
        self._handlers.clear()
        for thread in self._threads.values():
            thread.join(_LAST_S)

    def _handler(self, answer: Callable[[World], None]) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            if self._stack_file is not None:
                self._stack_file.empty()  # who is here can answer
            world = self._slot.world
            busy = self._threads.get(number)
            if world is None or os.getpid() != self._pid or (busy is not None and busy.is_alive()):
                return
            thread = threading.Thread(target=answer, args=(world,), name=f"meshdist-answer-{world.rank}", daemon=True)
            self._threads[number] = thread
            thread.start()

        return handle


def publish(world: World) -> None:
    """Tell the rank that asks, which looks into the store, what this one is in."""
    from meshdist.debug.rank_state import rank_state
    from meshdist.debug.reach import RECORDS_SENT

    with suppress(DistError):  # whoever asks will say that there is no answer
        world.vigil.reach.publish(rank_state(world, "was asked", RECORDS_SENT), waits=world.vigil.is_watching)


def show(world: World) -> None:
    """Write this rank's state to its file where there is a directory for it, else in short to stderr."""
    from meshdist.debug.dump import write_state
    from meshdist.debug.rank_state import rank_state
    from meshdist.debug.states import parse_state
    from meshdist.debug.story import in_words

    state = rank_state(world, "SIGUSR1")
    directory = os.environ.get(DIRECTORY_VARIABLE)
    try:
        if directory:
            words = f"its last calls are in {write_state(state, Path(directory))}"
        else:
            words = "\n  ".join(in_words(parse_state(state, "here")))
    except OSError as error:
        words = f"its last calls cannot be written to {directory}: {error}"
    print(f"meshdist rank {world.rank}: {words}", file=sys.stderr, flush=True)
