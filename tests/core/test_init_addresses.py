"""Where rank 0 listens and how the others get there: IPv6, names, several addresses of one name."""

import os
import socket
import sys
import traceback

import numpy as np
import pytest
from worlds import WorkerSet, worker_rank

import meshdist as dist
from meshdist.store import TCPStore

pytestmark = pytest.mark.timeout(60)
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")


@pytest.fixture
def pair(worlds):
    with WorkerSet(worlds.nursery, 2) as workers:
        yield workers


@pytest.fixture
def ipv6_port():
    """A port on which nobody listens, in neither IP version."""
    try:
        with (
            socket.socket(socket.AF_INET6) as sock,
            socket.socket() as other,
        ):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("::1", 0))
            other.bind(("127.0.0.1", sock.getsockname()[1]))
            other.close()
            yield sock.getsockname()[1]
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


def meet(url, variables):
    os.environ.update(variables)
    dist.init_process_group("gloo", init_method=url, rank=worker_rank(), world_size=2, timeout=20)
    total = int(dist.all_reduce(np.array(1)))
    dist.destroy_process_group()
    return total


@needs_linux
def test_an_ipv6_address_in_the_url(pair, ipv6_port):
    pair.start(meet, f"tcp://[::1]:{ipv6_port}", {})
    assert pair.gather() == [2, 2]


@needs_linux
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_in_the_environment(pair, ipv6_port, host):
    pair.start(meet, "env://", {"MASTER_ADDR": host, "MASTER_PORT": str(ipv6_port)})
    assert pair.gather() == [2, 2]


@needs_linux
def test_rank_and_size_in_the_query_of_env(pair, port):
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "7"}
    for rank in range(2):
        pair.start(by_query, f"env://?rank={rank}&world_size=2", variables, ranks=[rank])
    assert pair.gather() == [2, 2]


def by_query(url, variables):
    os.environ.update(variables)
    dist.init_process_group(init_method=url, timeout=20)
    total = int(dist.all_reduce(np.array(1)))
    dist.destroy_process_group()
    return total


@needs_linux
def test_a_name(pair, port):
    pair.start(meet, f"tcp://localhost:{port}", {})
    assert pair.gather() == [2, 2]


@pytest.fixture
def _localhost_is_both(monkeypatch):
    genuine = socket.getaddrinfo

    def both(host, port, *args, **kwargs):
        if host != "localhost":
            return genuine(host, port, *args, **kwargs)
        return [found for name in ("::1", "127.0.0.1") for found in genuine(name, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", both)


@pytest.mark.usefixtures("_localhost_is_both")
def test_a_store_at_localhost_is_found_in_both_ip_versions(ipv6_port):
    for port in (0, ipv6_port):
        with TCPStore("localhost", port, is_master=True, timeout=20) as store:
            for host in ("127.0.0.1", "::1", "localhost"):
                with TCPStore(host, store.port, timeout=20) as client:
                    client.set("host", host)
                    assert store.get("host") == host.encode()


@pytest.mark.usefixtures("_localhost_is_both")
def test_a_port_that_is_taken_in_one_ip_version_is_named(ipv6_port):
    with socket.create_server(("127.0.0.1", ipv6_port)):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(dist.DistNetworkError, match=f"localhost:{ipv6_port} is taken by another socket"):
            TCPStore("localhost", ipv6_port, is_master=True)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_host_that_is_not_known_is_named(port):
    with pytest.raises(dist.DistNetworkError, match=f"cannot listen on nowhere.invalid:{port}: "):
        dist.init_process_group("gloo", init_method=f"tcp://nowhere.invalid:{port}", rank=0, world_size=2, timeout=5)
    with pytest.raises(dist.DistNetworkError, match=f"no store answered at nowhere.invalid:{port} within") as failed:
        dist.init_process_group("gloo", init_method=f"tcp://nowhere.invalid:{port}", rank=1, world_size=2, timeout=0.3)
    assert "direct cause" not in "".join(traceback.format_exception(failed.value))
