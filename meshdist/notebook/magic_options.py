"""The options of `%%mesh`."""

from __future__ import annotations

import argparse
import math
import shlex
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from meshdist.system.option_parser import OptionParser
from meshdist.system.platform import check_num_processes
from meshdist.system.plurals import counted

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class CellOptions:
    """How to run a cell."""

    num_ranks: int  # the number of workers
    axes: Axes = ()  # names and sizes of the mesh that the cell finds as `mesh`; empty for none
    backend: str = "gloo"  # of the workers' world
    timeout_s: float = 300.0  # how long a call of the workers may wait
    send: tuple[str, ...] = ()  # variables copied from the notebook to the workers before the cell
    get: tuple[str, ...] = ()  # variables copied from the workers to the notebook after it, as lists by rank
    restart: bool = False  # start new workers


class _Parser(OptionParser):
    def error(self, message: str) -> NoReturn:
        stop = " " if message.endswith("?") else "; "
        raise ValueError(f"%%mesh: {message}{stop}usage: %%mesh -n 4 --axes dp=2,tp=2 --send x --get y")


def parse_options(line: str, before: CellOptions | None = None) -> CellOptions:
    """Return the options of a cell from `line`, the text after `%%mesh`.

    Those of the cell before are the defaults, except for `send`, `get` and `restart`.

    Raises:
        ValueError: An option is wrong; the message shows the usage.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:  # an unclosed quotation
        raise ValueError(f"%%mesh: {error}") from None
    given = _parser().parse_args(words)
    axes = None if given.axes is None else _axes(given.axes)
    num_ranks, axes = _shape(given.n, axes, before)
    if given.timeout is not None and not given.timeout > 0:
        raise ValueError(f"%%mesh: --timeout must be a positive number of seconds, got {given.timeout:g}")
    options = replace(
        before or CellOptions(num_ranks),
        num_ranks=num_ranks,
        axes=axes,
        send=_names("--send", given.send),
        get=_names("--get", given.get),
        restart=given.restart,
    )
    if given.backend is not None:
        options = replace(options, backend=given.backend)
    return options if given.timeout is None else replace(options, timeout_s=given.timeout)


def asks_for_help(line: str) -> bool:
    return not {"-h", "--help"}.isdisjoint(line.split())


def help_text() -> str:
    """Return what the options of `%%mesh` do."""
    return f"{_parser().format_help()}\n%mesh lists the workers, %mesh stop ends them."


def _parser() -> _Parser:
    parser = _Parser(
        prog="%%mesh",
        add_help=False,
        allow_abbrev=False,
        description="Run the cell on all workers. Options hold for the cells after it, except for the last three.",
        formatter_class=partial(argparse.HelpFormatter, width=100),  # not as wide as the terminal of the kernel
    )
    parser.add_argument("-n", "--nproc", dest="n", metavar="N", type=int, help="the number of workers")
    parser.add_argument("--axes", metavar="dp=2,tp=2", help="the axes of the mesh that cells find as `mesh`")
    parser.add_argument("--backend", help="the backend of the workers' world, such as gloo")
    parser.add_argument("--timeout", metavar="S", type=float, help="how many seconds a call may wait")
    parser.add_argument("--send", metavar="x,y", default="", help="variables to copy to the workers before the cell")
    parser.add_argument("--get", metavar="x,y", default="", help="variables to copy back after it, as lists by rank")
    parser.add_argument("--restart", action="store_true", help="start new workers")
    return parser


def _axes(text: str) -> Axes:
    axes = []
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"%%mesh: --axes takes names and sizes, as in --axes dp=2,tp=2, got {text!r}")
        axes.append((name, int(size)))
    if len({name for name, _ in axes}) < len(axes):
        raise ValueError(f"%%mesh: --axes names an axis twice: {text!r}")
    return tuple(axes)


def _shape(num_ranks: int | None, axes: Axes | None, before: CellOptions | None) -> tuple[int, Axes]:
    if num_ranks is not None and num_ranks < 1:
        raise ValueError(f"%%mesh: -n must be at least 1, got {num_ranks}")
    product = math.prod(size for _, size in axes or ())
    check_num_processes(max(num_ranks or 1, product), "%%mesh: ")
    if axes is not None:
        if num_ranks not in (None, product):
            sizes = ",".join(f"{name}={size}" for name, size in axes)
            raise ValueError(f"%%mesh: --axes {sizes} has {counted(product, 'rank')}, but -n is {num_ranks}")
        return product, axes
    if num_ranks is None and before is None:
        raise ValueError("%%mesh: pass the number of workers, as in %%mesh -n 4, or --axes dp=2,tp=2")
    if before is None or num_ranks not in (None, before.num_ranks):
        assert num_ranks is not None
        return num_ranks, ()
    return before.num_ranks, before.axes


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"%%mesh: {option} takes names of variables, as in {option} x,y, got {text!r}")
    return names
