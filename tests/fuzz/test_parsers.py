"""Any bytes, at whatever reads bytes or files: it reads them or says what is wrong, and nothing else happens.

MESHDIST_FUZZ_EXAMPLES sets the number of examples of each test; where it is set they are new ones in every run.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from absurd import LIMIT_S, changed, fuzz, outcome
from hypothesis import given
from hypothesis import strategies as st

import meshdist as dist
from meshdist.backends.gloo.tcp import frames
from meshdist.backends.gloo.tcp.connection import Connection
from meshdist.cluster.nodelist import expand_nodelist
from meshdist.security.credentials import read_secret_file
from meshdist.security.handshake import ServerHandshake, connect_handshake
from meshdist.store.table import REQUEST, pack_fields, unpack_fields
from meshdist.system.deadline import Deadline
from meshdist.topology import Topology

pytestmark = pytest.mark.timeout(LIMIT_S)
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([2**16, 2**31 - 1, 2**31, 2**32 - 1]))
SECRET = b"a secret"
# What one handshake says, in the order of its messages.
HELLO_BYTES, CHALLENGE_BYTES, VERDICT_BYTES = 108, 92, 12


# ---- The store


@given(st.lists(st.binary(max_size=50), max_size=6))
@fuzz
def test_fields_come_back(fields: list[bytes]) -> None:
    assert unpack_fields(pack_fields(fields)) == fields


@given(st.lists(st.one_of(st.binary(max_size=12), LENGTHS.map(lambda size: struct.pack("!I", size)))).map(b"".join))
@fuzz
def test_fields_are_whole_or_refused(body: bytes) -> None:
    fields, message = outcome(lambda: unpack_fields(body))
    assert "cut off" in message if fields is None else pack_fields(fields) == body


@pytest.fixture(scope="module")
def store() -> Iterator[dist.TCPStore]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHDIST_SECRET", SECRET.decode())
        master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield master
        master.close()


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    body = draw(st.one_of(st.binary(max_size=60), st.lists(st.binary(max_size=9), max_size=4).map(pack_fields)))
    size = draw(st.one_of(st.just(len(body)), LENGTHS, st.just(2**64 - 1)))
    seconds = draw(st.sampled_from([0.0, 0.001, -1.0, float("nan"), float("inf")]))
    return REQUEST.pack(size, draw(st.integers(0, 30)), seconds, draw(st.integers(0, 3))) + body


@given(st.one_of(st.binary(max_size=80), st.lists(requests(), max_size=3).map(b"".join)))
@fuzz
def test_a_member_that_talks_nonsense_harms_nobody_else(store: dist.TCPStore, nonsense: bytes) -> None:
    with socket.create_connection(("127.0.0.1", store.port), timeout=10) as member:
        connect_handshake(member, SECRET, "store", "the store")
        member.settimeout(10)
        member.sendall(nonsense)
        member.shutdown(socket.SHUT_WR)
        while True:
            try:
                if not member.recv(4096):
                    break
            except ConnectionResetError:
                break
    store.set("key of the test", "well")
    assert store.get("key of the test") == b"well"


# ---- The handshake


def hello_of(secret: bytes) -> bytes:
    """Return what a client says first."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(dist.DistNetworkError):
            connect_handshake(ours, secret, "store", "nobody")
        return theirs.recv(4096)


HELLO = hello_of(SECRET)


@given(st.one_of(st.binary(max_size=300), changed(HELLO)), st.lists(st.integers(1, 100), max_size=9))
@fuzz
def test_no_bytes_get_a_stranger_in(words: bytes, pieces: list[int]) -> None:
    handshake = ServerHandshake(SECRET, "store")
    answered = 0
    for size in [*pieces, 300]:
        while words and handshake.refusal is None and not handshake.trusted:
            piece, words = words[: min(size, handshake.wanted)], words[min(size, handshake.wanted) :]
            answered += len(handshake.feed(piece))
            if size != 300:
                break
    assert not handshake.trusted
    assert answered <= CHALLENGE_BYTES + VERDICT_BYTES


def challenge() -> bytes:
    """Return what a server of the job answers."""
    return ServerHandshake(SECRET, "store").feed(HELLO)


