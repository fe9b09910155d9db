"""Where the store of a running rank is, and what it takes to get in: from the environment of its process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from meshdist.handshake import SECRET_VARIABLE
from meshdist.secret_file import SECRET_FILE_VARIABLE
from meshdist.store.address import endpoint
from meshdist.switches import INSECURE
from meshdist.tls_files import TLS_CA_VARIABLE, TLS_CERT_VARIABLE, TLS_KEY_VARIABLE

_NAMED = 8
_PATHS = (SECRET_FILE_VARIABLE, TLS_CERT_VARIABLE, TLS_KEY_VARIABLE, TLS_CA_VARIABLE)
_TAKEN = (SECRET_VARIABLE, INSECURE, *_PATHS)


def store_of(pid: int) -> tuple[str, dict[str, str]]:
    """Return the address of the store of a rank's job, and the variables by which it lets this process in.

    Only its own user, and root, may read the environment of a process.

    Args:
        pid: The rank's process, on this host.

    Raises:
        ValueError: There is no such process, its environment cannot be read, or it does not say where a store is.
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
            f"process {pid} is no rank: it has no MASTER_ADDR and MASTER_PORT in its environment;"
            f" {_ranks_below(pid) or 'give the pid of a rank that meshrun has started'},"
            f" or --store HOST:PORT and {SECRET_VARIABLE}"
        )
    taken = {name: found.get(name, "") for name in _TAKEN}
    # What it names relative to its directory is meant there.
    taken.update({name: os.path.join(directory, taken[name]) for name in _PATHS if taken[name]})
    return endpoint(host, int(port)) if port.isdecimal() else f"{host}:{port}", taken


def _ranks_below(pid: int) -> str:
    """Return which ranks a process has started, such as a meshrun; nothing where it has started none."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            variables = _parsed((place / "environ").read_bytes()) if parent == pid else {}
        except OSError:
            continue  # it has ended meanwhile, or is another user's
        if "MASTER_ADDR" in variables and variables.get("RANK", "").isdecimal():
            found[int(variables["RANK"])] = int(place.name)
    ranks = [f"{process} (rank {rank})" for rank, process in sorted(found.items())]
    more = ", ..." if len(ranks) > _NAMED else ""
    return f"it has started ranks: give --pid {', '.join(ranks[:_NAMED])}{more}" if ranks else ""


def _parsed(environment: bytes) -> Mapping[str, str]:
    pairs = (pair.partition(b"=") for pair in environment.split(b"\0") if pair)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
