"""Signals that ask a rank for its state: SIGURG from other ranks, SIGUSR1 from users, SIGTERM from the launcher.

SIGURG is ignored by default, and is taken only where the script has no handler for it. A Go library in the process
sends itself SIGURG to preempt goroutines: it treats a lost signal as a missed hint, and passes its signals on to a
handler that it replaces. Such a signal only makes the rank publish its state once more, one answer at a time.
SIGUSR1 is likewise taken only where the script has no handler. Both interrupt the main thread in Python code, and a new
thread answers, since the interrupted code may hold locks.

SIGTERM ends the ranks of a job once one has failed. Where MESHDIST_FLIGHT_RECORDER_DIR is set, a rank writes its file
first: the rank for which the others have waited makes no call that fails, and is the one to look at. Under launchers
that turn Ctrl-C into SIGTERM, a rank of a job that hangs also prints what it was doing, unless the script has a handler
for it. Then the signal does what it did before: it ends the process, or the script's handler has its turn. A rank that
runs native code does neither, so this is only done where the launcher sends SIGKILL next.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from meshdist.backends.mpi.shared_report import has_shown_error
from meshdist.cluster.launchers import Launcher, find_launcher
from meshdist.debug.dump import BY_SIGNAL, RECORDS_SENT, dump_terminated, rank_state, write_state
from meshdist.debug.instrumentation import launcher_reports, own_state
from meshdist.debug.stack_without_gil import StackFile
from meshdist.errors import DistError
from meshdist.runtime.flight_recorder import DIRECTORY_VARIABLE
from meshdist.runtime.log import RankLog
from meshdist.store.brief_requests import brief
from meshdist.system.platform import start_thread

if TYPE_CHECKING:
    from meshdist.groups.world import World
    from meshdist.runtime.context import WorldSlot

_log = RankLog()
_LAST_S = 1.0
# How long a rank that is asked to end takes at most to write its file.
_WRITING_S = 2.0
# How long a call has to last to be reported then, and how long the rank asks the store whether others wait for it.
_LONG_S, _ASKING_S = 0.5, 0.1
_STDERR = 2


class SignalWatch:
    """Answers signals for the world in `slot`, until it is closed."""

    def __init__(self, slot: WorldSlot) -> None:
        self._slot = slot
        self._pid = os.getpid()
        # By signal: the previous handler and ours.
        self._handlers: dict[int, tuple[Any, Any]] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._stack_file: StackFile | None = None
        self._launcher: Launcher | None = None  # if this rank reports when it gets SIGTERM
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        if sys.platform == "win32":
            return  # no such signals
        for number, answer in ((signal.SIGURG, publish), (signal.SIGUSR1, show)):
            # getsignal is None for a handler outside of Python, such as faulthandler's: leave it.
            if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
                handler = self._handler(answer)
                self._handlers[number] = signal.signal(number, handler), handler
        if signal.SIGURG in self._handlers:
            with suppress(OSError, AttributeError):  # without it, ranks blocked in native code cannot be located
                self._stack_file = StackFile(signal.SIGURG)
        before = signal.getsignal(signal.SIGTERM)
        self._launcher = None if launcher_reports() or before is not signal.SIG_DFL else find_launcher(os.environ)
        tells = self._launcher is not None and self._launcher.kills_after_sigterm
        writes = bool(os.environ.get(DIRECTORY_VARIABLE)) and (before is signal.SIG_DFL or callable(before))
        if tells or writes:
            self._handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._report_and_end), self._report_and_end

    def close(self) -> None:
        if self._stack_file is not None and self._pid == os.getpid():
            self._stack_file.close()
            self._stack_file = None
        if threading.current_thread() is threading.main_thread():
            for number, (before, ours) in self._handlers.items():
                if signal.getsignal(number) == ours:  # the script may have set one of its own since
                    signal.signal(number, before)
        self._handlers.clear()
        for thread in self._threads.values():
            thread.join(_LAST_S)

    def _handler(self, answer: Callable[[World], None]) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            if self._stack_file is not None:
                self._stack_file.empty()  # Python code runs, so this rank can answer
            world = self._slot.world
            busy = self._threads.get(number)
            if world is None or os.getpid() != self._pid or (busy is not None and busy.is_alive()):
                return
            thread = threading.Thread(target=answer, args=(world,), name=f"meshdist-answer-{world.rank}", daemon=True)
            try:
                start_thread(thread)
            except DistError as error:  # not the fault of the call that the signal interrupts
                _log.warning("cannot answer signal %d: %s", number, error)
            else:
                self._threads[number] = thread

        return handle

    def _report_and_end(self, number: int, frame: FrameType | None) -> None:
        """Say what this rank was doing, and write its file, then do what the signal did before."""
        before = self._handlers.get(number, (signal.SIG_DFL, None))[0]
        world = self._slot.world
        if world is not None and os.getpid() == self._pid:
            thread = threading.Thread(target=self._report, args=(world,), name="meshdist-last-state", daemon=True)
            with suppress(DistError):  # no more threads: it ends without its file
                start_thread(thread)
                thread.join(_WRITING_S)
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _report(self, world: World) -> None:
        if os.environ.get(DIRECTORY_VARIABLE):
            dump_terminated(world)
        if self._launcher is not None and self._launcher.kills_after_sigterm:
            show_terminated(world, to_launcher=self._launcher.drops_last_output)


def publish(world: World) -> None:
    """Put this rank's state into the store, for the rank that asks."""
    from meshdist.debug.hang_watchdog import watchdog_of

    with suppress(DistError):  # the rank that asks reports the missing answer
        watchdog_of(world).exchange.publish(
            rank_state(world, "was asked", RECORDS_SENT), waits=watchdog_of(world).is_watching
        )


