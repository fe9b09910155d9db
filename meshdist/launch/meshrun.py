"""The command line of meshrun."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from meshdist._version import __version__
from meshdist.launch.agent import Settings, launch
from meshdist.launch.options import (
    DEFAULT_LAST_CALL_S,
    DEFAULT_MEETING_PORT,
    Count,
    address_of_store,
    as_argument,
    host_and_port,
    number_of_nodes,
    number_of_ranks,
    port_number,
    rendezvous_backend,
    rendezvous_of,
    seconds,
    torchrun_variables,
    truth,
    whole_number,
)
from meshdist.launch.outputs import STDERR, STDOUT, Routing, Streams, parse_streams
from meshdist.launch.supervisor import DEFAULT_GRACE_S, DEFAULT_INTERVAL_S
from meshdist.launch.worker_env import LOOPBACK
from meshdist.system.command_lines import until_closed
from meshdist.system.platform import why_no_processes

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterable

USAGE_STATUS = 2
STATUS = "status"
"""The first word that shows running jobs, unless a script of this name is in the current directory."""

_FLAGS = ("-h", "--help", "--version", "-m", "--module", "--no-python", "--standalone", "--use-env", "--dashboard")
"""Options that take no value, or one after `=`."""

_TORCHRUN_OPTIONS = {
    "--rdzv-conf": "--rdzv-timeout and --rdzv-last-call say how long the launchers wait for each other",
    "--start-method": "every rank is a new process",
}
"""Options of torchrun that meshrun does not have, and why."""

_OF_THE_SCRIPT = {
    "--backend": 'the script chooses the backend, as in init_process_group("gloo")',
    "--axes": "the script creates the mesh, with init_device_mesh",
}
"""Options of `%%mesh` and of other commands, and where they are with meshrun."""

_NAMES_OF_NUM_RANKS = ("--n", "--np", "--nproc", "--nprocs", "--num-ranks", "--ranks", "--world-size")
"""Names by which other launchers, and `spawn`, know --nproc-per-node."""

_USAGE = """meshrun [options] script.py [argument ...]
       meshrun [options] -m module [argument ...]
       meshrun [options] --no-python program [argument ...]
       meshrun status [JOB] [--watch]"""

_DESCRIPTION = """\
Start the ranks of a job, monitor them, and exit with the job's status. For
several hosts, start meshrun on each.

