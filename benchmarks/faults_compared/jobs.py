"""The driver's side: the ranks of one library that something befalls, from their start to their end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from sidebyside.libraries import BENCHMARKS, LIBRARIES, environment

from faults_compared.fault import Fault

_START_S = 60.0
_END_S = 5.0
_PAUSE_S = 0.005
_THEIR_FILES = ("meshdist", "torch", "gloo", "sm_segment", "vader", "ompi", "pmix", "prte")
_LAUNCHERS = {library.name: library for library in LIBRARIES}


@dataclass
class Seen:
    """What became of one rank.

    Attributes:
        pid: Its process; 0 if it was not seen.
        fault_s: When it said that the fault happens.
        ended_s: When the call had ended; None if it had not.
        error: What that raised.
        right: Whether what it wrote was right, where that was asked.
        notes: What it found.
        gone_s: When its process was gone; None if it was there to the end.
        status: What that ended with, where this is known: of those that are started by hand.
    """

    pid: int = 0
    fault_s: float | None = None
    ended_s: float | None = None
    error: str | None = None
    right: bool | None = None
    notes: list[str] = field(default_factory=list)
    gone_s: float | None = None
    status: int | None = None


class Job:
    """The ranks of one library.

    Args:
        name: The library.
        fault: What befalls them.
        folder: An empty directory.
    """

    def __init__(self, name: str, fault: Fault, folder: Path) -> None:
        self.seen = [Seen() for _ in range(fault.ranks)]
        self.fault_s: float | None = None
        self.over_s: float | None = None
        self._name, self._fault, self._folder = name, fault, folder
        self._is_launched = fault.launched or name == "openmpi"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._there_before = _shared_files()

    def run(self) -> None:
        """Start the ranks, and watch them until all is told."""
        try:
            self._start()
            self._watch()
        finally:
            self._end()

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            url = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
        what = ["-m", "faults_compared.rank", self._name, self._fault.name, str(self._folder)]
        if self._is_launched:
            by = ["-m", self._fault.mpi_module] if self._name == "openmpi" and self._fault.mpi_module else []
            self._popen([*_LAUNCHERS[self._name].launcher(self._fault.ranks), *by, *what, "env://"])
            return
        for rank in range(self._fault.ranks):
            self._popen([sys.executable, *what, url, str(rank)])

    def _popen(self, command: list[str]) -> None:
        # What libraries leave behind lies in a directory of this job's own.
        variables = {
            "TMPDIR": str(self._folder / "tmp"),
            "MESHDIST_SECRET": "that of this job",
            "PYTHONWARNINGS": "ignore",
        }
        (self._folder / "tmp").mkdir(exist_ok=True)
        with (self._folder / f"output_{len(self._processes)}").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=BENCHMARKS,
                env={**environment(), **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes.append(process)

    def _watch(self) -> None:
        end_s = time.monotonic() + _START_S
        has_killed = False
        while time.monotonic() < (end_s if self.fault_s is None else self.fault_s + self._fault.grace_s):
            self._look()
            if self._fault.kills == "launcher" and not has_killed and all(seen.notes for seen in self.seen):
                has_killed, self.fault_s = True, time.monotonic()
                self._processes[0].kill()
            if self._is_over():
                return
            time.sleep(_PAUSE_S)

    def _look(self) -> None:
        now_s = time.monotonic()
        for process in self._processes:
            process.poll()  # no zombie of it shall look alive
        for rank, seen in enumerate(self.seen):
            self._read(rank, seen)
            if seen.pid and seen.gone_s is None and not _lives(seen.pid):
                self._read(rank, seen)  # its last word may have come in between
                seen.gone_s = now_s
                if not self._is_launched:
                    seen.status = self._processes[rank].wait(_END_S)  # its last threads may be a while
        told = [seen.fault_s for seen in self.seen if seen.fault_s is not None]
        if told and self._fault.kills is None and (self.fault_s is None or len(told) == len(self.seen)):
            self.fault_s = max(told)  # where all say so, the last of them has begun

    def _read(self, rank: int, seen: Seen) -> None:
        path = self._folder / f"rank_{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        seen.notes = []
        for line in lines:
            with contextlib.suppress(ValueError):  # half of a line
                found = json.loads(line)
                seen.notes += [found.pop("note")] if "note" in found else []
                vars(seen).update(found)

    def _is_over(self) -> bool:
        if self._fault.asks == "processes":
            is_over = all(seen.gone_s is not None for seen in self.seen) and self._processes[0].poll() is not None
        else:
            ranks = range(self._fault.ranks) if self._fault.watched is None else self._fault.watched
            is_over = self.fault_s is not None and all(
                self.seen[rank].ended_s is not None or self.seen[rank].gone_s is not None for rank in ranks
            )
        if is_over:
            self.over_s = time.monotonic()
        return is_over

    def _end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL if not self._is_launched else signal.SIGTERM)
        if self._is_launched:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[0].wait(_END_S)
            self._processes[0].kill()
        for seen in self.seen:
            if seen.pid and _lives(seen.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(seen.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def left(self) -> list[str]:
        """Return what the ranks have left in /dev/shm and their directory for temporary files."""
        new = sorted(_shared_files() - self._there_before)
        # What a process has that still lives is another job's, which has begun meanwhile.
        shared = [f"/dev/shm/{name}" for name in new if not _is_mapped(f"/dev/shm/{name}")]
        return shared + [f"$TMPDIR/{path.name}" for path in (self._folder / "tmp").iterdir()]


def _shared_files() -> set[str]:
    """Return the files in shared memory whose names are such as these libraries give."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(_THEIR_FILES)}


def _is_mapped(path: str) -> bool:
    """Return whether a process has mapped a file, or the file is gone."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if path in maps.read_text():
                return True
    return not Path(path).exists()


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
