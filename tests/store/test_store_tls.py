"""A store with TLS: nothing can be read on the way, and both sides know each other by the job's authority."""

import os
import socket
import ssl
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from authorities import TLS_VARIABLES, Authority
from handshakes import begin_tls
from strangers import delay_nobody, is_hung_up
from until import until

from meshdist.errors import DistError, DistNetworkError
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S
from meshdist.store import TCPStore

LOOPBACK = "127.0.0.1"


@pytest.fixture(scope="session")
def strange_authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("strange_authority"))


@pytest.fixture
def with_tls(monkeypatch):
    """A function that sets the variables, or takes them away."""

    def use(variables):
        for name in TLS_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in (variables or {}).items():
            monkeypatch.setenv(name, value)

    return use


@pytest.fixture
def master(resources, with_tls, authority):
    with_tls(authority.sign("node"))
    return resources.enter_context(TCPStore(LOOPBACK, 0, is_master=True, timeout=30, secret=b"secret"))


def call(port):
    return socket.create_connection((LOOPBACK, port), 30)


def client(port, **more):
    return TCPStore(LOOPBACK, port, timeout=30, **{"secret": b"secret", **more})


@pytest.mark.slow
def test_300_strangers_that_begin_tls_and_are_silent_delay_nobody(master, resources):
    strangers = [resources.enter_context(call(master.port)) for _ in range(300)]
    begin_tls(strangers)
    with client(master.port) as member:
        delay_nobody(strangers, lambda: call(master.port), lambda: member.add("count", 1))


def num_open_files():
    return len(os.listdir("/proc/self/fd"))


class Tap:
    """Passes on what goes to a port and back, and remembers it."""

    def __init__(self, port):
        self.heard = bytearray()
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        self._target = port
        self._stack = ExitStack()
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self):
        with suppress(OSError):
            while True:
                near = self._stack.enter_context(self._listener.accept()[0])
                far = self._stack.enter_context(socket.create_connection((LOOPBACK, self._target)))
                for pair in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=pair))
                    self._threads[-1].start()

    def _pass_on(self, source, target):
        with suppress(OSError):
            while data := source.recv(65536):
                self.heard += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for thread in self._threads[1:]:
            thread.join()
        self._stack.close()


def test_nothing_can_be_read_on_the_way(master, with_tls):
    with Tap(master.port) as tap, client(tap.port) as store:
        store.set("the weights' key", "the secret weights")
        assert store.get("the weights' key") == b"the secret weights"
    assert len(tap.heard) > 1000
    assert b"weights" not in tap.heard
    assert b"MESHDIST" not in tap.heard
    with_tls(None)
    with (
        TCPStore(LOOPBACK, 0, is_master=True, secret=b"secret") as bare,
        Tap(bare.port) as tap,
        client(tap.port) as store,
    ):
        store.set("the weights' key", "the secret weights")
    assert b"the secret weights" in tap.heard


def test_much_passes_in_both_directions_at_once(master):
    value = os.urandom(8 << 20)
    with client(master.port) as one, client(master.port) as other:
        thread = threading.Thread(target=one.set, args=("one", value))
        thread.start()
        other.set("other", value[::-1])
        thread.join()
        assert other.get("one") == value
        assert one.get("other") == value[::-1]


def test_hosts_may_have_certificates_of_their_own(master, with_tls, authority):
    with_tls(authority.sign("node2"))
    with client(master.port) as store:
        assert store.add("count", 1) == 1


def test_a_last_will_is_executed(master):
    with client(master.port) as store:
        store.set_last_will({"gone": "client"})
    assert master.get("gone") == b"client"


def test_client_without_tls_is_told_so_at_once(master, with_tls):
    with_tls(None)
    began = time.monotonic()
    with pytest.raises(DistNetworkError) as caught:
        client(master.port)
    assert time.monotonic() - began < HANDSHAKE_TIMEOUT_S
    assert str(caught.value) == (
        f"the store at {LOOPBACK}:{master.port} requires TLS, but this process does not use it: set "
        "MESHDIST_ENCRYPTION and MESHDIST_TLS_CERT to the same values on all processes of the job"
    )
    refusals = []
    until(lambda: refusals.extend(master.take_refusals()) or refusals, "it is refused")
    assert "came without TLS" in refusals[0]


def test_store_without_tls_is_named_at_once(with_tls, authority):
    with TCPStore(LOOPBACK, 0, is_master=True, secret=b"secret") as master:
        with_tls(authority.sign("node"))
        began = time.monotonic()
        with pytest.raises(DistNetworkError) as caught:
            client(master.port)
        assert time.monotonic() - began < HANDSHAKE_TIMEOUT_S
        assert str(caught.value) == (
            f"the store at {LOOPBACK}:{master.port} does not use TLS, but this process does: set "
            "MESHDIST_ENCRYPTION and MESHDIST_TLS_CERT to the same values on all processes of the job"
        )
        refusals = []
        until(lambda: refusals.extend(master.take_refusals()) or refusals, "it is refused")
        assert "speaks TLS, but this side does not" in refusals[0]
        assert master.add("count", 1) == 1