Each rank is a process that finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT and the job's secret in its environment, which is all that
meshdist.init_process_group() needs. If a rank fails, its traceback is shown
once, the others are terminated, on all hosts, and meshrun exits with its status
(128 + n if signal n killed it). Ctrl-C ends all ranks. Several hosts need one
secret in MESHDIST_SECRET, or in a file that MESHDIST_SECRET_FILE names."""

_EPILOG = """\
examples:
  meshrun --nproc-per-node 4 train.py --steps 100
  meshrun -n 4 train.py --steps 100         (the same)
  meshrun --nproc-per-node gpu -m package.train
  meshrun --launcher mpi --nproc-per-node 4 train.py --backend mpi
  meshrun --nproc-per-node 2 --log-dir logs --no-python ./solver input.dat
  meshrun status                            (what your jobs' ranks are doing)

on each of two hosts, or of two to four; with Slurm:
  meshrun --nnodes 2 --rdzv-endpoint node1:29400 --nproc-per-node 8 train.py
  meshrun --nnodes 2:4 --rdzv-endpoint node1:29400 --max-restarts 3 train.py
  srun --nodes 2 --ntasks-per-node 1 meshrun --nnodes 2 -n 8 train.py

Options come before the script; what follows it is passed on. They may be
spelled with _ for - as well."""


def main(arguments: list[str] | None = None, *, passes_local_rank: bool = False) -> int:
    """Run meshrun and return its exit status.

    Args:
        arguments: Its arguments; those of `sys.argv` if None.
        passes_local_rank: Pass `--local-rank=N` to the script before its arguments, unless `--use-env` is given.
    """
    why_not = why_no_processes()
    if why_not is not None:
        _complain(why_not)
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [STATUS] and not os.path.isfile(STATUS):
        from meshdist.launch.status_command import main as show_status

        return until_closed(lambda: show_status(arguments[1:]))
    options, command = split_command(arguments)
    for option in options:
        name = option.partition("=")[0]
        if name in _NAMES_OF_NUM_RANKS:
            _complain(f"{name} is not an option of meshrun: write -n, or --nproc-per-node")
        if name in _TORCHRUN_OPTIONS:
            _complain(
                f"{name} is an option of torchrun that meshrun does not have: {_TORCHRUN_OPTIONS[name]}; leave it out"
            )
    parser = _parser()
    parser.set_defaults(**torchrun_variables(os.environ))
    parsed, unknown = parser.parse_known_args(options)
    if unknown:
        _complain(_no_option(unknown[0].partition("=")[0], parser._option_string_actions))
    kind = "module" if parsed.module else "program" if parsed.no_python else "script"
    problem = _problem_with(parsed, kind, command)
    if problem is not None:
        _complain(problem)
    if misplaced := _misplaced_number(options, command):
        print(
            f"meshrun: starting 1 rank: {misplaced} comes after {command[0]}, so the {kind} gets it; for more ranks, "
            f"put it before {command[0]}",
            file=sys.stderr,
        )
    if parsed.launcher == "mpi":
        from meshdist.launch.mpirun import exec_mpirun, refusal

        refused = refusal(options, parsed.nnodes.most)
        if refused is None and parsed.nproc_per_node.least != parsed.nproc_per_node.most:
            refused = f"--nproc-per-node {parsed.nproc_per_node}: MPI cannot restart with fewer ranks; pass one number"
        if refused is not None:
            _complain(refused)
        return exec_mpirun(kind, command, parsed.nproc_per_node.most)
    try:
        settings = _settings(parsed, kind, command, passes_local_rank and not parsed.use_env)
    except ValueError as error:
        _complain(str(error))
    gc.freeze()  # what was imported stays; Python need not look for garbage in it, at the end above all
    return launch(settings)


def _no_option(name: str, known: Iterable[str]) -> str:
    from meshdist.system.option_parser import did_you_mean  # with modules that an error alone needs

    meant = did_you_mean(name, (*known, *_OF_THE_SCRIPT))
    for option, where in _OF_THE_SCRIPT.items():
        if option == name or option in meant:
            return f"{name} is not an option of meshrun: {where}"
    return f"{name} is not an option of meshrun{meant}"


def _settings(parsed: Namespace, kind: str, command: list[str], passes_local_rank: bool) -> Settings:
    everything = Streams(STDOUT | STDERR)
    # A terminal of no size, as in some containers, has no place for a table.
    dashboard = parsed.dashboard and sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns > 0
    if parsed.dashboard:
        from meshdist.launch.dashboard import why_no_dashboard

        why_not = why_no_dashboard()
        if why_not is not None:
            raise ValueError(why_not)
        if not dashboard:  # plain lines instead
            parsed.tee = everything
    # A directory alone sends all output into files, unless --tee passes some on.
    redirects = parsed.redirects or (
        everything if parsed.log_dir is not None and parsed.tee == Streams() else Streams()
    )
    if parsed.redirects is not None and parsed.redirects != Streams() and parsed.log_dir is None:
        raise ValueError("--redirects needs --log-dir DIR, the directory of the files")
    rendezvous = rendezvous_of(parsed)
    address, port = address_of_store(parsed)
    return Settings(
        kind=kind,
        command=command,
        num_ranks=parsed.nproc_per_node.most,
        least_ranks=parsed.nproc_per_node.least,
        master_addr=address,
        master_port=port,
        grace_s=parsed.grace,
        routing=Routing(parsed.log_dir, redirects, parsed.tee),
        max_restarts=parsed.max_restarts,
        interval_s=parsed.monitor_interval,
        rendezvous=rendezvous,
        run_id=parsed.rdzv_id,
        error_dir=parsed.error_dir or parsed.log_dir,
        dashboard=dashboard,
        passes_local_rank=passes_local_rank,
    )


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
        if name[:2] == "-n" and name[2:].isdecimal():  # -n4
            name, equals, value = "-n", "=", name[2:]
        options.append(name + equals + value)
        if not equals and name not in _FLAGS and words:
            options.append(words.pop(0))
    return options, words


def _misplaced_number(options: list[str], command: list[str]) -> str | None:
    """Return the number of ranks among the arguments of the command, as it is written, if it is nowhere else."""
    if "PET_NPROC_PER_NODE" in os.environ or any(_sets_number(word) for word in options):
        return None
    arguments = command[1:]
    for number, word in enumerate(arguments):
        if word == "--":
            return None
        if _sets_number(word):
            value = arguments[number + 1 : number + 2]
            has_value = "=" in word or word[2:].isdecimal()
            if has_value or (value and _is_number_of_ranks(value[0])):
                return word if has_value else f"{word} {value[0]}"
    return None


def _sets_number(word: str) -> bool:
    name = word.partition("=")[0].replace("_", "-")
    return name in ("-n", "-np", "--nproc-per-node") or (name[:2] == "-n" and name[2:].isdecimal())


def _is_number_of_ranks(text: str) -> bool:
    return text in ("cpu", "gpu", "auto") or text.replace(":", "", 1).isdecimal()


def _parser() -> ArgumentParser:
    import argparse
    from functools import partial

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            _complain(message)

        def format_help(self) -> str:
            self.formatter_class = argparse.RawDescriptionHelpFormatter
            return super().format_help()

    parser = Parser(
        prog="meshrun",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
        # Each option is checked with a formatter. Only the help needs the width of the terminal, which takes 2 ms.
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=80),
    )
    add = parser.add_argument
    add("--version", action="version", version=f"meshrun, of meshdist {__version__}")
    add(
        "-n",
        "--nproc-per-node",
        type=as_argument(number_of_ranks),
        default=Count(1, 1),
        metavar="N",
        help="how many ranks: a number, cpu (one per processor), gpu (one per GPU) or auto (gpu if there are any, "
        "else cpu); default 1. With 2:4: start 4; a restart leaves out ranks killed by a signal, down to 2",
    )
    add(
        "--launcher",
        choices=["own", "mpi"],
        default="own",
        help="mpi: start the ranks with mpirun (found next to this Python or on PATH), for scripts that use backend "
        "mpi",
    )
    add("-m", "--module", action="store_true", help="run a module, as python -m does")
    add("--no-python", action="store_true", help="run a program instead of a Python script")
    add(
        "--use-env",
        type=as_argument(truth),
        nargs="?",
        const=True,
        default=False,
        metavar="True",
        help="do not pass --local-rank=N to the script, which then reads LOCAL_RANK from the environment. Only "
        "python -m meshdist.launch passes it; meshrun and --launcher mpi never do",
    )
    _add_hosts(parser)
    _add_watching(parser)
    _add_output(parser)
    return parser


def _add_hosts(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("hosts and how they meet")
    add = group.add_argument
    add("--standalone", action="store_true", help="run on this host only, which is the default without --nnodes")
    add(
        "--nnodes",
        type=as_argument(number_of_nodes),
        default=Count(1, 1),
        metavar="N",
        help="the number of hosts, default 1; or a minimum and a maximum, as in 2:4: after a restart the job continues "
        "without lost hosts, and with hosts that have joined",
    )
    add(
        "--node-rank",
        type=as_argument(whole_number),
        metavar="N",
        help="the number of this host, from 0; assigned automatically if omitted",
    )
    add(
        "--master-addr",
        metavar="HOST",
        help=f"on one host, the address on which the ranks' store listens, default {LOOPBACK}; on several, as "
        "--rdzv-endpoint",
    )
    add(
        "--master-port",
        type=as_argument(port_number),
        default=0,
        metavar="PORT",
        help="the port of the ranks' store, default 0: any free port; with --nnodes and --master-addr, the port where "
        "the launchers meet",
    )
    _add_rendezvous(add)


def _add_rendezvous(add: Callable[..., object]) -> None:
    add(
        "--rdzv-endpoint",
        type=as_argument(host_and_port),
        metavar="HOST:PORT",
        help="where the launchers meet: the name of one of the hosts, which runs their store, and a free port; "
        f"default port {DEFAULT_MEETING_PORT}. Not needed under srun (the job's number gives the port), mpirun and "
        "Kubernetes",
    )
    add("--rdzv-id", metavar="NAME", help="names the job; launchers with another name are refused")
    add(
        "--rdzv-backend",
        type=as_argument(rendezvous_backend),
        metavar="NAME",
        help="c10d or static; accepted for compatibility with torchrun, and ignored",
    )
    add(
        "--rdzv-timeout",
        type=as_argument(seconds),
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for the other launchers; default 600",
    )
    add(
        "--rdzv-last-call",
        type=as_argument(seconds),
        default=DEFAULT_LAST_CALL_S,
        metavar="SECONDS",
        help="with --nnodes 2:4, how long to wait for more hosts once the minimum has joined, and before a restart "
        f"for new hosts; default {DEFAULT_LAST_CALL_S:g}",
    )


def _add_watching(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("failures")
    add = group.add_argument
    add(
        "--max-restarts",
        type=as_argument(whole_number),
        default=0,
        metavar="N",
        help="how often to start all ranks again, on all hosts, after one has failed; default 0. RESTART_COUNT tells "
        "the ranks how often they were started again",
    )
    add(
        "--monitor-interval",
        type=as_argument(seconds),
        default=DEFAULT_INTERVAL_S,
        metavar="SECONDS",
        help="polling interval in seconds for the ranks' error files and similar checks; the exit of a rank is noticed "
        "immediately; "
        f"default {DEFAULT_INTERVAL_S:g}",
    )
    add(
        "--grace",
        type=as_argument(seconds),
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        help=f"how long a rank may take to exit after SIGTERM before it is killed; default {DEFAULT_GRACE_S:g}",
    )


def _add_output(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--log-dir",
        metavar="DIR",
        help="write the ranks' output to rankN.stdout.log and rankN.stderr.log in DIR; after a restart the names are "
        "rankN.restart1.stdout.log and so on",
    )
    add(
        "--error-dir",
        metavar="DIR",
        help="write rankN.error.json in DIR for each rank that failed or was terminated: how it ended, the traceback, "
        "and what failed first; default: the directory of --log-dir, if given",
    )
    add(
        "--redirects",
        type=as_argument(parse_streams),
        metavar="WHAT",
        help="which streams go only to these files: 0 (none), 1 (stdout), 2 (stderr), 3 (both, the default with "
        "--log-dir), or for some ranks of this host: 0:3,1:2",
    )
    add(
        "--tee",
        type=as_argument(parse_streams),
        default=Streams(),
        metavar="WHAT",
        help="which streams go to these files and are also shown, with [rankN] before each line; values as for "
        "--redirects",
    )
    add(
        "--dashboard",
        action="store_true",
        help="show a live table of the ranks, their states, last calls and last lines of output; needs rich. Without a "
        "terminal, the same as --tee 3",
    )


def _problem_with(parsed: Namespace, kind: str, command: list[str]) -> str | None:
    """Return an error in the command that can be found before any process is started."""
    if parsed.module and parsed.no_python:
        return "-m and --no-python exclude each other"
    if not command:
        return f"expected a {kind} to run"
    name = command[0]
    if kind == "script" and not os.path.exists(name):
        from meshdist.system.option_parser import did_you_mean

        if os.path.basename(name).startswith("python") and len(command) > 1:
            return f"no such file: {name!r}; leave out {name}, meshrun runs scripts with {sys.executable}"
        if name.isdecimal() and len(command) > 1:
            return f"no such file: {name!r}; for that many ranks, write meshrun -n {name} {command[1]}"
        return f"no such file: {name!r}{did_you_mean(name, [STATUS])}"
    if kind == "script" and os.path.isdir(name) and not os.path.isfile(os.path.join(name, "__main__.py")):
        return f"{name!r} is a directory without a __main__.py"
    if kind == "module" and not _is_importable(name):
        hint = f"; to run a file, leave out -m: meshrun {name}" if os.path.isfile(name) else ""
        return f"no module named {name!r}{hint}"
    if kind == "program":
        import shutil

        if shutil.which(name) is None:
            return f"no such program: {name!r}"
    return None


def _is_importable(name: str) -> bool:
    """Return False if the ranks, which search the current directory first, will not find this module or package.

    Nothing is imported: of the modules in a package, the ranks alone find out.
    """
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    top_level, *inner = name.split(".")
    try:
        spec = PathFinder.find_spec(top_level, [os.getcwd()]) or find_spec(top_level)
    except (ImportError, ValueError):
        return False
    return spec is not None and (not inner or spec.submodule_search_locations is not None)


def _complain(message: str) -> NoReturn:
    print(f"meshrun: {message}{'' if message.endswith('?') else '; see meshrun --help'}", file=sys.stderr)
    raise SystemExit(USAGE_STATUS)


if __name__ == "__main__":
    raise SystemExit(until_closed(main))
