"""A small process that outlives a killed launcher just long enough to end its processes.

The kernel kills a worker whose launcher was killed, but not the worker's own children, and not on every system. The
reaper knows the process groups of all workers. It sleeps until its pipe from the launcher closes, which also happens
after a `kill -9` of the launcher. It is started by its path, with no package to import.
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


class Reaper:
    """The launcher's side of the reaper process."""

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
        """Return the descriptor whose closing wakes the reaper; a forked child must close its copy."""
        return self._pipe.fileno()

    def watch(self, group: int) -> None:
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Do not signal the process group `group` any more: it has ended, and its number may be reused."""
        self._send(f"-{group}\n")

    def close(self) -> None:
        """End the reaper process without killing anything."""
        import subprocess

        if self._pipe.closed:
            return
        self._send("done\n")
        self._pipe.close()
        try:
            self._process.wait(_LONGEST_END_S)
        except subprocess.TimeoutExpired:  # it is stopped
            self._process.kill()
            self._process.wait(_LONGEST_END_S)

    def _send(self, line: str) -> None:
        # Without the reaper the job continues: the kernel still ends the workers with the launcher.
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(line.encode())


def _wait_for_launcher(launcher_pid: int) -> set[int] | None:
    """Return the process groups that are left when the launcher ends; None if it has closed the reaper."""
    import select

    groups: set[int] = set()
    watched = [0]
    timeout_s: float | None = _WITHOUT_PIDFD_S
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        try:
            watched.append(os.pidfd_open(launcher_pid))
            timeout_s = None
        except OSError:  # an older kernel, or the launcher has ended: check the parent below
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
        # A forked child may hold the pipe open after the launcher's death, so check the parent as well.
        if chunk == b"" or (chunk is None and os.getppid() != launcher_pid):
            return groups


def _end(groups: set[int]) -> None:
    """Kill the leader of each group; give the others a moment to clean up, then kill them."""
    import signal
    import time

    if sys.platform == "win32":
        return  # no process groups
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
    """Run `reaper.py LAUNCHER_PID ERROR_DIRECTORY`."""
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
