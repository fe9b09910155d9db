"""What meshrun does with --max-restarts, and where the ranks' output goes."""

import os
import signal
import socket

import pytest
from launching import all_gone, finish, meshrun, reported, start_meshrun, write_script


def test_all_ranks_are_started_again_with_a_new_secret_and_store(tmp_path):
    body = """
from meshdist.bootstrap.rendezvous import rendezvous
count = int(os.environ["RESTART_COUNT"])
store, _, _ = rendezvous("env://", timeout=30)
assert store.add("there", 1) <= 2
tell(f"told{rank}.{count}", " ".join(os.environ[name] for name in ("MESHDIST_SECRET", "TORCHELASTIC_RUN_ID")))
if rank == count:
    hear(f"told{1 - rank}.{count}")
    os._exit(3)
while count < 2: time.sleep(60)
"""
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "--max-restarts", "3", "script.py")
    assert status == 0
    assert [line for line in err.splitlines() if "again" in line or "first failure: " in line] == [
        *[line for line in err.splitlines() if "first failure: rank 0 (pid " in line],
        "meshrun: starting all ranks again, restart 1 of at most 3",
        *[line for line in err.splitlines() if "first failure: rank 1 (pid " in line],
        "meshrun: starting all ranks again, restart 2 of at most 3",
    ]
    said = [[reported(tmp_path, f"told{rank}.{count}").split() for rank in range(2)] for count in range(3)]
    assert all(first == second for first, second in said)
    assert len({secret for (secret, _), _ in said}) == 3
    assert len({run_id for (_, run_id), _ in said}) == 1


def test_secret_of_the_users_is_kept(tmp_path):
    body = """
secret = os.environ["MESHDIST_SECRET"] + os.environ["MESHDIST_SECRET_FILE"]
tell(os.environ["RESTART_COUNT"], secret)
if os.environ["RESTART_COUNT"] == "0": sys.exit(1)
"""
    write_script(tmp_path, body)
    (tmp_path / "secret").write_text("given\n")
    (tmp_path / "secret").chmod(0o600)
    variables = {"MESHDIST_SECRET_FILE": str(tmp_path / "secret")}
    assert meshrun(tmp_path, "--max-restarts", "1", "script.py", variables=variables)[0] == 0
    assert [reported(tmp_path, count) for count in "01"] == ["given", "given"]


def test_last_failure_counts_where_restarts_are_used_up(tmp_path):
    write_script(tmp_path, "os._exit(3 + int(os.environ['RESTART_COUNT']))")
    status, _, err = meshrun(tmp_path, "--max-restarts", "2", "script.py")
    assert status == 5
    assert [word in err for word in ("status 3", "status 4", "status 5")] == [True] * 3


def test_signal_is_no_reason_to_start_again(tmp_path):
    write_script(tmp_path, "tell('pid0', os.getpid())\ntime.sleep(60)")
    process = start_meshrun(tmp_path, "--max-restarts", "9", "script.py")
    pid = int(reported(tmp_path, "pid0"))
    process.send_signal(signal.SIGTERM)
    assert finish(process) == "meshrun: stopped by SIGTERM\n"
    assert process.returncode == 143
    all_gone([pid])


def test_nothing_is_left_of_the_starts_before(tmp_path):
    body = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
count = os.environ["RESTART_COUNT"]
tell(f"pids{count}", f"{os.getpid()} {child.pid}")
if count == "0":
    raise ValueError
