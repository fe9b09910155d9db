"""The end of a store over TCP: what is left, and which side outlives which."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from until import until

from meshdist.errors import DistNetworkError, DistStoreError
from meshdist.security.handshake import HandshakeUnanswered
from meshdist.store import TCPStore
from meshdist.store import connect as connect_module
from meshdist.store.tcp import connect_again

LOOPBACK = "127.0.0.1"


@pytest.fixture
def master(resources: ExitStack) -> TCPStore:
    return resources.enter_context(TCPStore(LOOPBACK, 0, is_master=True, timeout=30))


def run_script(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )


def test_calls_after_close(master: TCPStore) -> None:
    client = TCPStore(LOOPBACK, master.port)
    client.close()
    with pytest.raises(DistStoreError, match="was closed in this process"):
        client.get("key")


def test_clients_notice_the_masters_end() -> None:
    master = TCPStore(LOOPBACK, 0, is_master=True)
    with TCPStore(LOOPBACK, master.port, timeout=60) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, "key")
        client.set("other", "value")
        master.close()
        with pytest.raises(DistNetworkError, match=f"lost the store at {LOOPBACK}:{master.port}"):
            waiting.result(timeout=30)
        with pytest.raises(DistNetworkError, match="lost the store"):
            client.set("key", "value")


@pytest.mark.usefixtures("_nothing_left")
def test_closing_leaves_nothing() -> None:
    for _ in range(20):
        with TCPStore(LOOPBACK, 0, is_master=True) as master, TCPStore(LOOPBACK, master.port, timeout=30) as client:
            client.set("key", "value")
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(client.get, ["key"] * 8))


@pytest.mark.usefixtures("_nothing_left")
def test_a_failed_start_leaves_nothing(free_port: int) -> None:
    for arguments in ((LOOPBACK, 0, 2, True, 0.01), (LOOPBACK, free_port, None, False, 0.01)):
        with pytest.raises((DistStoreError, DistNetworkError)):
            TCPStore(*arguments)


@pytest.mark.usefixtures("_nothing_left")
def test_a_forgotten_store_is_closed() -> None:
    master = TCPStore(LOOPBACK, 0, is_master=True)
    client = TCPStore(LOOPBACK, master.port)
    client.set("key", "value")
    del master, client
    gc.collect()


@pytest.mark.usefixtures("_nothing_left")
def test_a_multi_tenant_store_leaves_nothing() -> None:
    def server_threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("meshdist-store")]

    before = server_threads()
    with TCPStore(LOOPBACK, 0, is_master=True, multi_tenant=True):
        (server,) = (thread for thread in server_threads() if thread not in before)
    server.join(timeout=30)


def test_the_interpreter_ends_with_a_store_open_and_a_thread_in_get() -> None:
    start = time.monotonic()
    done = run_script(
        "import threading; from meshdist.store import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True)\n"
        "def wait():\n"
        "    try: store.get('never')\n"
        "    except RuntimeError: pass\n"
        "threading.Thread(target=wait, daemon=True).start()\n"
        "store.set('key', 'value')\n"
        "print(store.get('key').decode())"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "value\n", "")
    assert time.monotonic() - start < 20


def test_ctrl_c_ends_a_wait() -> None:
    done = run_script(
        "import signal, threading; from meshdist.store import TCPStore\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # of tests in the background, it is ignored
        "store = TCPStore('127.0.0.1', 0, is_master=True)\n"
        "threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()\n"
        "try: store.get('never')\n"
        "except KeyboardInterrupt: print('interrupted')\n"
        "store.set('key', 'value'); print(store.get('key').decode())"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\nvalue\n", "")


def test_a_forked_child_uses_the_store_and_leaves_it_to_the_parent() -> None:
    done = run_script(
        "import os; from meshdist.store import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, timeout=30)\n"
        "store.set('key', 'value')\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    assert store.get('key') == b'value'\n"
        "    store.add('children', 1)\n"
        "    raise SystemExit(0)\n"  # ends as usual, with all that is done at exit
        "assert os.waitpid(child, 0)[1] == 0\n"
        "print(store.get('children').decode(), store.add('count', 1))"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 1\n", "")


def test_a_forked_child_does_not_keep_the_port() -> None:
    done = run_script(
        "import os; from meshdist.store import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, timeout=30)\n"
        "client = TCPStore('127.0.0.1', store.port, timeout=30)\n"
        "read, write = os.pipe()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.close(write); os.read(read, 1); os._exit(0)\n"
        "store.close()\n"
        "try: client.get('key')\n"
        "except RuntimeError as error: print(type(error).__name__)\n"
        "TCPStore('127.0.0.1', store.port, is_master=True, timeout=30).close()\n"
        "os.close(write); os.waitpid(child, 0)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "DistNetworkError\n", "")


FEW_FILES = """
import resource, sys
from meshdist.store import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, timeout=30)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_server_without_file_descriptors_says_so_and_goes_on(resources: ExitStack) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    server = resources.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", FEW_FILES], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    )
    assert server.stdin is not None
    assert server.stdout is not None
    resources.callback(server.stdin.close)
    port = int(server.stdout.readline())
    clients: list[TCPStore] = []

    def come_until_refused() -> None:
        for _ in range(60):
            clients.append(resources.enter_context(TCPStore(LOOPBACK, port, timeout=1.0)))

    with pytest.raises(DistNetworkError, match="no file descriptor left: raise `ulimit -n` there"):
        come_until_refused()
    assert clients[0].add("count", 1) == 1
    clients.pop().close()
    with TCPStore(LOOPBACK, port, timeout=30) as client:
        assert client.add("count", 1) == 2


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            HandshakeUnanswered("no answer; choose another port"),
            "lost the store at .*: it does not answer on a new connection; is its process stopped",
        ),
        (TimeoutError("timed out"), "lost the store at .*: timed out; is the network to its host cut"),
    ],
)
def test_a_store_that_takes_no_other_connection_is_no_stranger_and_has_not_ended(
    master: TCPStore, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def unanswered(*_: object) -> None:
        raise error

    client = TCPStore(LOOPBACK, master.port)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, ["key"], 20.0)
        until(lambda: not client._client._idle, "the only connection is taken")  # type: ignore[union-attr]
        with monkeypatch.context() as patch:
            patch.setattr("meshdist.store.client.connect_once", unanswered)
            with pytest.raises(DistNetworkError, match=words):
                client.check(["key"])
        master.set("key", "")
        waiting.result(20)


def test_another_client_of_a_store_waits_while_its_host_is_silent(
    master: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, attempts = connect_module.connect_once, []

    def answers_at_the_third(*args: Any) -> socket.socket:
        attempts.append(args)
        if len(attempts) < 3:
            raise HandshakeUnanswered("it accepted the connection but did not answer; choose another port")
        return connect(*args)

    monkeypatch.setattr(connect_module, "connect_once", answers_at_the_third)
    with connect_again(master, 20.0) as client:
        client.set("key", "there")
    assert master.get("key") == b"there"
    assert len(attempts) == 3
    attempts.clear()
    with pytest.raises(
        DistNetworkError, match="does not answer on a new connection within 0 s; is its process stopped"
    ):
        connect_again(master, 0.0)
