"""The rendezvous of env://: plain variables, those of a launcher, or both."""

from __future__ import annotations

import os
from typing import NamedTuple

from meshdist.bootstrap.url import NOT_GIVEN, check_ranks
from meshdist.security.credentials import is_insecure_allowed, secret_from_environment
from meshdist.system.env_flags import to_int

_START = "start the script with meshrun, srun or mpirun, or set"


class EnvPlace(NamedTuple):
    """This process's rank, the number of ranks, and the address of rank 0's store."""

    rank: int
    world_size: int
    host: str
    port: int


def place_from_environment(rank: int, world_size: int) -> EnvPlace:
    """Return RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; ask the launcher for those that are not set.

    Rank 0 hosts the store, and needs no MASTER_ADDR. The rank and the world size are looked for only if they are
    NOT_GIVEN. Without any value, and without a launcher, this process is a world of one rank.

    Raises:
        ValueError: A value is missing, not a number, or contradicts the others.
    """
    rank = rank if rank != NOT_GIVEN else _number("RANK")
    world_size = world_size if world_size != NOT_GIVEN else _number("WORLD_SIZE")
    # An IPv6 address may be in brackets, as in a URL.
    host = os.environ.get("MASTER_ADDR", "").removeprefix("[").removesuffix("]")
    port = _number("MASTER_PORT")
    if world_size != NOT_GIVEN:
        check_ranks("env://", rank if rank != NOT_GIVEN else 0, world_size)
    if NOT_GIVEN in (rank, world_size, port) or not host:
        return _with_launcher(rank, world_size, host, port)
    return EnvPlace(rank, world_size, host, port)


def _number(name: str) -> int:
    return to_int(os.environ[name], f"the environment variable {name}") if os.environ.get(name) else NOT_GIVEN


def _with_launcher(rank: int, world_size: int, host: str, port: int) -> EnvPlace:
    """Return the place with missing values from the launcher, which must agree with the given ones."""
    from meshdist.cluster.place import find_place  # only needed here

    found = find_place(world_size=None if world_size == NOT_GIVEN else world_size)
    given = {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": world_size}
    missing = [name for name, value in given.items() if value in ("", NOT_GIVEN)]
    if found is None and missing == ["MASTER_ADDR"] and rank == 0:
        # Only the others need the address of rank 0. Without a secret, none of them can be on another host.
        is_open = bool(secret_from_environment()) or is_insecure_allowed()
        return EnvPlace(rank, world_size, "::" if is_open else "localhost", port)
    if found is None and not os.environ.get("SLURM_JOB_ID") and _is_alone(rank, world_size, missing):
        return EnvPlace(0, 1, "localhost", 0)
    if found is None:
        are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise ValueError(
            f"env:// rendezvous: {', '.join(missing)} {are} missing from the environment; {_START} {them} (RANK and "
            f"WORLD_SIZE may also be given as rank= and world_size=){_batch_script()}"
        )
    said = {"RANK": found.rank, "WORLD_SIZE": found.world_size}
    for name, value in said.items():
        if name not in missing and given[name] != value:
            raise ValueError(
                f"env:// rendezvous: {name} is {given[name]}, but {found.launcher.name} says that this is rank "
                f"{found.rank} of {found.world_size}; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, all of them, "
                f"or leave {name} to {found.launcher.name}"
            )
    if not host and found.address is None:
        raise ValueError(f"env:// rendezvous: MASTER_ADDR is missing from the environment: {found.no_address}")
    return EnvPlace(found.rank, found.world_size, host or str(found.address), port if port != NOT_GIVEN else found.port)


def _is_alone(rank: int, world_size: int, missing: list[str]) -> bool:
    """Return whether this process is a world of one: nothing is set, or it is rank 0 of 1 without an address."""
    is_only_rank = rank == 0 and world_size == 1 and {"MASTER_ADDR", "MASTER_PORT"}.issuperset(missing)
    return is_only_rank or len(missing) == len(EnvPlace._fields)


def _batch_script() -> str:
    """Return a hint for a batch script without srun, which only starts itself."""
    if not os.environ.get("SLURM_JOB_ID"):
        return ""
    return "; this is a Slurm job, in which only what `srun` starts is a rank: write srun python script.py"
