"""WorkerProcess: one worker, as the notebook sees it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from meshdist.exit_status import signal_name
from meshdist.launch.env import Job, worker_environment
from meshdist.notebook.worker import Answer

_END_S = 5.0
_CHUNK = 1 << 16


class WorkerProcess:
    """A process that runs cells as one rank.

    Attributes:
        rank: Its rank.
        connection: Readable when it has answered, or ended.
        output: A descriptor that is readable when it has printed something, or ended.
        may_print: It has not ended yet.
        has_begun: It has read the last question, as far as can be told.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.rank = rank
        ours, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "meshdist.notebook.worker", str(its.fileno()), str(os.getpid())],
                env=_environment(job, rank),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[its.fileno()],
                start_new_session=True,  # Ctrl-C, and the interrupt of a notebook, are for the notebook alone
            )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        self.output = self._pipe.fileno()
        if sys.platform != "win32":
            os.set_blocking(self.output, False)
        self._line = b""
        self.may_print = True
        self.has_begun = True
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, question: Any) -> None:
        """Send a question; where the worker has ended, reading its answer will say so."""
        self.has_begun = True
        try:
            self.connection.send_bytes(pickle.dumps(question))
        except (BrokenPipeError, ConnectionResetError):
            self.has_begun = False

    def answer(self) -> Answer | None:
        """Return its answer, waiting for it; None where it has ended."""
        try:
            answer: Answer = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            return None
        except ConnectionResetError:  # and no end of file: there was a question that it had not read
            self.has_begun = False
            return None
        return answer

    def printed(self, to_the_end: bool = False) -> list[str]:
        """Return the lines that it has printed meanwhile.

        Args:
            to_the_end: The last one as well if it does not end yet.
        """
        with contextlib.suppress(BlockingIOError):
            while self.may_print:
                chunk = os.read(self.output, _CHUNK)
                self._line += chunk
                self.may_print = bool(chunk)
        *lines, self._line = self._line.split(b"\n")
        if to_the_end and self._line:
            lines.append(self._line)
            self._line = b""
        return [line.decode(errors="replace").rpartition("\r")[2] for line in lines]

    def interrupt(self) -> None:
        """Have its cell raise KeyboardInterrupt."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def how_it_ended(self) -> str:
        """Return in words how it ended, which it has or is about to."""
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"closed its connection, while pid {self.pid} went on"
        return f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"

    def close(self) -> None:
        """End it, and give back what it held here."""
        self.connection.close()
        try:
            self._process.wait(_END_S / 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe.close()


def _environment(job: Job, rank: int) -> dict[str, str]:
    # Where this package is; the rest of the notebook's path comes with the first question.
    here = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    # The notebook's own way to draw would look for its page here.
    drawing = {"MPLBACKEND": "module://meshdist.notebook.figures"}
    return {**os.environ, **worker_environment(job, rank), "PYTHONPATH": paths, **drawing}
