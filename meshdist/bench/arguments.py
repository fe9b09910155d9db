"""The command line of `python -m meshdist.bench`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from meshdist.arrays.host import check_dtype
from meshdist.arrays.reduce_op import ReduceOp, as_reduce_op, check_op_dtype
from meshdist.backends.gloo.shm.tuning import TUNED_BYTES
from meshdist.backends.registry import entry_of
from meshdist.bench.figure import problem_with
from meshdist.bench.operations import NEVER, OPERATIONS
from meshdist.bench.results import parse_size
from meshdist.system.env_flags import DISABLE_SHM, TUNING, TUNING_MODES, switch, tuning_mode
from meshdist.system.option_parser import OptionParser, did_you_mean
from meshdist.system.terminal import fold

T = TypeVar("T")

_DESCRIPTION = """\
Measure collectives, and check their results.

Run directly, it starts its own ranks on this host. Under meshrun, mpirun, srun
or torchrun it measures the ranks of that job, on any number of hosts."""

_HELP_WIDTH = 80
_EPILOG = f"""\
{fold("collectives: " + ", ".join(OPERATIONS), _HELP_WIDTH)}

examples:
  python -m meshdist.bench
      all_reduce of 8 B to 64 MiB on two ranks
  python -m meshdist.bench all_gather,broadcast -n 4 -b 1M -e 1G -f 4
  python -m meshdist.bench --shared --plot all_reduce.png
      arrays of meshdist.empty
  python -m meshdist.bench all --dtype float64 --csv all.csv
  python -m meshdist.bench all --tune --plot algorithms.png
      the algorithms of long calls, measured
  mpirun -n 4 python -m meshdist.bench --backend mpi
      over MPI
  meshrun --nnodes 2 --nproc-per-node 8 -m meshdist.bench
      two hosts; on both

