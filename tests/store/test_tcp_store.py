"""The store over TCP: joining, sharing, closing."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import numpy as np
import pytest
from handshakes import accept_handshake

from meshdist.errors import DistNetworkError, DistStoreError
from meshdist.store import TCPStore

LOOPBACK = "127.0.0.1"


@pytest.fixture
def master(resources: ExitStack) -> TCPStore:
    return resources.enter_context(TCPStore(LOOPBACK, 0, is_master=True, timeout=30))


# Addresses and ports


def test_port_0_picks_one(master: TCPStore) -> None:
    assert master.port > 0
    assert master.host == LOOPBACK
    with TCPStore(LOOPBACK, 0, is_master=True) as second:
        assert second.port != master.port


@pytest.mark.parametrize("host", ["localhost", "::1", "127.0.0.2"])
def test_other_names_of_this_host(host: str) -> None:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        pytest.skip(f"cannot listen on {host} here: {error}")
    with TCPStore(host, 0, is_master=True) as store, TCPStore(host, store.port) as client:
        client.set("key", "value")
        assert store.get("key") == b"value"


def test_a_taken_port_names_itself(master: TCPStore) -> None:
    with pytest.raises(DistNetworkError, match=f"{LOOPBACK}:{master.port} is taken"):
        TCPStore(LOOPBACK, master.port, is_master=True)
    master.set("key", "still there")
    assert master.get("key") == b"still there"


def test_the_port_is_free_again_after_close() -> None:
    port = 0
    for _ in range(3):
        with TCPStore(LOOPBACK, port, is_master=True) as store, TCPStore(LOOPBACK, store.port) as client:
            client.set("key", "value")
            port = store.port


@pytest.mark.parametrize("port", [-1, 65536])
def test_impossible_ports(port: int) -> None:
    with pytest.raises(ValueError, match="between 0 and 65535"):
        TCPStore(LOOPBACK, port, is_master=True)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="port must be an integer"):
        TCPStore(LOOPBACK, "29500", is_master=True)
    with pytest.raises(ValueError, match="the port that it picked"):
        TCPStore(LOOPBACK, 0)
    with pytest.raises(ValueError, match="world_size"):
        TCPStore(LOOPBACK, 0, 0, is_master=True)
    with pytest.raises(ValueError, match="host_name"):
        TCPStore("", 0, is_master=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((True, 1, True), "port must be an integer, got bool"),
        ((0, True, True), "world_size must be an integer, None or -1, got bool True"),
        ((0, timedelta(seconds=30), True), "world_size must be an integer, None or -1, got timedelta"),
        ((0, 1, timedelta(seconds=30)), "is_master must be True or False, got timedelta"),
        ((0, 1, 1), "is_master must be True or False, got int 1"),
        ((0, 1, True, True), "timeout must be a timedelta or a number of seconds, got bool"),
        ((0, 1, True, 30, timedelta(seconds=30)), "wait_for_workers must be True or False, got timedelta"),
        ((0, 1, True, 30, True, 30.0), "multi_tenant must be True or False, got float"),
    ],
)
def test_arguments_in_the_wrong_place(arguments: tuple, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        TCPStore(LOOPBACK, *arguments)


def test_a_flag_may_be_numpys() -> None:
    with TCPStore(LOOPBACK, 0, is_master=np.int64(0) == 0) as store:
        assert store.is_master


def test_an_unknown_host_cannot_be_hosted_on() -> None:
    with pytest.raises(DistNetworkError, match=r"cannot listen on no-such-host\.invalid:0: "):
        TCPStore("no-such-host.invalid", 0, is_master=True, secret=b"s")


def test_positions_are_those_of_torch() -> None:
    with TCPStore(LOOPBACK, 0, 1, True, timedelta(seconds=5), True, False, None, False) as store:
        assert store.timeout == timedelta(seconds=5)


def test_a_listening_socket_can_be_handed_over() -> None:
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    with pytest.raises(ValueError, match=f"bound to port {port}"):
        TCPStore(LOOPBACK, 1, is_master=True, master_listen_fd=listener.fileno())
    with (
        TCPStore(LOOPBACK, port, is_master=True, master_listen_fd=listener.detach()) as store,
        TCPStore(LOOPBACK, port) as client,
    ):
        client.set("key", "value")
        assert (store.port, store.get("key")) == (port, b"value")


def test_only_a_tcp_socket_can_be_handed_over() -> None:
    read, write = os.pipe()
    mine, theirs = socket.socketpair()
    for fd in (read, mine.fileno()):
        with pytest.raises(ValueError, match="must be a bound TCP socket"):
            TCPStore(LOOPBACK, 0, is_master=True, master_listen_fd=fd)
    mine.close(), theirs.close(), os.close(read), os.close(write)


def test_a_multi_tenant_store_is_shared_and_outlives_its_owner() -> None:
    first = TCPStore(LOOPBACK, 0, is_master=True, multi_tenant=True)
    second = TCPStore(LOOPBACK, first.port, is_master=True, multi_tenant=True)
    assert (first.is_master, second.is_master) == (True, False)
    first.set("key", "value")
    assert second.get("key") == b"value"
    first.close()
    second.set("key", "later")
    assert second.get("key") == b"later"
    second.close()


# Connecting


def test_a_client_may_come_before_the_master(free_port: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(TCPStore, LOOPBACK, free_port, timeout=30)
        with TCPStore(LOOPBACK, free_port, is_master=True) as store, coming.result(timeout=30) as client:
            client.set("key", "value")
            assert store.get("key") == b"value"


def test_a_client_that_meets_a_store_at_its_end_waits_for_the_next(resources: ExitStack) -> None:
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(TCPStore, LOOPBACK, port, timeout=30)
        with listener:
            sock, _ = listener.accept()
            with sock:
                accept_handshake(sock, b"", "store")
                assert sock.recv(1)
        with TCPStore(LOOPBACK, port, is_master=True) as store, coming.result(timeout=30) as client:
            client.set("key", "value")
            assert store.get("key") == b"value"


def test_nobody_home_fails_at_the_timeout(free_port: int) -> None:
    start = time.monotonic()
    with pytest.raises(DistNetworkError, match=rf"{LOOPBACK}:{free_port} within 0.5 s \(last error: .*refused"):
        TCPStore(LOOPBACK, free_port, timeout=0.5)
    assert 0.5 <= time.monotonic() - start < 10


def test_an_unknown_host_fails_at_the_timeout() -> None:
    with pytest.raises(DistNetworkError, match=r"no-such-host\.invalid:29500 within 0.1 s \(last error"):
        TCPStore("no-such-host.invalid", 29500, timeout=0.1)


def test_an_unreachable_address_fails_at_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(DistNetworkError, match=r"192\.0\.2\.1:29500 within 0.5 s"):  # an address for documentation
        TCPStore("192.0.2.1", 29500, timeout=0.5, secret=b"s")
    assert time.monotonic() - start < 5


# Joining


def test_the_constructor_waits_for_all_to_join(free_port: int) -> None:
    with ThreadPoolExecutor(3) as pool:
        joining = [pool.submit(TCPStore, LOOPBACK, free_port, 4, timeout=30) for _ in range(3)]
        with TCPStore(LOOPBACK, free_port, 4, is_master=True, timeout=30), ExitStack() as clients:
            for client in joining:
                clients.enter_context(client.result(timeout=30))


def test_who_waits_in_vain_says_how_many_came() -> None:
    with pytest.raises(DistStoreError, match=r"1 of 3 had joined after 0.2 s"):
        TCPStore(LOOPBACK, 0, 3, is_master=True, timeout=0.2)


def test_nobody_waits_unless_told_to() -> None:
    with (
        TCPStore(LOOPBACK, 0, 3, is_master=True, wait_for_workers=False) as store,
        TCPStore(LOOPBACK, store.port, 3, wait_for_workers=False) as client,
        TCPStore(LOOPBACK, store.port, -1),
    ):
        assert client.num_keys() == 0


def test_world_sizes_that_disagree() -> None:
    with (
        TCPStore(LOOPBACK, 0, 2, is_master=True, wait_for_workers=False) as store,
        pytest.raises(ValueError, match="this store is for world_size=2, not 3"),
    ):
        TCPStore(LOOPBACK, store.port, 3)


# Many at once


def test_200_clients(master: TCPStore) -> None:
    def be_a_client(number: int) -> bytes:
        with TCPStore(LOOPBACK, master.port, timeout=60) as client:
            if client.add("joined", 1) == 200:
                client.set("all", "here")
            return client.get("all")

    with ThreadPoolExecutor(200) as pool:
        assert list(pool.map(be_a_client, range(200))) == [b"here"] * 200
    assert master.get("joined") == b"200"


def test_a_waiting_thread_does_not_hold_up_another(master: TCPStore) -> None:
    with TCPStore(LOOPBACK, master.port, timeout=60) as client, ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(client.get, f"answer{number}") for number in range(20)]
        for number in range(100):
            assert client.add("count", 1) == number + 1
        for number in range(20):
            client.set(f"answer{number}", str(number))
        assert [result.result(timeout=30) for result in waiting] == [b"%d" % number for number in range(20)]


def test_a_client_that_leaves_while_it_waits_is_forgotten(master: TCPStore) -> None:
    leaving = TCPStore(LOOPBACK, master.port)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(leaving.get, "key")
        leaving.close()
        with pytest.raises((DistNetworkError, DistStoreError), match="was closed in this process"):
            waiting.result(timeout=30)
    master.set("key", "value")
    assert master.get("key") == b"value"


def test_a_slow_reader_of_much_holds_up_nobody(master: TCPStore) -> None:
    value = bytes(32 << 20)
    master.set("large", value)
    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(master.get, "large") for _ in range(3)]
        for number in range(100):
            assert master.add("count", 1) == number + 1
        assert all(result.result(timeout=60) == value for result in reading)


def test_a_value_has_at_most_a_gigabyte(master: TCPStore) -> None:
    with pytest.raises(ValueError, match="at most 1073741824 bytes, got 1073741825"):
        master.set("key", bytes((1 << 30) + 1))
    with pytest.raises(ValueError, match="one call can carry at most"):
        master.multi_set(["a", "b", "c"], [bytes(400 << 20)] * 3)
    assert not master.check(["key"])


# Who may come


def test_beyond_this_host_only_with_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in (
        lambda: TCPStore("0.0.0.0", 0, is_master=True),
        lambda: TCPStore("192.0.2.1", 29500, timeout=30),
    ):
        start = time.monotonic()
        with pytest.raises(DistNetworkError, match=r"(?s)MESHDIST_SECRET.*MESHDIST_INSECURE=1"):
            attempt()
        assert time.monotonic() - start < 5
    with TCPStore("0.0.0.0", 0, is_master=True, secret=b"s") as store:
        assert TCPStore(LOOPBACK, store.port, secret=b"s").num_keys() == 0
    monkeypatch.setenv("MESHDIST_INSECURE", "1")
    TCPStore("0.0.0.0", 0, is_master=True).close()


def test_an_inherited_listener_is_no_way_around_the_secret() -> None:
    with (
        socket.create_server(("0.0.0.0", 0)) as listener,
        pytest.raises(DistNetworkError, match="MESHDIST_SECRET"),
    ):
        TCPStore(LOOPBACK, 0, is_master=True, master_listen_fd=listener.fileno())


def test_the_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHDIST_SECRET", "hush")
    with TCPStore(LOOPBACK, 0, is_master=True) as store, TCPStore(LOOPBACK, store.port, secret=b"hush") as client:
        client.set("key", "value")
        assert store.get("key") == b"value"


def own_address() -> str | None:
    """Return the address by which other hosts know this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = sock.getsockname()[0]
        return None if address.startswith("127.") else address


def test_a_loopback_store_is_not_reachable_from_outside(master: TCPStore) -> None:
    address = own_address()
    if address is None:
        pytest.skip("this host has no address but loopback")
    with socket.socket() as sock, pytest.raises(ConnectionRefusedError):
        sock.connect((address, master.port))


def test_a_secret_job_is_reached_by_this_hosts_address() -> None:
    address = own_address()
    if address is None:
        pytest.skip("this host has no address but loopback")
    with (
        TCPStore(address, 0, is_master=True, secret=b"s") as store,
        TCPStore(address, store.port, secret=b"s") as client,
    ):
        client.set("key", "value")
        assert store.get("key") == b"value"
