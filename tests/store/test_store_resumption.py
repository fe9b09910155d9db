"""Connections with a store that are reset while both processes live: each request is carried out once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from middlebox import LOOPBACK, Middlebox
from until import until

from meshdist.errors import DistNetworkError, DistStoreError
from meshdist.store import TCPStore
from meshdist.store.brief_requests import brief
from meshdist.store.repeated_requests import SLOT_CLAIM, Slot, Slots
from meshdist.store.session import Session
from meshdist.store.table import Status

SECRET = b"secret"


@pytest.fixture(params=["off", "all"], ids=["in the clear", "encrypted"])
def encryption(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHDIST_ENCRYPTION", request.param)


@pytest.fixture
def master(resources: ExitStack, encryption: None) -> TCPStore:
    return resources.enter_context(TCPStore(LOOPBACK, 0, is_master=True, timeout=30, secret=SECRET))


@pytest.fixture
def box(resources: ExitStack, master: TCPStore) -> Middlebox:
    box = Middlebox(master.port)
    resources.callback(box.close)
    return box


@pytest.fixture
def client(resources: ExitStack, box: Middlebox) -> TCPStore:
    return resources.enter_context(TCPStore(LOOPBACK, box.port, timeout=30, secret=SECRET))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def lose_reply(box: Middlebox, pool: ThreadPoolExecutor, call: Any, *args: Any) -> Future[Any]:
    """Start a call that the store carries out, and whose reply is lost in a reset."""
    swallowed = box.num_swallowed
    box.swallows_replies = True
    called = pool.submit(call, *args)
    until(lambda: box.num_swallowed > swallowed, "the store has answered")
    box.reset()
    return called


def test_a_request_whose_reply_is_lost_is_carried_out_once(
    master: TCPStore, client: TCPStore, box: Middlebox, pool: ThreadPoolExecutor
) -> None:
    for count in range(1, 6):
        assert lose_reply(box, pool, client.add, "count", 1).result(20) == count
    lose_reply(box, pool, client.append, "text", "word").result(20)
    assert lose_reply(box, pool, client.compare_set, "taken", "", "by me").result(20) == b"by me"
    assert lose_reply(box, pool, client.delete_key, "taken").result(20) is True
    assert (master.get("count"), master.get("text")) == (b"5", b"word")


@pytest.mark.parametrize("at", ["both", "client", "store"])
def test_a_wait_goes_on(master: TCPStore, client: TCPStore, box: Middlebox, pool: ThreadPoolExecutor, at: str) -> None:
    waiting = pool.submit(client.get, "key")
    for number in range(1, 4 if at != "store" else 1):
        box.reset(at)
        until(lambda number=number: box.num_connections > number, "it connects again")  # type: ignore[misc]
    if at == "store":  # the client learns of it by its own next bytes
        box.reset(at)
        box.reset("client")
    master.set("key", "value")
    assert waiting.result(20) == b"value"


def test_an_idle_connection_is_made_again(client: TCPStore, box: Middlebox) -> None:
    client.set("key", "value")
    box.reset()
    assert client.get("key") == b"value"
    assert box.num_connections == 2


def test_a_connection_that_was_reset_long_ago_is_replaced(
    client: TCPStore, box: Middlebox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshdist.store.server.resumption_s", lambda: 0.0)
    assert client.add("count", 1) == 1
    box.reset("store")
    box.reset("client")
    assert client.add("count", 1) == 2


def test_another_store_is_not_taken_for_the_one_before(client: TCPStore, box: Middlebox) -> None:
    client.set("key", "value")
    with TCPStore(LOOPBACK, 0, is_master=True, timeout=30, secret=SECRET) as another:
        box.store_port = another.port
        box.reset()
        with pytest.raises(DistNetworkError, match="lost the store at .*: a connection was reset, and restored too"):
            client.set("key", "value")


def test_a_client_is_counted_once(box: Middlebox, pool: ThreadPoolExecutor, master: TCPStore) -> None:
    joining = pool.submit(TCPStore, LOOPBACK, box.port, 3, timeout=2.0, secret=SECRET)
    until(lambda: box.num_connections, "it connects")
    for number in (1, 2):
        box.reset()
        until(lambda number=number: box.num_connections > number, "it connects again")  # type: ignore[misc]
    with pytest.raises(DistStoreError, match="2 of 3 had joined after"):
        joining.result(20)


def test_a_last_will_is_not_executed_for_a_reset(master: TCPStore, client: TCPStore, box: Middlebox) -> None:
    client.set_last_will({"gone": "client"})
    box.reset()
    until(lambda: box.num_connections == 2, "it connects again though it is idle")
    assert not master.check(["gone"])
    client.close()
    assert master.get("gone") == b"client"


def test_the_last_will_of_a_client_that_does_not_come_again_is_executed(
    master: TCPStore, client: TCPStore, box: Middlebox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshdist.store.server.resumption_s", lambda: 0.1)
    client.set_last_will({"gone": "client"})
    box.refuse()
    box.reset()
    assert master.get("gone") == b"client"


@pytest.mark.parametrize("how", ["reset", "closed in order"])
def test_a_store_that_has_ended_is_an_error_at_once(client: TCPStore, box: Middlebox, how: str) -> None:
    """Something on the way that closes a connection in order cannot be told from the end of the process."""
    client.set("key", "value")
    box.refuse()
    if how == "reset":
        box.reset()
    else:
        box.close_connections()
    with pytest.raises(DistNetworkError, match=r"lost the store at .*: its process ended or closed it"):
        client.get("key")


def test_an_orderly_close_in_the_middle_of_a_wait_is_an_error_at_once(
    client: TCPStore, box: Middlebox, pool: ThreadPoolExecutor
) -> None:
    before = box.num_passed_on
    waiting = pool.submit(client.get, "key")
    until(lambda: box.num_passed_on > before, "the request is passed on")  # else, the close would be a reset
    box.close_connections()
    with pytest.raises(DistNetworkError, match=r"lost the store at .*: its process ended or closed it: .*closed"):
        waiting.result(20)


@pytest.mark.parametrize("encryption", ["all"], indirect=True)
def test_bytes_that_are_changed_on_the_way_end_the_connection(
    master: TCPStore, client: TCPStore, box: Middlebox, caplog: pytest.LogCaptureFixture
) -> None:
    box.change = lambda data: data[:-1] + bytes([data[-1] ^ 1]) if data else data
    with pytest.raises(DistNetworkError, match="lost the store at"):
        client.set("key", "value")
    assert "the store hung up on 127.0.0.1" in caplog.text
    assert "what it sent was changed on the way" in caplog.text
    box.change = bytes
    assert not master.check(["key"])


@pytest.mark.parametrize("encryption", ["off"], indirect=True)
def test_brief_calls_end_in_time(client: TCPStore) -> None:
    with brief(0.05), pytest.raises(DistStoreError, match="did not answer within"):
        client.get("never")
    with brief(30.0), pytest.raises(DistStoreError, match="was not set within 0 s"):
        client.wait(["never"], 0.0)
    client.set("key", "value")


def test_slots() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        slots, sessions = Slots(), [Session(ours, b"", "a client") for _ in range(3)]
        name = bytes(range(16))
        slot, before = slots.enter(sessions[0], SLOT_CLAIM.pack(name, 0))
        assert isinstance(slot, Slot)
        assert before is None
        assert slots.enter(sessions[1], SLOT_CLAIM.pack(name, 0)) == (None, None), "a recorded claim"
        assert slots.enter(sessions[1], SLOT_CLAIM.pack(name, 2)) == (slot, sessions[0])
        assert slots.enter(sessions[2], SLOT_CLAIM.pack(name, 1)) == (None, None), "an earlier attempt that is late"
        assert slot.reply_to(1) is None
        slot.keep(Status.OK, [b"1"])
        assert slot.reply_to(1) == (Status.OK, [b"1"])
        assert slot.reply_to(2) is None
        with pytest.raises(ValueError, match="not a request: number 4 after 1"):
            slot.reply_to(4)
        slot.last_will = [b"key", b"value"]
        assert slots.forget(slot) == [b"key", b"value"]
        assert slots.enter(sessions[2], SLOT_CLAIM.pack(name, 3)) == (None, None)
