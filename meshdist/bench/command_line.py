"""Run `python -m meshdist.bench`: find or start the ranks, measure, and show the results."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from signal import SIGINT
from typing import Any

import meshdist as dist
from meshdist.bench.arguments import parse
from meshdist.bench.figure import draw, draw_choices
from meshdist.bench.measuring import Effort, Row, measure, tune
from meshdist.bench.operations import OPERATIONS, Setting, elements, is_in_place
from meshdist.bench.results import (
    head,
    legend,
    line,
    series,
    show_size,
    tables_of_ways,
    write_csv,
    write_json,
)
from meshdist.cluster.place import find_place, is_first_rank
from meshdist.errors import DistError
from meshdist.groups.world import current_world
from meshdist.launch.spawn_context import ProcessException
from meshdist.system.env_flags import TUNING
from meshdist.system.plurals import counted
from meshdist.system.processes import INTERRUPT_BASE
from meshdist.system.terminal import fold, terminal_width
from meshdist.system.versions import versions

_DEFAULT_RANKS = 2
_WRONG_OPTIONS = 2
# The shell's status for a program that writes to a closed pipe, such as that of `head`.
_BROKEN_PIPE = INTERRUPT_BASE + 13
_JOIN_S = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Measure as the arguments ask (`sys.argv` if None), and return the exit status."""
    launched = find_place() is not None or "RANK" in os.environ
    try:
        with redirect_stderr(StringIO()) as usage, redirect_stdout(StringIO()) as help_text:
            options = parse(arguments)
    except SystemExit as end:  # wrong options, or --help
        if end.code:
            return _complain(usage.getvalue(), launched)
        print(help_text.getvalue() if is_first_rank() else "", end="")
        return 0
    problem = _problem_with(options, launched)
    if problem is not None:
        return _complain(_with_usage(problem), launched)
    if options.tune:
        os.environ[TUNING] = "force"
    if launched:
        return _be_a_rank(options)
    num_ranks = options.ranks or _DEFAULT_RANKS
    try:
        if options.backend == "threads":
            return max(dist.run(_measure_all, num_ranks, (options,)))
        dist.spawn(_exit_as_a_rank, (options,), nprocs=num_ranks)
    except ProcessException as error:
        status = getattr(error, "exit_code", None)
        if status in (1, _WRONG_OPTIONS, _BROKEN_PIPE):
            return int(status)  # a rank has printed the error, or stdout is closed
        print(error, file=sys.stderr)
        return 1
    except DistError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = [str(path) for path in (options.csv, options.json) if path is not None and path.exists()]
        print(f"interrupted{'; results so far are in ' if kept else ''}{', '.join(kept)}", file=sys.stderr)
        return INTERRUPT_BASE + SIGINT
    return 0


def _problem_with(options: Namespace, launched: bool) -> str | None:
    if launched and options.ranks is not None:
        return "-n is for ranks that are started here, and a launcher has started these; leave it out"
    if launched and options.backend == "threads":
        return "--backend threads starts its own ranks; start it without a launcher"
    num_ranks = options.ranks or _DEFAULT_RANKS
    if not launched and options.backend == "mpi":
        return f"--backend mpi needs mpirun: mpirun -n {num_ranks} python -m meshdist.bench --backend mpi"
    if not launched and options.root >= num_ranks:
        return f"--root must be one of the ranks 0 to {num_ranks - 1}, got {options.root}"
    return None


def _with_usage(problem: str) -> str:
    return f"python -m meshdist.bench: {problem}; see --help\n"


def _complain(words: str, launched: bool) -> int:
    """Print the error once, and return the exit status."""
    if not launched:
        print(words, end="", file=sys.stderr)
        return 2
    prints = True
    # A launcher ends all ranks as soon as one ends, so the others wait until rank 0 has printed. If they cannot join,
    # each prints.
    with suppress(DistError, ValueError):
        dist.init_process_group("gloo", timeout=_JOIN_S)
        prints = dist.get_rank() == 0
    if prints:
        print(words, end="", file=sys.stderr, flush=True)
    if dist.is_initialized():
        with suppress(DistError):
            dist.barrier()
        dist.destroy_process_group()
    return 2


def _exit_as_a_rank(rank: int, options: Namespace) -> None:
    status = _be_a_rank(options)
    if status:
        raise SystemExit(status)


