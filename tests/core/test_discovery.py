"""Processes that look for each other by datagrams: sealed, lost, doubled, of other jobs, of strangers."""

from __future__ import annotations

import hmac
import json
import os
import random
import re
import select
import socket
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshdist.bootstrap.multicast import Beacon, Discovery, meet, sign, verify
from meshdist.bootstrap.multicast_socket import MulticastSocket, is_multicast
from meshdist.errors import DistNetworkError, DistTimeoutError
from meshdist.system.deadline import Deadline

pytestmark = pytest.mark.timeout(60)
TOKEN = "0123456789abcdef"
BEACON = Beacon(TOKEN, "job", "host", 4000, ("fedcba9876543210",))


class Air:
    """Carries datagrams between channels, and loses some: a local network in memory."""

    def __init__(self, loss=0.0, seed=0):
        self.loss = loss
        self.sent = []
        self._random = random.Random(seed)
        self._ears = []

    def channel(self):
        read, write = os.pipe()
        ear = Ear(self, read, write)
        self._ears.append(ear)
        return ear

    def carry(self, data):
        self.sent.append(data)
        for ear in list(self._ears):
            copies = 0 if self._random.random() < self.loss else self._random.choice([1, 1, 2])
            for _ in range(copies):
                ear.queue.append(data)
                os.write(ear.write, b"x")

    def close(self):
        for ear in self._ears:
            os.close(ear.read)
            os.close(ear.write)


class Ear:
    name = "239.0.0.0:1"

    def __init__(self, air, read, write):
        self.queue = deque()
        self.air, self.read, self.write = air, read, write
        self._poll = select.poll()
        self._poll.register(read, select.POLLIN)

    def send(self, data):
        self.air.carry(data)

    def receive(self, timeout_s):
        if not self._poll.poll(timeout_s * 1000):
            return None
        os.read(self.read, 1)
        return self.queue.popleft(), "192.0.2.99"  # of no meaning: all are on this host


@pytest.fixture
def air():
    air = Air()
    yield air
    air.close()


def searcher(air, job="job", secret=b""):
    return Discovery(air.channel(), job, secret, this_host_only=True)


def all_meet(discoveries, ranks, timeout_s=30.0, world_size=None):
    """Return the rank of each; all must be in one store."""
    with ThreadPoolExecutor(len(discoveries)) as pool:
        calls = [
            pool.submit(meet, discovery, rank, world_size or len(ranks), Deadline(timeout_s))
            for discovery, rank in zip(discoveries, ranks, strict=True)
        ]
        met = [call.result(timeout=50) for call in calls]
    stores = [store for store, _ in met]
    assert len({store.port for store in stores}) == 1
    assert sum(store.is_master for store in stores) == 1
    for store in sorted(stores, key=lambda store: store.is_master):
        store.close()
    return [rank for _, rank in met]


# ---- Notices


def test_a_notice_says_what_was_said():
    assert verify(sign(BEACON, b"key"), b"key") == BEACON
    assert verify(sign(BEACON, b""), b"") == BEACON


def test_without_the_secret_nothing_is_believed():
    data = sign(BEACON, b"key")
    assert verify(data, b"") is None
    assert verify(sign(BEACON, b""), b"key") is None
    for at in range(len(data)):
        assert verify(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], b"key") is None
        assert verify(data[:at], b"key") is None


@pytest.mark.parametrize(
    "change",
    [
        {"token": "short"},
        {"token": 5},
        {"group_name": None},
        {"group_name": "x" * 5000},
        {"host": ["a"]},
        {"port": -1},
        {"port": 65536},
        {"port": "80"},
        {"heard": "text"},
        {"heard": ("short",)},
        {"heard": (1,)},
    ],
)
def test_what_is_no_notice_is_dropped_also_where_anyone_can_seal(change):
    assert verify(sign(BEACON._replace(**change), b""), b"") is None


def test_deep_nesting_is_dropped():
    magic = sign(BEACON, b"")[: -len(json.dumps(BEACON)) - 32]
    body = b"[" * 60_000
    assert verify(magic + hmac.digest(b"", magic + body, "sha256") + body, b"") is None


# ---- Discovery


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_find_one_store(air, size):
    start = time.monotonic()
    assert sorted(all_meet([searcher(air) for _ in range(size)], [-1] * size)) == list(range(size))
    assert time.monotonic() - start < 10


def test_ranks_that_are_given_are_kept(air):
    assert all_meet([searcher(air) for _ in range(3)], [2, -1, 0]) == [2, 1, 0]


@pytest.mark.parametrize("seed", range(3))
def test_lost_and_doubled_datagrams_do_no_harm(seed):
    air = Air(loss=0.6, seed=seed)
    try:
        assert sorted(all_meet([searcher(air) for _ in range(4)], [-1] * 4)) == [0, 1, 2, 3]
    finally:
        air.close()


def test_two_stores_become_one(air):
    """Each half hears nothing of the other until both have a store."""
    other = Air()
    ears = [air.channel(), other.channel()]
    try:
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(meet, searcher(each), -1, 2, Deadline(30.0)) for each in (air, other)]
            for ear in ears:
                await_store(ear)
            bridge(air, other)
            met = [call.result(timeout=40) for call in calls]
        assert sorted(rank for _, rank in met) == [0, 1]
        assert met[0][0].port == met[1][0].port
        for store, _ in sorted(met, key=lambda pair: pair[0].is_master):
            store.close()
    finally:
        other.close()


def await_store(ear):
    """Wait until somebody says that it hosts a store."""
    deadline = Deadline(30.0)
    while not ((came := ear.receive(0.05)) and verify(came[0], b"").port):
        assert not deadline.expired()


