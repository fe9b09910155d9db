"""What every store does, through two views of it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from meshdist.errors import DistStoreError
from meshdist.store import Store


def test_get_returns_what_set_stored(store: Store, other: Store) -> None:
    store.set("text", "grün")
    store.set("bytes", b"\x00\xff")
    store.set("array", bytearray(b"ab"))
    store.set("empty", "")
    assert other.get("text") == "grün".encode()
    assert other.multi_get(["bytes", "array", "empty"]) == [b"\x00\xff", b"ab", b""]
    assert type(other.get("array")) is bytes


def test_set_replaces(store: Store, other: Store) -> None:
    store.set("key", "old")
    assert other.get("key") == b"old"
    other.set("key", "new")
    assert store.get("key") == b"new"


def test_large_value(store: Store, other: Store) -> None:
    value = bytes(range(256)) * (5 << 12)
    store.set("large", value)
    assert other.get("large") == value


def test_strange_keys(store: Store, other: Store) -> None:
    keys = ["", "a/b", "/", "with space", "line\nbreak", "schlüssel", "k" * 10_000]
    store.multi_set(keys, [str(number) for number in range(len(keys))])
    assert other.multi_get(keys) == [b"%d" % number for number in range(len(keys))]
    assert sorted(other.list_keys()) == sorted(keys)


def test_add_counts_as_decimal_text(store: Store, other: Store) -> None:
    assert store.add("count", 1) == 1
    assert other.add("count", 41) == 42
    assert store.get("count") == b"42"
    assert store.add("count", -50) == -8
    assert other.get("count") == b"-8"
    other.set("count", "7")
    assert store.add("count", 0) == 7


def test_add_beyond_64_bits(store: Store, other: Store) -> None:
    store.set("count", str(2**63))
    assert other.add("count", 2**70) == 2**63 + 2**70


@pytest.mark.parametrize("text", ["abc", "", "1.5", "1_0", " 1", "٣", "-"])
def test_add_to_text_is_an_error_and_the_store_lives(store: Store, other: Store, text: str) -> None:
    store.set("key", text)
    with pytest.raises(ValueError, match="key'"):
        store.add("key", 1)
    assert store.get("key") == text.encode()
    assert other.get("key") == text.encode()
    assert store.add("count", 1) == 1


def test_compare_set(store: Store, other: Store) -> None:
    assert store.compare_set("key", "not there", "new") == b"not there"
    assert not other.check(["key"])
    assert store.compare_set("key", "", "first") == b"first"
    assert other.compare_set("key", "", "second") == b"first"
    assert other.compare_set("key", "wrong", "second") == b"first"
    assert other.compare_set("key", b"first", b"second") == b"second"
    assert store.get("key") == b"second"


def test_compare_set_has_one_winner(store: Store, other: Store) -> None:
    views = [store, other]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: views[number % 2].compare_set("chief", "", str(number)), range(8)))
    assert len(set(results)) == 1
    assert store.get("chief") == results[0]


def test_check_does_not_wait(store: Store, other: Store) -> None:
    assert not store.check(["a"])
    store.set("a", "1")
    assert other.check(["a"])
    assert not other.check(["a", "b"])
    assert other.check([])


def test_delete_key(store: Store, other: Store) -> None:
    store.set("key", "value")
    assert other.delete_key("key")
    assert not store.delete_key("key")
    assert not store.check(["key"])
    store.set("key", "again")
    assert other.get("key") == b"again"


def test_num_keys(store: Store, other: Store) -> None:
    assert store.num_keys() == 0
    store.multi_set(["a", "b"], ["1", "2"])
    store.add("c", 1)
    other.set("a", "1")
    assert other.num_keys() == 3
    other.delete_key("b")
    assert store.num_keys() == 2


def test_append(store: Store, other: Store) -> None:
    store.append("log", "one ")
    other.append("log", b"two")
    assert store.get("log") == b"one two"


def test_append_from_many_threads_loses_nothing(store: Store, other: Store) -> None:
    views = [store, other]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: views[number % 2].append("log", f"{number};"), range(60)))
    assert sorted(map(int, store.get("log").split(b";")[:-1])) == list(range(60))


def test_add_from_many_threads_loses_nothing(store: Store, other: Store) -> None:
    views = [store, other]
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda number: views[number % 2].add("count", 1), range(100)))
    assert sorted(sums) == list(range(1, 101))


def test_extended_api(store: Store) -> None:
    assert store.has_extended_api()


def test_multi_set_needs_as_many_values_as_keys(store: Store) -> None:
    with pytest.raises(ValueError, match="2 keys and 1 value$"):
        store.multi_set(["a", "b"], ["1"])
    assert not store.check(["a"])


def test_get_waits_until_the_key_is_there(store: Store, other: Store) -> None:
    def answer() -> None:
        for step in range(20):
            other.set(f"answer{step}", other.get(f"question{step}") + b"!")

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(answer)
        for step in range(20):
            store.set(f"question{step}", str(step))
            assert store.get(f"answer{step}") == b"%d!" % step
        answers.result(timeout=30)


def test_wait_returns_when_the_last_key_is_there(store: Store, other: Store) -> None:
    keys = [f"key{number}" for number in range(5)]
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(other.wait, keys), pool.submit(other.wait, keys, 30.0)]
        values = pool.submit(store.multi_get, keys)
        for key in reversed(keys):
            assert not any(wait.done() for wait in waits)
            store.set(key, key)
        for wait in waits:
            assert wait.result(timeout=30) is None
        assert values.result(timeout=30) == [key.encode() for key in keys]


def test_add_append_compare_set_wake_waiters(store: Store, other: Store) -> None:
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(other.get, key) for key in ("added", "appended", "compared")]
        store.add("added", 3)
        store.append("appended", "x")
        store.compare_set("compared", "", "y")
        assert [result.result(timeout=30) for result in waiting] == [b"3", b"x", b"y"]


def test_many_waiters_for_one_key(store: Store, other: Store) -> None:
    ready = threading.Barrier(21)

    def wait_for_it() -> bytes:
        ready.wait(timeout=30)
        return other.get("go")

    with ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(wait_for_it) for _ in range(20)]
        ready.wait(timeout=30)
        store.set("go", "now")
        assert [result.result(timeout=30) for result in waiting] == [b"now"] * 20


def test_get_names_the_key_and_the_timeout_at_the_deadline(store: Store) -> None:
    store.set_timeout(0.2)
    start = time.monotonic()
    with pytest.raises(DistStoreError, match=r"missing' was not set within 0.2 s"):
        store.get("missing")
    assert 0.2 <= time.monotonic() - start < 10
    store.set("missing", "late")
    assert store.get("missing") == b"late"


def test_wait_and_multi_get_name_only_what_is_missing(store: Store) -> None:
    store.set("there", "1")
    with pytest.raises(DistStoreError, match=r"a', '.*b' were not set within 0.05 s") as raised:
        store.wait(["a", "there", "b"], timedelta(milliseconds=50))
    assert "there" not in str(raised.value)
    store.set_timeout(0.05)
    with pytest.raises(DistStoreError, match="a' was not set"):
        store.multi_get(["there", "a"])


def test_a_long_list_of_missing_keys_is_shortened(store: Store) -> None:
    with pytest.raises(DistStoreError, match="and 90 more"):
        store.wait([f"key{number:02}" for number in range(100)], 0.0)


def test_a_timeout_of_nothing_still_finds_what_is_there(store: Store) -> None:
    store.set("key", "value")
    store.wait(["key"], 0)
    with pytest.raises(DistStoreError):
        store.wait(["none"], 0)


def test_waiting_for_no_keys_returns(store: Store) -> None:
    store.wait([], 0)
    assert store.multi_get([]) == []


def test_set_timeout(store: Store) -> None:
    store.set_timeout(timedelta(seconds=1.5))
    assert store.timeout == timedelta(seconds=1.5)
    store.set_timeout(float("inf"))
    store.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ValueError, match="negative"):
        store.set_timeout(-1)
    with pytest.raises(TypeError):
        store.set_timeout("1")


@pytest.mark.parametrize("key", [1, b"bytes", None])
def test_a_key_must_be_text(store: Store, key: object) -> None:
    for call in (lambda: store.set(key, "v"), lambda: store.get(key), lambda: store.add(key, 1)):
        with pytest.raises(TypeError, match="key must be a str"):
            call()
    with pytest.raises(TypeError):
        store.wait([key])


def test_one_key_for_a_list_is_an_error(store: Store) -> None:
    for call in (store.wait, store.check, store.multi_get):
        with pytest.raises(TypeError, match=r"write \['key'\]"):
            call("key")


@pytest.mark.parametrize("value", [1, None, ["a"]])
def test_a_value_must_be_text_or_bytes(store: Store, value: object) -> None:
    with pytest.raises(TypeError, match="value must be str or bytes"):
        store.set("key", value)
    with pytest.raises(TypeError):
        store.add("key", "1")
    assert not store.check(["key"])


def test_close_twice_and_with(opener) -> None:
    with opener() as store:
        store.set("key", "value")
        store.close()
    store.close()
