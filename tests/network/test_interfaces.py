"""At which interfaces ranks listen."""

from __future__ import annotations

import socket
import sys

import numpy as np
import pytest
from listening import listening_at

import meshdist as dist
from meshdist.backends.gloo.tcp.connector import ListenerRecord, first_interface
from meshdist.backends.gloo.tcp.listen_addresses import listen_addresses
from meshdist.store import HashStore

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for its interfaces"),
]
VARIABLES = ("MESHDIST_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("variable", VARIABLES)
def test_named_interfaces_in_their_order(monkeypatch, variable):
    monkeypatch.setenv(variable, "lo, lo")
    assert listen_addresses(HashStore(), one_machine=False) == ["127.0.0.1", "127.0.0.1"]


def test_our_variable_comes_first(monkeypatch):
    monkeypatch.setenv("MESHDIST_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense")
    assert listen_addresses(HashStore(), one_machine=True) == ["127.0.0.1"]


@pytest.mark.parametrize("variable", VARIABLES)
def test_unknown_interface_lists_the_known(monkeypatch, variable):
    monkeypatch.setenv(variable, "nonsense7")
    with pytest.raises(
        dist.DistNetworkError, match=rf"{variable}=nonsense7: .*'nonsense7'.*those that have one are .*lo"
    ):
        listen_addresses(HashStore(), one_machine=True)


def test_one_machine_needs_no_network():
    assert listen_addresses(HashStore(), one_machine=True) == ["127.0.0.1"]


def test_address_of_several_machines_is_one_of_this_host():
    [address] = listen_addresses(HashStore(), one_machine=False)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((address, 0))  # only one's own can be bound


@pytest.mark.parametrize("apart", [2, 3, 4, 7])
@pytest.mark.parametrize("interfaces", [2, 3])
def test_pairs_of_ranks_of_two_hosts_begin_with_all_interfaces(apart, interfaces):
    turns = [first_interface(rank + apart, rank) % interfaces for rank in range(interfaces)]
    assert sorted(turns) == list(range(interfaces))


def test_neighbouring_pairs_take_turns():
    assert [first_interface(rank, rank + 4) % 2 for rank in range(4)] == [0, 1, 0, 1]


def test_a_listening_rank_is_found_as_it_was_published():
    listed = ListenerRecord(b"12345678", [("127.0.0.1", 4711)], "no secret")
    assert ListenerRecord.decode(listed.encode()) == listed


def reduce_on_both():
    for count in (3, 100_000):
        x = np.full(count, dist.get_rank() + 1.0)
        dist.all_reduce(x)
        assert (x == 3.0).all()


def test_ranks_use_two_interfaces(tcp_workers):
    workers = tcp_workers(2, MESHDIST_SOCKET_IFNAME="lo,lo")
    workers.start(reduce_on_both)
    workers.gather()
    assert [len(listening_at(pid)) for pid in workers.pids] == [2, 2]


def fail_to_listen():
    with pytest.raises(dist.DistNetworkError, match="no interface 'nonsense7'"):
        dist.barrier()


def test_unknown_interface_fails_the_first_call(tcp_workers):
    workers = tcp_workers(2, GLOO_SOCKET_IFNAME="nonsense7")
    workers.start(fail_to_listen)
    workers.gather()
