"""The driver's side: a job of each library, whose ranks wait for orders."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, cast

from sidebyside.cases import Case, Kept
from sidebyside.libraries import Library, environment

START_S, ORDER_S, END_S, FAREWELL_S = 120.0, 300.0, 20.0, 3.0


class JobError(RuntimeError):
    """A job did not start, a rank ended, or a rank's call failed; the message says which."""


class Job:
    """Some ranks of one library, from their start by the library's launcher to their end.

    Attributes:
        library: The library.
        ranks: The number of ranks.
        pids: Their processes, once started.
    """

    def __init__(self, library: Library, ranks: int) -> None:
        self.library = library
        self.ranks = ranks
        self._connections: list[Connection] = []
        self.pids: list[int] = []
        self._launcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Job:
        try:
            self._start()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._kill()
            return
        for connection in self._connections:
            connection.close()
        if not self._ended_within(END_S):
            self._kill()
            raise JobError(f"the ranks of {self.library.name} did not end within {END_S:g} s")
        if self._launcher and self._launcher.returncode:
            raise JobError(f"the launcher of {self.library.name} ended with status {self._launcher.returncode}")

    def prepare(self, case: Case) -> None:
        """Have all ranks prepare this case, and check its result."""
        self._order(case)

    def take_up(self, case: Case) -> None:
        """Have all ranks take up this case again; the first time it is prepared, checked and kept."""
        self._order(Kept(case))

    def time(self, iterations: int) -> float:
        """Have the prepared case called so many times; return the seconds of a call on the slowest rank."""
        return max(self._order(iterations)) / iterations

    def _start(self) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(folder) / "driver")
            listener.bind(address)
            listener.listen(self.ranks)
            listener.settimeout(0.2)
            command = [*self.library.launcher(self.ranks), "-m", "sidebyside.rank", self.library.script, address]
            # In a session of its own, so that Ctrl-C comes to the driver, which ends all jobs in good order.
            self._launcher = subprocess.Popen(command, env=environment(), start_new_session=True)
            deadline = monotonic() + START_S
            while len(self._connections) < self.ranks:
                with contextlib.suppress(TimeoutError):
                    self._connections.append(Connection(listener.accept()[0].detach()))
                if self._launcher.poll() is not None:
                    raise JobError(f"{self.library.name} did not start: status {self._launcher.returncode}")
                if monotonic() > deadline:
                    raise JobError(f"{self.library.name} did not start within {START_S:g} s")
        self.pids = [pid for _, pid in self._answers(deadline)]

    def _order(self, order: Case | Kept | int) -> list[float]:
        for connection in self._connections:
            with self._noticing_an_end():
                connection.send(order)
        answers = self._answers(monotonic() + ORDER_S)
        for answer in answers:
            if isinstance(answer, str):
                raise JobError(f"a rank of {self.library.name} failed at {order}:\n{answer}")
        return answers

    def _answers(self, deadline: float) -> list[Any]:
        """Return an answer of every rank; a failure ends it at once, since the peers of a failed rank may hang."""
        answers: list[Any] = []
        silent = {connection.fileno(): connection for connection in self._connections}
        while silent:
            ready = wait(silent, max(0.0, deadline - monotonic()))
            if not ready:
                raise JobError(f"{len(silent)} of {self.ranks} ranks of {self.library.name} did not answer in time")
            for number in ready:
                with self._noticing_an_end():
                    answers.append(silent.pop(cast(int, number)).recv())
                if isinstance(answers[-1], str):
                    return answers
        return answers

    @contextlib.contextmanager
    def _noticing_an_end(self) -> Iterator[None]:
        """Raise JobError where the rank at the other end of a connection is no more."""
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise JobError(f"a rank of {self.library.name} has ended") from None

    def _kill(self) -> None:
        """End all, in good order where ranks still listen. Launchers put ranks into sessions of their own."""
        for connection in self._connections:
            connection.close()
        if self._launcher is None or self._ended_within(FAREWELL_S):
            return
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._launcher.terminate()
        if not self._ended_within(END_S):
            self._launcher.kill()
            self._launcher.wait()

    def _ended_within(self, timeout_s: float) -> bool:
        assert self._launcher is not None
        try:
            self._launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True
