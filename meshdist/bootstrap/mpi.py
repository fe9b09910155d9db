"""The rendezvous of mpi://: MPI provides the ranks, and broadcasts the address of the store."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from meshdist.backends.mpi.aborting import abort_on_exceptions
from meshdist.backends.mpi.dispatcher import open_resources
from meshdist.backends.mpi.environment import is_launched, local_size, not_launched, wrong_launcher
from meshdist.backends.mpi.library import Polled, Requests, Session, session
from meshdist.bootstrap.url import NOT_GIVEN, parse_init_url
from meshdist.errors import DistBackendError, DistNetworkError
from meshdist.runtime.waiting import EventDoorbell, wait_until
from meshdist.security.credentials import secret_from_environment
from meshdist.store import Store, TCPStore
from meshdist.system.deadline import Deadline

URL = "mpi://"
UNSEEN = (
    "it may have named another backend, or have ended before it imported meshdist, which ends the job only under"
    " `meshrun --launcher mpi`"
)
ELSEWHERE = (
    "in a job of MPI, all ranks have to name the same backend: others may wait for this one in the 'mpi' backend"
)
_NOTICE_BYTES = 2048
_CONNECT_S = 10.0
_LOOPBACK = "127.0.0.1"


def rendezvous_mpi(text: str, rank: int, world_size: int, timeout_s: float) -> tuple[Store, int, int]:
    """Return the store of the MPI job's ranks, this process's rank and the world size.

    Rank 0 hosts the store and broadcasts its address and secret over MPI.

    Raises:
        DistBackendError: No MPI launcher started this process, or that of a different MPI library.
        ValueError: A rank or a world size is given that differs from MPI's.
        DistTimeoutError: Rank 0 did not arrive.
    """
    url = parse_init_url(text, rank, world_size)
    if not is_launched() and url.world_size != 1:
        raise DistBackendError(f"backend 'mpi': {not_launched()}")
    mine = session()
    abort_on_exceptions(mine)
    problem = wrong_launcher(mine.mpi) if url.world_size != 1 else None
    if problem is not None:
        raise DistBackendError(f"backend 'mpi': {problem}")
    told = (("rank", url.rank, mine.rank), ("world_size", url.world_size, mine.size))
    wrong = [f"{name} must be {found} and is {given}" for name, given, found in told if given not in (NOT_GIVEN, found)]
    if wrong:
        raise ValueError(
            f"init_process_group (rank {mine.rank} of {mine.size} in MPI): {', '.join(wrong)}; MPI provides both, so"
            " leave them out"
        )
    deadline = Deadline(timeout_s)
    return _shared_store(mine, deadline), mine.rank, mine.size


def finish_setup() -> Callable[[], None]:
    """Finish the part of the set-up that needs all ranks; return the function that undoes it."""
    mine = session()
    open_resources(mine)
    return abort_on_exceptions(mine)


def _shared_store(mine: Session, deadline: Deadline) -> Store:
    beacon = bytearray(_NOTICE_BYTES)
    store = None
    if mine.rank == 0:
        store = _host_store(mine, deadline, beacon)
    byte = mine.mpi.BYTE
    with mine.lock:
        request = mine.mpi.COMM_WORLD.Ibcast([beacon, byte], 0)
    told = Beacon(Requests(mine, [request], beacon))
    if store is not None:
        # The wait for ranks in the store names missing ones; meanwhile a thread advances the broadcast.
        threading.Thread(target=_move_on, args=(told, deadline), name="meshdist-notice", daemon=True).start()
        return store
    wait_until(told, EventDoorbell(1), deadline, f"init_process_group (rank {mine.rank} of {mine.size} in MPI)")
    return _join_store(bytes(beacon), deadline)


def _move_on(told: Beacon, deadline: Deadline) -> None:
    pause = threading.Event()
    while not told.ready() and not deadline.expired():
        pause.wait(told.poll_interval_s())


def _host_store(mine: Session, deadline: Deadline, beacon: bytearray) -> TCPStore:
    secret = secret_from_environment() or secrets.token_hex(16).encode()
    one_host = mine.size in (1, local_size())  # if the launcher does not report it, there may be other hosts
    hosts = [_LOOPBACK] if one_host else _addresses()
    store = TCPStore(hosts[0], 0, is_master=True, wait_for_workers=False, timeout=deadline.timeout_s, secret=secret)
    text = json.dumps({"hosts": hosts, "port": store.port, "secret": secret.hex()}).encode()
    beacon[: len(text)] = text
    return store


def _join_store(beacon: bytes, deadline: Deadline) -> TCPStore:
    told = json.loads(beacon.rstrip(b"\0"))
    failures = []
    for host in told["hosts"]:
        try:
            store = TCPStore(
                host, told["port"], timeout=deadline.slice_s(_CONNECT_S), secret=bytes.fromhex(told["secret"])
            )
        except DistNetworkError as error:
            failures.append(str(error))
            continue
        store.set_timeout(deadline.timeout_s)
        return store
    raise DistNetworkError(f"the store of rank 0 cannot be reached: {'; '.join(failures)}")


def _addresses() -> list[str]:
    """Return addresses at which other hosts may reach this one, the most likely first."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; selects the outgoing interface
            found.append(probe.getsockname()[0])
        except OSError:  # no route; the host's name may still be known
            found.append(socket.gethostname())
    try:
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    except OSError:
        found.append(socket.gethostname())
    outward = [host for host in dict.fromkeys(found) if not host.startswith(("127.", "::1"))]
    return outward or [socket.gethostname()]


class Beacon(Polled):
    """The broadcast of the store's address from rank 0."""

    def __init__(self, requests: Requests) -> None:
        super().__init__()
        self._requests: Any = requests

    def ready(self) -> bool:
        return bool(self._requests.done())

    def check(self) -> None:
        return

    def missing(self) -> str:
        return f"rank 0 to call init_process_group ({UNSEEN})"
