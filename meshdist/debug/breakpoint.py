"""breakpoint: stop in the debugger on one rank, while the others wait."""

from __future__ import annotations

import os
import stat
import sys
from operator import index
from typing import Any, TextIO

from meshdist.collectives.barrier import barrier
from meshdist.groups.world import current_world
from meshdist.runtime.call_site import call_site
from meshdist.runtime.log import RankLog
from meshdist.system.deadline import Timeout

_TERMINAL = "/dev/tty"


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: Timeout | None = 3600.0) -> None:
    """Stop in the debugger on one rank; the others wait for it in a barrier of the world. All ranks call it.

    The debugger begins in the caller's frame. It reads from stdin, which launchers leave to the ranks, or from the
    terminal where stdin is `/dev/null`. A hook set by PYTHONBREAKPOINT or `sys.breakpointhook` is called instead, as by
    Python's own `breakpoint`.

    Args:
        rank: The global rank to debug.
        skip: Do not stop the first `skip` times that this line is reached.
        timeout_s: How long the others wait: seconds or a timedelta. The world's timeout if None.

    Raises:
        ValueError: There is no such rank, or no world.
        RuntimeError: On the rank to debug, without a stdin or terminal for commands. The other ranks go on.
        DistTimeoutError: On the others, when `timeout_s` is over.
    """
    world = current_world()
    if not 0 <= index(rank) < world.size:
        allowed = f"rank must be 0 to {world.size - 1}, got" if world.size > 1 else "there is only rank 0; got"
        raise ValueError(f"breakpoint: {allowed} {rank}")
    site = call_site()
    world.passes[site] += 1
    if world.passes[site] <= index(skip):
        RankLog(world.rank).info("breakpoint at %s skipped, %d of %d times", site, world.passes[site], skip)
        return
    missing = None
    if world.rank == rank:
        if "PYTHONBREAKPOINT" in os.environ or sys.breakpointhook is not sys.__breakpointhook__:
            sys.breakpointhook()  # the user's debugger
            barrier(world.default_group, timeout=timeout_s)
            return
        try:
            debugger = _debugger()
        except OSError as error:
            missing = error
        else:
            debugger.message(f"rank {rank} of {world.size} at {site}; the other ranks wait until you continue")
            debugger.cmdqueue.append("up")  # to the caller's frame: the next lines here belong to this one
            debugger.set_trace()
    barrier(world.default_group, timeout=timeout_s)
    if missing is not None:
        raise RuntimeError(
            f"breakpoint (rank {rank} of {world.size}): there is nothing to read commands from: stdin is closed or"
            f" {os.devnull}, and {_TERMINAL} cannot be opened ({missing}); start the job from a terminal"
        )


def _debugger() -> Any:
    """Return a debugger that leaves Ctrl-C as it is."""
    import pdb

    if _can_be_read(sys.stdin):
        return pdb.Pdb(nosigint=True)
    # Processes that multiprocessing made have no stdin of their own.
    return pdb.Pdb(stdin=open(_TERMINAL), stdout=open(_TERMINAL, "w"), nosigint=True)


def _can_be_read(stream: TextIO | None) -> bool:
    if stream is None or stream.closed:
        return False
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return True  # not a file, as in a notebook
    if sys.platform == "win32":
        return True
    return not (stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev)
