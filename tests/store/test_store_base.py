"""A store of the user's own, and prefixes over it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdist.errors import DistStoreError
from meshdist.store import FileStore, HashStore, PrefixStore, Store, TCPStore


class DictStore(Store):
    """The least that a store of one's own has to define."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)


def test_four_methods_make_a_store() -> None:
    store = DictStore()
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["a", "b"]) == [b"1", b"2"]
    assert store.add("a", 1) == 2
    assert store.timeout == timedelta(minutes=5)
    assert not store.has_extended_api()
    with store:
        store.wait(["a"])


def test_wait_is_made_of_check() -> None:
    store = DictStore()
    thread = threading.Timer(0.02, store.set, ("key", "value"))
    thread.start()
    store.wait(["key"], 30)
    thread.join()
    with pytest.raises(DistStoreError, match=r"DictStore: key 'none' was not set within 0.02 s"):
        store.wait(["key", "none"], 0.02)
    store.set_timeout(0.01)
    with pytest.raises(DistStoreError, match=r"0.01 s"):
        store.get("none")


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("compare_set", ("k", "", "v")),
        ("append", ("k", "v")),
        ("delete_key", ("k",)),
        ("num_keys", ()),
        ("list_keys", ()),
    ],
)
def test_what_is_not_defined_says_so(method: str, args: tuple[str, ...]) -> None:
    for store in (DictStore(), PrefixStore("p", DictStore())):
        with pytest.raises(NotImplementedError, match=f"DictStore has no {method}"):
            getattr(store, method)(*args)


def test_a_store_must_define_its_basics() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Store()


def test_timeout_is_five_minutes_unless_set(tmp_path) -> None:
    assert HashStore().timeout == timedelta(minutes=5)
    with FileStore(tmp_path / "store") as store, TCPStore("127.0.0.1", 0, is_master=True) as master:
        assert store.timeout == master.timeout == timedelta(minutes=5)


def test_prefix_writes_prefix_slash_key() -> None:
    store = HashStore()
    part = PrefixStore("a", PrefixStore("b", store))
    part.set("key", "value")
    assert store.get("b/a/key") == b"value"
    assert part.prefix == "a"
    assert part.underlying_store.underlying_store is store
    store.set("other", "")
    assert part.list_keys() == ["key"]
    assert part.num_keys() == 2
    part.set_timeout(7)
    assert store.timeout == timedelta(seconds=7)


def test_prefixes_are_apart() -> None:
    store = HashStore()
    one, two = PrefixStore("1", store), PrefixStore("2", store)
    one.set("key", "one")
    assert not two.check(["key"])
    assert two.compare_set("key", "", "two") == b"two"
    assert one.get("key") == b"one"


def test_prefix_over_a_store_of_ones_own() -> None:
    part = PrefixStore("p", DictStore())
    part.multi_set(["a"], ["1"])
    assert part.add("a", 1) == 2
    assert part.multi_get(["a"]) == [b"2"]


def test_prefix_arguments() -> None:
    with pytest.raises(TypeError, match="store must be a Store"):
        PrefixStore("p", {})
    with pytest.raises(TypeError, match="prefix must be a str"):
        PrefixStore(HashStore(), "p")


KEYS = st.sampled_from(["a", "b"])
VALUES = st.sampled_from(["", "1", "-3", "text"])
CALLS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("add"), KEYS, st.integers(-3, 3)),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("delete_key"), KEYS),
)


@settings(max_examples=50)
@given(calls=st.lists(CALLS, max_size=20))
def test_a_file_replayed_equals_the_store_that_wrote_it(calls, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("replay") / "store"
    model = HashStore()

    def outcome(store: Store, name: str, args: tuple) -> object:
        try:
            return getattr(store, name)(*args)
        except ValueError as error:
            return str(error)

    with FileStore(path) as writer:
        for name, *args in calls:
            assert outcome(writer, name, args) == outcome(model, name, args)
        with FileStore(path) as reader:
            keys = sorted(model.list_keys())
            assert sorted(reader.list_keys()) == sorted(writer.list_keys()) == keys
            assert reader.multi_get(keys) == model.multi_get(keys)
