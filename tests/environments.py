"""Virtual environments that tests make for themselves, once."""

import subprocess

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
