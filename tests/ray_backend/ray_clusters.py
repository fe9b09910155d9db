"""A cluster of Ray for the tests of a file: started, used and ended by a driver in a process of its own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from until import until
from worlds import needs_linux

ROOT = Path(__file__).parents[2]
NO_CLUSTER = 3  # the exit status of a driver if Ray could not start, for which it has 30 s
_PAGE = (ROOT / "docs" / "ray.md").read_text()
_MARK = "MESHDIST_TEST_CLUSTER"
marks = [
    needs_linux,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed; pip install 'meshdist[ray]'"),
]


def program(heading: str) -> str:
    """Return the first program under a heading of docs/ray.md."""
    return _PAGE.split(f"\n## {heading}\n")[1].split("``` py\n")[1].split("```")[0]


@contextmanager
def driven(driver: str, *words: str, limit_s: float, **variables: str) -> Iterator[Any]:
    """Run a driver of this folder with `words`, and yield what it says as JSON in a line."""
    mark = secrets.token_hex(8)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MESHDIST_SECRET", "RAY_"))}
    # Ray's sockets are in the directory, and have short names; its token would be a file in the home directory.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / driver), directory, *words],
            env={
                **kept,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
                "OMP_NUM_THREADS": "1",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_memory_monitor_refresh_ms": "0",  # it kills actors where others use the memory of the machine
                _MARK: mark,
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output, errors = process.communicate(timeout=limit_s)
            if process.returncode == NO_CLUSTER:
                pytest.skip(f"Ray could not start a cluster here: {output.strip()}")
            assert process.returncode == 0, errors
            # Ray itself may print lines after it.
            yield json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
            until(lambda: not _left_behind(mark), "Ray ends its processes", 60)
        finally:
            for pid in [*_left_behind(mark), process.pid] if process.poll() is None else _left_behind(mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(timeout=10)


def _left_behind(mark: str) -> list[int]:
    """Return the processes that have inherited the mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
