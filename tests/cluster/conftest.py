import pytest
from faulty_link import FaultyHosts
from two_hosts import make_two_hosts


@pytest.fixture
def two_hosts():
    hosts = make_two_hosts()
    yield hosts
    hosts.remove()


@pytest.fixture
def faulty_hosts():
    """Two hosts whose link has faults as the test sets them: `faulty_hosts.link`."""
    hosts = make_two_hosts(FaultyHosts)
    yield hosts
    hosts.remove()
