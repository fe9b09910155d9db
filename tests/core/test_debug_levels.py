"""Debug levels, and what is logged at each."""

import contextlib
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
from worlds import WorkerSet, report

import meshdist as dist
from meshdist import DebugLevel

pytestmark = pytest.mark.timeout(60)
LOGGER = logging.getLogger("meshdist")


@pytest.fixture(autouse=True)
def _untouched(monkeypatch):
    for name in ("MESHDIST_DEBUG", "TORCH_DISTRIBUTED_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    level, handlers = LOGGER.level, list(LOGGER.handlers)
    yield
    LOGGER.setLevel(level)
    LOGGER.handlers[:] = handlers


# ---- The level


def test_off_unless_something_is_said():
    assert dist.get_debug_level() is DebugLevel.OFF
    assert [level.name for level in DebugLevel] == ["OFF", "INFO", "DETAIL"]
    assert [int(level) for level in DebugLevel] == [0, 1, 2]


def test_a_level_prints_as_torch_prints_it():
    level = dist.get_debug_level()
    assert (str(level), repr(level), f"{level}") == ("DebugLevel.OFF", "<DebugLevel.OFF: 0>", "DebugLevel.OFF")
    assert "%s" % DebugLevel.DETAIL == f"{DebugLevel.DETAIL!s}" == "DebugLevel.DETAIL"  # noqa: UP031


@pytest.mark.parametrize("level", list(DebugLevel))
def test_set_and_get(level):
    dist.set_debug_level(level)
    assert dist.get_debug_level() is level


@pytest.mark.parametrize("wrong", ["INFO", 1, None])
def test_set_takes_levels_only(wrong):
    with pytest.raises(
        TypeError, match=r"level must be one of DebugLevel.OFF, DebugLevel.INFO, DebugLevel.DETAIL, got"
    ):
        dist.set_debug_level(wrong)


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, DebugLevel.OFF),
        ({"MESHDIST_DEBUG": "detail"}, DebugLevel.DETAIL),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, DebugLevel.INFO),
        ({"MESHDIST_DEBUG": "", "TORCH_DISTRIBUTED_DEBUG": "INFO"}, DebugLevel.INFO),
        ({"MESHDIST_DEBUG": "OFF", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, DebugLevel.OFF),
    ],
)
def test_from_the_environment(monkeypatch, variables, level):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert dist.get_debug_level() is level  # nobody has set another one
    dist.set_debug_level(DebugLevel.INFO)
    assert dist.get_debug_level() is DebugLevel.INFO
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() is level


@pytest.mark.parametrize(
    ("value", "hint"), [("DETALI", "; did you mean DETAIL?"), ("inf", "; did you mean INFO?"), ("LOUD", "")]
)
def test_a_misspelt_value_is_answered_with_the_one_that_was_meant(monkeypatch, value, hint):
    monkeypatch.setenv("MESHDIST_DEBUG", value)
    with pytest.raises(ValueError, match="got ") as raised:
        dist.get_debug_level()
    assert str(raised.value).endswith(f"got '{value}'{hint}")


@pytest.mark.parametrize("name", ["MESHDIST_DEBUG", "TORCH_DISTRIBUTED_DEBUG"])
def test_a_wrong_value_is_refused_before_anything_is_done(monkeypatch, name):
    monkeypatch.setenv(name, "LOUD")
    for call in (
        dist.get_debug_level,
        dist.set_debug_level_from_env,
        lambda: dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1),
        lambda: dist.run(dist.get_rank, 2, timeout=20),
    ):
        with pytest.raises(ValueError, match=f"{name} must be one of OFF, INFO, DETAIL, got 'LOUD'"):
            call()
    assert not dist.is_initialized()


def test_the_level_of_the_logger_is_the_debug_level():
    LOGGER.setLevel(logging.DEBUG)
    assert dist.get_debug_level() is DebugLevel.DETAIL
    LOGGER.setLevel(logging.ERROR)
    assert dist.get_debug_level() is DebugLevel.OFF


# ---- What is logged


