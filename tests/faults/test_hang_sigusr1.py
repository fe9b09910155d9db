"""The reaction to SIGUSR1. Workers use it for faulthandler, so these tests start processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]

SCRIPT = """
import os, select, signal, sys, time
import numpy as np
import meshdist as dist
{before}
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0?rank=0&world_size=1")
dist.all_reduce(np.ones(4))
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.05)[0]: pass  # Python sees no signal that comes just before a long wait
print(signal.getsignal(signal.SIGUSR1), flush=True)
dist.destroy_process_group()
print(signal.getsignal(signal.SIGUSR1) == {after}, flush=True)
"""


def signalled(tmp_path, before="", after="signal.SIG_DFL", last_line="", **variables):
    """Return what a rank says on SIGUSR1; `last_line` is in the last line of that."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(before=before, after=after))
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        said = process.stderr.readline()
        while last_line not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        out, err = process.communicate("go on\n", timeout=30)
    finally:
        process.kill()
        process.wait()
    assert out.endswith("True\n"), (out, err)
    return said + err


def test_sigusr1_writes_the_file(tmp_path):
    last_line = f"  its last calls are in {tmp_path / 'dumps' / 'rank_0.json'}\n"
    said = signalled(tmp_path, last_line=last_line, MESHDIST_FLIGHT_RECORDER_DIR=str(tmp_path / "dumps"))
    assert said.startswith("meshdist rank 0: not in a meshdist call; it has been at script.py:9 in <module> for ")
    state = json.loads((tmp_path / "dumps" / "rank_0.json").read_text())
    assert [record["text"] for record in state["records"]] == ["all_reduce(float64[4], op=sum)"]
    assert state["place"].startswith(str(tmp_path / "script.py"))


def test_sigusr1_shows_where_the_rank_is(tmp_path):
    said = signalled(tmp_path)
    assert said.startswith("meshdist rank 0: not in a meshdist call; it has been at script.py:9 in <module> for ")
    assert "its last call was all_reduce(float64[4], op=sum), call 1 on 'world', at script.py:7" in said


def test_a_handler_that_the_script_sets_later_stays(tmp_path):
    script = SCRIPT.replace('print("ready"', 'signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nprint("ready"')
    path = tmp_path / "script.py"
    path.write_text(script.format(before="", after="signal.SIG_IGN"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(path)], input="\n", capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.endswith("True\n"), (done.stdout, done.stderr)


def test_a_handler_of_the_script_is_left_alone(tmp_path):
    before = "def mine(*args): print('my own', file=sys.stderr, flush=True)\nsignal.signal(signal.SIGUSR1, mine)"
    assert signalled(tmp_path, before, after="mine") == "my own\n"