@pytest.mark.parametrize("theirs", [True, False])
def test_certificate_of_another_authority_is_refused_at_once(master, with_tls, authority, strange_authority, theirs):
    node, strange = authority.sign("node"), strange_authority.sign("node")
    # A client that knows the job's authority but has not its signature; and one that knows another.
    known = node if theirs else strange
    with_tls({**strange, "MESHDIST_TLS_CA": known["MESHDIST_TLS_CA"]})
    began = time.monotonic()
    with pytest.raises(DistNetworkError) as caught:
        client(master.port)
    assert time.monotonic() - began < HANDSHAKE_TIMEOUT_S
    begin = f"no TLS with the store at {LOOPBACK}:{master.port}: "
    if theirs:
        begin += "it does not accept the certificate of this side, MESHDIST_TLS_CERT: "
    else:
        begin += "its certificate is not one of MESHDIST_TLS_CA: "
    assert str(caught.value).startswith(begin)
    assert master.add("count", 1) == 1


def test_tls_does_not_replace_the_secret(master):
    with pytest.raises(DistNetworkError, match="belongs to another job"):
        client(master.port, secret=b"another")


def test_a_client_whose_certificate_is_of_another_secret_is_reported(monkeypatch):
    monkeypatch.setenv("MESHDIST_ENCRYPTION", "all")
    with TCPStore(LOOPBACK, 0, is_master=True, secret=b"secret") as master:
        with pytest.raises(DistNetworkError, match="belongs to another job"):
            client(master.port, secret=b"another")
        refusals = []
        until(lambda: refusals.extend(master.take_refusals()) or refusals, "it is refused")
        assert refusals[0].endswith(", which belongs to another job: it has another MESHDIST_SECRET")


def test_client_that_shows_no_certificate_sees_nothing(master, resources, authority):
    context = ssl.create_default_context(cafile=authority.sign("node")["MESHDIST_TLS_CA"])
    context.check_hostname = False
    sock = resources.enter_context(socket.create_connection((LOOPBACK, master.port), timeout=10))
    with context.wrap_socket(sock) as stranger, pytest.raises(OSError, match="certificate required"):
        stranger.recv(100)  # TLS 1.3 says so behind the client's part of the handshake


def test_old_versions_of_tls_are_refused(master, resources, authority):
    context = ssl.create_default_context(cafile=authority.sign("node")["MESHDIST_TLS_CA"])
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    sock = resources.enter_context(socket.create_connection((LOOPBACK, master.port), timeout=10))
    with pytest.raises(ssl.SSLError, match="protocol version"):
        context.wrap_socket(sock)


def test_strangers_delay_nobody_and_are_hung_up_on_in_time(master, resources):
    files = num_open_files()
    hello = b"\x16\x03\x01\x02\x00\x01"  # as TLS begins, and nothing behind it
    with ExitStack() as stack:
        strangers = [stack.enter_context(call(master.port)) for _ in range(150)]
        for stranger in strangers[50:100]:
            stranger.sendall(hello)
        for stranger in strangers[100:]:
            stranger.shutdown(socket.SHUT_WR)

        def ask():
            with client(master.port) as store:
                store.add("count", 1)

        delay_nobody(strangers, lambda: call(master.port), ask)
    until(lambda: num_open_files() == files, "the server notices that the last client has gone")


def client_hello():
    outgoing = ssl.MemoryBIO()
    stranger = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="store")
    with suppress(ssl.SSLWantReadError):
        stranger.do_handshake()
    return outgoing.read()


def test_strangers_who_have_the_store_sign_delay_no_member(master, resources):
    store = resources.enter_context(client(master.port))
    store.set("key", "value")
    strangers = [resources.enter_context(call(master.port)) for _ in range(400)]
    answered = []

    def ask():
        while not done.is_set():
            answered.append(store.get("key"))

    done = threading.Event()
    asking = threading.Thread(target=ask)
    asking.start()
    hello = client_hello()
    for stranger in strangers:
        stranger.sendall(hello)
    # The server's side of the handshake has begun, or, on a busy machine, its time is over.
    answers = {stranger.recv(1) for stranger in strangers}
    done.set()
    asking.join()
    assert b"\x16" in answers
    assert answers <= {b"\x16", b""}
    assert len(answered) > 5  # while the strangers' turn came


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\x16" * 4096, b"\x16\x03\x01\xff\xff"])
def test_garbage_is_hung_up_on(master, resources, garbage):
    stranger = resources.enter_context(socket.create_connection((LOOPBACK, master.port), 30))
    with suppress(ConnectionError):
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
    began = time.monotonic()
    assert is_hung_up(stranger)
    assert time.monotonic() - began < HANDSHAKE_TIMEOUT_S
    assert master.add("count", 1) == 1


