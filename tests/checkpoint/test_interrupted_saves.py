"""A save that fails at any point leaves the last checkpoint whole, and nothing else."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from checkpoint_trees import save_steps
from worlds import WorkerSet, needs_linux

import meshdist
from meshdist.checkpoint import CheckpointError, latest, load, save
from meshdist.checkpoint.opening import Opened
from meshdist.checkpoint.verification import check_checkpoint

TREE = {"w": np.arange(3000.0), "n": 1}


def is_whole(directory, least):
    """Return the step of the newest checkpoint, every byte of which must be right."""
    opened = Opened.at(directory)
    assert list(check_checkpoint(opened)) == []
    found = load(directory)
    assert found["step"] == opened.manifest.step >= least
    assert (found["w"] == found["step"]).all()
    assert (found["b"] == found["step"]).all()
    assert found["w"].shape == (300, 2000)
    return found["step"]


@needs_linux
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "moments", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.exhaustive])], ids=["few", "200"]
)
def test_killed_at_any_moment_the_last_checkpoint_is_whole(worlds, tmp_path, moments):
    chance = random.Random(moments)
    step = 0
    for moment in range(moments):
        format, asynchronous = ("safetensors", "npy")[moment % 2], moment % 3 == 2
        with WorkerSet(worlds.nursery, 2) as workers:
            workers.join()
            workers.start(save_steps, str(tmp_path), step, format, asynchronous)
            workers.reported(0)
            threading.Event().wait(chance.uniform(0, 0.1))  # to any moment of the saves that follow
            for rank in (0, 1):  # all of the job
                workers.signal(rank, signal.SIGKILL)
            assert all(workers.ended(rank) for rank in (0, 1))
        step = is_whole(tmp_path, step - asynchronous) + 1
    meshdist.run(lambda: save(tmp_path, {"step": step}), 1)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".step"))
    assert left == []
    assert not (tmp_path / ".saving").exists()


def save_and_lose(directory):
    save(directory, TREE, step=1)
    if meshdist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        save(directory, TREE, step=2)
    except meshdist.DistError as error:
        return str(error)


@needs_linux
def test_a_lost_rank_ends_the_save_of_the_others(worlds, tmp_path):
    with WorkerSet(worlds.nursery, 2) as workers:
        workers.join()
        workers.start(save_and_lose, str(tmp_path))
        assert "rank 1" in workers.outcome(0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def save_with_limit(directory, limited):
    save(directory, {"n": 1}, step=1)
    if meshdist.get_rank() == limited:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    try:
        save(directory, {"w": np.ones(1 << 20)}, step=2)
    except OSError as error:
        found = error.errno, str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return found


@needs_linux
@pytest.mark.parametrize("limited", [0, 1])
def test_where_no_room_is_left_all_ranks_say_so(worlds, tmp_path, limited):
    with WorkerSet(worlds.nursery, 2) as workers:
        workers.join()
        workers.start(save_with_limit, str(tmp_path), limited)
        found = workers.gather()
    assert found[0] == found[1]
    assert found[0][0] == errno.EFBIG
    assert f"(rank {limited} of 2): File too large: {tmp_path}/.step-2-" in found[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert load(tmp_path) == {"n": 1}


@needs_linux
def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path):
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path]).returncode:
        pytest.skip("mounting a small disk needs root")

    def program():
        save(tmp_path, {"n": 1})
        with pytest.raises(OSError, match=r"save to .* \(rank 0 of 2\): No space left on device") as caught:
            save(tmp_path, {"w": np.ones(1 << 20)})
        assert caught.value.errno == errno.ENOSPC

    try:
        meshdist.run(program, 2)
        assert [path.name for path in tmp_path.iterdir()] == ["step-0"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()

    def program():
        with pytest.raises(OSError, match=r"\(rank 0 of 2\): Not a directory"):
            save(tmp_path / "file" / "run", TREE)

    meshdist.run(program, 2)


def test_a_step_is_replaced_only_if_asked_for(tmp_path):
    def program():
        save(tmp_path, {"n": 1}, step=5)
        with pytest.raises(FileExistsError, match="step-5 exists already; save another step, or pass overwrite=True"):
            save(tmp_path, {"n": 2}, step=5)
        assert load(tmp_path) == {"n": 1}
        save(tmp_path, {"n": 3}, step=5, overwrite=True)
        return load(tmp_path)

    assert meshdist.run(program, 2) == [{"n": 3}] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


def test_the_checkpoint_just_saved_is_kept(tmp_path):
    def program():
        for step in (5, 9, 7):
            save(tmp_path, {}, step=step)
        save(tmp_path, {}, step=3, keep=2)

    meshdist.run(program, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-9"]


def test_damage_is_named_wherever_it_is(tmp_path):
    meshdist.run(lambda: save(tmp_path, {"w": np.arange(700, dtype="f4"), "b": np.arange(9, dtype="i1")}), 2)
    files = [path for path in (tmp_path / "step-0").iterdir() if path.is_file()]
    assert len(files) == 3
    for path in files:
        good = path.read_bytes()
        for place in sorted({*range(0, len(good), 97), *range(4090, len(good), 53), len(good) - 1}):
            path.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
            with pytest.raises(CheckpointError, match=rf"{path.name} is damaged") as caught:
                load(tmp_path)
            if path.suffix == ".safetensors" and place >= 4096:
                assert ("array 'w'" if place < 4096 + 2800 else "array 'b'") in str(caught.value)
        for length in (0, 1, 7, 8, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:length])
            with pytest.raises(CheckpointError, match=rf"{path.name} is damaged"):
                load(tmp_path)
        if path.suffix == ".safetensors":
            path.unlink()
            with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
                load(tmp_path)
        path.write_bytes(good)
    load(tmp_path)


def test_damaged_npy_files_are_named(tmp_path):
    meshdist.run(lambda: save(tmp_path, {"w": np.arange(700)}, format="npy"), 2)
    path = tmp_path / "step-0" / "w.npy"
    good = path.read_bytes()
    for place in (0, 7, 8, 20, 70, 127, 128, 900, len(good) - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        with pytest.raises(CheckpointError, match=r"w.npy is damaged"):
            load(tmp_path, {"w": np.zeros(700, int)})


def claim(directory, **changes):
    """Leave a claim on a folder, as a job that saves has it, and return its file."""
    found = {}

    def program():
        save(directory, {}, step=0, overwrite=True)

    real = os.link
    try:
        os.link = lambda source, to: (found.update(json.loads(source.read_text())), real(source, to))
        meshdist.run(program, 1)
    finally:
        os.link = real
    path = directory / ".saving"
    path.write_text(json.dumps({**found, **changes}))
    return path


def test_two_jobs_do_not_save_into_one_folder_at_a_time(tmp_path):
    path = claim(tmp_path)  # of this process, which is alive

    def program():
        expected = rf"process {os.getpid()} on {socket.gethostname()} is saving into .* has ended remove .*\.saving"
        with pytest.raises(CheckpointError, match=expected):
            save(tmp_path, TREE)

    meshdist.run(program, 2)
    assert path.exists()
    assert [step.name for step in tmp_path.glob("step-*")] == ["step-0"]


def test_the_claim_of_a_job_that_was_killed_is_void(tmp_path):
    path = claim(tmp_path)
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    found = json.loads(path.read_text())
    found["member"][3] = done.stdout.strip()
    path.write_text(json.dumps(found))
    shutil.copy(path, tmp_path / ".saving-0123456789abcdef")  # killed while it made the claim
    (tmp_path / ".step-9-0123abcd").mkdir()
    (tmp_path / ".step-9-mine").mkdir()  # no name that a save gives
    meshdist.run(lambda: save(tmp_path, TREE), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-9-mine", "step-0", "step-1"]


def test_the_claim_of_another_host_is_void_once_it_is_not_renewed(tmp_path):
    path = claim(tmp_path)
    found = json.loads(path.read_text())
    found["member"][2], found["host"] = "another", "elsewhere"
    path.write_text(json.dumps(found))

    def refused():
        with pytest.raises(CheckpointError, match=r"on elsewhere is saving into"):
            save(tmp_path, TREE)

    meshdist.run(refused, 1)
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 1000))
    meshdist.run(lambda: save(tmp_path, TREE), 1)
    assert latest(tmp_path).name == "step-1"


def test_jobs_that_take_turns_in_one_folder_are_told(tmp_path):
    def first():
        save(tmp_path, TREE, step=1)
        shutil.copytree(tmp_path / "step-1", tmp_path / "step-2")  # as another job
        with pytest.raises(
            CheckpointError, match=r"step-2 came from another job, process \d+ on .* give each job its own folder"
        ):
            save(tmp_path, TREE, step=3)

    meshdist.run(first, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_links_are_not_needed(tmp_path, monkeypatch):
    def link(source, to):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    meshdist.run(lambda: save(tmp_path, TREE), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]


def test_nothing_to_load(tmp_path):
    def program():
        with pytest.raises(FileNotFoundError, match=r"load from .* there is no checkpoint in .*: no step-<n>"):
            load(tmp_path)
        with pytest.raises(FileNotFoundError, match="no such folder"):
            load(tmp_path / "none")

    meshdist.run(program, 2)


def test_folders_that_are_no_checkpoints_are_skipped_in_words_and_counted(tmp_path, caplog):
    def program():
        save(tmp_path, TREE)
        save(tmp_path, {"n": 1})
        if meshdist.get_rank() == 0:
            (tmp_path / "step-1" / "checkpoint.json").unlink()
            (tmp_path / "step-50").mkdir()
        meshdist.barrier()
        found = load(tmp_path)
        return found.keys() == TREE.keys(), save(tmp_path, {"n": 2}).name, load(tmp_path)

    assert meshdist.run(program, 2) == [(True, "step-51", {"n": 2})] * 2
    words = "is skipped as it has no checkpoint.json: remove it, or load it by its own name"
    assert caplog.messages == [f"{tmp_path / name} {words}" for name in ("step-50", "step-1")]
    caplog.clear()
    assert latest(tmp_path).name == "step-51"
    assert not caplog.messages


def test_a_link_to_a_checkpoint_is_removed_and_not_the_checkpoint(tmp_path):
    elsewhere, runs = tmp_path / "elsewhere", tmp_path / "runs"

    def program():
        kept = save(elsewhere, {"n": 1}, step=1)
        if meshdist.get_rank() == 0:
            runs.mkdir()
            (runs / "step-1").symlink_to(kept)
            (runs / ".step-0-0123abcd").symlink_to(kept)  # as a save that was killed leaves one
        meshdist.barrier()
        save(runs, {"n": 2}, step=2, keep=1)

    meshdist.run(program, 2)
    assert [path.name for path in runs.iterdir()] == ["step-2"]
    assert load(elsewhere) == {"n": 1}


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "step-1").write_text("mine")
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-3").symlink_to(tmp_path / "step-2")

    def program():
        for step in (1, 2, 3):
            with pytest.raises(FileExistsError, match=f"step-{step} exists and is not a checkpoint: move it away"):
                save(tmp_path, TREE, step=step, overwrite=True)
        return save(tmp_path, TREE, step=4).name

    assert meshdist.run(program, 2) == ["step-4"] * 2
    assert (tmp_path / "step-1").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2", "step-3", "step-4"]


@needs_linux
def test_a_read_only_file_system_is_named(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path]
    if os.geteuid() != 0 or subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("mounting a disk needs root")

    def program():
        with pytest.raises(OSError, match=r"save to .* \(rank 0 of 2\): Read-only file system") as caught:
            save(tmp_path, TREE)
        assert caught.value.errno == errno.EROFS
        return load(tmp_path)

    try:
        meshdist.run(lambda: save(tmp_path, {"n": 1}), 2)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        assert meshdist.run(program, 2) == [{"n": 1}] * 2
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_locks_are_not_needed(tmp_path, monkeypatch):
    import fcntl

    def lock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, lock)
    meshdist.run(lambda: save(tmp_path, TREE), 2)
    path = claim(tmp_path)

    def second():
        with pytest.raises(CheckpointError, match=r"is saving into"):
            save(tmp_path, TREE)

    meshdist.run(second, 2)
    assert path.exists()


@needs_linux
def test_memory_of_loads_is_that_of_the_arrays(tmp_path):
    meshdist.run(lambda: save(tmp_path, {name: np.ones(1 << 20) for name in "abcd"}), 1)
    code = (
        "import resource, sys, numpy as np\n"
        "from meshdist.checkpoint import load\n"
        "like = {name: np.full(1 << 20, 2.0) for name in 'abcd'}\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "load(sys.argv[1], like, in_place=True)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, sum(x[0] for x in like.values()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    more_kib, total = done.stdout.split()
    assert float(total) == 4.0
    assert int(more_kib) < 24 << 10


def save_twice(path):
    meshdist.run(lambda: [save(path, {"n": step, "w": np.ones(3)}, step=step) for step in (1, 2)], 1)


def test_a_newest_checkpoint_that_is_removed_while_it_is_opened(tmp_path, monkeypatch):
    """As by another job that keeps one."""
    save_twice(tmp_path)
    check, newest = Opened.check_files, tmp_path / "step-2"

    def removes(self):
        if self.folder == newest and newest.exists():
            shutil.rmtree(newest)
        check(self)

    monkeypatch.setattr(Opened, "check_files", removes)
    assert load(tmp_path)["n"] == 1
    with pytest.raises(FileNotFoundError):
        load(newest)


def test_a_newest_checkpoint_that_is_damaged_is_not_passed_over(tmp_path):
    save_twice(tmp_path)
    (tmp_path / "step-2" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"step-2/model.safetensors is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda path: save({"w": np.ones(3)}, str(path)), "got dict; did you swap directory and tree"),
        (lambda path: save(3, {"w": np.ones(3)}), "save: directory must be the path of a folder, got int"),
        (lambda path: save(path, {"w": np.zeros(2, np.longdouble)}), r"tree\['w'\]: dtype .* differs between machines"),
        (lambda path: save(path, {"w": np.array(["a"])}), r"tree\['w'\] has the unsupported .*; lists of strings"),
        (lambda path: load(path, strict="no"), "strict must be True or False, got 'no'"),
    ],
)
def test_arguments_that_are_wrong_are_named(tmp_path, call, words):
    def program():
        with pytest.raises(TypeError, match=words):
            call(tmp_path)

    meshdist.run(program, 2)
