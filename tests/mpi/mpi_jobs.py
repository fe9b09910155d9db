"""MPI jobs of scripts, from the command line to the exit status."""

from __future__ import annotations

import subprocess
from pathlib import Path

import mpi_worlds

import meshdist
from meshdist.launch.mpirun import mpirun_command

JOB_S, END_S = 60.0, 10.0


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a job whose ranks find meshdist, and what it needs, where the tests do."""
    return {**mpi_worlds.variables(), "PYTHONPATH": str(Path(meshdist.__file__).resolve().parents[1]), **more}


def run(command: list[str], cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, here or in another directory."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(**more), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )
    try:
        out, err = process.communicate(timeout=JOB_S)
    except BaseException:
        process.terminate()  # mpirun ends its ranks then
        try:
            process.communicate(timeout=END_S)
        finally:
            process.kill()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def job(library: str, size: int, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script, and its arguments, on so many ranks."""
    python = str(mpi_worlds.environment(library))
    return run([*mpirun_command(python, size), python, *map(str, command)], **more)
