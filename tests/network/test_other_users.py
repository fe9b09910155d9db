"""What another user of the same host can reach of a world: nothing but names, and doorbells that wake in vain."""

from __future__ import annotations

import ctypes
import encodings.idna  # noqa: F401 - host names need it, and another user may not read the library
import errno
import json
import os
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from listening import listening_at

import meshdist as dist
from meshdist.backends.gloo.shm import single_copy
from meshdist.errors import DistNetworkError
from meshdist.security.handshake import connect_handshake

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what a user may do"),
    pytest.mark.skipif(sys.platform != "win32" and os.geteuid() != 0, reason="only root can become another user"),
]
NOBODY = 65534
_LIBC = ctypes.CDLL(None, use_errno=True)


def as_nobody(attempts: dict[str, Callable[[], object]]) -> dict[str, str]:
    """Return how each attempt ends in a child that is another user: "" or the name of the exception."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        answers = {}
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        for name, attempt in attempts.items():
            try:
                attempt()
                answers[name] = ""
            except BaseException as error:
                answers[name] = type(error).__name__
        os.write(writing, json.dumps(answers).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    answers: dict[str, str] = json.loads(text)
    return answers


def read_memory_of(pid: int) -> None:
    buffer = ctypes.create_string_buffer(8)
    part = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
    if _LIBC.process_vm_readv(pid, part, 1, part, 1, 0) < 0 and ctypes.get_errno() == errno.EPERM:
        raise PermissionError


def large_and_small() -> list[float]:
    """Use all ways of the shared memory."""
    found = []
    for count in (3, 20_000, 2_000_000):
        x = np.ones(count)
        dist.all_reduce(x)
        found.append(float(x[-1]))
    return found


def doorbells() -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return ["\0" + line.split()[7][1:] for line in lines if len(line.split()) > 7 and line.split()[7][0] == "@"]


def ring(addresses: list[str]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        for address in addresses:
            with suppress(OSError):  # of other kinds, or full
                sock.sendto(b"x" * 100, socket.MSG_DONTWAIT, address)


def test_memory_descriptors_and_processes_of_ranks_are_out_of_reach(worlds):
    workers = worlds.workers("gloo", 2)
    workers.start(large_and_small)
    before = workers.gather()
    victim = workers.pids[0]
    answers = as_nobody(
        {
            "descriptors": lambda: os.listdir(f"/proc/{victim}/fd"),
            "a descriptor": lambda: os.open(f"/proc/{victim}/fd/3", os.O_RDONLY),
            "memory": lambda: os.open(f"/proc/{victim}/mem", os.O_RDONLY),
            "environment": lambda: os.open(f"/proc/{victim}/environ", os.O_RDONLY),
            "reading": lambda: read_memory_of(victim),
            "signal": lambda: os.kill(victim, signal.SIGUSR1),
            "doorbells": lambda: ring(doorbells()),
        }
    )
    assert answers.pop("doorbells") == ""
    assert set(answers.values()) == {"PermissionError"}, answers
    workers.start(large_and_small)
    assert workers.gather() == before == [[2.0, 2.0, 2.0]] * 2


def test_files_of_a_world_are_its_users_alone(worlds):
    workers = worlds.workers("gloo", 2)
    workers.start(large_and_small)
    workers.gather()
    for folder in ("/dev/shm", tempfile.gettempdir()):
        for path in Path(folder).glob("meshdist*"):
            with suppress(FileNotFoundError):  # of another test, which has ended
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_store_and_ranks_admit_nobody_without_the_secret(tcp_workers, monkeypatch, worlds):
    assert worlds.nursery
    monkeypatch.setenv("MESHDIST_SECRET", "of this user")
    workers = tcp_workers(2, MESHDIST_SECRET="of this user")
    workers.start(large_and_small)
    workers.gather()
    [(host, port)] = listening_at(workers.pids[0])
    store_host, _, store_port = workers.address.rpartition(":")

    def call(address: tuple[str, int], purpose: str) -> None:
        with socket.create_connection(address, timeout=10) as sock:
            connect_handshake(sock, b"", purpose, "the peer")

    answers = as_nobody(
        {
            "rank": lambda: call((host, port), "rank's wire"),
            "store": lambda: call((store_host or "127.0.0.1", int(store_port)), "store"),
        }
    )
    assert set(answers.values()) <= {"OtherJobError", DistNetworkError.__name__}, answers
    workers.start(large_and_small)
    assert workers.gather() == [[2.0, 2.0, 2.0]] * 2


def test_the_consent_to_be_traced_ends_with_the_world(monkeypatch):
    given = []
    monkeypatch.setattr(single_copy, "_yama_asks", lambda: True)
    monkeypatch.setattr(single_copy, "_set_ptracer", given.append)
    options = SimpleNamespace(shared_resources={})
    single_copy.allow_peers(options)
    single_copy.allow_peers(options)  # of the world's next group
    assert given == [-1]  # any process of the same user
    for resource in options.shared_resources.values():
        resource.close()
    assert given == [-1, 0]
