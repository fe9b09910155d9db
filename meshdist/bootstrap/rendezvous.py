"""Rendezvous: from an init method such as env:// to a store, a rank and a world size."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import suppress

from meshdist.bootstrap.from_environment import place_from_environment
from meshdist.bootstrap.spawned import (
    callers_address,
    check_common_secret,
    exceeds_spawn,
    meet_strangers,
)
from meshdist.bootstrap.torchrun import AGENT_STORE_VARIABLE, keeps_torchs_store, meeting_file
from meshdist.bootstrap.url import (
    NOT_GIVEN,
    ImpossibleRankError,
    check_ranks,
    parse_init_url,
    whole_number,
    with_group_name,
)
from meshdist.errors import DistError
from meshdist.store import PrefixStore, Store, TCPStore
from meshdist.store.address import PortTakenError
from meshdist.system.deadline import DEFAULT_TIMEOUT_S, Timeout, seconds
from meshdist.system.env_flags import to_int

_TELL_WITHIN_S = 2.0

Rendezvous = tuple[Store, int, int]
RendezvousHandler = Callable[[str, int, int, float], Rendezvous]
"""Takes the URL, the rank and the world size (-1 where not given) and the timeout in seconds."""


def rendezvous(
    url: str,
    rank: int = NOT_GIVEN,
    world_size: int = NOT_GIVEN,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    *,
    group_name: str = "",
) -> Rendezvous:
    """Return the store that the ranks share, this process's rank and the world size.

    Args:
        url: A URL whose scheme has a handler.

            - `env://` reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; those that are not set are derived from the
              variables that Slurm, Open MPI, MPICH or Kubernetes set. Where torchrun keeps that port for a store of
              torch, the ranks of one host meet in a file of their own. In a rank of `spawn`, a world of more ranks than
              that call has started meets at the MASTER_ADDR and MASTER_PORT that the caller of `spawn` has set.
            - `tcp://host:port` names the host and port at which rank 0 hosts the store.
            - `tcp://239.1.2.3:port`, or another multicast address: the ranks find each other on the local network.
            - `file:///path` names a file that all ranks can reach.
            - `mpi://`: the ranks are those of the MPI job that `mpirun` started.

            Each may end in `?rank=0&world_size=2` instead of the arguments. With a multicast address or a file, ranks
            are optional: processes without one get the free ranks, in the order of arrival, host by host.
        rank: This process's rank, or -1 if `url` gives it, or it is to be assigned.
        world_size: The number of ranks, or -1 if `url` gives it.
        timeout: How long to wait for the store, and the store's default: a timedelta or seconds.
        group_name: Distinguishes jobs that meet at the same multicast address or file. A handler gets it in the URL's
            query, where it may also be given: `?group_name=job`.

    Raises:
        ValueError: The scheme is not known; or a value is missing, given twice, not a number or out of range; or, with
            a multicast address or a file, the rank is taken or the world sizes differ.
        DistNetworkError: There is no store of this job at the address.
        DistStoreError: The file cannot be used.
        DistTimeoutError: With a multicast address or a file: some ranks did not arrive; the message names those that
            did.

    Example:
        >>> from meshdist import rendezvous
        >>> store, rank, world_size = rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1")
        >>> rank, world_size
        (0, 1)
        >>> store.close()
    """
    if not isinstance(url, str):
        raise TypeError(f"url or init_method must be a str such as 'env://', got {type(url).__name__}")
    scheme, separator, _ = url.partition("://")
    handler = _HANDLERS.get(scheme.lower()) if separator else None
    if handler is None:
        known = ", ".join(f"{name}://" for name in sorted(_HANDLERS))
        raise ValueError(f"url or init_method must begin with one of {known}, got {url!r}")
    if not isinstance(group_name, str):
        raise TypeError(f"group_name must be a str, got {type(group_name).__name__}")
    rank, world_size = whole_number(rank, "rank"), whole_number(world_size, "world_size")
    return handler(with_group_name(url, group_name), rank, world_size, seconds(timeout))


def register_rendezvous_handler(scheme: str, handler: RendezvousHandler) -> None:
    """Register `handler` for URLs of `scheme` in `rendezvous`.

    Args:
        scheme: What comes before "://".
        handler: Takes the URL, the rank and the world size (-1 where not given) and the timeout in seconds, and returns
            the store, the rank and the world size.

    Raises:
        ValueError: The scheme already has a handler.
    """
    if scheme.lower() in _HANDLERS:
        raise ValueError(f"the scheme {scheme!r} has a rendezvous handler already; choose another name")
    _HANDLERS[scheme.lower()] = handler


def _rendezvous_env(text: str, rank: int, world_size: int, timeout_s: float) -> Rendezvous:
    url = parse_init_url(text, rank, world_size)
    rank, world_size, host, port = place_from_environment(url.rank, url.world_size)
    is_launchers = is_launchers_store()
    if is_launchers and exceeds_spawn(world_size):
        (host, port), is_launchers = callers_address(text, world_size), False
    check_common_secret(text, world_size, lambda: meet_strangers(host, port, rank == 0))
    try:
        check_ranks(text, rank, world_size)
    except ImpossibleRankError as error:
        if not keeps_torchs_store() and not is_launchers:
            _tell_others(host, port, timeout_s, error)
        raise ValueError(str(error)) from None
    if keeps_torchs_store():
        from meshdist.bootstrap.file_meeting import meet_in_file

        return meet_in_file(meeting_file(), rank, world_size, timeout_s)
    if not is_launchers:
        return _tcp_store(text, host, port, rank, world_size, timeout_s), rank, world_size
    # The launcher hosts the store through all restarts; each start of the workers uses its own part.
    _check_port(text, port, 1)
    attempt = _env_int("TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in os.environ else 0
    store = TCPStore(host, port, is_master=False, timeout=timeout_s)
    return _OwnPart(f"worker/attempt_{attempt}", store), rank, world_size


class _OwnPart(PrefixStore):
    """A part of a store which nothing else in this process uses: the store is closed with it."""

    def close(self) -> None:
        self._store.close()


def is_launchers_store() -> bool:
    """Return True if MASTER_ADDR and MASTER_PORT are the launcher's, not set by the script for a store of its own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return False
    master = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return os.environ.get(AGENT_STORE_VARIABLE) == master