class Kept(logging.Handler):
    """Keeps (rank, level, message) of every record."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append((record.rank, record.levelname, record.getMessage()))


@contextlib.contextmanager
def kept():
    handler = Kept()
    LOGGER.addHandler(handler)
    try:
        yield handler.records
    finally:
        LOGGER.removeHandler(handler)


def some_calls():
    rank, size = dist.get_rank(), dist.get_world_size()
    x, other = np.zeros(3), 1 - rank
    group = dist.new_group(range(size), group_desc="pair")
    group.all_reduce(x)
    dist.all_gather([np.zeros(1) for _ in range(size)], np.zeros(1))
    dist.all_reduce(x, async_op=True).wait()
    dist.barrier()
    works = [dist.isend(x, other), dist.irecv(np.zeros(3), other)]
    for work in works:
        work.wait()
    dist.send(x, other) if rank == 0 else dist.recv(x, other)
    with dist.coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(x.copy())
    dist.destroy_process_group(group)


def test_at_off_nothing_is_logged():
    with kept() as records:
        dist.run(some_calls, 2, timeout=20)
    assert records == []


def test_at_info_set_up_and_groups_are_logged(monkeypatch):
    monkeypatch.setenv("MESHDIST_DEBUG", "INFO")
    with kept() as records:
        dist.run(some_calls, 2, timeout=20)
    for rank in (0, 1):
        mine = [message for of, level, message in records if of == rank and level == "INFO"]
        assert f"this is rank {rank} of 2, pid {os.getpid()}" in mine[0]
        assert mine[1:] == [
            "created group 'world': ranks 0, 1, backend threads",
            "created group 'pair': ranks 0, 1, backend threads",
            "connecting group 'pair' with backend threads",
            "connecting group 'world' with backend threads",
            "group 'pair' has been destroyed",
            "left the world of 2 ranks",
        ]
    assert len(records) == 14


def test_at_detail_every_call_is_logged_with_its_group_bytes_and_line(monkeypatch):
    monkeypatch.setenv("MESHDIST_DEBUG", "DETAIL")
    with kept() as records:
        dist.run(some_calls, 2, timeout=20)
    first = some_calls.__code__.co_firstlineno
    for rank in (0, 1):
        calls = [message for of, level, message in records if of == rank and level == "DEBUG"]
        where = f"(rank {rank} of 2)"
        expected = [
            (f"all_reduce on group 'pair' {where}: 24 B in place", 4),
            (f"all_gather on group 'world' {where}: sends 8 B and receives 16 B", 5),
            (f"all_reduce on group 'world' {where}: 24 B in place", 6),
            (f"barrier on group 'world' {where}: no data", 7),
            (f"isend on group 'world' {where}: sends 24 B", 8),
            (f"irecv on group 'world' {where}: receives 24 B", 8),
            (f"{('send', 'recv')[rank]} on group 'world' {where}: {('sends', 'receives')[rank]} 24 B", 11),
            (f"all_reduce_coalesced on group 'world' {where}: 48 B in place", 12),
        ]
        assert calls == [f"{words}, at test_debug_levels.py:{first + line}" for words, line in expected]


def switch():
    dist.barrier()
    dist.set_debug_level(DebugLevel.DETAIL)
    dist.barrier()
    dist.all_reduce(np.zeros(1))
    with dist.coalescing_manager():  # calls go another way meanwhile, and come back to where they are watched
        dist.set_debug_level(DebugLevel.DETAIL)
        dist.all_reduce(np.zeros(1))
    dist.send(np.zeros(1), 1) if dist.get_rank() == 0 else dist.recv(np.zeros(1), 0)
    dist.set_debug_level(DebugLevel.INFO)
    dist.barrier()
    dist.send(np.zeros(1), 1) if dist.get_rank() == 0 else dist.recv(np.zeros(1), 0)


def switch_and_tell():
    with kept() as records:
        switch()
    report([message.partition(" on ")[0] for _, level, message in records if level == "DEBUG"])
    dist.set_debug_level(DebugLevel.OFF)


def test_the_level_can_change_between_calls(worlds):
    with WorkerSet(worlds.nursery, 2) as workers:
        workers.join()
        workers.start(switch_and_tell)
        for rank, message in ((0, "send"), (1, "recv")):
            assert workers.reported(rank) == ["barrier", "all_reduce", "all_reduce_coalesced", message]
        workers.gather()


def test_a_watched_call_that_fails_says_what_it_says_unwatched(monkeypatch):
    monkeypatch.setenv("MESHDIST_DEBUG", "DETAIL")

    def wrong():
        with pytest.raises(TypeError, match=r"all_reduce on group 'world' \(rank 0 of 1\): tensor must be an array"):
            dist.all_reduce("text")
        return dist.all_reduce(np.ones(2), op=dist.ReduceOp.MAX).tolist()

    assert dist.run(wrong, 1, timeout=20) == [[1.0, 1.0]]


SCRIPT = """
import logging, sys
import meshdist as dist
if sys.argv[1] == "configured":
    logging.basicConfig(format="mine %(rank)s %(message)s", level=logging.WARNING)
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] == "later":
    logging.basicConfig(format="mine %(rank)s %(message)s")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")
@pytest.mark.parametrize(
    ("when", "before", "after"),
    [
        ("never", "meshdist rank 0: ", "meshdist rank 0: "),
        ("configured", "mine 0 ", "mine 0 "),
        ("later", "meshdist rank 0: ", "mine 0 "),
    ],
)
def test_where_records_are_seen(when, before, after):
    environment = {**os.environ, "MESHDIST_DEBUG": "DETAIL", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, when], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"{before}all ranks have joined; this is rank 0 of 1")
    assert lines[1:] == [
        f"{before}created group 'world': rank 0, backend gloo",
        f"{after}barrier on group 'world' (rank 0 of 1): no data, at <string>:9",
        f"{after}connecting group 'world' with backend gloo",
        f"{after}left the world of 1 rank",
    ]


TALKING = """
import logging
from meshdist.debug.debug_level import DebugLevel, set_debug_level
set_debug_level(DebugLevel.INFO)
for _ in range(2000):
    logging.getLogger("meshdist").info("a line of many letters that must not be cut")
"""


def test_lines_of_ranks_that_log_at_once_do_not_run_together():
    read_fd, write_fd = os.pipe()
    speakers = [subprocess.Popen([sys.executable, "-c", TALKING], stderr=write_fd) for _ in range(3)]
    os.close(write_fd)
    with os.fdopen(read_fd) as stream:
        lines = stream.read().splitlines()
    assert [speaker.wait(60) for speaker in speakers] == [0, 0, 0]
    assert lines == ["meshdist: a line of many letters that must not be cut"] * 6000
