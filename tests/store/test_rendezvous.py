"""From an init method to a store, a rank and a world size."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from meshdist.bootstrap.rendezvous import register_rendezvous_handler, rendezvous
from meshdist.errors import DistNetworkError, DistStoreError
from meshdist.store import HashStore, PrefixStore, TCPStore

LOOPBACK = "127.0.0.1"


def meet(*calls: tuple) -> None:
    """Have all ranks meet at once, and check that they share a store."""
    with ThreadPoolExecutor(len(calls)) as pool:
        results = [result.result(timeout=30) for result in [pool.submit(rendezvous, *call) for call in calls]]
    stores = [store for store, _, _ in results]
    assert [rank for _, rank, _ in results] == list(range(len(calls)))
    assert {world_size for _, _, world_size in results} == {len(calls)}
    stores[0].set("key", "value")
    assert [store.get("key") for store in stores] == [b"value"] * len(calls)
    for store in reversed(stores):
        assert store.timeout == timedelta(seconds=20)
        store.close()


def test_env(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    meet(("env://", 0, -1, 20), ("env://", 1, -1, 20.0))
    monkeypatch.setenv("RANK", "7")
    meet(("env://", 0, 2, 20), ("env://", 1, 2, timedelta(seconds=20)))
    meet(("env://?rank=0", -1, 2, 20), ("env://?rank=1", -1, 2, 20))


def test_env_alone_needs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    store, rank, world_size = rendezvous("env://")
    assert (rank, world_size, store.timeout) == (0, 1, timedelta(minutes=30))
    store.close()


def test_env_names_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT, RANK are missing") as raised:
        rendezvous("env://", world_size=2)
    assert "meshrun" in str(raised.value)
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    with pytest.raises(ValueError, match="rendezvous: MASTER_PORT, WORLD_SIZE are missing"):
        rendezvous("env://", rank=0)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["one", "1.0", "2 ranks"])
def test_env_names_what_is_no_number(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for good, number in {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(good, number)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"variable {name} must be a whole number, got '{value}'"):
        rendezvous("env://")


def test_under_a_launcher_every_rank_is_a_client(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    with TCPStore(LOOPBACK, 0, is_master=True) as agent:
        monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
        monkeypatch.setenv("MASTER_PORT", str(agent.port))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MESHDIST_AGENT_STORE", f"{LOOPBACK}:{agent.port}")
        meet(("env://", 0, 2, 20), ("env://", 1, 2, 20))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        meet(("env://", 0, 2, 20), ("env://", 1, 2, 20))
        assert sorted(agent.list_keys()) == ["worker/attempt_0/key", "worker/attempt_1/key"]
        store, _, _ = rendezvous("env://", 0, 2)
        assert isinstance(store, PrefixStore)
        # A script that sets another port means a store of its own.
        monkeypatch.setenv("MASTER_PORT", str(free_port))
        meet(("env://", 0, 2, 20), ("env://", 1, 2, 20))


def test_tcp(free_port: int) -> None:
    url = f"tcp://{LOOPBACK}:{free_port}"
    meet((url, 0, 3, 20), (url, 1, 3, 20), (url + "/", 2, 3, 20))
    meet((f"{url}?rank=0&world_size=2", -1, -1, 20), (f"{url}?world_size=2", 1, -1, 20))
    meet((f"TCP{url[3:]}", 0, 1, 20))


def test_tcp_over_ipv6() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as sock:
            port = sock.getsockname()[1]
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    meet((f"tcp://[::1]:{port}", 0, 2, 20), (f"tcp://[::1]:{port}", 1, 2, 20))


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "with space"
    meet((f"file://{path}", 0, 2, 20), (f"file://{tmp_path}/with%20space?rank=1", -1, 2, 20))
    assert not path.exists()


def test_file_in_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(DistStoreError, match=f"directory {tmp_path}/none does not exist"):
        rendezvous(f"file://{tmp_path}/none/store", 0, 2)


@pytest.mark.parametrize(
    ("url", "rank", "world_size", "message"),
    [
        ("tcp://127.0.0.1:29500", -1, -1, "rank and world_size missing"),
        ("tcp://127.0.0.1:29500", 0, -1, "world_size missing"),
        ("tcp://127.0.0.1:29500?world_size=2", -1, -1, "rank missing"),
        ("tcp://127.0.0.1:29500?rank=1", 1, 2, r"rank is given twice \(1 and 1\)"),
        ("tcp://127.0.0.1:29500?world_size=2", 1, 3, r"world_size is given twice \(3 and 2\)"),
        ("tcp://127.0.0.1:29500?rank=1&rank=1", -1, 2, "rank is given twice"),
        ("tcp://127.0.0.1:29500?rank=x", -1, 2, "rank must be a whole number, got 'x'"),
        ("tcp://127.0.0.1:29500?rank=", -1, 2, "rank must be a whole number, got ''"),
        ("tcp://127.0.0.1:29500?rank=-1", -1, 2, "rank must not be negative"),
        ("tcp://127.0.0.1:29500?size=2", 0, 2, "may have rank, world_size and group_name, got 'size'"),
        ("tcp://127.0.0.1:29500", 2, 2, "rank must be between 0 and world_size - 1 = 1, got 2"),
        ("tcp://127.0.0.1:29500", -2, 2, "rank must be between 0 and world_size - 1 = 1, got -2"),
        ("tcp://127.0.0.1:29500", 0, 0, "world_size must be at least 1, got 0"),
        ("tcp://127.0.0.1:29500", 0, -5, "world_size must be at least 1, got -5"),
        ("tcp://127.0.0.1", 0, 2, "write tcp://host:port"),
        ("tcp://:29500", 0, 2, "write tcp://host:port"),
        ("tcp://127.0.0.1:99999", 0, 2, "write tcp://host:port"),
        ("tcp://127.0.0.1:port", 0, 2, "write tcp://host:port"),
        ("tcp://127.0.0.1:29500/path", 0, 2, "write tcp://host:port"),
        ("tcp://[::1", 0, 2, r"tcp://\[::1"),
        ("tcp://127.0.0.1:0", 0, 2, "the port must be between 1 and 65535"),
        ("tcp://127.0.0.1:29500?group_name=a&group_name=b", 0, 2, "group_name is given twice"),
        ("file:///tmp/store", -1, -1, "world_size missing"),
        ("file:///tmp/store", 0, -1, "world_size missing"),
        ("tcp://239.1.2.3:29500", -1, -1, "world_size missing"),
        ("tcp://239.1.2.3:29500", 2, 2, "rank must be between 0 and world_size - 1 = 1, got 2"),
        ("tcp://239.1.2.3", -1, 2, "write tcp://host:port"),
        ("tcp://[ff15::1]:0", -1, 2, "the port must be between 1 and 65535"),
        ("file:///tmp/store", 2, 2, "rank must be between"),
        ("file://tmp/store", 0, 2, "three slashes"),
        ("file://", 0, 2, "three slashes"),
        ("ftp://host", 0, 2, "must begin with one of .*env://, .*tcp://, got 'ftp://host'"),
        ("env", 0, 2, "must begin with one of"),
        ("", 0, 2, "must begin with one of"),
    ],
)
def test_mistakes(url: str, rank: int, world_size: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshdist.bootstrap.rendezvous._TELL_WITHIN_S", 0.05)  # there is nobody to tell
    with pytest.raises(ValueError, match=message):
        rendezvous(url, rank, world_size)


def test_env_ranks_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshdist.bootstrap.rendezvous._TELL_WITHIN_S", 0.05)
    for name, value in {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": "29500", "RANK": "2", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="rank must be between 0 and world_size - 1 = 1, got 2"):
        rendezvous("env://")
    monkeypatch.setenv("MASTER_PORT", "70000")
    with pytest.raises(ValueError, match="port must be between"):
        rendezvous("env://", rank=1)


def test_an_init_method_is_text() -> None:
    with pytest.raises(TypeError, match="init_method must be a str"):
        rendezvous(None)


def test_the_url_is_named_as_torch_names_it(tmp_path: Path) -> None:
    store, rank, world_size = rendezvous(url=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert (rank, world_size) == (0, 1)
    store.close()


def test_nobody_home(free_port: int) -> None:
    with pytest.raises(DistNetworkError, match=f"{LOOPBACK}:{free_port} within 0.3 s"):
        rendezvous(f"tcp://{LOOPBACK}:{free_port}", 1, 2, 0.3)


def test_a_scheme_of_ones_own() -> None:
    store = HashStore()
    seen = []

    def handler(url: str, rank: int, world_size: int, timeout_s: float) -> tuple[HashStore, int, int]:
        seen.append((url, rank, world_size, timeout_s))
        return store, 3, 4

    register_rendezvous_handler("bulletin", handler)
    assert rendezvous("bulletin://board?x=1", timeout=timedelta(seconds=5)) == (store, 3, 4)
    assert seen == [("bulletin://board?x=1", -1, -1, 5.0)]
    with pytest.raises(ValueError, match="bulletin://, env://, file://, mpi://, tcp://"):
        rendezvous("other://")
    for scheme in ("bulletin", "TCP"):
        with pytest.raises(ValueError, match=f"'{scheme}' has a rendezvous handler already"):
            register_rendezvous_handler(scheme, handler)
