"""A store in a bad neighbourhood: strangers at its port, and strangers at the port where it should be."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from strangers import delay_nobody, is_hung_up

from meshdist.errors import DistNetworkError
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, HandshakeUnanswered, connect_handshake
from meshdist.store import TCPStore
from meshdist.store.session import PURPOSE
from meshdist.system.deadline import Deadline

LOOPBACK = "127.0.0.1"


@pytest.fixture
def master(resources: ExitStack) -> TCPStore:
    return resources.enter_context(TCPStore(LOOPBACK, 0, is_master=True, timeout=30, secret=b"secret"))


def call_here(resources: ExitStack, port: int) -> socket.socket:
    sock = resources.enter_context(socket.create_connection((LOOPBACK, port), timeout=30))
    sock.settimeout(30)
    return sock


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(4096),
    "huge length": struct.pack("!QBd", 1 << 62, 1, 1.0),
    "noise": os.urandom(4096),
    "magic and garbage": b"MESHDIST" + b"\xff" * 4096,
    "much": bytes(4 << 20),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_hung_up_on_at_once(master: TCPStore, resources: ExitStack, garbage: bytes) -> None:
    stranger = call_here(resources, master.port)
    start = time.monotonic()
    with suppress(ConnectionError):  # hung up on before it had said all
        stranger.sendall(garbage)
    assert is_hung_up(stranger)
    assert time.monotonic() - start < HANDSHAKE_TIMEOUT_S
    assert master.add("count", 1) == 1


def test_300_silent_slow_and_half_open_strangers_delay_nobody(master: TCPStore, resources: ExitStack) -> None:
    strangers = [call_here(resources, master.port) for _ in range(300)]
    for stranger in strangers[100:200]:
        stranger.sendall(b"MESHDIST\x01")
    for stranger in strangers[200:]:
        stranger.shutdown(socket.SHUT_WR)

    def ask() -> None:
        with TCPStore(LOOPBACK, master.port, timeout=30, secret=b"secret") as client:
            client.add("count", 1)
        with suppress(ConnectionError):  # of one byte a time, each in good time, none is the last
            strangers[199].sendall(b"\0")

    delay_nobody(strangers, lambda: call_here(resources, master.port), ask)


def test_a_client_that_gives_up_its_handshake_was_not_refused(
    master: TCPStore, resources: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy host, it has waited too long for the store's answer, and comes again."""
    client = call_here(resources, master.port)
    client.sendall(hello())
    assert client.recv(1)  # the store knows it for a process of meshdist
    client.shutdown(socket.SHUT_WR)
    assert is_hung_up(client)
    assert master.add("count", 1) == 1  # after what the store did about the client
    assert master.take_refusals() == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def hello() -> bytes:
    """Return the first message of a client of the job."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(HandshakeUnanswered):
            connect_handshake(ours, b"secret", PURPOSE, "nobody", Deadline(0.0))
        return theirs.recv(4096)


def test_more_strangers_than_the_server_will_bear(master: TCPStore, resources: ExitStack) -> None:
    strangers = [call_here(resources, master.port) for _ in range(600)]
    start = time.monotonic()
    assert all(is_hung_up(stranger) for stranger in strangers[:80])
    assert time.monotonic() - start < HANDSHAKE_TIMEOUT_S  # they have made room
    with TCPStore(LOOPBACK, master.port, timeout=30, secret=b"secret") as client:
        assert client.add("count", 1) == 1


def test_a_request_before_the_handshake_does_nothing(master: TCPStore, resources: ExitStack) -> None:
    stranger = call_here(resources, master.port)
    body = struct.pack("!I", 3) + b"key" + struct.pack("!I", 5) + b"value"
    stranger.sendall(struct.pack("!QBd", len(body), 1, 1.0) + body)
    assert is_hung_up(stranger)
    assert not master.check(["key"])


@pytest.mark.parametrize("secret", [b"", b"other"])
def test_another_jobs_client_is_told_so_at_once(master: TCPStore, secret: bytes) -> None:
    start = time.monotonic()
    with pytest.raises(DistNetworkError, match=f"{LOOPBACK}:{master.port} belongs to another job"):
        TCPStore(LOOPBACK, master.port, timeout=30, secret=secret)
    assert time.monotonic() - start < HANDSHAKE_TIMEOUT_S
    assert master.num_keys() == 0


def test_a_client_with_a_secret_does_not_join_a_store_without() -> None:
    with (
        TCPStore(LOOPBACK, 0, is_master=True) as master,
        pytest.raises(DistNetworkError, match="belongs to another job"),
    ):
        TCPStore(LOOPBACK, master.port, timeout=30, secret=b"secret")


def test_a_second_job_on_the_port_is_told_so(master: TCPStore) -> None:
    for multi_tenant, message in ((False, "is taken"), (True, "belongs to another job")):
        with pytest.raises(DistNetworkError, match=f"{LOOPBACK}:{master.port} {message}"):
            TCPStore(LOOPBACK, master.port, is_master=True, multi_tenant=multi_tenant, timeout=30, secret=b"other")


# Strangers where the store should be


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    with socket.create_server((LOOPBACK, 0)) as listener:
        yield listener


def test_a_silent_listener_is_not_a_store(stranger: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshdist.store.connect.HANDSHAKE_TIMEOUT_S", 60.0)
    port = stranger.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(DistNetworkError, match=f"{LOOPBACK}:{port} is not a meshdist store"):
        TCPStore(LOOPBACK, port, timeout=0.5)
    assert 0.4 < time.monotonic() - start < 10


def test_a_talking_listener_is_not_a_store(stranger: socket.socket, resources: ExitStack) -> None:
    port = stranger.getsockname()[1]

    def greet() -> None:
        sock, _ = stranger.accept()
        with sock:
            sock.sendall(b"220 mail.example ESMTP\r\n")
            sock.recv(4096)

    thread = threading.Thread(target=greet)
    thread.start()
    resources.callback(thread.join, 30)
    start = time.monotonic()
    with pytest.raises(DistNetworkError, match=f"{LOOPBACK}:{port} is not a meshdist store: it answered b'220 mail"):
        TCPStore(LOOPBACK, port, timeout=30)
    assert time.monotonic() - start < HANDSHAKE_TIMEOUT_S


def test_a_listener_that_hangs_up_is_not_a_store(stranger: socket.socket, resources: ExitStack) -> None:
    port = stranger.getsockname()[1]
    stranger.settimeout(30)

    def hang_up() -> None:
        while True:
            try:
                stranger.accept()[0].close()
            except OSError:
                return

    thread = threading.Thread(target=hang_up)
    thread.start()
    resources.callback(thread.join, 30)
    resources.callback(stranger.shutdown, socket.SHUT_RDWR)
    with pytest.raises(DistNetworkError, match=rf"{LOOPBACK}:{port} is not a meshdist store.*\(for 0.3 s\)"):
        TCPStore(LOOPBACK, port, timeout=0.3)