def show(world: World) -> None:
    """Print what this rank does to stderr, and write its state to its file if the environment names a directory."""
    from meshdist.debug.hang_report import in_words
    from meshdist.debug.hang_watchdog import watchdog_of
    from meshdist.debug.states import parse_state

    state = rank_state(world, BY_SIGNAL)
    lines = in_words(parse_state(state, "here"), subject="", missing=watchdog_of(world).take_missing())
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory:
        try:
            lines.append(f"its last calls are in {write_state(state, directory)}")
        except OSError as error:
            lines.append(f"its last calls cannot be written to {directory}: {error}")
    print(f"meshdist rank {world.rank}: " + "\n  ".join(lines), file=sys.stderr, flush=True)


def show_terminated(world: World, *, to_launcher: bool) -> None:
    """Print what this rank was doing when the launcher ended it, if it waited for others or others wait for it.

    Nothing is printed if another rank has failed: its error is shown. With `to_launcher`, the line goes to the stderr
    of the launcher, which no longer passes on that of its ranks.
    """
    from meshdist.debug.blocked_wait import waits_of
    from meshdist.debug.hang_report import in_words, waited_s
    from meshdist.debug.hang_watchdog import watchdog_of

    state = own_state(world)
    is_of_hang = waited_s(state) >= _LONG_S
    with suppress(DistError), brief(_ASKING_S):  # the store may have ended with its rank
        if has_shown_error(world.store):
            return
        is_of_hang = is_of_hang or any(world.rank in ranks for ranks in waits_of(world.store, world.size))
    if is_of_hang:
        words, *_ = in_words(state, missing=watchdog_of(world).take_missing())
        line = f"meshdist rank {world.rank}: terminated; {words}\n".encode()
        file = _launchers_stderr() if to_launcher else None
        os.write(_STDERR if file is None else file, line)
    if world.rank == 0:  # others may still ask its store
        threading.Event().wait(_ASKING_S)


def _launchers_stderr() -> int | None:
    """Return a descriptor of the stderr of the process that started this one; None if it cannot be opened."""
    with suppress(OSError):  # it may be a socket, or the system without /proc
        return os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_APPEND)
    return None
