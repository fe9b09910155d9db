"""python -m meshdist.doctor: its lines, its exit status, and what it finds between the ranks of a job."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshdist.doctor import machine, network
from meshdist.doctor.__main__ import main
from meshdist.doctor.finding import ERROR, NOTE, OK, WARNING, Finding, run_checks
from meshdist.doctor.host_connections import check_cluster
from meshdist.store import HashStore

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="it looks at Linux")]


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_PORT", "MESHDIST_SECRET"):
        monkeypatch.delenv(name, raising=False)


def named(findings, name):
    return next(finding for finding in findings if finding.name == name)


def test_this_machine_is_looked_at_line_by_line():
    found = list(run_checks((*machine.CHECKS, *network.CHECKS)))
    names = {finding.name for finding in found}
    assert {
        "versions",
        "processors",
        "shared memory",
        "process_vm_readv",
        "open files",
        "interfaces",
        "secret",
    } <= names
    assert {finding.status for finding in found} <= {OK, NOTE, WARNING, ERROR}
    for finding in found:
        assert finding.status not in (WARNING, ERROR) or finding.remedy, finding


def test_a_terminal_gets_lines_that_fit():
    finding = Finding(
        "locked memory", NOTE, "at most 8192 KiB: enough for gloo", "ulimit -l unlimited, where it is used"
    )
    assert finding.folded(40).splitlines() == [
        "note     locked memory: at most 8192",
        "         KiB: enough for gloo",
        "         -> ulimit -l unlimited, where",
        "            it is used",
    ]
    assert finding.folded(80) == str(finding)


def test_a_check_that_fails_is_a_finding():
    def odd_place():
        raise OSError("no such device")
        yield

    (found,) = run_checks([odd_place])
    assert (found.name, found.status) == ("odd place", WARNING)
    assert "OSError: no such device" in found.text


def test_too_many_ranks_for_the_processors(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    found = named(run_checks([machine.processors]), "processors")
    assert found.status == WARNING
    assert "for 100000 ranks" in found.text
    assert "--nproc-per-node" in found.remedy


def test_too_many_threads_for_the_processors(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    found = named(run_checks([machine.processors]), "processors")
    assert found.status == WARNING
    assert found.remedy.startswith("set OMP_NUM_THREADS=")


def test_a_low_limit_of_open_files_is_a_warning_with_its_cure():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "from meshdist.doctor import machine; print(*machine.limits(), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "warning  open files: at most 64 (hard limit 64)\n         -> ulimit -n 65536" in done.stdout


def test_a_forbidden_single_copy_is_noted(monkeypatch):
    monkeypatch.setenv("MESHDIST_SINGLE_COPY", "0")
    assert named(run_checks([machine.single_copy]), "process_vm_readv").status == NOTE


def test_a_taken_port_is_a_warning(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        found = named(run_checks([network.ports]), "store's port")
    assert found.status == WARNING
    assert "MASTER_PORT" in found.remedy


def test_a_secret_file_that_others_may_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text("known to all")
    path.chmod(0o644)
    monkeypatch.setenv("MESHDIST_SECRET_FILE", str(path))
    found = named(run_checks([network.secret]), "secret")
    assert found.status == ERROR
    assert "chmod 600" in found.text


def test_json_and_the_exit_status(capsys):
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"name", "status", "text", "remedy"} == set(found[0])
    assert {"MPI", "GPUs", "CuPy"} <= {finding["name"] for finding in found}


def test_warnings_count_where_they_are_to(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert main(["--strict"]) == 1
    assert re.search(
        r"(?<!\d)(1 of \d+ checks needs|[2-9] of \d+ checks need) attention$", capsys.readouterr().out.rstrip()
    )


def examine(size, own=None):
    """Run the ranks' parts of the examination as threads; return what rank 0 learns."""
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        parts = [pool.submit(check_cluster, store, rank, size, (own or {}).get(rank, [])) for rank in range(size)]
        return [part.result(60) for part in parts]


def test_ranks_of_one_host_agree():
    found, *others = examine(3)
    assert others == [[], []]
    assert named(found, "ranks").text.startswith("3 on 1 host: ")
    assert named(found, "meshdist of all ranks").status == OK
    assert named(found, "clocks").status == OK


def test_what_a_host_finds_on_itself_is_told_once():
    bad = Finding("open files", WARNING, "at most 64", "ulimit -n 65536").as_dict()
    found = examine(2, {0: [bad, Finding("clock", OK, "tsc").as_dict()], 1: [bad]})[0]
    assert [finding.text for finding in found if finding.name.startswith("open files on ")] == ["at most 64"]
    assert not [finding for finding in found if finding.name.startswith("clock on ")]


def test_under_meshrun_the_ranks_are_compared():
    command = [sys.executable, "-m", "meshdist.launch.meshrun", "-n", "2", "-m", "meshdist.doctor", "--json"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert found["ranks"]["text"].startswith("2 on 1 host")
    assert found["secret"]["status"] == OK
    assert found["clocks"]["status"] == OK


def test_a_job_that_does_not_meet_is_an_error(monkeypatch, port, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr("meshdist.doctor.__main__.MEET_S", 1.0)
    assert main([]) == 1
    assert "error    job: rank 1 cannot join the others" in capsys.readouterr().out


def test_finding_shows_its_cure():
    finding = Finding("open files", "warning", "at most 64", "ulimit -n 4096")
    assert str(finding) == "warning  open files: at most 64\n         -> ulimit -n 4096"
