"""A small process that outlives a killed launcher just long enough to end what it started.

The kernel kills a worker whose launcher was killed, but not the worker's own children, and not every system can do it.
The guard knows the process groups of all workers. It sleeps until its pipe from the launcher closes, which also a
`kill -9` of the launcher does. It is started by its path, with no package to import.
"""

from __future__ import annotations

import contextlib
import os
import sys

TYPE_CHECKING = False  # as typing's, without loading typing
if TYPE_CHECKING:
    from typing import IO

_WITHOUT_PIDFD_S = 0.2
_LONGEST_END_S = 5.0
_CLEAN_UP_S = 0.5
_POLL_S = 0.02


class Guard:
    """The launcher's end of the guard process.

    Example:
        >>> guard = Guard(error_directory="/nonexistent")
        >>> guard.close()
    """

    def __init__(self, error_directory: str) -> None:
        import subprocess

        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), error_directory]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )
        assert self._process.stdin is not None
        self._pipe: IO[bytes] = self._process.stdin

    def fileno(self) -> int:
        """Return the descriptor that keeps the guard asleep; a forked child closes its copy."""
        return self._pipe.fileno()

    def watch(self, group: int) -> None:
        """Kill the process group `group` if the launcher is killed."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Leave the process group `group` alone from now on: it has ended, and its number may be given to others."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guard; nothing is killed."""
        import subprocess

        if self._pipe.closed:
            return
        self._tell("done\n")
        self._pipe.close()
        try:
            self._process.wait(_LONGEST_END_S)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._process.kill()
            self._process.wait(_LONGEST_END_S)

    def _tell(self, line: str) -> None:
        # Where somebody killed the guard, the job goes on: the kernel still ends the workers with the launcher.
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(line.encode())


def _wait_for_launcher(launcher_pid: int) -> set[int] | None:
    """Return the process groups that are left when the launcher ends; None if it says that it is done."""
    import select

    groups: set[int] = set()
    watched = [0]
    timeout_s: float | None = _WITHOUT_PIDFD_S
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        try:
            watched.append(os.pidfd_open(launcher_pid))
            timeout_s = None
        except OSError:  # an older kernel, or the launcher has ended: the look at the parent below tells
            timeout_s = _WITHOUT_PIDFD_S
    text = b""
    while True:
        ready = select.select(watched, [], [], timeout_s)[0]
        chunk = os.read(0, 65536) if 0 in ready else None
        *lines, text = (text + (chunk or b"")).split(b"\n")
        for line in lines:
            if line == b"done":
                return None
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
        # A forked child may hold the pipe open after the launcher's death, so that death is looked for itself too.
        if chunk == b"" or (chunk is None and os.getppid() != launcher_pid):
            return groups


def _end(groups: set[int]) -> None:
    """Kill the leader of each group; let the others clean up for a moment, then kill them."""
    import signal
    import time

    if sys.platform == "win32":
        return  # where there are no groups of processes
    end_s = time.monotonic() + _CLEAN_UP_S
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(group, signal.SIGKILL)
        _signal_group(group, signal.SIGTERM)
    while time.monotonic() < end_s and any(_signal_group(group, 0) for group in groups):
        time.sleep(_POLL_S)
    for group in groups:
        _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    if sys.platform == "win32":
        return False
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main() -> None:
    """Run `guard.py LAUNCHER_PID ERROR_DIRECTORY`."""
    import signal

    for number in signal.Signals:
        if number.name in ("SIGINT", "SIGTERM", "SIGHUP"):
            signal.signal(number, signal.SIG_IGN)
    launcher_pid, error_directory = int(sys.argv[1]), sys.argv[2]
    groups = _wait_for_launcher(launcher_pid)
    if groups is None:
        return
    _end(groups)
    if os.path.isdir(error_directory):
        import shutil

        shutil.rmtree(error_directory, ignore_errors=True)


if __name__ == "__main__":
    main()
