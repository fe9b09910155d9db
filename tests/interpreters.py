"""Programs that run as under `python -c`, in forks of an interpreter that has imported what all of them import.

In an interpreter of its own, each program would spend half a second of processor time on imports.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshdist.launch.worker import die_with_parent

_CODE = "import sys; sys.path.insert(1, sys.argv[1]); import interpreters; del sys.path[1]; interpreters.serve()"


class Interpreter:
    """The process that forks for each program, seen from outside.

    Args:
        preloaded: The modules that it imports.
        environment: The environment variables of the programs.
    """

    def __init__(self, preloaded: Sequence[str], environment: Mapping[str, str]) -> None:
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = [str(its.fileno()), str(os.getpid())]
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(Path(__file__).parent), *numbers, *preloaded],
                pass_fds=[its.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, program: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; after a timeout there can be no more."""
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            socket.send_fds(self._socket, [program.encode()], [stdout.fileno(), stderr.fileno()])
            self._socket.settimeout(timeout_s)
            try:
                status = self._socket.recv(100)
            except TimeoutError:
                self._kill()
                raise
            finally:
                stdout.seek(0)
                stderr.seek(0)
            assert status, "the interpreter that forks has ended"
            return subprocess.CompletedProcess("python -c", int(status), stdout.read(), stderr.read())

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._kill()
            raise

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)


def serve() -> None:
    """In the interpreter: fork for every program, until there are no more."""
    control, parent_pid = int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent_pid)
    for name in sys.argv[4:]:
        importlib.import_module(name)
    pid = os.getpid()
    with socket.socket(fileno=control) as messages:
        while True:
            program, fds, _, _ = socket.recv_fds(messages, 1 << 20, 2)
            if not program:
                return
            child = os.fork()
            if child == 0:
                messages.close()
                die_with_parent(pid)
                _run_as_main(program.decode(), *fds)
                return  # and the interpreter ends, as that of any program does
            for fd in fds:
                os.close(fd)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            messages.send(str(status).encode())


def _run_as_main(program: str, stdout: int, stderr: int) -> None:
    for fd, place in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, place)
        os.close(fd)
    sys.argv[:] = ["-c"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), main.__dict__)
