"""Connections between ranks under TLS: nothing can be read or changed on the way, and strangers learn nothing."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack

import numpy as np
import pytest
from authorities import Authority
from handshakes import begin_tls
from listening import listening_at
from strangers import delay_nobody

import meshdist as dist
from meshdist.backends.gloo.tcp.connection import Connection
from meshdist.backends.gloo.tcp.frames import EAGER, pack
from meshdist.backends.gloo.tcp.outgoing import Outgoing
from meshdist.errors import DistNetworkError
from meshdist.runtime.departure import PeerExit, describe
from meshdist.security.credentials import TlsError, TlsFiles
from meshdist.security.encryption import Encryption
from meshdist.security.handshake import HandshakeBroken, connect_handshake
from meshdist.security.tls import TlsSocket, connect_tls
from meshdist.system.deadline import Deadline

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(sys.platform != "linux", reason="links need Linux")]
SECRET = "the secret of this job"
WORDS = b"what nobody else may read, " * 10


@pytest.fixture
def with_secret(worlds, monkeypatch):
    """Give the stores of this test's worlds a secret; those of other tests, whose processes are as old, have none."""
    assert worlds.nursery
    monkeypatch.setenv("MESHDIST_SECRET", SECRET)


@pytest.fixture
def encrypted(tcp_workers, with_secret, monkeypatch):
    """Make a world whose ranks connect over loopback, encrypted: `encrypted(size, NAME=value)`."""
    monkeypatch.setenv("MESHDIST_ENCRYPTION", "all")
    return lambda size, **variables: tcp_workers(
        size, MESHDIST_SECRET=SECRET, **{"MESHDIST_ENCRYPTION": "all", **variables}
    )


class FrameRecorder:
    def __init__(self):
        self.frames, self.holds = [], False

    def take(self, header, connection):
        if self.holds:
            self.holds = False
            connection.hold()
            return None, None
        data = bytearray(header[4])
        return memoryview(data), lambda: self.frames.append(bytes(data))

    def on_closed(self, connection):
        pass


class Wire:
    """Two ends of a connection under TLS; what one sends reaches the other when the test passes it on."""

    def __init__(self, stack, secret=SECRET, other_secret=SECRET, files=(None, None)):
        self.ends, self.far, self.recorders = [], [], []
        for is_server, own in ((True, secret), (False, other_secret)):
            near, far = socket.socketpair()
            for sock in (near, far):
                sock.setblocking(False)
                stack(sock)
            encryption = Encryption(own.encode(), files[0] if is_server else files[1])
            context = encryption.server if is_server else encryption.client
            self.ends.append(TlsSocket(near, context, is_server=is_server))
            stack(self.ends[-1])
            self.far.append(far)

    def carry(self, source, change=lambda data: data):
        """Pass on what end `source` has sent; return how many bytes."""
        try:
            data = self.far[source].recv(1 << 20)
        except BlockingIOError:
            return 0
        self.far[1 - source].sendall(change(data))
        return len(data)

    def shake_hands(self):
        done = [False, False]
        while not all(done):
            for end in (1, 0):
                done[end] = done[end] or self.ends[end].handshake_is_done()
                self.carry(end)

    def connect(self):
        self.shake_hands()
        self.recorders = [FrameRecorder(), FrameRecorder()]
        return [
            Connection(sock, recorder, lambda reads, writes: None)
            for sock, recorder in zip(self.ends, self.recorders, strict=True)
        ]


@pytest.fixture
def wire(request):
    return Wire(lambda sock: request.addfinalizer(sock.close))


def frame(data=WORDS):
    return Outgoing(pack(EAGER, 1, 2, num_bytes=len(data)), memoryview(data))


# ---- What goes over the wire


def test_frames_arrive_and_cannot_be_read_on_the_way(wire):
    receiver, sender = wire.connect()
    sender.send(frame())
    heard = []
    wire.carry(1, lambda data: heard.append(data) or data)
    receiver.read()
    assert wire.recorders[0].frames == [WORDS]
    assert len(heard[0]) > len(WORDS)
    assert WORDS[:8] not in heard[0]


