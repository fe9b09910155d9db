"""Run a script as one rank of an MPI job, and end the job if the script raises or exits with a nonzero status.

    mpirun -n 4 python -m meshdist.launch.mpi_rank [-m] train.py --epochs 3

MPI_Init and MPI_Finalize wait for all ranks. A rank that exits without MPI_Abort, even before it has imported
anything, would leave the others waiting.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from meshdist.backends.mpi.aborting import abort_job, abort_on_early_exceptions, exit_status

_RUNNERS = (__file__, runpy.__file__, runpy.run_path.__code__.co_filename)


def run(arguments: list[str]) -> None:
    """Run a script, or with `-m` a module, with its arguments, as `python` would.

    Raises:
        SystemExit: The script exits; if its status is not 0, the other ranks are ended first.
    """
    sys.excepthook = partial(_show, sys.excepthook)
    abort_on_early_exceptions()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        status = exit_status(error.code)
        if status:
            if not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
            print(f"meshdist: this rank exits with status {status}, which ends the MPI job", file=sys.stderr)
            abort_job(status)
            sys.exit(status)
        raise


def _show(shown: Callable[..., None], kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Show an exception from the script's first frame on, as `python` does."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _RUNNERS:
        trace = trace.tb_next
    shown(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1:] == ["-m"]:
        sys.exit("usage: python -m meshdist.launch.mpi_rank [-m] script [arguments]")
    run(sys.argv[1:])
