import pytest
from two_hosts import make_two_hosts


@pytest.fixture
def two_hosts():
    hosts = make_two_hosts()
    yield hosts
    hosts.remove()
