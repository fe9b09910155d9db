"""Stores to test: each fixture closes what it opened."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from authorities import TLS_VARIABLES, Authority

from meshdist.store import FileStore, HashStore, PrefixStore, Store, TCPStore

VARIABLES = (
    "MESHDIST_SECRET",
    "MESHDIST_INSECURE",
    "MESHDIST_AGENT_STORE",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    *TLS_VARIABLES,
)

Opener = Callable[[], Store]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _hash(stack: ExitStack, folder: Path) -> Opener:
    store = HashStore()
    return lambda: store


def _file(stack: ExitStack, folder: Path) -> Opener:
    return lambda: stack.enter_context(FileStore(folder / "store"))


def _tcp(stack: ExitStack, folder: Path) -> Opener:
    master = stack.enter_context(TCPStore("127.0.0.1", 0, is_master=True, timeout=60))
    return lambda: master


def _tcp_client(stack: ExitStack, folder: Path) -> Opener:
    master = stack.enter_context(TCPStore("127.0.0.1", 0, is_master=True, timeout=60))
    return lambda: stack.enter_context(TCPStore("127.0.0.1", master.port, timeout=60))


OPENERS = {"hash": _hash, "file": _file, "tcp": _tcp, "tcp-client": _tcp_client, "tls-client": _tcp_client}


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority of a job, which has signed a certificate for `node`."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(params=[f"{prefix}{kind}" for prefix in ("", "prefix-") for kind in OPENERS])
def opener(request: pytest.FixtureRequest, resources: ExitStack, tmp_path: Path) -> Opener:
    """Open one more view of the same store, of each kind in turn."""
    name: str = request.param
    if "tls" in name:
        authority: Authority = request.getfixturevalue("authority")
        monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        for variable, value in authority.sign("node").items():
            monkeypatch.setenv(variable, value)
    open_one = OPENERS[name.removeprefix("prefix-")](resources, tmp_path)
    if name.startswith("prefix-"):
        return lambda: PrefixStore("part", open_one())
    return open_one


@pytest.fixture
def store(opener: Opener) -> Store:
    return opener()


@pytest.fixture
def other(opener: Opener, store: Store) -> Store:
    """The same store, as another process or thread would see it."""
    return opener()


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port of 127.0.0.1 on which nobody listens, and that nobody else is given meanwhile."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the test itself may listen on it
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_store_threads() -> int:
    return sum(thread.name.startswith("meshdist-store") for thread in threading.enumerate())


@pytest.fixture
def _nothing_left() -> Iterator[None]:
    files, threads = num_open_files(), num_store_threads()
    yield
    assert num_store_threads() == threads
    assert num_open_files() == files
