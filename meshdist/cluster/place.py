"""This process's place in a job: its rank, the number of ranks, and the host of rank 0."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import NamedTuple

from meshdist.cluster.launchers import KUBERNETES, SLURM, Environment, Launcher, find_launcher
from meshdist.cluster.nodelist import expand_nodelist
from meshdist.system.env_flags import to_int
from meshdist.system.plurals import counted

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500

# Above the usual ephemeral ports, so that the chosen port is most likely free.
_FIRST_PORT, _NUM_PORTS = 61_000, 4_500


class Place(NamedTuple):
    """A process's place, according to its launcher."""

    launcher: Launcher
    rank: int
    world_size: int
    address: str | None  # the host of rank 0; None if the launcher does not report it
    # Equal for all ranks of this start, and most likely different from those of other jobs on the host; 0 (any free
    # port) for a world of one.
    port: int
    no_address: str = ""  # what to do if `address` is None


def find_place(
    environ: Environment | None = None,
    world_size: int | None = None,
    full_host_name: Callable[[], str] = socket.getfqdn,
) -> Place | None:
    """Return the place of this process, None if no known launcher started it.

    The caller gives `world_size` if it knows it and the launcher may not report it; `full_host_name` returns this
    host's name with its domain. Raises ValueError if the launcher's variables are incomplete, impossible, or
    contradictory.
    """
    environ = os.environ if environ is None else environ
    launcher = find_launcher(environ)
    if launcher is None:
        return None
    tells = any(environ.get(name) for name in launcher.size if name != "WORLD_SIZE")
    size = _number(environ, launcher, *launcher.size) if tells or world_size is None else world_size
    rank = _number(environ, launcher, launcher.rank)
    if not 0 <= rank < size:
        raise ValueError(
            f"{launcher.name} says {launcher.rank}={rank}, but there are {counted(size, 'rank')}, 0 to {size - 1}"
        )
    for name in launcher.same_start:
        if environ.get(name, str(rank)) != str(rank):
            raise ValueError(
                f"{launcher.name} says {launcher.rank}={rank}, but {name}={environ[name]}: these are of two launchers, "
                f"one started within the other; {_set_all()}"
            )
    address, no_address = _address(environ, launcher, size, full_host_name)
    return Place(launcher, rank, size, address, 0 if size == 1 else _port(environ, launcher), no_address)


def local_rank_here(environ: Environment | None = None) -> int | None:
    """Return this process's rank on its host according to its launcher, None if no launcher reports it."""
    environ = os.environ if environ is None else environ
    name = "LOCAL_RANK"
    if name not in environ:
        launcher = find_launcher(environ)
        name = (launcher and launcher.local_rank) or ""
    return to_int(environ[name], f"the environment variable {name}") if environ.get(name) else None


def is_first_rank(environ: Environment | None = None) -> bool:
    """Return whether this process is to speak for its job: it is rank 0, or no launcher has started it."""
    environ = os.environ if environ is None else environ
    launcher = find_launcher(environ)
    rank = environ.get("RANK") or (environ.get(launcher.rank) if launcher is not None else None)
    return not rank or rank == "0"


def _number(environ: Environment, launcher: Launcher, *names: str) -> int:
    for name in names:
        if environ.get(name):
            return to_int(environ[name], f"the environment variable {name}")
    sign = next(sign for sign in launcher.signs if environ.get(sign))
    raise ValueError(
        f"{launcher.name} started this process ({sign}={environ[sign]}), but {' or '.join(names)} is not set: set it "
        f"({launcher.how_to_set}), or {_set_all()}"
    )


def _set_all() -> str:
    return "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself"


def _address(
    environ: Environment, launcher: Launcher, size: int, full_host_name: Callable[[], str]
) -> tuple[str | None, str]:
    """Return the host of rank 0; or None and what to do about it."""
    if size == 1 or (launcher.local_size and environ.get(launcher.local_size) == str(size)):
        return LOOPBACK, ""
    if launcher is KUBERNETES:
        return _first_pod(environ, full_host_name())
    # mpirun within a Slurm job starts on its first host, as srun does.
    names = ("SLURM_STEP_NODELIST",) if launcher is SLURM else ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    for name in names:
        if environ.get(name):
            nodes = expand_nodelist(environ[name])
            return (LOOPBACK if len(nodes) == 1 else nodes[0]), ""
    return None, (
        f"{launcher.name} does not tell the host of rank 0 to ranks on other hosts; give it as MASTER_ADDR "
        f"({launcher.how_to_set})"
    )


def _first_pod(environ: Environment, full_name: str) -> tuple[str | None, str]:
    """Return the name of the pod with index 0, which differs from this pod's only in the index."""
    index = environ[KUBERNETES.rank]
    host, dot, domain = full_name.partition(".")
    if not dot or not host.endswith(f"-{index}"):
        return None, (
            f"this pod is called {full_name!r}, from which the name of the pod with index 0 cannot be derived: give"
            " the pod template a subdomain with a headless Service of that name, or set MASTER_ADDR (env:)"
        )
    return f"{host.removesuffix(index)}0.{domain}", ""


def _port(environ: Environment, launcher: Launcher) -> int:
    said = [environ[name] for name in launcher.job if environ.get(name)]
    if not said:
        return DEFAULT_PORT
    from zlib import crc32  # not needed to import meshdist

    return _FIRST_PORT + crc32(".".join(said).encode()) % _NUM_PORTS
