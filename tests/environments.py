"""Virtual environments that tests make for themselves, once."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

INSTALL_S = 600


def install_step(of: str, *command: str) -> None:
    """Run a command that makes an environment with some packages; skip the test where it fails, and say why."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        problem = done.stderr if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem is not None:
        last = (problem.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"no environment with {of} can be made here: {last}")


@contextlib.contextmanager
def made_once(folder: Path) -> Iterator[bool]:
    """Say whether `folder` is to be made; one process at a time gets here, and what it makes is kept if it succeeds."""
    import fcntl  # which Windows does not have

    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_new = not (folder / "complete").exists()
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        yield is_new
        (folder / "complete").touch()