Exit status: 0, 1 if an element was wrong or a rank failed, 2 for wrong options."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options; for wrong ones, print an error and exit with status 2."""
    parser = OptionParser(
        prog="python -m meshdist.bench",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = _type(_names)
    many = "collectives to measure, or all (default: all_reduce)"
    add("collectives", nargs="*", type=names, metavar="collective", help=many)
    add("-b", "--begin", type=_type(parse_size), default=8, metavar="SIZE", help="the first size (default: 8)")
    add("-e", "--end", type=_type(parse_size), metavar="SIZE", help="the last size (default: 64M, or the first)")
    factor = "factor between successive sizes (default: 4)"
    add("-f", "--factor", type=_type(_factor), default=4.0, metavar="N", help=factor)
    add("-n", "--ranks", type=_type(_positive), help="ranks to start on this host (default: 2)")
    add("-d", "--dtype", type=_type(_dtype), default=np.dtype("float32"), help="element dtype (default: float32)")
    add("--op", type=_type(as_reduce_op), default=ReduceOp.SUM, help="the reduction (default: sum)")
    add("--root", type=_type(_natural), default=0, metavar="RANK", help="source or destination (default: 0)")
    add("--backend", type=_type(_backend), default="gloo", help="gloo, threads or mpi (default: gloo)")
    add(
        "-i",
        "--iterations",
        type=_type(_positive),
        metavar="N",
        help="timed calls for each size (default: by --seconds)",
    )
    add("--seconds", type=_type(_seconds), default=0.5, help="approximate time for each size (default: 0.5)")
    add(
        "-w",
        "--warmup",
        type=_type(_natural),
        metavar="N",
        help="untimed calls before these (default: a tenth as many)",
    )
    add("--in-place", action="store_true", help="use one array for input and output")
    add("--shared", action="store_true", help="use arrays in shared memory, from meshdist.empty")
    add("--tune", action="store_true", help="autotune calls of 32 KiB and more, and print the time of every algorithm")
    add("--no-check", action="store_true", help="do not check the results")
    add("--json", type=Path, metavar="PATH", help="write everything to this file")
    add("--csv", type=Path, metavar="PATH", help="write the table to this file")
    add("--plot", type=Path, metavar="PATH", help="draw time and bandwidth by size: .png, .svg or .pdf")
    options: argparse.Namespace = parser.parse_args(arguments)
    options.collectives = list(dict.fromkeys(chain(*options.collectives))) or ["all_reduce"]
    problem = _problem_with(options)
    if problem is not None:
        parser.error(problem)
    return options


def _problem_with(options: argparse.Namespace) -> str | None:
    if options.tune:
        if options.backend != "gloo":
            return f"--tune is for the gloo backend: {options.backend} has one algorithm for a call"
        if options.shared or options.json is not None or options.csv is not None:
            return "--tune is not for --shared, --json and --csv"
        if TUNING_MODES[tuning_mode()] in ("off", "cached"):
            return f"--tune measures, which {TUNING}={os.environ[TUNING]} turns off"
        options.begin = max(options.begin, TUNED_BYTES)
        options.factor = 2.0
    if options.end is None:
        options.end = max(options.begin, 64 << 20)
    if options.end < options.begin:
        return f"-e must not be below -b: sizes go from {options.begin} to {options.end} bytes"
    never = [name for name in options.collectives if OPERATIONS[name].in_place == NEVER]
    if options.in_place and never and len(options.collectives) < len(OPERATIONS):
        known = ", ".join(name for name, operation in OPERATIONS.items() if operation.in_place != NEVER)
        return f"--in-place is not for {', '.join(never)}; it is for {known}"
    for name, path in (("--json", options.json), ("--csv", options.csv), ("--plot", options.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            return f"{name}: there is no directory {str(path.absolute().parent)!r}; make it first"
        if path is not None and path.is_dir():
            return f"{name} must be a file, and {str(path)!r} is a directory"
    paths = [path.absolute() for path in (options.json, options.csv, options.plot) if path is not None]
    if len(set(paths)) < len(paths):
        return "--json, --csv and --plot must be different files"
    if options.shared and switch(DISABLE_SHM):
        return f"--shared needs the shared memory that {DISABLE_SHM}=1 turns off"
    problem = None if options.plot is None else problem_with(options.plot)
    if problem is not None:
        return f"--plot {problem}"
    if any(OPERATIONS[name].reduces for name in options.collectives):
        try:
            check_op_dtype(options.op, options.dtype)
        except TypeError as error:
            return f"--op: {error}"
    return None


def _type(read: Callable[[str], T]) -> Callable[[str], T]:
    # argparse shows the message of this exception, and replaces others.
    def typed(text: str) -> T:
        try:
            return read(text)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def _names(text: str) -> list[str]:
    names = list(OPERATIONS) if text == "all" else text.split(",")
    for name in names:
        if name not in OPERATIONS:
            known = f"all, {', '.join(OPERATIONS)}"
            raise ValueError(f"{name!r} is not known; choose from {known}{did_you_mean(name, OPERATIONS)}")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"expected a number of at least 0, got {text!r}")
    return int(text)


def _factor(text: str) -> float:
    number = _number(text)
    if not 1.01 <= number <= 1 << 40:
        raise ValueError(f"expected a factor above 1, such as 2, got {text!r}")
    return number


def _seconds(text: str) -> float:
    number = _number(text)
    if not 0 < number < 86_400:
        raise ValueError(f"expected seconds above 0, got {text!r}")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text!r}") from None


def _dtype(text: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(text)
    except TypeError:
        dtype = _extension_dtype(text)
    check_dtype(np.empty(0, dtype), "--dtype")
    return dtype


def _extension_dtype(text: str) -> np.dtype[Any]:
    hint = "; bfloat16 and float8 need ml_dtypes: pip install ml_dtypes"
    if find_spec("ml_dtypes") is not None:
        import ml_dtypes

        if isinstance(getattr(ml_dtypes, text, None), type):
            found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, text))
            return found
        hint = ""
    raise ValueError(f"{text!r} is not a dtype; use one of NumPy's, such as float32, int8 and complex64{hint}")


def _backend(text: str) -> str:
    name = text.lower()
    entry = entry_of(name)
    if "cpu" not in entry.devices:
        raise ValueError(f"{text!r} does not support NumPy arrays, which are measured; use gloo, threads or mpi")
    missing = entry.missing()
    if missing is not None:
        raise ValueError(f"{text!r} cannot be used here: {missing}")
    return name
