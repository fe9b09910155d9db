"""What scripts rely on in the stores beside the calls: names, forms of a call, nesting, what a system lacks."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from meshdist.errors import DistStoreError
from meshdist.store import FileStore, HashStore, PrefixStore, Store, TCPStore

pytestmark = pytest.mark.timeout(60)


def test_both_forms_of_wait(store: Store, other: Store) -> None:
    store.set("a", "1")
    store.multi_set(["b", "c"], ["2", "3"])
    assert other.wait(["a", "b"]) is None
    assert other.wait(["a", "c"], timedelta(seconds=10)) is None
    for timeout in (timedelta(milliseconds=20), 0.02):
        with pytest.raises(DistStoreError, match="none' was not set within 0.02 s"):
            store.wait(["a", "none"], timeout)


def test_arguments_by_name(store: Store) -> None:
    store.set(key="count", value="1")
    assert store.add(key="count", amount=2) == 3
    assert store.get(key="count") == b"3"
    assert store.compare_set(key="count", expected_value="3", desired_value="4") == b"4"
    store.append(key="count", value="2")
    assert store.check(keys=["count"])
    store.wait(keys=["count"], timeout=1.0)
    store.multi_set(keys=["x"], values=["y"])
    assert store.multi_get(keys=["x", "count"]) == [b"y", b"42"]
    assert store.delete_key(key="x")
    store.set_timeout(timeout=timedelta(seconds=3))
    assert store.timeout == timedelta(seconds=3)


def test_arguments_of_the_constructors() -> None:
    names = "host_name port world_size is_master timeout wait_for_workers multi_tenant master_listen_fd use_libuv"
    parameters = inspect.signature(TCPStore).parameters
    assert [name for name in parameters if name != "secret"] == names.split()
    defaults = [parameter.default for parameter in parameters.values()]
    assert defaults[2:8] == [None, False, 300.0, True, False, None]
    assert list(inspect.signature(FileStore).parameters)[:2] == ["file_name", "world_size"]
    assert inspect.signature(FileStore).parameters["world_size"].default == -1
    assert list(inspect.signature(PrefixStore).parameters) == ["prefix", "store"]
    assert not inspect.signature(HashStore).parameters


@pytest.mark.parametrize("use_libuv", [True, False])
def test_either_kind_of_server_may_be_asked_for(use_libuv: bool) -> None:
    with TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20), use_libuv=use_libuv) as store:
        assert store.port > 0
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_prefix_in_a_prefix(store: Store, other: Store) -> None:
    inner = PrefixStore("inner", PrefixStore("outer", store))
    inner.set("key", "1")
    assert other.get("outer/inner/key") == b"1"
    assert inner.add("key", 1) == 2
    inner.append("key", "0")
    assert inner.compare_set("key", "20", "x") == b"x"
    inner.multi_set(["a", "b"], ["1", "2"])
    assert PrefixStore("outer", other).multi_get(["inner/a", "inner/b"]) == [b"1", b"2"]
    assert sorted(inner.list_keys()) == ["a", "b", "key"]
    assert inner.num_keys() == store.num_keys() == 3
    assert inner.check(["a"])
    assert not store.check(["a"])
    assert inner.delete_key("a")
    assert not inner.delete_key("a")
    inner.set_timeout(0.05)
    assert inner.timeout == timedelta(milliseconds=50)
    with pytest.raises(DistStoreError, match="outer/inner/none' was not set within 0.05 s"):
        inner.get("none")
    with pytest.raises(ValueError, match="outer/inner/b'|outer/inner/key'"):
        inner.add("key", 1)


WITHOUT_LOCKS = """
import sys
sys.modules["fcntl"] = None
import meshdist
store = meshdist.TCPStore("127.0.0.1", 0, is_master=True, timeout=20)
store.set("key", "value")
print(store.get("key").decode())
store.close()
for use in (lambda path: meshdist.FileStore(path), lambda path: meshdist.rendezvous(f"file://{path}", 0, 1)):
    try:
        use(sys.argv[1])
    except meshdist.DistStoreError as error:
        print(error)
"""


def test_a_system_without_file_locks_has_all_but_the_file_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_LOCKS, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert process.returncode == 0, process.stderr
    value, *errors = process.stdout.splitlines()
    assert value == "value"
    assert (
        errors
        == [
            f"FileStore {path}: this system (linux) has no fcntl file locks; use a TCPStore, or an init_method of"
            " tcp://host:port"
        ]
        * 2
    )
    assert not path.exists()
