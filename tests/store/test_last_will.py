"""Keys that a store sets when a client's connection ends."""

import signal
import subprocess
import sys

import pytest

from meshdist.store import TCPStore


@pytest.fixture
def server():
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=10) as store:
        yield store


def test_set_at_the_end_of_the_connection_and_not_before(server):
    client = TCPStore("127.0.0.1", server.port)
    client.set_last_will({"a": "1", "b": b"2"})
    assert not server.check(["a"])
    client.close()
    assert server.multi_get(["a", "b"]) == [b"1", b"2"]


def test_what_is_there_is_kept(server):
    client = TCPStore("127.0.0.1", server.port)
    client.set_last_will({"a": "of the dead", "b": "2"})
    server.set("a", "of the living")
    client.close()
    assert server.multi_get(["a", "b"]) == [b"of the living", b"2"]


def test_the_last_will_counts(server):
    client, other = TCPStore("127.0.0.1", server.port), TCPStore("127.0.0.1", server.port)
    client.set_last_will({"a": "1"})
    client.set_last_will({"b": "2"})
    client.close()
    server.wait(["b"])
    other.set_last_will({"c": "3"})
    other.set_last_will({})
    other.close()
    assert not server.check(["a"])
    assert not server.check(["c"])


def test_killed_process_leaves_its_word(server):
    program = f"""
import os, signal
from meshdist.store import TCPStore
client = TCPStore("127.0.0.1", {server.port})
client.set_last_will({{"killed": "yes"}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == -signal.SIGKILL
    assert server.get("killed") == b"yes"


def test_end_of_the_store_is_nobodys_end():
    server = TCPStore("127.0.0.1", 0, is_master=True)
    with TCPStore("127.0.0.1", server.port) as client:
        client.set_last_will({"a": "1"})
        server.close()


@pytest.mark.parametrize("values", [{1: "a"}, {"a": 1}])
def test_keys_and_values_are_checked(server, values):
    with pytest.raises(TypeError, match="must be"):
        server.set_last_will(values)
