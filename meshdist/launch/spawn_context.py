"""The result and the exceptions of `spawn`."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshdist.errors import DistError
from meshdist.system.deadline import Deadline, Timeout
from meshdist.system.processes import signal_name

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from meshdist.launch.failures import Failure
    from meshdist.launch.supervisor import Supervisor
    from meshdist.store import TCPStore


UNGUARDED_STATUS = 113
"""The exit status of a rank that calls `spawn` while it imports the script that started it."""


class ProcessException(DistError):
    """A process of `spawn` failed; base of the two exceptions below.

    Attributes:
        error_index: Its rank.
        error_pid: Its process id.

    Example:
        >>> from meshdist.launch.spawn_context import ProcessException
        >>> ProcessException("rank 1 failed", error_index=1, error_pid=77).error_index
        1
    """

    def __init__(self, message: str, error_index: int, error_pid: int) -> None:
        super().__init__(message)
        self.error_index = error_index
        self.error_pid = error_pid

    def __reduce__(self) -> tuple[type[ProcessException], tuple[object, ...]]:
        return type(self), (str(self), self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """A rank raised an exception, whose traceback is in the message.

    Attributes:
        error_index: The rank.
        error_pid: Its process id.

    Example:
        >>> from meshdist.launch.spawn_context import ProcessException, ProcessRaisedException
        >>> issubclass(ProcessRaisedException, ProcessException)
        True
    """


class ProcessExitedException(ProcessException):
    """A rank exited with a nonzero status, or was killed, without raising.

    Attributes:
        error_index: The rank.
        error_pid: Its process id.
        exit_code: Its exit status, or minus the number of the signal that killed it.
        signal_name: The name of that signal, or None.

    Example:
        >>> from meshdist import ProcessExitedException
        >>> oom = ProcessExitedException("rank 1 was killed", error_index=1, error_pid=77, exit_code=-9)
        >>> oom.signal_name
        'SIGKILL'
    """

    def __init__(self, message: str, error_index: int, error_pid: int, exit_code: int) -> None:
        super().__init__(message, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name(-exit_code) if exit_code < 0 else None

    def __reduce__(self) -> tuple[type[ProcessException], tuple[object, ...]]:
        return type(self), (str(self), self.error_index, self.error_pid, self.exit_code)


class SpawnContext:
    """The processes that `spawn(..., join=False)` started.

    Attributes:
        processes: The `multiprocessing` processes, by rank.

    Example:
        >>> from meshdist.launch.spawn import spawn
        >>> context = spawn(divmod, args=(2,), nprocs=2, join=False)  # runs divmod(0, 2) and divmod(1, 2)
        >>> len(context.pids())
        2
        >>> context.join(timeout=60.0)
        True
    """

    def __init__(self, processes: list[BaseProcess], supervisor: Supervisor, store: TCPStore) -> None:
        import atexit

        self.processes = processes
        self._supervisor = supervisor
        self._store = store
        self._error: ProcessException | None = None
        self._finished = False
        self._owner_pid = os.getpid()
        # The ranks need the store until they end, even if `join` is never called.
        atexit.register(self._end_with_program)

    def pids(self) -> list[int]:
        """Return the process ids, by rank."""
        return [process.pid for process in self.processes if process.pid is not None]

    def join(self, timeout: Timeout | None = None, grace_period: float | None = None) -> bool:
        """Wait until all ranks have succeeded; if one fails, end the others and raise.

        Args:
            timeout: How long to wait, in seconds or as a timedelta; no limit if None.
            grace_period: Seconds between asking a rank to end and killing it; 10 if None.

        Returns:
            True once all have ended, False at the timeout; `join` can then be called again.

        Raises:
            ProcessRaisedException: A rank raised. It is the first failure that does not follow from another rank's.
            ProcessExitedException: A rank exited with a nonzero status, or was killed.
        """
        from meshdist.launch.supervisor import DEFAULT_GRACE_S

        __tracebackhide__ = True
        grace_s = DEFAULT_GRACE_S if grace_period is None else grace_period
        if not self._finished:
            with self.passing_on_ctrl_c(grace_s):
                if not self._supervisor.watch(Deadline(math.inf if timeout is None else timeout)):
                    return False
                if self._supervisor.failures:
                    self._supervisor.end(signal.SIGTERM, grace_s)
                    self._error = _as_exception(self._supervisor.failures[0])
            self._close()
        if self._error is not None:
            raise self._error
        return True

    @contextlib.contextmanager
    def passing_on_ctrl_c(self, grace_s: float = 10.0) -> Iterator[None]:
        """End the ranks if a Ctrl-C ends this block; it does not reach them, since each has its own session."""
        try:
            yield
        except KeyboardInterrupt:
            if not self._finished:
                try:
                    self._report_hang()
                    self._supervisor.end(signal.SIGINT, grace_s)
                finally:
                    self._close()
            raise

    def _report_hang(self) -> None:
        """After Ctrl-C on ranks that hang, show who waits for whom, as meshrun does; a further Ctrl-C ends that."""
        from meshdist.debug.attach import hang_of_interrupted  # most jobs do not hang
        from meshdist.store.address import endpoint

        job = self._supervisor.job
        for line in hang_of_interrupted(self._store, endpoint(job.master_addr, job.master_port)):
            print(f"spawn: {line}", file=sys.stderr, flush=True)

    def _end_with_program(self) -> None:
        """At exit, wait for the processes, or end them if all are daemonic, as multiprocessing does."""
        from meshdist.launch.supervisor import DEFAULT_GRACE_S

        if os.getpid() != self._owner_pid:  # a fork of the program
            return
        if all(process.daemon for process in self.processes):
            self._supervisor.end(signal.SIGTERM, DEFAULT_GRACE_S)
            self._close()
        else:
            self.join()

    def _close(self) -> None:
        import atexit

        atexit.unregister(self._end_with_program)
        self._finished = True
        self._supervisor.close()
        self._store.close()
        for process in self.processes:
            process.join(0)  # it has ended; this frees it in multiprocessing


def _as_exception(failure: Failure) -> ProcessException:
    if failure.traceback:
        return ProcessRaisedException(failure.report(), failure.rank, failure.pid)
    if failure.status == UNGUARDED_STATUS:
        words = (
            "each rank imports this script, and calls spawn again: put the code that starts the ranks"
            ' under `if __name__ == "__main__":`'
        )
        return ProcessExitedException(words, failure.rank, failure.pid, failure.status)
    return ProcessExitedException(failure.report().rstrip(), failure.rank, failure.pid, failure.status)
