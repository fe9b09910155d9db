"""WorkerProcess: the notebook's side of one worker."""

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

from meshdist.launch.worker_env import Job, worker_environment
from meshdist.notebook.cell_worker import Answer
from meshdist.system.processes import signal_name

KILLED = "killed by "
"""How `WorkerProcess.how_it_ended` begins for a process that a signal killed; the name of the signal follows."""

_END_S = 5.0
_CHUNK = 1 << 16


class WorkerProcess:
    """A process that runs cells as one rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "meshdist.notebook.cell_worker", str(theirs.fileno()), str(os.getpid())],
                env=_environment(job, rank),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # only the notebook gets Ctrl-C and interrupts
            )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        self.output = self._pipe.fileno()  # a descriptor that is readable when it has printed something, or ended
        if sys.platform != "win32":
            os.set_blocking(self.output, False)
        self._line = b""
        self.may_print = True  # it has not closed its output
        self.has_begun = True  # it has read the last request, as far as is known
        self.connection = Connection(ours.detach())  # readable when it has answered, or ended

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Any) -> None:
        """Send a request; if the worker has ended, `answer` returns None."""
        self.has_begun = True
        try:
            self.connection.send_bytes(pickle.dumps(request))
        except (BrokenPipeError, ConnectionResetError):
            self.has_begun = False

    def answer(self) -> Answer | None:
        """Wait for its answer; None where it has ended."""
        try:
            answer: Answer = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            return None
        except ConnectionResetError:  # instead of end of file: the worker had not read the request
            self.has_begun = False
            return None
        return answer

    def printed(self, to_the_end: bool = False) -> list[str]:
        """Return its new lines of output; with `to_the_end` also an unfinished last line."""
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
        """Raise KeyboardInterrupt in its cell."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()

    def how_it_ended(self) -> str:
        """Describe how it ended; wait for the end if it is still to come."""
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"closed its connection, while pid {self.pid} went on"
        return f"{KILLED}{signal_name(-status)}" if status < 0 else f"exit status {status}"

    def close(self) -> None:
        """End it, and release its descriptors."""
        self.connection.close()
        try:
            self._process.wait(_END_S / 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe.close()


def _environment(job: Job, rank: int) -> dict[str, str]:
    # The path of this package; the rest of the notebook's sys.path comes with the first request.
    here = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    # The notebook's own matplotlib backend needs its front end.
    drawing = {"MPLBACKEND": "module://meshdist.notebook.figures"}
    return {**os.environ, **worker_environment(job, rank), "PYTHONPATH": paths, **drawing}
