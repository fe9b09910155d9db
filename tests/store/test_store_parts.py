"""Parts of the stores and of their security, each by itself."""

import os
import socket

import pytest

from meshdist.errors import DistNetworkError
from meshdist.security.credentials import TlsError, TlsFiles
from meshdist.security.handshake import HandshakeBroken, OtherJobError, ServerHandshake, answer_without_tls
from meshdist.security.tls import TlsSocket
from meshdist.store import HashStore
from meshdist.store.address import PortTakenError, listen, reachable_from_here, resolve
from meshdist.store.client import StoreClient
from meshdist.store.connect import NotReachedError
from meshdist.store.file_log import RequestLog
from meshdist.store.file_members import Member, Members
from meshdist.store.request import DryStore, RequestStore
from meshdist.store.server import StoreServer
from meshdist.store.session import Session
from meshdist.store.table import BLOCKING, Op, Status, Table
from meshdist.store.waiters import Waiter, Waiters
from meshdist.system.deadline import Deadline


@pytest.fixture
def session():
    mine, theirs = socket.socketpair()
    session = Session(mine, b"", "a client")
    yield session
    session.close()
    theirs.close()


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (HandshakeBroken, DistNetworkError),
        (OtherJobError, DistNetworkError),
        (PortTakenError, DistNetworkError),
        (NotReachedError, DistNetworkError),
        (TlsError, OSError),
        (TlsSocket, socket.socket),
        (HashStore, RequestStore),
    ],
)
def test_kinds(kind, base):
    assert issubclass(kind, base)


def test_a_server_that_is_no_store():
    text = "node1:29500 is not a meshdist store: it answered b'HTTP/1.1 400 Bad Request'; choose another port"
    assert str(answer_without_tls(b"HTTP/1.1 400 Bad Request", "store", "node1:29500")) == text


def test_a_client_that_is_not_of_meshdist():
    handshake = ServerHandshake(b"secret", "store")
    assert handshake.feed(b"GET / HTTP/1.1") == b""
    assert handshake.refusal == "not a meshdist client"


def test_records():
    assert TlsFiles("node.pem", "node.key", "ca.pem").authority == "ca.pem"
    assert resolve("127.0.0.1", 80)[0].is_loopback
    assert Status.OK.name == "OK"
    assert Op.GET in BLOCKING


def test_a_client_and_a_server():
    listener = listen("127.0.0.1", 0, b"")
    address = reachable_from_here(listener)
    server = StoreServer(listener, b"")
    server.start()
    client = StoreClient("here", lambda: [address], b"")
    client.connect(Deadline(5.0))
    assert client.request(Op.ADD, [b"count", b"1"], 5.0) == (Status.OK, [b"1"])
    client.close()
    server.close()


def test_tables():
    table = Table()
    assert table.apply(Op.ADD, [b"count", b"2"]) == ([b"2"], (b"count",))
    assert table.apply(Op.GET, [b"count"]) == ([b"2"], ())
    assert DryStore("TCPStore [localhost]:1234", Table()).reply(Op.ADD, [b"count", b"2"]) == [b"2"]


def test_a_request_log_is_replayed(tmp_path):
    log = RequestLog(str(tmp_path / "log"))
    with log.locked(Deadline(1.0)):
        assert log.read_new() == []
        log.append(Op.SET, [b"key", b"value"])
        log.rewind()
        assert log.read_new() == [(Op.SET, [b"key", b"value"])]
    log.close()


def test_members_of_a_file():
    assert not Member.here().is_dead()
    assert Member.parse(Member.here().pack()).pid == os.getpid()
    members = Members()
    members.joined(Member.here())
    assert members.refusal(Member.here(), world_size=1) == "it already has the 1 users it is for"


def test_a_session_begins_without_trust(session):
    assert not session.is_trusted


def test_waiters_wake_when_their_keys_are_set(session):
    waiters, table = Waiters(), Table()
    waiters.park(Waiter(session, Op.GET, [b"key"], [b"key"]))
    _, changed = table.apply(Op.SET, [b"key", b"value"])
    assert [waiter.keys for waiter in waiters.wake(changed, table)] == [[b"key"]]
