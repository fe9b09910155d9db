"""Two ends that prove to each other that they know the job's secret."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from handshakes import accept_handshake
from hypothesis import given
from hypothesis import strategies as st

from meshdist.errors import DistNetworkError
from meshdist.security.credentials import secret_from_environment
from meshdist.security.handshake import (
    CLAIM_BYTES,
    MAGIC,
    PROTOCOL,
    HandshakeBroken,
    ServerHandshake,
    busy_notice,
    connect_handshake,
    job_id,
)
from meshdist.system.deadline import Deadline

PEER = "10.0.0.1:29500"
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    client, server = socket.socketpair()
    with client, server:
        yield client, server


def shake(pair: Pair, secrets: tuple[bytes, bytes], purposes: tuple[str, str] = ("store", "store")) -> list[object]:
    """Return what the client's end and the server's end came to."""
    client, server = pair

    def outcome(call: Callable[[], object], sock: socket.socket) -> object:
        try:
            return call()
        except DistNetworkError as error:
            sock.shutdown(socket.SHUT_RDWR)
            return error

    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(
                outcome, lambda: connect_handshake(client, secrets[0], purposes[0], PEER, claim=b"rank 3"), client
            ),
            pool.submit(outcome, lambda: accept_handshake(server, secrets[1], purposes[1]), server),
        ]
        return [end.result(timeout=30) for end in ends]


@pytest.mark.parametrize("secret", [b"", b"s", bytes(range(256)) * 10])
def test_who_knows_the_secret_gets_in_with_its_claim(pair: Pair, secret: bytes) -> None:
    assert shake(pair, (secret, secret)) == [None, b"rank 3".ljust(CLAIM_BYTES, b"\0")]
    pair[0].sendall(b"what follows")
    assert pair[1].recv(100) == b"what follows"
    pair[1].sendall(b"and back")
    assert pair[0].recv(100) == b"and back"


@pytest.mark.parametrize("secrets", [(b"a", b"b"), (b"", b"b"), (b"a", b"")])
def test_another_job_is_told_so_at_once(pair: Pair, secrets: tuple[bytes, bytes]) -> None:
    start = time.monotonic()
    client, server = shake(pair, secrets)
    assert str(client).startswith(f"{PEER} belongs to another job")
    assert "MESHDIST_SECRET" in str(client)
    assert "belongs to job" in str(server)
    assert time.monotonic() - start < 10


def test_another_purpose_is_refused(pair: Pair) -> None:
    client, server = shake(pair, (b"s", b"s"), ("store", "data to rank 1"))
    assert str(client) == f"{PEER} is not a meshdist store: it serves another purpose"
    assert "connected for another purpose" in str(server)


def test_a_claim_that_is_too_long_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match=f"at most {CLAIM_BYTES} bytes, got {CLAIM_BYTES + 1}"):
        connect_handshake(pair[0], b"s", "store", PEER, claim=bytes(CLAIM_BYTES + 1))


def test_the_job_id_tells_jobs_apart() -> None:
    assert job_id(b"a") == job_id(b"a") != job_id(b"b")
    assert len(job_id(b"a")) == 16


def test_the_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert secret_from_environment() == b""
    monkeypatch.setenv("MESHDIST_SECRET", "hüsh")
    assert secret_from_environment() == "hüsh".encode()


# The client and a server that is none of ours


def answer_with(pair: Pair, *parts: bytes, close: bool = True) -> DistNetworkError:
    """Return the error of a client whose server says `parts` and closes."""
    client, server = pair

    def serve() -> None:
        for part in parts:
            server.sendall(part)
        if close:
            server.recv(1024)
            server.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(DistNetworkError) as raised:
        connect_handshake(client, b"s", "store", PEER, Deadline(0.3))
    thread.join(timeout=30)
    return raised.value


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0", b"MESHDISX"])
def test_a_stranger_is_told_by_its_first_words(pair: Pair, words: bytes) -> None:
    error = answer_with(pair, words, close=False)
    assert str(error).startswith(f"{PEER} is not a meshdist store: it answered {words!r}"[:60])
    assert not isinstance(error, HandshakeBroken)


@pytest.mark.parametrize("words", [b"", b"MESH"])
def test_a_silent_server_is_given_up_at_the_deadline(pair: Pair, words: bytes) -> None:
    start = time.monotonic()
    error = answer_with(pair, words, close=False)
    assert str(error).startswith(
        f"{PEER} is not a meshdist store: it accepted the connection but did not answer within 0.3 s"
    )
    assert 0.3 <= time.monotonic() - start < 10


@pytest.mark.parametrize("words", [b"", b"MESHDIST\x01"])
def test_a_server_that_hangs_up_may_be_tried_again(pair: Pair, words: bytes) -> None:
    error = answer_with(pair, words)
    assert isinstance(error, HandshakeBroken)
    assert str(error).startswith(f"{PEER} is not a meshdist store, or is overloaded: it closed the connection")


def test_a_server_without_file_descriptors_may_be_tried_again(pair: Pair) -> None:
    error = answer_with(pair, busy_notice())
    assert isinstance(error, HandshakeBroken)
    assert "ulimit -n" in str(error)


def test_a_server_that_knows_the_job_but_not_the_secret_is_found_out(pair: Pair) -> None:
    error = answer_with(pair, b"MESHDIST" + bytes([PROTOCOL, 0, 0, 0]) + job_id(b"s") + bytes(64))
    assert "does not know its MESHDIST_SECRET" in str(error)


def test_a_server_of_another_version_says_so(pair: Pair) -> None:
    error = answer_with(pair, b"MESHDIST\x09\x03\x00\x00" + bytes(80))
    words = f"speaks version 9 of meshdist's protocol, this process {PROTOCOL}: install the same meshdist on all hosts"
    assert str(error) == f"{PEER} {words}"


@pytest.mark.parametrize("theirs", [PROTOCOL - 1, PROTOCOL + 1])
def test_versions_refuse_each_other_with_a_sentence(theirs: int) -> None:
    hello = bytearray(record_client(b"s")[0])
    hello[len(MAGIC)] = theirs
    handshake = ServerHandshake(b"s", "store")
    challenge = handshake.feed(bytes(hello))
    assert handshake.refusal == f"speaks version {theirs} of meshdist's protocol, not {PROTOCOL}"
    assert challenge[: len(MAGIC) + 1] == MAGIC + bytes([PROTOCOL]), "by which the client says the same"
    client, server = socket.socketpair()
    with client, server:
        server.sendall(challenge)
        words = f"speaks version {PROTOCOL} of meshdist's protocol, this process {theirs}: install the same meshdist"
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr("meshdist.security.handshake.PROTOCOL", theirs)
            with pytest.raises(DistNetworkError, match=words):
                connect_handshake(client, b"s", "store", PEER)


# The server and a client that is none of ours


def record_client(secret: bytes) -> tuple[bytes, bytes]:
    """Return the two messages of a client that got in."""
    client, server = socket.socketpair()
    with client, server, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect_handshake, client, secret, "store", PEER)
        handshake = ServerHandshake(secret, "store")
        messages = []
        for _ in range(2):
            messages.append(server.recv(handshake.wanted, socket.MSG_WAITALL))
            server.sendall(handshake.feed(messages[-1]))
        connecting.result(timeout=30)
        assert handshake.trusted
    return messages[0], messages[1]


def test_a_replayed_handshake_is_refused() -> None:
    hello, proof = record_client(b"s")
    handshake = ServerHandshake(b"s", "store")
    assert handshake.feed(hello)
    handshake.feed(proof)
    assert not handshake.trusted
    assert handshake.refusal == "does not know the job's secret"


def test_a_servers_proof_cannot_be_sent_back_to_it() -> None:
    hello, _ = record_client(b"s")
    handshake = ServerHandshake(b"s", "store")
    challenge = handshake.feed(hello)
    handshake.feed(challenge[-32:])
    assert not handshake.trusted


def test_messages_are_small_and_may_come_byte_by_byte() -> None:
    hello, _ = record_client(b"s")
    handshake = ServerHandshake(b"s", "store")
    replies = [handshake.feed(hello[at : at + 1]) for at in range(len(hello))]
    assert [len(reply) for reply in replies if reply] == [92]
    assert len(hello) + 92 + handshake.wanted <= 1024


@given(st.binary(min_size=1, max_size=92))
def test_garbage_never_gets_in(garbage: bytes) -> None:
    handshake = ServerHandshake(b"s", "store")
    handshake.feed(garbage[: handshake.wanted])
    assert not handshake.trusted
    if garbage[0] == 0x16:  # as a record of TLS begins
        assert handshake.refusal.startswith("speaks TLS")
    elif garbage[0] != ord("M"):
        assert handshake.refusal == "not a meshdist client"


def test_a_changed_hello_never_gets_in() -> None:
    hello, proof = record_client(b"s")
    for at in range(len(hello)):
        changed = bytearray(hello)
        changed[at] ^= 1
        handshake = ServerHandshake(b"s", "store")
        handshake.feed(bytes(changed))
        if handshake.refusal is None:
            handshake.feed(proof)
        assert not handshake.trusted


def test_a_silent_client_is_given_up_at_the_deadline(pair: Pair) -> None:
    with pytest.raises(DistNetworkError, match=r"did not prove itself in 0.2 s"):
        accept_handshake(pair[1], b"s", "store", Deadline(0.2))


def test_a_client_that_hangs_up(pair: Pair) -> None:
    pair[0].sendall(b"MESHDIST")
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(HandshakeBroken, match="closed the connection"):
        accept_handshake(pair[1], b"s", "store")


def test_a_client_that_is_no_client(pair: Pair) -> None:
    pair[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(DistNetworkError, match="not a meshdist client"):
        accept_handshake(pair[1], b"s", "store")
