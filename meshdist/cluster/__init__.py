"""Started by a cluster's own launcher: which rank this process is, and where the others are."""

from meshdist.cluster.launchers import LAUNCHERS, Launcher, find_launcher
from meshdist.cluster.nodelist import expand_nodelist
from meshdist.cluster.place import Place, find_place, is_first_rank, local_rank_here

__all__ = [
    "LAUNCHERS",
    "Launcher",
    "Place",
    "expand_nodelist",
    "find_launcher",
    "find_place",
    "is_first_rank",
    "local_rank_here",
]


def __dir__() -> list[str]:
    return sorted(__all__)
