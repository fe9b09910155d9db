"""Which name is meant by one that is not there: it is misspelt, or spelt as MPI does."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

# Similar enough among the many names of a package, among the options of a command, and among the few arguments of one
# call. In short options, such as -n and --axes, one wrong letter weighs more.
CLOSE, _LIKE, NEAR = 0.8, 0.75, 0.6
_SHORT = 4
# MPI's names, and some others, that differ from meshdist's by more than case and underscores: functions, then methods
# of groups.
_OF_MPI = {
    "abort": "abort_process_group abort",
    "allgatherv": "all_gather",
    "alltoallv": "all_to_all_single",
    "alltoallw": "all_to_all",
    "bcast": "broadcast",
    **dict.fromkeys(("bsend", "ibsend", "irsend", "issend"), "isend"),
    "cartcreate": "init_device_mesh",
    "cartshift": "shift",
    "commcreate": "new_group",
    "commcreategroup": "new_group",
    "commdup": "new_group",
    "commfree": "destroy_process_group",
    "commrank": "get_rank",
    "commsize": "get_world_size",
    "createcart": "init_device_mesh",
    **dict.fromkeys(("destroy", "finalize"), "destroy_process_group"),
    "gatherv": "gather",
    "getcoords": "get_coordinate",
    "getrank": "rank get_rank",
    **dict.fromkeys(("getsize", "getworldsize", "worldsize"), "get_world_size size"),
    "improbe": "iprobe",  # codespell:ignore improbe
    "init": "init_process_group",
    "initmesh": "init_device_mesh",
    "mprobe": "probe",
    **dict.fromkeys(("receive", "recieve"), "recv"),  # codespell:ignore recieve
    "reducescatterblock": "reduce_scatter_tensor",
    "scatterv": "scatter",
    "split": "split_group split",
    **dict.fromkeys(("rsend", "ssend"), "send"),
}


def spelt(name: str, known: Collection[str], least: float = CLOSE) -> str | None:
    """Return the one of the `known` names that is meant by `name`: in MPI's spelling, or similar; None if none is.

    `least` is the similarity that counts, as `difflib` measures it.

    Example:
        >>> spelt("Allreduce", ["all_reduce", "reduce"]), spelt("Bcast", ["broadcast"]), spelt("zip", ["zeros"])
        ('all_reduce', 'broadcast', None)
    """
    plain = _by_plain(name, known)
    close = get_close_matches(_plain(name), list(plain), n=1, cutoff=least)
    return same_name(name, known) or (plain[close[0]] if close else None)


def same_name(name: str, known: Collection[str]) -> str | None:
    """Return the one of the `known` names that differs from `name` by case and underscores, or by MPI's spelling."""
    plain = _by_plain(name, known).get(_plain(name))
    return plain or next((other for other in _OF_MPI.get(_plain(name), "").split() if other in known), None)


def _by_plain(name: str, known: Collection[str]) -> dict[str, str]:
    # Of two that are alike, such as ReduceOp and reduce_op, the one that begins as `name` does.
    alike_last = sorted(known, key=lambda other: other[:1].isupper() == name[:1].isupper())
    return {_plain(other): other for other in alike_last}


def option_meant(word: str, known: Collection[str]) -> str | None:
    """Return the one of the few `known` options or commands that is meant by `word`; None if none is.

    Example:
        >>> option_meant("--jsn", ["--json", "--strict"]), option_meant("--nn", ["-n", "--axes"])
        ('--json', '-n')
        >>> option_meant("--timout", ["--rdzv-timeout", "--rdzv-id"])  # of something else
    """
    return spelt(word, known, NEAR if len(_plain(word)) <= _SHORT else _LIKE)


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