def _rendezvous_tcp(text: str, rank: int, world_size: int, timeout_s: float) -> Rendezvous:
    from meshdist.bootstrap.multicast_socket import is_multicast  # only needed for these URLs

    url = parse_init_url(text, rank, world_size)
    host, port = url.host_and_port()
    if is_multicast(host):
        from meshdist.bootstrap.multicast import rendezvous_multicast  # rarely used

        url.require(rank=False)
        check_common_secret(text, url.world_size)
        _check_port(text, port, 1)
        return rendezvous_multicast(url, timeout_s)
    try:
        url.require()
    except ImpossibleRankError as error:
        _tell_others(host, port, timeout_s, error)
        raise ValueError(str(error)) from None
    check_common_secret(text, url.world_size, lambda: meet_strangers(host, port, url.rank == 0))
    return _tcp_store(text, host, port, url.rank, url.world_size, timeout_s), url.rank, url.world_size


def _rendezvous_file(text: str, rank: int, world_size: int, timeout_s: float) -> Rendezvous:
    from meshdist.bootstrap.file_meeting import rendezvous_file  # with the file's store, which few jobs use

    return rendezvous_file(text, rank, world_size, timeout_s)


def _tcp_store(url: str, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> TCPStore:
    """Return the store that rank 0 hosts, without waiting for the other ranks."""
    _check_port(url, port, 0 if world_size == 1 else 1)
    try:
        # The ranks compare their world sizes when they join, so that all of them get the error.
        return TCPStore(host, port, is_master=rank == 0, timeout=timeout_s, wait_for_workers=False)
    except PortTakenError as error:
        _tell_others(host, port, timeout_s, f"rank 0 has already joined; this is another rank 0 of {world_size}")
        raise PortTakenError(f"{error}; or is another process of this job rank 0 as well?") from None


def _tell_others(host: str, port: int, timeout_s: float, error: ValueError | str) -> None:
    """Report to the ranks that wait at rank 0's store that a process is none of them; they would wait in vain."""
    from meshdist.bootstrap.join import object_to

    # Without a store, or with one of another job, only this process's own error is raised.
    with (
        suppress(DistError, ValueError),
        TCPStore(host, port, is_master=False, timeout=min(timeout_s, _TELL_WITHIN_S), wait_for_workers=False) as store,
    ):
        object_to(store, f"refused pid {os.getpid()} on {platform.node()}: {error}")


def _check_port(url: str, port: int, lowest: int) -> None:
    if not lowest <= port <= 65535:
        raise ValueError(f"{url}: the port must be between {lowest} and 65535, and the same on all ranks, got {port}")


def _env_int(name: str) -> int:
    return to_int(os.environ[name], f"the environment variable {name}")


def _rendezvous_mpi(text: str, rank: int, world_size: int, timeout_s: float) -> Rendezvous:
    from meshdist.bootstrap.mpi import rendezvous_mpi  # needs mpi4py

    return rendezvous_mpi(text, rank, world_size, timeout_s)


# Registered handlers apply to the whole process, as backends do: module state, not part of a World.
_HANDLERS: dict[str, RendezvousHandler] = {
    "env": _rendezvous_env,
    "file": _rendezvous_file,
    "mpi": _rendezvous_mpi,
    "tcp": _rendezvous_tcp,
}