def flipped(data):
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


def swapped(data):
    return data[len(data) // 2 :] + data[: len(data) // 2]


@pytest.mark.parametrize(
    "change",
    [flipped, lambda data: data[:5] + data, lambda data: data + data, swapped],
    ids=["changed", "injected", "replayed", "reordered"],
)
def test_what_is_not_as_it_was_sent_ends_the_connection(wire, change):
    receiver, sender = wire.connect()
    sent = [b"first", b"other", b"third"]
    sender.send(frame(sent[0]))
    wire.carry(1)
    for data in sent[1:]:
        sender.send(frame(data))
    wire.carry(1, change)
    receiver.read()
    assert sent[: len(wire.recorders[0].frames)] == wire.recorders[0].frames
    assert receiver.ended is not None
    assert receiver.ended.exit is PeerExit.LOST
    assert "changed on the way" in describe(receiver.ended) or "its TLS is not compatible" in describe(receiver.ended)


def test_frames_that_arrive_with_the_end_of_the_handshake_are_read(wire):
    server, client = wire.ends
    assert not client.handshake_is_done()
    wire.carry(1)
    assert not server.handshake_is_done()
    wire.carry(0)
    assert client.handshake_is_done()
    client.sendall(pack(EAGER, 1, 2, num_bytes=len(WORDS)) + WORDS)
    wire.carry(1)  # at once
    assert server.handshake_is_done()
    recorder = FrameRecorder()
    Connection(server, recorder, lambda reads, writes: None).drain()
    assert recorder.frames == [WORDS]


def test_frames_behind_one_that_is_held_are_read_when_it_is_resumed(wire):
    receiver, sender = wire.connect()
    wire.recorders[0].holds = True
    for _ in range(3):
        sender.send(frame())
    wire.carry(1)
    receiver.read()
    assert wire.recorders[0].frames == []
    receiver.resume()
    assert wire.recorders[0].frames == [WORDS] * 3


def test_the_certificate_of_another_secret_is_refused_on_both_sides(request):
    wire = Wire(lambda sock: request.addfinalizer(sock.close), other_secret="that of another job")
    server, client = wire.ends
    assert not client.handshake_is_done()
    wire.carry(1)
    assert not server.handshake_is_done()
    wire.carry(0)
    with pytest.raises(TlsError, match="it has another MESHDIST_SECRET"):
        client.handshake_is_done()
    wire.carry(1)
    with pytest.raises(TlsError, match="it says that this side has another MESHDIST_SECRET"):
        server.handshake_is_done()


def test_both_ends_know_the_same_of_their_connection(wire):
    wire.shake_hands()
    server, client = wire.ends
    assert server.binding() == client.binding()
    assert len(client.binding()) == 64


def test_a_process_in_between_with_a_certificate_of_the_authority_is_found_out(request, tmp_path):
    authority = Authority(tmp_path)
    bindings = []
    for server_name, client_name in (("evil", "honest"), ("honest", "evil")):
        files = [TlsFiles(*authority.sign(name).values()) for name in (server_name, client_name)]
        wire = Wire(lambda sock: request.addfinalizer(sock.close), files=files)
        wire.shake_hands()
        bindings.append([end.binding() for end in wire.ends])
    # The honest client on the first connection and the honest server on the second do not agree.
    assert bindings[0][1] != bindings[1][0]


@pytest.mark.parametrize("alert", [b"\x15\x03\x03\x00\x02\x02\x30", b"\x15\x03\x03\x00\x02\x02\x28"])
def test_an_alert_that_anybody_may_have_sent_is_no_last_word(alert):
    near, far = socket.socketpair()
    with near, far:
        far.sendall(alert)
        client = Encryption(b"s").client
        with pytest.raises(HandshakeBroken):
            connect_tls(near, client, "store", "the store", Deadline(30))


# ---- Worlds


def exchange():
    """Send arrays of many sizes in all directions at once, and return whether all arrived as they were."""
    rank, size = dist.get_rank(), dist.get_world_size()
    following, preceding = (rank + 1) % size, (rank - 1) % size
    correct = []
    for count in (1, 100, 20_000, 600_000):
        works = [dist.isend(np.full(count, rank + tag), following, tag=tag) for tag in range(3)]
        for tag in reversed(range(3)):
            got = np.zeros(count, dtype=int)
            dist.recv(got, preceding, tag=tag)
            correct.append(bool((got == preceding + tag).all()))
        for work in works:
            work.wait()
        total = np.full(count, rank + 1.0)
        dist.all_reduce(total)
        correct.append(bool((total == size * (size + 1) / 2).all()))
    return all(correct)


def test_collectives_and_messages_of_all_sizes(encrypted):
    workers = encrypted(3)
    workers.start(exchange)
    assert workers.gather() == [True] * 3


def all_reduce_once():
    x = np.ones(3)
    dist.all_reduce(x)
    return x.tolist()


@pytest.fixture
def world(encrypted):
    workers = encrypted(2)
    workers.start(all_reduce_once)
    workers.gather()
    return workers


def call(world):
    [(host, port)] = listening_at(world.pids[0])
    sock = socket.create_connection((host, port), timeout=30)
    sock.settimeout(30)
    return sock


def test_a_stranger_without_tls_is_told_and_refused(world):
    with (
        call(world) as stranger,
        pytest.raises(DistNetworkError, match="requires TLS, but this process does not use it"),
    ):
        connect_handshake(stranger, SECRET.encode(), "rank's wire", "the rank")
    world.start(all_reduce_once)
    assert world.gather() == [[2.0] * 3] * 2


def test_a_stranger_with_another_secret_is_refused(world):
    other = Encryption(b"that of another job").client
    with call(world) as stranger, pytest.raises(DistNetworkError, match="belongs to another job.*same MESHDIST_SECRET"):
        connect_tls(stranger, other, "rank's wire", "the rank", Deadline(30))
    world.start(all_reduce_once)
    assert world.gather() == [[2.0] * 3] * 2


@pytest.mark.slow
def test_300_strangers_that_begin_tls_and_are_silent_delay_nobody(world):
    with ExitStack() as stack:
        strangers = [stack.enter_context(call(world)) for _ in range(300)]
        begin_tls(strangers)

        def ask():
            world.start(all_reduce_once)
            assert world.gather() == [[2.0] * 3] * 2

        delay_nobody(strangers, lambda: call(world), ask)


def encrypt_all():
    os.environ["MESHDIST_ENCRYPTION"] = "all"


def error_of_all_reduce():
    try:
        dist.all_reduce(np.ones(3))
    except dist.DistError as error:
        return str(error)
    return ""


def test_ranks_with_other_settings_say_so(tcp_workers, with_secret):
    workers = tcp_workers(2, MESHDIST_SECRET=SECRET)
    workers.start(encrypt_all, ranks=[0])
    workers.outcome(0)
    workers.start(error_of_all_reduce)
    told = workers.gather()
    words = "encrypted by MESHDIST_ENCRYPTION=", "to the same values on all processes"
    assert any(all(part in text for part in words) for text in told), told


# ---- Settings


@pytest.mark.parametrize(
    ("mode", "secret", "host", "covered"),
    [
        ("", b"s", "10.0.0.7", True),
        ("", b"s", "127.0.0.1", False),
        ("", b"s", "::1", False),
        ("on", b"s", "fd00::7", True),
        ("off", b"s", "10.0.0.7", False),
        ("all", b"s", "127.0.0.1", True),
        ("all", b"", "10.0.0.7", False),  # everybody has the certificate of no secret
    ],
)
def test_which_connections_are_encrypted(monkeypatch, mode, secret, host, covered):
    monkeypatch.setenv("MESHDIST_ENCRYPTION", mode)
    assert Encryption(secret).covers(host) is covered


def test_an_unknown_setting_is_refused(monkeypatch):
    monkeypatch.setenv("MESHDIST_ENCRYPTION", "yes")
    with pytest.raises(ValueError, match="MESHDIST_ENCRYPTION must be one of off, on, all, got 'yes'"):
        Encryption(b"s")
