"""Options: what both soaks are asked for."""

from __future__ import annotations

import argparse

from sidebyside.options import positive, positive_float
from sidebyside.report import add_output_options


def add_options(parser: argparse.ArgumentParser, unit: str, timeout_s: float) -> argparse._MutuallyExclusiveGroup:
    """Add the options for how long to run, on what ranks, and where to put the report.

    Args:
        parser: The parser.
        unit: What is counted: programs, or trials.
        timeout_s: What waits longer has hung, where nothing else is said.

    Returns:
        The options for the ways between the ranks, which exclude each other.
    """
    add = parser.add_argument
    add("--seconds", type=positive_float, default=60.0, help="(default: %(default)g)")
    add("--seed", type=int, help=f"of all {unit}s (default: one that is printed)")
    add("--first", type=int, default=0, metavar="N", help=f"number of the first {unit} (default: 0)")
    add("--ranks", type=positive, default=4, help="(default: %(default)s)")
    add("--timeout", type=positive_float, default=timeout_s, help="of the groups, s (default: %(default)g)")
    paths = parser.add_mutually_exclusive_group()
    paths.add_argument("--tcp", action="store_true", help="no memory is shared: every rank is a host of its own")
    paths.add_argument("--hosts", type=positive, default=1, help="on how many hosts the ranks believe to be")
    add("--no-core", action="store_true", help="without the compiled core")
    add_output_options(parser)
    return paths


def way(args: argparse.Namespace) -> str:
    """Return what the ranks share, for a title."""
    between = "over TCP" if args.tcp else f"on {args.hosts} hosts" if args.hosts > 1 else "over shared memory"
    return f"{between} without the compiled core" if args.no_core else between
