"""Whole jobs whose stores speak TLS."""

import os
import socket
import subprocess
import sys

import pytest
from authorities import Authority
from launching import environment, finish, meshrun, start_meshrun, write_script

SUM = """
import numpy as np
import meshdist as dist
dist.init_process_group(timeout=30)
x = np.full(3, 1.0 + rank)
dist.all_reduce(x)
print(x.tolist())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


def test_ranks_of_meshrun_meet_by_tls(tmp_path, authority):
    write_script(tmp_path, SUM)
    found = meshrun(tmp_path, "--nproc-per-node", "2", "script.py", variables=authority.sign("node"))
    assert found == (0, "[3.0, 3.0, 3.0]\n" * 2, "")


def test_launchers_and_ranks_of_two_hosts_meet_by_tls(tmp_path, authority):
    write_script(tmp_path, SUM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{probe.getsockname()[1]}"]
    launchers = [
        start_meshrun(tmp_path, *where, "script.py", variables={**authority.sign(name), "MESHDIST_DISABLE_SHM": "1"})
        for name in ("node1", "node2")
    ]
    assert [finish(launcher) for launcher in launchers] == ["", ""]
    assert [launcher.returncode for launcher in launchers] == [0, 0]


def test_launcher_without_tls_is_told_so(tmp_path, authority):
    write_script(tmp_path, SUM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{probe.getsockname()[1]}", "--rdzv-timeout", "20"]
    first = start_meshrun(tmp_path, *where, "--node-rank", "0", "script.py", variables=authority.sign("node"))
    try:
        second = start_meshrun(tmp_path, *where, "--node-rank", "1", "script.py")
        assert "requires TLS, but this process does not use it" in finish(second)
        assert second.returncode == 1
    finally:
        first.terminate()
        finish(first)


def test_variables_by_half_stop_meshrun_in_a_sentence(tmp_path):
    write_script(tmp_path, "pass")
    status, _, err = meshrun(tmp_path, "script.py", variables={"MESHDIST_TLS_CERT": "node.pem"})
    assert status == 1
    assert err.startswith("meshrun: cannot start the job: TLS for the store needs MESHDIST_TLS_CERT, MESHDIST_TLS_KEY")
    assert "Traceback" not in err


@pytest.mark.parametrize("half", [True, False])
def test_doctor_looks_at_the_files(tmp_path, authority, half):
    variables = authority.sign("node")
    if half:
        del variables["MESHDIST_TLS_CA"]
    command = [sys.executable, "-m", "meshdist.doctor"]
    ran = subprocess.run(
        command, env=environment(**variables), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    line = next(line for line in ran.stdout.splitlines() if "TLS" in line)
    assert ("MESHDIST_TLS_CA is not set" if half else os.fspath(authority.folder)) in line