def _be_a_rank(options: Namespace) -> int:
    dist.init_process_group(options.backend)
    try:
        return _measure_all(options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's output at exit
        return _BROKEN_PIPE
    finally:
        dist.destroy_process_group()


def _measure_all(options: Namespace) -> int:
    """Measure on this rank; return the exit status, equal on all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    setting = Setting(rank, num_ranks, options.dtype, options.op, options.root, options.in_place, options.shared)
    prints = rank == 0
    # Rank 0 decides for all: other ranks may see another amount of memory.
    problem = [_misfit(options, setting) if prints else None]
    dist.broadcast_object_list(problem, 0)
    if problem[0] is not None:
        if prints:
            print(_with_usage(problem[0]), end="", file=sys.stderr, flush=True)
        dist.barrier()  # a launcher ends the ranks as soon as one has ended
        return 2
    if options.tune:
        return _tune_all(options, setting)
    effort = Effort(options.iterations, options.seconds, options.warmup, not options.no_check)
    rows: list[Row] = []
    width = terminal_width()
    if prints:
        print(fold(_about(options, num_ranks), width))
        _write_tables(options, rows, setting)  # overwrite the tables of an earlier run
    for name in options.collectives:
        if prints:
            print("\n" + head(_title(name, setting), width), flush=True)
        for num_bytes in _sizes(name, options, setting):
            rows.append(measure(name, OPERATIONS[name], num_bytes, setting, effort))
            if prints:
                print(line(rows[-1], width), flush=True)
                _write_tables(options, rows, setting)  # after each row, as the run may be interrupted
    wrong = sum(row.wrong or 0 for row in rows)
    if prints:
        print(f"\n{legend(width)}\n" + ("" if options.no_check else f"{wrong} wrong elements.\n"), end="")
        _end(options, rows, setting)
    return 1 if wrong else 0


def _tune_all(options: Namespace, setting: Setting) -> int:
    prints, found = setting.rank == 0, []
    width = terminal_width()
    if prints:
        print(fold(_about(options, setting.num_ranks), width))
    for name in options.collectives:
        own = [choice for num_bytes in _sizes(name, options, setting) for choice in tune(name, num_bytes, setting)]
        found += own
        if prints:
            for table in tables_of_ways(own):
                print("\n" + table, flush=True)
    if prints and not found:
        print("\nNothing was measured: each of these calls has only one algorithm here.")
    elif prints:
        said = "Times are means of a few calls on the slowest rank, the shortest of up to 40."
        said += " The choices are remembered for later jobs. docs/performance.md#algorithms explains the algorithms."
        print(f"\n{fold(said, width, hanging=0)}")
        if options.plot is not None:
            draw_choices(options.plot, found, f"{counted(setting.num_ranks, 'rank')}, {setting.dtype}")
            print(f"wrote {options.plot}")
    return 0


def _sizes(name: str, options: Namespace, setting: Setting) -> list[int]:
    operation = OPERATIONS[name]
    if operation.gives is None:
        return [0]
    # Keep one of the sizes that round to the same number of elements.
    sizes = series(options.begin, options.end, options.factor)
    return list({elements(operation, size, setting): size for size in reversed(sizes)}.values())[::-1]


def _misfit(options: Namespace, setting: Setting) -> str | None:
    if options.root >= setting.num_ranks:
        return f"--root must be one of the ranks 0 to {setting.num_ranks - 1}, got {options.root}"
    between_two = next((name for name in options.collectives if OPERATIONS[name].trips == 2), None)
    if between_two is not None and setting.num_ranks < 2:
        return f"{between_two} needs two ranks at least; start more, or leave it out"
    needed = max(_needed_bytes(name, options, setting) for name in options.collectives)
    available = _available_bytes()
    if available is not None and needed > available:
        return (
            f"-e {show_size(options.end)} needs {needed / 1e9:.1f} GB on this host, which has {available / 1e9:.1f} GB"
            " left; choose a smaller -e, or fewer ranks"
        )
    return None


def _needed_bytes(name: str, options: Namespace, setting: Setting) -> int:
    gives, takes, _ = elements(OPERATIONS[name], options.end, setting)
    hosts = current_world().default_group.hosts()
    both = OPERATIONS[name].in_place == "always"
    count = max(gives, takes) if both else gives + takes
    return int(count * setting.dtype.itemsize * hosts.count(hosts[setting.rank]))


def _available_bytes() -> int | None:
    try:
        with open("/proc/meminfo") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def _about(options: Namespace, num_ranks: int) -> str:
    hosts = len(set(current_world().default_group.hosts()))
    named = versions()
    cores = named.pop("cores")
    where = "" if hosts == 1 else f" on {hosts} hosts"
    return (
        f"meshdist {named.pop('meshdist')}, {_several(num_ranks, 'rank')}{where}, backend {options.backend}\n"
        f"{named.pop('CPU')}, {cores} core{'' if cores == '1' else 's'}, {named.pop('kernel')}, "
        + ", ".join(f"{name} {value}" for name, value in named.items())
    )


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _title(name: str, setting: Setting) -> str:
    operation = OPERATIONS[name]
    words = [] if operation.gives is None else [str(setting.dtype)]
    words += [setting.op.value] * operation.reduces
    words += [f"root {setting.root}"] * operation.rooted
    words += ["in place"] * is_in_place(operation, setting)
    words += ["arrays of meshdist.empty"] * (setting.shared and operation.gives is not None)
    words += ["half the round-trip time"] * (operation.trips == 2)
    return f"{name}{': ' if words else ''}{', '.join(words)}"


def _write_tables(options: Namespace, rows: list[Row], setting: Setting) -> None:
    job: dict[str, Any] = {
        "ranks": setting.num_ranks,
        "backend": options.backend,
        "dtype": str(setting.dtype),
        "op": setting.op.value,
        "root": setting.root,
        "shared": setting.shared,
    }
    for path, write in ((options.csv, write_csv), (options.json, write_json)):
        if path is not None:
            write(path, rows, job)


def _end(options: Namespace, rows: list[Row], setting: Setting) -> None:
    """Draw the plot, and list the written files."""
    sizeless = sorted({row.collective for row in rows if not row.num_bytes})
    drawn = options.plot if any(row.num_bytes for row in rows) else None
    if options.plot is not None and sizeless:
        print(f"not drawn, since it has no sizes: {', '.join(sizeless)}")
    if drawn is not None:
        draw(drawn, rows, f"{counted(setting.num_ranks, 'rank')}, {options.backend}, {setting.dtype}")
    for path in (options.csv, options.json, drawn):
        if path is not None:
            print(f"wrote {path}")
