"""Run meshrun in tests: write a script, start it, look at what is left of it."""

import os
import pathlib
import signal
import subprocess
import sys

from until import until

ROOT = str(pathlib.Path(__file__).resolve().parents[2])

# What every script of these tests begins with: ranks and the test tell each other things through files.
PRELUDE = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])

def tell(name, what=""):
    part = pathlib.Path(f"{name}.part{rank}")
    part.write_text(str(what))
    part.rename(name)

def hear(name):
    end = time.monotonic() + 30
    while not os.path.exists(name):
        assert time.monotonic() < end, f"nobody told {name}"
        time.sleep(0.005)
    return pathlib.Path(name).read_text()
"""

# A package that loads another of its name, and takes as long as on a busy machine.
SLOW_PACKAGE = """
import importlib.machinery, sys, time
time.sleep({seconds})
spec = importlib.machinery.PathFinder.find_spec(__name__, [path for path in sys.path if not __file__.startswith(path)])
__path__[:] = spec.submodule_search_locations
exec(spec.loader.get_code(__name__))
"""


def write_script(directory, body, name="script.py"):
    path = directory / name
    path.write_text(PRELUDE + body)
    return name


def environment(**variables):
    chosen = ("MESHDIST_", "OMP_", "PYTHONUNBUFFERED")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    return {**inherited, "PYTHONPATH": ROOT, **variables}


def slow_networkx(directory, seconds):
    """Return the variables of a job whose processes take `seconds` longer to import networkx."""
    package = directory / "slow" / "networkx"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SLOW_PACKAGE.format(seconds=seconds))
    return {"PYTHONPATH": str(package.parent)}


def _ignores_no_signal():
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start_meshrun(directory, *arguments, variables=None, **popen):
    """Start meshrun as a shell would: no signal is ignored, whatever the tests themselves run under, such as nohup."""
    return subprocess.Popen(
        [sys.executable, "-m", "meshdist.launch.meshrun", *arguments],
        cwd=directory,
        env=environment(**(variables or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_ignores_no_signal,
        **popen,
    )


def meshrun(directory, *arguments, variables=None):
    """Run meshrun to its end and return (exit status, stdout, stderr)."""
    process = start_meshrun(directory, *arguments, variables=variables)
    try:
        out, err = process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


def finish(process):
    """Wait for a meshrun that is about to end; return its stderr."""
    try:
        return process.communicate(timeout=20)[1]
    finally:
        process.kill()
        process.wait()


def reported(directory, name):
    """Wait for what a rank tells."""
    until((directory / name).exists, f"a rank tells {name}")
    return (directory / name).read_text()


def is_alive(pid):
    """Return True if the process runs; a zombie does not."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def all_gone(pids, timeout_s=5.0):
    until(lambda: not any(is_alive(pid) for pid in pids), f"none of {pids} is alive", timeout_s)
