"""Find the store of a running rank, and the credentials for it, in the environment of the rank's process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from meshdist.security.credentials import (
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    TLS_CA_VARIABLE,
    TLS_CERT_VARIABLE,
    TLS_KEY_VARIABLE,
)
from meshdist.store.address import endpoint
from meshdist.system.env_flags import INSECURE

_NAMED = 8
_PATHS = (SECRET_FILE_VARIABLE, TLS_CERT_VARIABLE, TLS_KEY_VARIABLE, TLS_CA_VARIABLE)
_TAKEN = (SECRET_VARIABLE, INSECURE, *_PATHS)


def store_of(pid: int) -> tuple[str, dict[str, str]]:
    """Return the address of the store of a rank's job, and the variables that give access to it.

    Only its own user, and root, may read the environment of a process.

    Args:
        pid: The rank's process, on this host.

    Raises:
        ValueError: There is no such process, its environment cannot be read, or it names no store.
    """
    place = Path("/proc", str(pid))
    try:
        found = _parsed((place / "environ").read_bytes())
        directory = os.readlink(place / "cwd")
    except FileNotFoundError:
        raise ValueError(f"there is no process {pid} on this host") from None
    except OSError as error:
        raise ValueError(f"the environment of process {pid} cannot be read: {error.strerror}") from error
    host, port = found.get("MASTER_ADDR", ""), found.get("MASTER_PORT", "")
    if not host or not port:
        raise ValueError(
            f"process {pid} is not a rank: it has no MASTER_ADDR and MASTER_PORT in its environment;"
            f" {_ranks_below(pid) or 'give the pid of a rank that meshrun has started'},"
            f" or --store HOST:PORT and {SECRET_VARIABLE}"
        )
    taken = {name: found.get(name, "") for name in _TAKEN}
    # Relative paths refer to the directory of that process.
    taken.update({name: os.path.join(directory, taken[name]) for name in _PATHS if taken[name]})
    return endpoint(host, int(port)) if port.isdecimal() else f"{host}:{port}", taken


def _ranks_below(pid: int) -> str:
    """Return a hint at the ranks that a process, such as meshrun, has started; empty without any."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            variables = _parsed((place / "environ").read_bytes()) if parent == pid else {}
        except OSError:
            continue  # it has ended, or belongs to another user
        if "MASTER_ADDR" in variables and variables.get("RANK", "").isdecimal():
            found[int(variables["RANK"])] = int(place.name)
    ranks = [f"{process} (rank {rank})" for rank, process in sorted(found.items())]
    more = ", ..." if len(ranks) > _NAMED else ""
    return f"it has started ranks: give --pid {', '.join(ranks[:_NAMED])}{more}" if ranks else ""


def _parsed(environment: bytes) -> Mapping[str, str]:
    pairs = (pair.partition(b"=") for pair in environment.split(b"\0") if pair)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
