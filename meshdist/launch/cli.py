"""The command line of meshrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

from meshdist.launch.agent import Settings, launch
from meshdist.launch.devices import parse_num_ranks
from meshdist.launch.env import LOOPBACK
from meshdist.launch.supervisor import DEFAULT_GRACE_S

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

USAGE_STATUS = 2

_FLAGS = ("-h", "--help", "-m", "--module", "--no-python", "--standalone")
"""The options that take no value."""

_USAGE = """meshrun [options] script.py [argument ...]
       meshrun [options] -m module [argument ...]
       meshrun [options] --no-python program [argument ...]"""

_DESCRIPTION = """\
Start the ranks of a job on this host, watch over them, and exit as they do.

Each rank is a process that finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and the job's secret in its
environment, which is all that meshdist.init_process_group() needs. If a rank fails, its traceback is shown once, the
others are ended, and meshrun exits with its status (128 + n if signal n killed it). Ctrl-C ends all ranks."""

_EPILOG = """\
examples:
  meshrun --nproc-per-node 4 train.py --steps 100
  meshrun --nproc-per-node gpu -m package.train
  meshrun --launcher mpi --nproc-per-node 4 train.py --backend mpi
  meshrun --nproc-per-node 2 --log-dir logs --no-python ./solver input.dat

Options come before the script; what follows it is passed on. They may be spelled with _ for - as well."""

_T = TypeVar("_T")


def main(arguments: list[str] | None = None) -> int:
    """Run meshrun with these arguments (those of this process if None) and return its exit status."""
    options, command = split_command(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    parsed = parser.parse_args(options)
    kind = "module" if parsed.module else "program" if parsed.no_python else "script"
    problem = _problem_with(parsed, kind, command)
    if problem is not None:
        _complain(problem)
    if parsed.launcher == "mpi":
        from meshdist.launch.mpi import exec_mpirun, refused_options

        refused = refused_options(options)
        if refused:
            _complain(f"{refused} is of no use with --launcher mpi: mpirun starts the ranks and watches over them")
        return exec_mpirun(kind, command, parsed.nproc_per_node)
    settings = Settings(
        kind=kind,
        command=command,
        num_ranks=parsed.nproc_per_node,
        master_addr=parsed.master_addr,
        master_port=parsed.master_port,
        grace_s=parsed.grace,
        log_directory=parsed.log_dir,
    )
    return launch(settings)


def split_command(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split into the launcher's options, spelled with dashes, and the command, which begins at the first other word."""
    options: list[str] = []
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        options.append(name + equals + value)
        if not equals and name not in _FLAGS and words:
            options.append(words.pop(0))
    return options, words


def _parser() -> ArgumentParser:
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            _complain(message)

    parser = Parser(
        prog="meshrun",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--nproc-per-node",
        type=_as_argument(parse_num_ranks),
        default=1,
        metavar="N",
        help="how many ranks: a number, cpu (one per processor), gpu (one per GPU) or auto (gpu if there are any, "
        "else cpu); default 1",
    )
    add(
        "--launcher",
        choices=["own", "mpi"],
        default="own",
        help="mpi: become the mpirun found next to this Python or on the PATH, for scripts that use backend mpi",
    )
    add("-m", "--module", action="store_true", help="run a module, as python -m does")
    add("--no-python", action="store_true", help="run a program instead of a Python script")
    add("--standalone", action="store_true", help="run on this host alone, as it always does")
    add("--nnodes", type=_as_argument(_one_node), default=1, metavar="1", help="the number of hosts; must be 1")
    add("--master-addr", default=LOOPBACK, metavar="HOST", help=f"where the store listens; default {LOOPBACK}")
    add("--master-port", type=_as_argument(_port), default=0, metavar="PORT", help="default 0: any free port")
    add(
        "--grace",
        type=_as_argument(_grace),
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        help=f"how long a rank that is asked to end may take until it is killed; default {DEFAULT_GRACE_S:g}",
    )
    add(
        "--log-dir",
        metavar="DIR",
        help="write the ranks' output to rankN.stdout.log and rankN.stderr.log there",
    )
    return parser


def _as_argument(convert: Callable[[str], _T]) -> Callable[[str], _T]:
    """Make argparse show what a ValueError of `convert` says."""
    from argparse import ArgumentTypeError

    def converted(text: str) -> _T:
        try:
            return convert(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return converted


def _one_node(text: str) -> int:
    if text != "1":
        raise ValueError(f"meshrun starts ranks on one host: expected 1, got {text!r}")
    return 1


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= 65535):
        raise ValueError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def _grace(text: str) -> float:
    try:
        grace_s = float(text)
    except ValueError:
        grace_s = -1.0
    if not 0 <= grace_s < float("inf"):
        raise ValueError(f"expected a number of seconds, at least 0, got {text!r}")
    return grace_s


def _problem_with(parsed: Namespace, kind: str, command: list[str]) -> str | None:
    """Return what is wrong with the command, before any process is started for it."""
    if parsed.module and parsed.no_python:
        return "-m and --no-python exclude each other"
    if not command:
        return f"expected a {kind} to run"
    name = command[0]
    if kind == "script" and not os.path.exists(name):
        return f"no such file: {name!r}"
    if kind == "script" and os.path.isdir(name) and not os.path.isfile(os.path.join(name, "__main__.py")):
        return f"{name!r} is a directory without a __main__.py"
    if kind == "module" and not _is_importable(name.partition(".")[0]):
        return f"no module named {name!r}"
    if kind == "program":
        import shutil

        if shutil.which(name) is None:
            return f"no such program: {name!r}"
    return None


def _is_importable(top_level_name: str) -> bool:
    """Return True if the ranks, which look in the current directory first, will find this module or package."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    try:
        return bool(PathFinder.find_spec(top_level_name, [os.getcwd()]) or find_spec(top_level_name))
    except (ImportError, ValueError):
        return False


def _complain(message: str) -> NoReturn:
    print(f"meshrun: {message} (meshrun --help tells more)", file=sys.stderr)
    raise SystemExit(USAGE_STATUS)
