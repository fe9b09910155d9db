"""Faults by strangers: processes that are not of the job, and want something of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from faults_compared.fault import TIMEOUT_S, Fault
from faults_compared.library import Library, ones
from faults_compared.witness import Witness

_LISTENS = "0A"
_GARBAGE_S = 5.0
_NO_STORE = {"openmpi": "not applicable: there is no store; mpirun's own processes were not examined"}


def _listening_at() -> list[str]:
    """Return the addresses, IPv4 and IPv6, at which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and f"socket:[{inode}]" in inodes:
                words = bytes.fromhex(local.partition(":")[0])
                swapped = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add(socket.inet_ntop(family, swapped))
    return sorted(found)


def listens(lib: Library, witness: Witness) -> None:
    """A job at 127.0.0.1, whose ranks are all on this host."""
    lib.all_reduce(ones(4))
    witness.fault()
    witness.attempt(lambda: witness.note(f"listens at {', '.join(_listening_at()) or 'no address'}"))


def _while_a_job_runs(lib: Library, witness: Witness, stranger: Callable[[str, int], None]) -> None:
    host, _, port = witness.url.removeprefix("tcp://").rpartition(":")
    runs = witness.folder / "runs"
    if witness.rank == 0:
        lib.join(0, 1, TIMEOUT_S, witness.url)
        runs.touch()
        time.sleep(60)
    while not runs.exists():
        time.sleep(0.01)
    os.environ.pop("MESHDIST_SECRET", None)
    witness.fault()
    stranger(host, int(port))


def reads(lib: Library, witness: Witness) -> None:
    """A stranger asks the store of a job, with the library's own client."""
    _while_a_job_runs(lib, witness, lambda host, port: witness.attempt(lambda: lib.peek(host, port), lambda: False))


def garbage(lib: Library, witness: Witness) -> None:
    """A stranger makes connections, sends what means nothing, and keeps them."""

    def stranger(host: str, port: int) -> None:
        held = Path(f"/proc/{witness.pid_of(0)}/fd")
        before = len(list(held.iterdir()))
        with ExitStack() as stack:
            for _ in range(80):
                sock = stack.enter_context(socket.create_connection((host, port)))
                with suppress(OSError):
                    sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            time.sleep(_GARBAGE_S)
            left = len(list(held.iterdir())) - before
        witness.attempt(lambda: witness.note(f"{left} of the 80 are still held after {_GARBAGE_S:g} s"))

    _while_a_job_runs(lib, witness, stranger)


STRANGERS = (
    Fault("where a job on one host listens", listens),
    Fault("an unauthenticated client reads from the store", reads, 2, (1,), joins=False, senseless=_NO_STORE),
    Fault("80 unauthenticated connections that send garbage", garbage, 2, (1,), joins=False, senseless=_NO_STORE),
)
