"""The package as it is published, and environments that have it installed and what it needs, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MINORS = (10, 11, 12, 13)
# The oldest that the package says it runs with.
OLDEST = ("numpy==1.24.*", "networkx==3.0")
INSTALL_S = 300.0


def python_of(minor: int) -> str | None:
    """Return the path of Python 3.<minor>, if there is one on this machine."""
    if sys.version_info[:2] == (3, minor):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    kept = sorted(pyenv.glob(f"3.{minor}.*/bin/python3"))
    return str(kept[-1]) if kept else shutil.which(f"python3.{minor}")


def run(*command: str | Path, **how: object) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it said; a failure is one of the test."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, **how)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel without the compiled core and an sdist, as `python -m build` makes them."""
    for package in ("build", "hatchling"):
        pytest.importorskip(package, reason=f'{package} is not installed: pip install -e ".[dev]"')
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, env=without_core())
    return folder


def without_core() -> dict[str, str]:
    return {**os.environ, "MESHDIST_CORE": "python"}


@pytest.fixture(scope="session")
def environment(distributions: Path) -> Iterator[Callable[[int], Path]]:
    """Return the folder of an environment of Python 3.<minor> with the wheel; that of 3.10 has the oldest NumPy."""
    made: dict[int, Path] = {}
    wheel = next(distributions.glob("*.whl"))

    def of(minor: int) -> Path:
        if minor not in made:
            python = python_of(minor)
            if python is None:
                pytest.skip(f"there is no Python 3.{minor} on this machine")
            folder = distributions / f"python3.{minor}"
            run(python, "-m", "venv", "--without-pip", folder)
            pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-compile")
            _install_needed(*pip, *(OLDEST if minor == MINORS[0] else ("numpy", "networkx")))
            run(*pip, "--no-index", wheel)  # which says if something else is needed
            made[minor] = folder
        return made[minor]

    yield of
    for folder in made.values():  # each is a hundred megabytes
        shutil.rmtree(folder)


def _install_needed(*command: str | Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"NumPy and networkx were not there within {INSTALL_S:g} s")
    if done.returncode:
        pytest.skip(f"NumPy and networkx cannot be had here: {done.stderr.strip().splitlines()[-1]}")