def bridge(first, second):
    """Have each carry what is sent in the other."""

    def joined(ours, theirs):
        def carry(data):
            Air.carry(ours, data)
            Air.carry(theirs, data)

        return carry

    first.carry, second.carry = joined(first, second), joined(second, first)


def test_jobs_of_other_names_and_secrets_do_not_mix(air):
    jobs = [("a", b""), ("b", b""), ("a", b"one"), ("a", b"two")]
    with ThreadPoolExecutor(len(jobs)) as pool:
        results = [pool.submit(all_meet, [searcher(air, *job) for _ in range(2)], [-1, -1]) for job in jobs]
        assert [sorted(result.result(timeout=50)) for result in results] == [[0, 1]] * len(jobs)


def test_recordings_of_an_earlier_run_disturb_nobody(air):
    all_meet([searcher(air) for _ in range(3)], [-1] * 3)
    recording = [data for data in air.sent if verify(data, b"").port] + air.sent[:20]
    start = time.monotonic()
    discoveries = [searcher(air) for _ in range(2)]
    for data in recording:
        air.carry(data)
    assert sorted(all_meet(discoveries, [-1] * 2)) == [0, 1]
    assert time.monotonic() - start < 10


def test_a_store_that_is_not_there_is_passed_over(air):
    """Somebody answers, says that it hosts a store, and there is none: the others meet without it."""
    liar = air.channel()
    discoveries = [searcher(air) for _ in range(2)]
    air.sent.clear()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(all_meet, discoveries, [-1, -1])
        while not result.done():
            came = liar.receive(0.02)
            notice = came and verify(came[0], b"")
            if notice and notice.token != "0" * 16:
                liar.send(sign(Beacon("0" * 16, "job", notice.host, 1, (notice.token,)), b""))
        assert sorted(result.result(timeout=40)) == [0, 1]


def test_who_is_missing_and_what_was_ignored_is_said(air):
    noise = air.channel()
    discovery = searcher(air, secret=b"")
    noise.send(b"noise")
    noise.send(sign(Beacon(TOKEN, "another job", "host", 0, ()), b""))
    noise.send(sign(Beacon(TOKEN, "job", "another host", 0, ()), b""))
    with pytest.raises(DistTimeoutError) as raised:
        meet(discovery, -1, 3, Deadline(0.8))
    message = str(raised.value)
    assert re.search(r"\(3 ranks\): 1 rank joined within 0.8 s \(pid \d+ on .*\); 2 missing", message)
    assert "datagrams of strangers or jobs with a different secret were ignored (" in message
    assert "datagrams of group_name 'another job' were ignored (" in message
    assert "datagrams of other hosts were ignored (" in message
    assert "without MESHDIST_SECRET only processes of this host are looked for" in message


def test_the_deadline_is_kept_by_all_and_all_say_who_came(air):
    def late(discovery):
        start = time.monotonic()
        with pytest.raises(DistTimeoutError, match="2 ranks joined within 1.5 s .*; 1 missing"):
            meet(discovery, -1, 3, Deadline(1.5))
        return time.monotonic() - start

    with ThreadPoolExecutor(2) as pool:
        took = [call.result(timeout=30) for call in [pool.submit(late, searcher(air)) for _ in range(2)]]
    assert all(1.4 < each_s < 4 for each_s in took)


@pytest.mark.parametrize(
    ("rank", "world_size", "words"), [(0, 3, "rank 0 has already joined"), (-1, 2, "world size is 3")]
)
def test_who_is_wrong_is_told_at_once(air, rank, world_size, words):
    ear = air.channel()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, searcher(air), 0, 3, Deadline(30.0))
        await_store(ear)
        start = time.monotonic()
        with pytest.raises(ValueError, match=words):
            meet(searcher(air), rank, world_size, Deadline(30.0))
        assert time.monotonic() - start < 10
        others = [pool.submit(meet, searcher(air), -1, 3, Deadline(30.0)) for _ in range(2)]
        met = [call.result(timeout=30) for call in (first, *others)]
    assert met[0][1] == 0
    for store, _ in sorted(met, key=lambda pair: pair[0].is_master):
        store.close()


# ---- Sockets


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("224.0.0.1", True),
        ("239.255.255.255", True),
        ("ff02::1", True),
        ("ff12::1%lo", True),
        ("10.1.1.20", False),
        ("localhost", False),
        ("::1", False),
        ("", False),
    ],
)
def test_multicast_addresses(host, is_one):
    assert is_multicast(host) == is_one


def test_everybody_at_the_address_gets_a_datagram(port):
    with (
        MulticastSocket("239.255.77.3", port, this_host_only=True) as one,
        MulticastSocket("239.255.77.3", port, this_host_only=True) as two,
        MulticastSocket("239.255.77.4", port, this_host_only=True) as elsewhere,
    ):
        assert one.receive(0.0) is None
        one.send(b"to all")
        for channel in (one, two):
            data, host = channel.receive(10.0)
            assert data == b"to all"
            assert host
        assert elsewhere.receive(0.1) is None


def test_a_port_that_a_stranger_holds_is_named():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind(("0.0.0.0", 0))
        port = stranger.getsockname()[1]
        with pytest.raises(DistNetworkError, match=f"cannot listen on 239.255.77.3:{port}: .*choose another port"):
            MulticastSocket("239.255.77.3", port, this_host_only=True)


def test_an_interface_that_is_not_there_is_named():
    with pytest.raises(DistNetworkError, match="cannot be joined on any interface"):
        MulticastSocket("ff12::1%nonesuch", 45673, this_host_only=True)
