"""The secret appears nowhere, and no pickle of a stranger is read."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import socket
import subprocess
import sys

import numpy as np
import pytest
from listening import listening_at

import meshdist as dist
from meshdist.security.handshake import connect_handshake

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

SCRIPT = """
import os, pathlib
import numpy as np
import meshdist as dist

dist.init_process_group("gloo")
dist.all_reduce(np.ones(3))
secret = os.environ["MESHDIST_SECRET"].encode()
assert len(secret) >= 16
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdecimal():
        try:
            arguments = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended, or is somebody else's
        assert secret not in arguments, arguments
pathlib.Path(f"secret{dist.get_rank()}").write_bytes(secret)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("given", ["", "of the test: 0123456789abcdef"], ids=["made", "given"])
def test_the_secret_is_in_no_argument_and_no_log(tmp_path, given):
    (tmp_path / "script.py").write_text(SCRIPT)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MESHDIST_")}
    variables = {"MESHDIST_DEBUG": "DETAIL", "MESHDIST_DISABLE_SHM": "1"} | (
        {"MESHDIST_SECRET": given} if given else {}
    )
    root = str(pathlib.Path(__file__).parents[2])
    command = [sys.executable, "-m", "meshdist.launch.meshrun", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**inherited, "PYTHONPATH": root, **variables},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    secrets = {(tmp_path / f"secret{rank}").read_text() for rank in range(2)}
    assert len(secrets) == 1
    assert done.stderr, "level DETAIL logs every call"
    for secret in (*secrets, *filter(None, [given])):
        assert secret not in done.stdout + done.stderr


class Bomb:
    """Where it is unpickled, a file appears."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def say(address, words):
    """Say something as a stranger, and wait until the other end hangs up."""
    with socket.create_connection(address, timeout=30) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(words)
        while stranger.recv(4096):
            pass


def meet():
    return dist.all_reduce(np.ones(3)).tolist()


def test_no_pickle_of_a_stranger_is_read(tcp_workers, tmp_path):
    workers = tcp_workers(2)
    workers.start(meet)
    workers.gather()
    trace = tmp_path / "trace"
    bomb = pickle.dumps(Bomb(trace))
    store = ("127.0.0.1", int(workers.address.rpartition(":")[2]))
    for address in (store, listening_at(workers.pids[0])[0]):
        for greeting in (b"", b"MESHDIST\x01\x00\x00\x00"):
            say(address, (greeting + bomb).ljust(92, b"\0"))
    # Of a member the store takes bytes, and gives them back as they are.
    with socket.create_connection(store, timeout=30) as member:
        connect_handshake(member, os.environ.get("MESHDIST_SECRET", "").encode(), "store", "the store")
        member.sendall(bomb)
        member.shutdown(socket.SHUT_WR)
        assert member.recv(4096) == b""
    workers.start(meet)
    assert workers.gather() == [[2.0] * 3] * 2
    assert not trace.exists()
    pickle.loads(bomb)
    assert trace.exists(), "the bomb works"
