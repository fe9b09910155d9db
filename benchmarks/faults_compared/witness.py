"""Witness: writes down what a rank sees, at once, so that it is there whatever becomes of the rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any


class Witness:
    """What one rank sees, as lines of JSON in a file of its own.

    Times are of `time.monotonic()`, which all processes of a host share.

    Attributes:
        url: Where the ranks meet.
        folder: A directory for the ranks of this fault alone.
        rank: The number of this one.
    """

    def __init__(self, folder: Path, rank: int, url: str) -> None:
        self.folder, self.rank, self.url = folder, rank, url
        self._path = folder / f"rank_{rank}.jsonl"
        self._write(pid=os.getpid())

    def fault(self) -> None:
        """Say that it happens now."""
        self._write(fault_s=time.monotonic())

    def attempt(self, call: Callable[[], Any], is_right: Callable[[], bool] | None = None) -> None:
        """Make a call, and say how it ends.

        Args:
            call: The call.
            is_right: Where it does not raise: whether what it has written is what it has to be.
        """
        try:
            call()
        except BaseException as error:  # whatever a library raises; Ctrl-C is one of those
            first, *further = str(error).strip().splitlines() or [""]
            # A rank's line of an error is indented; what follows without is a stack trace of C++.
            ranks = [line.strip() for line in takewhile(lambda line: line.startswith("  "), further)]
            text = f"{first}: {'; '.join(ranks)}" if ranks else first
            self._write(
                ended_s=time.monotonic(), error=f"{type(error).__name__}: {text}" if text else type(error).__name__
            )
            return
        right = None if is_right is None else bool(is_right())
        self._write(ended_s=time.monotonic(), right=right)

    def note(self, text: str) -> None:
        """Say what was found."""
        self._write(note=text)

    def pid_of(self, rank: int) -> int:
        """Return the process of another rank."""
        lines = (self.folder / f"rank_{rank}.jsonl").read_text().splitlines()
        pid: int = json.loads(lines[0])["pid"]
        return pid

    def _write(self, **seen: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(seen) + "\n")