def test_silent_listener_costs_the_timeout_and_no_more(with_tls, authority, resources, monkeypatch):
    monkeypatch.setattr("meshdist.store.connect.HANDSHAKE_TIMEOUT_S", 60.0)
    with_tls(authority.sign("node"))
    listener = resources.enter_context(socket.create_server((LOOPBACK, 0)))
    port = listener.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(DistNetworkError, match=f"{LOOPBACK}:{port} is not a meshdist store"):
        TCPStore(LOOPBACK, port, timeout=0.5)
    assert 0.4 < time.monotonic() - began < 10


def test_talking_listener_is_quoted(with_tls, authority, resources):
    with_tls(authority.sign("node"))
    listener = resources.enter_context(socket.create_server((LOOPBACK, 0)))

    def answer():
        with suppress(OSError):
            sock = resources.enter_context(listener.accept()[0])
            sock.recv(100)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    # Where it is very quick, TLS has taken the first five bytes.
    with pytest.raises(DistNetworkError, match=r"is not a meshdist store: it answered b'(HTTP/)?1\.1 400"):
        TCPStore(LOOPBACK, listener.getsockname()[1], timeout=10)
    thread.join()


def test_nobody_home_fails_at_the_timeout(with_tls, authority, free_port):
    with_tls(authority.sign("node"))
    began = time.monotonic()
    with pytest.raises(DistNetworkError, match=f"no store answered at {LOOPBACK}:{free_port}"):
        TCPStore(LOOPBACK, free_port, timeout=0.5)
    assert 0.4 < time.monotonic() - began < 10


def test_store_at_its_end_is_noticed(master, with_tls):
    with client(master.port) as store:
        store.set("key", "value")
        master.close()
        with pytest.raises(DistNetworkError, match="lost the store"):
            store.get("key")


def test_close_ends_a_wait_of_another_thread(master):
    store = client(master.port)
    raised = []

    def wait():
        try:
            store.get("never")
        except DistError as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    store.close()
    thread.join(10)
    assert "was closed in this process" in raised[0]


@pytest.mark.parametrize("missing", TLS_VARIABLES)
def test_variables_are_set_all_or_none(with_tls, authority, missing):
    variables = {name: value for name, value in authority.sign("node").items() if name != missing}
    with_tls(variables)
    with pytest.raises(ValueError, match=f"but {missing} is not set"):
        TCPStore(LOOPBACK, 0, is_master=True)


def test_key_that_others_can_read_is_refused(with_tls, authority, tmp_path):
    variables = authority.sign("node")
    loose = tmp_path / "loose.key"
    loose.write_bytes(Path(variables["MESHDIST_TLS_KEY"]).read_bytes())
    loose.chmod(0o640)
    with_tls({**variables, "MESHDIST_TLS_KEY": str(loose)})
    with pytest.raises(ValueError, match="MESHDIST_TLS_KEY=.* must be readable by its owner alone"):
        TCPStore(LOOPBACK, 0, is_master=True)


@pytest.mark.parametrize("variable", TLS_VARIABLES)
@pytest.mark.parametrize("content", [None, b"", b"no PEM"])
def test_file_that_is_none_is_named(with_tls, authority, tmp_path, variable, content):
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with_tls({**authority.sign("node"), variable: str(path)})
    with pytest.raises(ValueError, match=f"{variable}={path}"):
        TCPStore(LOOPBACK, 0, is_master=True)


def test_key_of_another_certificate_is_named(with_tls, authority):
    other = authority.sign("node2")["MESHDIST_TLS_KEY"]
    with_tls({**authority.sign("node"), "MESHDIST_TLS_KEY": other})
    with pytest.raises(ValueError, match="must hold a certificate and its key"):
        TCPStore(LOOPBACK, 0, is_master=True)


def test_encrypted_key_asks_nobody_for_its_password(with_tls, authority, tmp_path):
    variables, path = authority.sign("node"), tmp_path / "encrypted.key"
    command = ["openssl", "ec", "-in", variables["MESHDIST_TLS_KEY"], "-aes128", "-passout", "pass:word", "-out", path]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    path.chmod(0o600)
    with_tls({**variables, "MESHDIST_TLS_KEY": str(path)})
    with pytest.raises(ValueError, match="MESHDIST_TLS_KEY is encrypted with a password"):
        TCPStore(LOOPBACK, 0, is_master=True)
