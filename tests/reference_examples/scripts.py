"""Run a documented program as its reader would: a file, started by Python or by the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CHOSEN = ("MESHDIST_", "TORCH_", "OMP_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def run_script(
    directory: Path, text: str, *arguments: str, launcher: tuple[str, ...] = (), **variables: str
) -> tuple[int, str, str]:
    """Write `text` to a file, run it, and return its exit status, stdout and stderr.

    Args:
        directory: Where it runs.
        text: The program.
        arguments: Its arguments.
        launcher: What stands before the file's name: nothing, or `-m meshdist.launch` and options.
        variables: Added to the environment.
    """
    (directory / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, *launcher, "script.py", *arguments],
        cwd=directory,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a documented program: this one without what concerns ranks, and `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_CHOSEN)}
    return {**kept, "PYTHONPATH": str(ROOT), **variables}