@given(st.one_of(st.binary(max_size=300), changed(challenge() + bytes(VERDICT_BYTES))))
@fuzz
def test_no_bytes_pass_for_the_store(words: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(words)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(dist.DistNetworkError, match="a stranger"):
            connect_handshake(ours, SECRET, "store", "a stranger", Deadline(5.0))


# ---- Frames between ranks

FRAME = frames.pack(frames.EAGER, 1, 7, 5, 8, 3, b"float64")


@given(st.one_of(st.binary(min_size=frames.HEADER_BYTES, max_size=frames.HEADER_BYTES), changed(FRAME + bytes(8))))
@fuzz
def test_a_header_is_one_or_refused(data: bytes) -> None:
    if len(data) < frames.HEADER_BYTES:
        return
    try:
        header = frames.unpack(data, 0)
    except frames.FrameError:
        return
    assert frames.EAGER <= header[0] <= frames.BYE
    assert 0 <= frames.follows(header) <= 1 << 56


class Forgetful:
    """Takes every frame and keeps nothing."""

    def __init__(self) -> None:
        self.is_over = False

    def take(self, header: frames.Header, connection: Connection) -> tuple[None, None]:
        return None, None

    def on_closed(self, connection: Connection) -> None:
        self.is_over = True


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    sizes = st.one_of(st.integers(0, 30), st.sampled_from([1 << 20, 1 << 45, 1 << 55, 1 << 60]))
    stream = b""
    for _ in range(draw(st.integers(0, 4))):
        kind, size = draw(st.integers(0, 12)), draw(sizes)
        stream += frames.pack(kind, draw(st.integers(0, 9)), 7, 0, size, 1, b"int8") + bytes(min(size, 30))
    return stream + draw(st.binary(max_size=60))


@given(streams())
@fuzz
def test_a_connection_reads_frames_or_ends(stream: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        sink = Forgetful()
        connection = Connection(ours, sink, lambda reads, writes: None)
        theirs.sendall(stream)
        theirs.shutdown(socket.SHUT_WR)
        for _ in range(100):
            connection.read()
            if connection.ended is not None:
                break
        assert sink.is_over


# ---- Files and variables


@pytest.mark.skipif(sys.platform == "win32", reason="files have no modes there")
@given(
    st.one_of(st.binary(max_size=60), st.binary(max_size=9).map(b"unguessable".__add__), st.just(b"x" * 4097)),
    st.one_of(st.integers(0, 0o777), st.just(0o600)),
)
@fuzz
def test_a_secret_file_is_safe_or_refused(tmp_path: Path, content: bytes, mode: int) -> None:
    path = tmp_path / "secret"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
    secret, message = outcome(lambda: read_secret_file(str(path)))
    if secret is None:
        assert str(path) in message
        assert "unguessable" not in message
    else:
        assert secret == content.strip()
        assert secret
        assert not mode & 0o077


NAMES = st.text("nodegpu-019", min_size=1, max_size=6)


@given(st.text("node[]-,0123456789 \n²٣", max_size=30))
@fuzz
def test_a_nodelist_is_one_or_refused(text: str) -> None:
    names, message = outcome(lambda: expand_nodelist(text))
    if names is None:
        assert message.startswith("the nodelist")
    else:
        assert names
        assert all(names)
        assert not any(set("[],") & set(name) for name in names)


@given(st.lists(st.tuples(NAMES, st.integers(0, 99), st.integers(0, 20)), min_size=1, max_size=4))
@fuzz
def test_a_nodelist_stands_for_its_hosts(ranges: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{name}[{first}-{first + count}]" for name, first, count in ranges)
    wanted = [
        name + str(number).zfill(len(str(first)))
        for name, first, count in ranges
        for number in range(first, first + count + 1)
    ]
    assert expand_nodelist(text) == wanted


LINES = [
    "[[host]]",
    "[[part]]",
    "[[measured]]",
    "[network]",
    'name = "a"',
    'name = "b"',
    'kind = "host"',
    'kind = "network"',
    'parent = "a"',
    'parent = "b"',
    "ranks = 2",
    "ranks = [0, 1]",
    "ranks = [1, 1]",
    "ranks = -1",
    "ranks = true",
    "ranks = [2, 'x']",
    "count = 3",
    "count = 0",
    "sockets = 2",
    "gpus = 1",
    "cores = 4",
    "cores = 1.5",
    "network = { latency_us = 5, bandwidth_gb_s = 10 }",
    "link = { latency_us = 5, bandwidth_gb_s = 10 }",
    "memory = { latency_s = nan, bandwidth = inf }",
    "link = { latency_us = -5, bandwidth_gb_s = 0 }",
    "link = 3",
    "latency_us = 1",
    "bandwidth_gb_s = 1e400",
    "name = ''",
    "name = [[",
    "colour = 'red'",
]


@given(
    st.one_of(
        st.binary(max_size=40),
        st.lists(st.one_of(st.sampled_from(LINES), st.text(max_size=6)), max_size=14).map(
            lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass")
        ),
    )
)
@fuzz
def test_a_topology_is_one_or_refused(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("tomllib", reason="Python 3.10 has no TOML of its own")
    path = tmp_path / "topology.toml"
    path.write_bytes(content)
    topology, message = outcome(lambda: Topology.load(path))
    assert str(path) in message if topology is None else topology.num_ranks >= 0
