"""The JSON files that meshrun writes about ranks that failed or were terminated."""

import datetime
import json
import os
import signal
import socket
import stat
import time

import pytest
from launching import finish, meshrun, reported, start_meshrun, write_script


def read(directory):
    return {path.name: json.loads(path.read_text()) for path in directory.iterdir() if path.suffix == ".json"}


def test_error_files_say_what_failed_first_and_how_the_others_ended(tmp_path):
    body = """
if rank == 0:
    tell("pid0", os.getpid())
    time.sleep(60)
if rank == 1:
    tell("pid1", os.getpid())
    sys.exit(0)
hear("pid0")
stat = pathlib.Path("/proc", hear("pid1"), "stat")
while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
    time.sleep(0.005)  # rank 1 is to end before this one fails
def inner():
    raise KeyError("no such weight")
inner()
"""
    write_script(tmp_path, body)
    began = time.time()
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "3", "--error-dir", "errors/run", "script.py")
    assert status == 1
    assert err.splitlines()[-1] == (
        "meshrun: error file of rank 2: errors/run/rank2.error.json (rank 0: same directory)"
    )
    files = read(tmp_path / "errors/run")
    assert files.keys() == {"rank0.error.json", "rank2.error.json"}  # rank 1 ended well
    first, other = files["rank2.error.json"], files["rank0.error.json"]
    assert (first["rank"], first["local_rank"], first["node"], first["restart"]) == (2, 2, 0, 0)
    assert first["host"] == os.uname().nodename
    assert (first["type"], first["message"], first["exit_status"], first["signal"]) == (
        "KeyError",
        "'no such weight'",
        1,
        None,
    )
    assert first["traceback"].startswith("Traceback (most recent call last):\n")
    assert f'File "{tmp_path}/script.py"' in first["traceback"]
    assert first["traceback"] in err
    assert began < first["time_s"] < time.time()
    written = datetime.datetime.strptime(first["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.timezone.utc)
    assert written.timestamp() == int(first["time_s"])
    assert (first["failed"], first["is_first"], first["follows_from_peer"]) == (True, True, False)
    assert (first["first_failure"], first["stderr"]) == (None, None)
    assert other["pid"] == int(reported(tmp_path, "pid0"))
    assert (other["failed"], other["is_first"], other["signal"]) == (False, False, "SIGTERM")
    assert other["how"] == "was terminated after the first failure"
    assert other["first_failure"]["rank"] == 2
    assert other["first_failure"]["time_s"] == first["time_s"]
    assert "KeyError: 'no such weight'" in other["first_failure"]["how"]
    assert first["run_id"] == other["run_id"] != ""
    for name in files:
        assert stat.S_IMODE((tmp_path / "errors/run" / name).stat().st_mode) == 0o600
    assert sorted(path.name for path in (tmp_path / "errors/run").iterdir()) == sorted(files)


@pytest.mark.parametrize(
    ("body", "status", "number", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", None, "SIGKILL", "was killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", None, "SIGSEGV", "was killed by SIGSEGV"),
        ("os._exit(9)", 9, None, "exited with status 9"),
        ("sys.exit(3)", 3, None, "exited with status 3"),
    ],
)
def test_end_without_an_exception_is_in_the_file(tmp_path, body, status, number, how):
    write_script(tmp_path, body)
    _, _, err = meshrun(tmp_path, "--log-dir", "logs", "script.py")
    assert "error file of rank 0: logs/rank0.error.json" in err.splitlines()[-1]
    said = read(tmp_path / "logs")["rank0.error.json"]
    assert (said["exit_status"], said["signal"], said["how"]) == (status, number, how)
    assert said["type"] == ("SystemExit" if "sys.exit" in body else None)
    assert (said["message"], said["traceback"]) == (None, None)
    assert said["stderr"] == "logs/rank0.stderr.log"
    assert said["is_first"]


def test_program_that_is_no_python_has_a_file_too(tmp_path):
    assert meshrun(tmp_path, "--error-dir", ".", "--no-python", "sh", "-c", "exit 7")[0] == 7
    assert read(tmp_path)["rank0.error.json"]["exit_status"] == 7


def test_failure_that_follows_from_a_peers_says_so(tmp_path):
    body = """
from meshdist.errors import DistNetworkError
if rank == 1:
    hear("noticed")
    os._exit(5)
try:
    raise DistNetworkError("rank 1 is gone", peer_failed=True)
finally:
    tell("noticed")
"""
    write_script(tmp_path, body)
    _, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "--error-dir", ".", "script.py")
    files = read(tmp_path)
    assert files["rank1.error.json"]["is_first"]
    assert "error file of rank 1: ./rank1.error.json" in err
    peer = files["rank0.error.json"]
    # Rank 0 may be asked to end while it is still on its way out.
    assert peer["follows_from_peer"] is peer["failed"]
    assert not peer["is_first"]
    assert peer["first_failure"]["rank"] == 1
    assert peer["first_failure"]["how"].endswith("exited with status 5")


def test_rank_that_had_to_be_killed_is_told_apart(tmp_path):
    body = """
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell("ready")
    time.sleep(60)
hear("ready")
raise ValueError("the end")
"""
    write_script(tmp_path, body)
    meshrun(tmp_path, "--nproc-per-node", "2", "--grace", "0.2", "--error-dir", ".", "script.py")
    said = read(tmp_path)["rank1.error.json"]
    assert said["how"] == "was killed after the first failure, as it did not end when asked to"
    assert said["signal"] == "SIGKILL"


def test_every_start_has_files_of_its_own_and_those_of_the_job_before_are_removed(tmp_path):
    (tmp_path / "rank7.restart2.error.json").write_text("{}")
    (tmp_path / "rank7.error.json").write_text("{}")
    (tmp_path / "other.error.json").write_text("{}")
    write_script(tmp_path, "raise ValueError(os.environ['RESTART_COUNT'])")
    _, _, err = meshrun(tmp_path, "--max-restarts", "1", "--error-dir", ".", "script.py")
    files = read(tmp_path)
    assert files.keys() == {"rank0.error.json", "rank0.restart1.error.json", "other.error.json"}
    assert [files[f"rank0{start}.error.json"]["message"] for start in ("", ".restart1")] == ["0", "1"]
    assert files["rank0.restart1.error.json"]["restart"] == 1
    assert err.count("meshrun: error file of rank 0: ") == 2
    write_script(tmp_path, "pass")
    assert meshrun(tmp_path, "--error-dir", ".", "script.py") == (0, "", "")
    assert read(tmp_path).keys() == {"other.error.json"}


def test_job_that_is_interrupted_has_no_error_files(tmp_path):
    write_script(tmp_path, "tell('ready')\ntime.sleep(60)")
    process = start_meshrun(tmp_path, "--error-dir", "errors", "script.py")
    reported(tmp_path, "ready")
    process.send_signal(signal.SIGINT)
    assert finish(process) == "meshrun: stopped by SIGINT\n"
    assert not read(tmp_path / "errors")


def test_directory_that_cannot_be_made_is_said_before_the_ranks_start(tmp_path):
    (tmp_path / "errors").write_text("a file")
    write_script(tmp_path, "tell('started')")
    status, _, err = meshrun(tmp_path, "--error-dir", "errors/here", "script.py")
    assert status == 1
    assert err.startswith("meshrun: cannot start the job: ")
    assert "errors/here" in err
    assert not (tmp_path / "started").exists()


def test_directory_that_is_gone_when_a_rank_fails_costs_the_files_alone(tmp_path):
    write_script(tmp_path, "os.rmdir('errors')\nraise ValueError('still seen')")
    status, _, err = meshrun(tmp_path, "--error-dir", "errors", "script.py")
    assert status == 1
    assert err.count("ValueError: still seen") == 1
    assert err.splitlines()[-1].startswith("meshrun: cannot write the ranks' error files: ")


def test_link_in_the_place_of_a_file_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors/rank0.error.json.part").symlink_to(tmp_path / "precious")
    write_script(tmp_path, "sys.exit(3)")
    meshrun(tmp_path, "--error-dir", "errors", "script.py")
    assert (tmp_path / "precious").read_text() == "kept"
    assert read(tmp_path / "errors")["rank0.error.json"]["exit_status"] == 3


def test_launchers_of_two_hosts_say_the_same_of_the_first_failure(tmp_path):
    body = """
tell(f"pid{rank}", os.getpid())
if rank == 1:
    hear("pid0")
    raise ValueError("on the other host")
time.sleep(60)
"""
    write_script(tmp_path, body)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{probe.getsockname()[1]}", "--error-dir", "errors"]
    launchers = [start_meshrun(tmp_path, *where, "--node-rank", str(node), "script.py") for node in range(2)]
    said = [finish(launcher) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [1, 1]
    for rank in range(2):
        assert said[rank].splitlines()[-1] == f"meshrun: error file of rank {rank}: errors/rank{rank}.error.json"
    ended, failed = (read(tmp_path / "errors")[f"rank{rank}.error.json"] for rank in range(2))
    assert (failed["node"], failed["is_first"], failed["message"]) == (1, True, "on the other host")
    assert (ended["node"], ended["failed"], ended["signal"]) == (0, False, "SIGTERM")
    assert (ended["first_failure"]["node"], ended["first_failure"]["rank"]) == (1, 1)
    assert ended["first_failure"]["time_s"] == failed["time_s"]
    assert ended["run_id"] == failed["run_id"]


def test_ranks_are_started_again_out_of_the_middle_of_their_calls(tmp_path):
    body = """
import numpy as np
import meshdist as dist
count = int(os.environ["RESTART_COUNT"])
dist.init_process_group(timeout=60)
x = np.full(50_000, float(rank))
for step in range(60):
    if count < 3 and rank == count and step == 20 + count:
        os.kill(os.getpid(), [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT][count])
    dist.all_reduce(x, op="max")
tell(f"done{rank}", x[-1])
dist.destroy_process_group()
"""
    write_script(tmp_path, body)
    arguments = ["--nproc-per-node", "4", "--max-restarts", "3", "--error-dir", "errors", "script.py"]
    status, _, err = meshrun(tmp_path, *arguments)
    assert status == 0, err
    assert [reported(tmp_path, f"done{rank}") for rank in range(4)] == ["3.0"] * 4
    first = [said for said in read(tmp_path / "errors").values() if said["is_first"]]
    assert sorted((said["restart"], said["rank"], said["signal"]) for said in first) == [
        (0, 0, "SIGKILL"),
        (1, 1, "SIGSEGV"),
        (2, 2, "SIGABRT"),
    ]
