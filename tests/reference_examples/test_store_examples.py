"""The documented examples of stores. Where a page waits for 10 or 30 seconds, these wait for a tenth of one."""

import threading
from datetime import timedelta

import pytest
from worlds import worker_rank

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
SOON = timedelta(seconds=0.1)


def serve_or_ask(port, size):
    is_server = worker_rank() == 0
    timeout = timedelta(seconds=30)
    with dist.TCPStore("127.0.0.1", port, size, is_server, timeout) as store:
        if is_server:
            store.set("first_key", "first_value")
        found = store.get("first_key")
        store.set(f"left by {worker_rank()}", "")
        if is_server:
            store.wait([f"left by {rank}" for rank in range(size)])  # the store ends with this process
    return found


def test_server_and_clients(bare, port):
    bare.start(serve_or_ask, port, bare.size)
    assert bare.gather() == [b"first_value"] * bare.size


def share_a_file(path, size):
    with dist.FileStore(path, size) as store:
        if worker_rank() == 0:
            store.set("first_key", "first_value")
        return store.get("first_key")


def test_file_store(bare, tmp_path):
    bare.start(share_a_file, str(tmp_path / "filestore"), bare.size)
    assert bare.gather() == [b"first_value"] * bare.size


def test_two_views_of_one_file(tmp_path):
    path = str(tmp_path / "filestore")
    with dist.FileStore(path, 2) as store1, dist.FileStore(path, 2) as store2:
        store1.set("first_key", "first_value")
        assert store2.get("first_key") == b"first_value"


def test_hash_store_is_used_by_other_threads():
    store, found = dist.HashStore(), []
    reader = threading.Thread(target=lambda: found.append(store.get("first_key")))
    reader.start()
    store.set("first_key", "first_value")
    reader.join(10)
    assert found == [b"first_value"]


def test_prefix_store_puts_a_prefix_before_each_key():
    store = dist.HashStore()
    dist.PrefixStore("part", store).set("first_key", "first_value")
    assert store.get("part/first_key") == b"first_value"


@pytest.fixture(params=["tcp", "file", "hash"])
def store(request, tmp_path):
    """A store of each kind: the pages take a TCPStore, and say that the others will do."""
    makers = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30)),
        "file": lambda: dist.FileStore(str(tmp_path / "filestore")),
        "hash": dist.HashStore,
    }
    with makers[request.param]() as made:
        yield made


def test_set_and_get(store):
    store.set("first_key", "first_value")
    assert store.get("first_key") == b"first_value"
    store.set("first_key", "second_value")
    assert store.get("first_key") == b"second_value"


def test_add_counts(store):
    assert store.add("first_key", 1) == 1
    assert store.add("first_key", 6) == 7
    assert store.get("first_key") == b"7"


def test_add_to_text_is_refused(store):
    store.set("first_key", "first_value")
    with pytest.raises(ValueError, match="first_key"):
        store.add("first_key", 1)


def test_compare_set(store):
    store.set("key", "first_value")
    assert store.compare_set("key", "first_value", "second_value") == b"second_value"
    assert store.get("key") == b"second_value"
    assert store.compare_set("key", "first_value", "third_value") == b"second_value"
    assert store.compare_set("new_key", "", "value") == b"value"


def test_wait_with_a_timeout_of_its_own(store):
    with pytest.raises(dist.DistStoreError, match="bad_key"):
        store.wait(["bad_key"], SOON)


def test_wait_and_get_take_the_timeout_of_the_store(store):
    store.set_timeout(SOON)
    assert store.timeout == SOON
    with pytest.raises(dist.DistStoreError, match="bad_key"):
        store.wait(["bad_key"])
    with pytest.raises(dist.DistStoreError, match="bad_key"):
        store.get("bad_key")


def test_num_keys_counts_what_was_set(store):
    # The page gets 2: torch's stores may add a key of their own, which is counted. There is none here.
    store.set("first_key", "first_value")
    assert store.num_keys() == 1


def test_delete_key(store):
    # The page calls `set` without a value, which no store takes.
    store.set("first_key", "first_value")
    assert store.delete_key("first_key") is True
    assert store.delete_key("bad_key") is False
