"""The store in a file: processes, leftovers, damage."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from meshdist.errors import DistStoreError
from meshdist.security.handshake import PROTOCOL
from meshdist.store import FileStore

SPAWN = multiprocessing.get_context("fork")


def run_processes(target: Callable[..., None], *argument_lists: tuple) -> None:
    processes = [SPAWN.Process(target=target, args=arguments) for arguments in argument_lists]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def count_up(path: Path, steps: int) -> None:
    with FileStore(path) as store:
        for _ in range(steps):
            store.add("count", 1)
            store.append("log", "x")


def test_the_file_is_named_as_in_torch(tmp_path: Path) -> None:
    with FileStore(file_name=str(tmp_path / "store"), world_size=1) as store:
        assert store.path == str(tmp_path / "store")


def test_processes_lose_no_count(tmp_path: Path) -> None:
    run_processes(count_up, *[(tmp_path / "store", 100)] * 4)
    with FileStore(tmp_path / "store") as store:
        assert store.get("count") == b"400"
        assert store.get("log") == b"x" * 400


def meet(path: Path, rank: int, world_size: int) -> None:
    with FileStore(path, world_size, timeout=30) as store:
        store.set(f"rank{rank}", str(rank))
        for other in range(world_size):
            assert store.get(f"rank{other}") == b"%d" % other


def test_processes_meet_and_the_last_deletes_the_file(tmp_path: Path) -> None:
    for _ in range(3):
        run_processes(meet, *[(tmp_path / "store", rank, 3) for rank in range(3)])
        assert not (tmp_path / "store").exists()


def test_without_a_world_size_the_file_stays(tmp_path: Path) -> None:
    with FileStore(str(tmp_path / "store")) as store:
        store.set("key", "value")
    with FileStore(tmp_path / "store") as store:
        assert store.get("key") == b"value"


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store:
        assert stat.S_IMODE(os.stat(store.path).st_mode) == 0o600


def test_an_empty_file_is_a_new_store(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    with FileStore(tmp_path / "store", 1) as store:
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_relative_path_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FileStore("store") as store:
        assert store.path == str(tmp_path / "store")


# What is wrong with the file


def test_a_missing_directory_is_named_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(DistStoreError, match=f"{tmp_path}/none/store: the directory {tmp_path}/none does not exist"):
        FileStore(tmp_path / "none" / "store")
    assert time.monotonic() - start < 10


def test_a_directory_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(DistStoreError, match=f"{tmp_path}: it cannot be opened"):
        FileStore(tmp_path)
    with pytest.raises(DistStoreError, match="not a regular file"):
        FileStore("/dev/null")


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_bytes(b"meshdist file store 1\n")
    with pytest.raises(
        DistStoreError, match=f"it is of version 1 of meshdist's protocol, this process uses {PROTOCOL}"
    ):
        FileStore(path, 2)


@pytest.mark.parametrize("content", [b"some notes\n", b"\0", b"meshdist file"])
def test_a_foreign_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    for world_size in (-1, 2):
        with pytest.raises(DistStoreError, match=f"{path}: it is not a meshdist file store"):
            FileStore(path, world_size)
    assert path.read_bytes() == content


def test_a_truncated_file_is_an_error_naming_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("key", "value")
    whole = path.read_bytes()
    for size in range(23, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DistStoreError, match=f"{path}: its record at byte 22 is cut off or damaged"):
            FileStore(path)


def test_a_damaged_file_is_an_error_naming_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("key", "value")
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DistStoreError, match=f"{path}: its record"):
        FileStore(path)


def test_a_file_that_changes_under_a_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("key", "value")
        os.truncate(path, 10)
        with pytest.raises(DistStoreError, match=f"{path}: it was cut to 10 bytes while in use"):
            store.get("key")
        path.unlink()
        with pytest.raises(DistStoreError, match=f"{path}: it was deleted while in use"):
            store.set("key", "value")


def test_calls_after_close(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.close()
    with pytest.raises(DistStoreError, match="it was closed"):
        store.get("key")


@pytest.mark.parametrize("world_size", [0, -2, 1.5])
def test_world_size(tmp_path: Path, world_size: object) -> None:
    with pytest.raises(ValueError, match="world_size must be"):
        FileStore(tmp_path / "store", world_size)


LIMITED = """
import resource, signal, sys
from meshdist.store import FileStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = FileStore(sys.argv[1])
store.set("key", "value")
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try: store.set("key", "x" * 5000)
except RuntimeError as error: print(type(error).__name__, "cannot be written" in str(error))
print(store.get("key").decode(), store.add("count", 1))
"""


def test_a_full_disk_is_an_error_and_leaves_the_file_whole(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "store")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("DistStoreError True\nvalue 1\n", "")
    with FileStore(tmp_path / "store") as store:
        assert store.multi_get(["key", "count"]) == [b"value", b"1"]


# Who else uses it


def test_one_user_more_than_the_world_size(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path, 2), FileStore(path, 2):
        start = time.monotonic()
        with pytest.raises(DistStoreError, match=f"{path}: it already has the 2 users it is for"):
            FileStore(path, 2)
        assert time.monotonic() - start < 10


def join_and_die(path: Path, world_size: int) -> None:
    store = FileStore(path, world_size)
    store.set("key", "stale")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_file_left_over_by_a_killed_run_is_named_at_once(tmp_path: Path, world_size: int) -> None:
    path = tmp_path / "store"
    process = SPAWN.Process(target=join_and_die, args=(path, world_size))
    process.start()
    process.join(timeout=60)
    start = time.monotonic()
    with pytest.raises(
        DistStoreError, match=f"{path}: it was left over by an earlier run, whose process {process.pid}"
    ):
        FileStore(path, world_size)
    assert time.monotonic() - start < 10
    path.unlink()
    with FileStore(path, world_size) as store:
        assert not store.check(["key"])


def test_a_file_left_over_by_a_killed_process_that_nobody_has_reaped(tmp_path: Path) -> None:
    path = tmp_path / "store"
    pid = os.fork()
    if pid == 0:
        join_and_die(path, 2)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(DistStoreError, match=f"it was left over by an earlier run, whose process {pid} is gone"):
            FileStore(path, 2, timeout=5)
    finally:
        os.waitpid(pid, 0)


def test_another_jobs_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    monkeypatch.setenv("MESHDIST_SECRET", "one")
    with FileStore(path, 2):
        monkeypatch.setenv("MESHDIST_SECRET", "two")
        with pytest.raises(DistStoreError, match=f"{path}: it belongs to another job"):
            FileStore(path, 2)


def test_who_comes_again_waits_for_those_still_leaving(tmp_path: Path) -> None:
    path = tmp_path / "store"
    first, second = FileStore(path, 2, timeout=30), FileStore(path, 2, timeout=30)
    first.set("key", "old")
    first.close()
    with pytest.raises(DistStoreError, match=r"users of an earlier run did not leave it within 0.05 s"):
        FileStore(path, 2, timeout=0.05)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(FileStore, path, 2, timeout=30)
        second.close()
        with again.result(timeout=30) as store:
            assert not store.check(["key"])


def test_a_stopped_process_that_holds_the_lock_hangs_nobody(tmp_path: Path, resources: ExitStack) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        holder = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import fcntl, sys\n"
                "file = open(sys.argv[1], 'r+b')\n"
                "fcntl.lockf(file, fcntl.LOCK_EX)\n"
                "print('locked', flush=True)\n"
                "sys.stdin.read()",
                str(path),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        resources.enter_context(holder)
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()
        store.set_timeout(0.2)
        with pytest.raises(DistStoreError, match=f"{path}: another process kept it locked for 0.2 s"):
            store.set("key", "value")
        holder.stdin.close()
        holder.wait(timeout=30)
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_two_stores_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as one, FileStore(path) as two, ThreadPoolExecutor(4) as pool:
        FileStore(path).close()  # closing one must not take the others' lock away
        list(pool.map(lambda number: (one, two)[number % 2].add("count", 1), range(200)))
        assert one.get("count") == b"200"


@pytest.mark.usefixtures("_nothing_left")
def test_a_forked_child_uses_the_store(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", 1) as store:
        store.set("key", "value")
        for _ in range(2):
            child = os.fork()
            if not child:
                os._exit(int(store.get("key") != b"value" or store.add("count", 1) < 1))
            assert os.waitpid(child, 0)[1] == 0
        assert store.get("count") == b"2"


@pytest.mark.usefixtures("_nothing_left")
def test_cleanup(tmp_path: Path) -> None:
    for _ in range(5):
        FileStore(tmp_path / "store", 1).set("key", "value")  # forgotten, so it is closed and the file deleted
    assert not (tmp_path / "store").exists()
    for refused in (lambda: FileStore("/dev/null"), lambda: FileStore(tmp_path)):
        with pytest.raises(DistStoreError):
            refused()
