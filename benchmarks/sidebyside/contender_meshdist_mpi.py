"""A rank of meshdist with the `mpi` backend."""

from __future__ import annotations

import meshdist as dist
from sidebyside.contender import Contender
from sidebyside.contender_meshdist import MeshdistRank


def join() -> Contender:
    """Meet the other ranks of the MPI job."""
    dist.init_process_group("mpi")
    return MeshdistRank()