hear("go on")
"""
    write_script(tmp_path, body)
    process = start_meshrun(tmp_path, "--max-restarts", "1", "script.py", variables={"TMPDIR": str(tmp_path)})
    reported(tmp_path, "pids1")
    all_gone([int(pid) for pid in reported(tmp_path, "pids0").split()])
    assert not list(tmp_path.glob("meshdist-*"))
    (tmp_path / "go on").touch()
    finish(process)
    assert process.returncode == 0


def test_fixed_port_can_be_used_by_every_start(tmp_path):
    body = "count = os.environ['RESTART_COUNT']\ntell(count, os.environ['MASTER_PORT'])\nif count < '2': sys.exit(1)"
    write_script(tmp_path, body)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    arguments = ["--max-restarts", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-backend", "c10d", "script.py"]
    assert meshrun(tmp_path, *arguments)[0] == 0
    assert [reported(tmp_path, count) for count in "012"] == [port] * 3


SPEAK = "print(f'out {rank}')\nprint(f'err {rank}', file=sys.stderr)\nprint('half a line', end='')"


def files(tmp_path):
    return {path.name: path.read_text() for path in (tmp_path / "logs").glob("*.log")}


def test_tee_shows_lines_with_their_rank(tmp_path):
    write_script(tmp_path, SPEAK)
    status, out, err = meshrun(tmp_path, "--nproc-per-node", "2", "--tee", "3", "script.py")
    assert status == 0
    assert sorted(out.splitlines()) == [
        "[rank0] half a line",
        "[rank0] out 0",
        "[rank1] half a line",
        "[rank1] out 1",
    ]
    assert sorted(err.splitlines()) == ["[rank0] err 0", "[rank1] err 1"]


def test_tee_writes_files_too(tmp_path):
    write_script(tmp_path, SPEAK)
    arguments = ["--nproc-per-node", "2", "--tee", "1", "--redirects", "1:2", "--log-dir", "logs", "script.py"]
    status, out, err = meshrun(tmp_path, *arguments)
    assert status == 0
    assert "[rank1] out 1\n" in out
    assert err == "err 0\n"
    assert files(tmp_path) == {
        "rank0.stdout.log": "out 0\nhalf a line",
        "rank1.stdout.log": "out 1\nhalf a line",
        "rank1.stderr.log": "err 1\n",
    }


def test_redirects_of_one_stream(tmp_path):
    write_script(tmp_path, SPEAK)
    status, out, err = meshrun(tmp_path, "--redirects", "2", "--log-dir", "logs", "script.py")
    assert (status, out, err) == (0, "out 0\nhalf a line", "")
    assert files(tmp_path) == {"rank0.stderr.log": "err 0\n"}


def test_restart_has_files_of_its_own(tmp_path):
    write_script(tmp_path, "count = os.environ['RESTART_COUNT']\nprint('start', count)\nif count == '0': sys.exit(1)")
    status, _, err = meshrun(tmp_path, "--max-restarts", "1", "--log-dir", "logs", "script.py")
    assert status == 0
    assert "logs/rank0.stderr.log" in err
    assert {name: text for name, text in files(tmp_path).items() if text} == {
        "rank0.stdout.log": "start 0\n",
        "rank0.restart1.stdout.log": "start 1\n",
    }


def test_long_output_passes_through_a_tee_whole(tmp_path):
    write_script(tmp_path, "for i in range(3000): print(i, 'x' * 60)\nprint('y' * 200_000)")
    status, out, _ = meshrun(tmp_path, "--nproc-per-node", "2", "--tee", "1", "script.py")
    assert status == 0
    for rank in range(2):
        lines = [line.removeprefix(f"[rank{rank}] ") for line in out.splitlines() if line.startswith(f"[rank{rank}] ")]
        assert lines[:3000] == [f"{i} {'x' * 60}" for i in range(3000)]
        assert "".join(lines[3000:]) == "y" * 200_000


def test_child_that_keeps_a_tee_open_does_not_keep_the_launcher(tmp_path):
    # It keeps only what is teed: this test waits for the end of the other stream.
    start = "subprocess.Popen(['sleep', '60'], start_new_session=True, stderr=subprocess.DEVNULL)"
    write_script(tmp_path, f"import subprocess\nprint({start}.pid)")
    status, out, _ = meshrun(tmp_path, "--tee", "1", "script.py")
    assert status == 0
    os.kill(int(out.removeprefix("[rank0] ")), signal.SIGKILL)  # it lives


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_costs_the_file_and_not_the_job(tmp_path):
    write_script(tmp_path, "for i in range(2000): print(i, 'x' * 100)")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank0.stdout.log").symlink_to("/dev/full")
    status, out, _ = meshrun(tmp_path, "--tee", "1", "--log-dir", "logs", "script.py")
    assert status == 0
    assert "[rank0] 1999 " in out
    assert out.count("cannot write logs/rank0.stdout.log, stopped writing it") == 1
