"""Any bytes in place of the other files and datagrams that are read: they are read, ignored, or named."""

import contextlib
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from absurd import DEEP, LIMIT_S, altered, changed, fuzz, outcome
from hypothesis import example, given
from hypothesis import strategies as st

import meshdist as dist
from meshdist.bootstrap.multicast import Beacon, sign, verify
from meshdist.bootstrap.url import parse_init_url
from meshdist.debug.report import report_on
from meshdist.debug.states import read_states
from meshdist.launch.failures import read_error_file
from meshdist.parallel import Schedule
from meshdist.runtime.departure import Departure, PeerExit, describe
from meshdist.system.tuning_cache import _VERSION, DIRECTORY, TuningCache, path_of

pytestmark = pytest.mark.timeout(LIMIT_S)


def documents(document):
    """Return JSON of what was right, with something wrong, as bytes."""
    text = json.dumps(document).encode()
    return st.one_of(st.binary(max_size=30), changed(text), altered(document).map(json.dumps).map(str.encode))


# ---- The file store


def log_of_a_store(folder):
    path = folder / "store"
    with contextlib.closing(dist.FileStore(str(path))) as store:
        store.set("key", b"value")
        store.add("number", 3)
        return path, path.read_bytes()


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return log_of_a_store(tmp_path_factory.mktemp("store"))


def signed_records(bodies):
    """Return records with the right checksum, of any content."""
    return b"".join(
        len(body).to_bytes(8, "big") + bytes([op]) + zlib.crc32(body).to_bytes(4, "big") + body for op, body in bodies
    )


RECORDS = st.lists(st.tuples(st.integers(0, 30), st.binary(max_size=30)), max_size=3).map(signed_records)


@given(st.data())
@fuzz
def test_a_file_store_is_read_or_refused(log, data):
    path, right = log
    path.unlink(missing_ok=True)
    content = data.draw(st.one_of(changed(right), RECORDS.map(right.__add__), st.binary(min_size=1, max_size=40)))
    Path(path).write_bytes(content)
    path.chmod(0o600)

    def use():
        with contextlib.closing(dist.FileStore(str(path), timeout=1.0)) as store:
            return store.num_keys()

    found, message = outcome(use, dist.DistStoreError)
    assert found is not None or str(path) in message, message


# ---- Datagrams of the discovery, which any process can send

BEACON = ["0" * 16, "job", "host", 29500, ["1" * 16]]


@given(documents(BEACON))
@example(DEEP)
@fuzz
def test_a_beacon_is_one_or_ignored(body):
    import hmac

    magic = sign(Beacon(*BEACON), b"key")[:18]
    found = verify(magic + hmac.digest(b"key", magic + body, "sha256") + body, b"key")
    assert found is None or 0 <= found.port <= 65535
    assert verify(body, b"key") is None


# ---- Files of the flight recorder


def state_of_a_rank():
    dist.all_reduce(np.ones(1))
    return json.loads(json.dumps(dist.flight_recorder()))


@pytest.fixture(scope="module")
def state():
    return dist.run(state_of_a_rank, 1)[0]


@given(st.data())
@fuzz
def test_a_flight_record_is_read_or_named(tmp_path, state, data):
    path = tmp_path / "rank0.json"
    Path(path).write_bytes(data.draw(st.one_of(documents(state), st.just(DEEP))))
    found, message = outcome(lambda: report_on(read_states([path])))
    assert found is not None or str(path) in message, message


# ---- Error files of ranks, and departures

ERROR = {"rank": 0, "pid": 7, "host": "h", "time_s": 1.5, "monotonic_s": 2.5, "status": 1}
ERROR |= {"type": "E", "message": "m", "traceback": "t", "secondary": False}


@given(st.one_of(documents(ERROR), st.just(DEEP)))
@fuzz
def test_an_error_file_is_read_or_ignored(tmp_path, content):
    path = tmp_path / "error.json"
    Path(path).write_bytes(content)
    failure = read_error_file(str(path), 3)
    assert failure is None or failure.headline().startswith("rank 3 (pid ")


DEPARTURE = {"exit": "gave up", "number": 3, "detail": "d", "call": ["call", 3, "x.py:3", 2], "first": "rank 1"}


@given(st.one_of(documents(DEPARTURE), st.just(DEEP)))
@fuzz
def test_a_departure_is_read_or_unknown(data):
    found = Departure.decode(data)
    assert isinstance(found.exit, PeerExit)
    assert describe(found)


# ---- The remembered choices of plans


@given(st.data())
@fuzz
def test_remembered_choices_are_read_or_ignored(tmp_path, monkeypatch, data):
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    machine = TuningCache(2)._machine  # its file is named after it
    path = path_of(machine)
    right = {"version": _VERSION, "machine": machine, "choices": {"2": {"all_reduce": "ring"}}, "candidates": {}}
    Path(path).write_bytes(data.draw(st.one_of(documents(right), st.just(DEEP))))
    cache = TuningCache(2)
    assert cache.choice("all_reduce") is None or isinstance(cache.choice("all_reduce"), str)
    cache.update({"broadcast": "tree"}, is_final=True)
    assert TuningCache(2).choice("broadcast") == "tree"


# ---- Schedules and URLs

CELLS = [
    "0F0",
    "1B0",
    "0F0SEND_F",
    "0RECV_F1",
    "(0F0;1B0)OVERLAP_F_B",
    "0UNSHARD",
    "",
    "9" * 30 + "F0",
    "0F" + "9" * 30,
]
CELLS += ["0I0", "0W0", "\0", '"', "²F0", "x" * 40]


@given(
    st.one_of(
        st.binary(max_size=40),
        st.lists(st.lists(st.sampled_from(CELLS), max_size=4).map(",".join), max_size=3).map("\n".join).map(str.encode),
    )
)
@fuzz
def test_a_schedule_is_read_or_refused(tmp_path, content):
    path = tmp_path / "schedule.csv"
    Path(path).write_bytes(content)
    outcome(lambda: repr(Schedule.from_csv(path)))


PARTS = [
    "tcp://",
    "env://",
    "file://",
    "[",
    "]",
    "::1",
    "127.0.0.1",
    ":",
    "29500",
    "99999",
    "/",
    "?",
    "rank=",
    "=",
    "&",
]
PARTS += ["world_size=", "-1", "3", "²", "group_name=", "a", "%", "#", "@", "\n", "9" * 5000]


@given(st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PARTS), max_size=9).map("".join)))
@fuzz
def test_an_init_url_is_read_or_refused(text):
    def parse():
        url = parse_init_url(text, -1, -1)
        outcome(url.host_and_port)
        return url

    found, message = outcome(parse)
    assert found is not None or message.startswith(text)
