"""breakpoint: the debugger on one rank, while the others wait."""

import subprocess
import sys

import pytest
from launching import start_meshrun, write_script

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]

SCRIPT = """
import numpy as np
import meshdist as dist
dist.init_process_group()
for turn in range(3):
    mine = 10 * rank + turn
    dist.breakpoint(1, skip=1)
    tell(f"after{rank}.{turn}", mine)
x = dist.all_reduce(np.array(mine))
tell(f"sum{rank}", x)
dist.destroy_process_group()
"""


def run_with_input(directory, text, body=SCRIPT):
    process = start_meshrun(directory, "--nproc-per-node", "2", write_script(directory, body), stdin=subprocess.PIPE)
    try:
        out, err = process.communicate(text, timeout=40)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


def test_one_rank_is_debugged_in_the_callers_frame(tmp_path):
    status, out, err = run_with_input(
        tmp_path, "p 'found', mine\nmine = 100\nc\np 'found', mine\nn\np 'next', mine\nc\n"
    )
    assert status == 0, err
    assert out.count("rank 1 of 2 at script.py:") == 2  # of three times, the first is skipped
    assert "('found', 11)" in out
    assert "('found', 12)" in out
    assert "('next', 12)" in out
    assert {(tmp_path / f"sum{rank}").read_text() for rank in (0, 1)} == {"14"}


def test_who_quits_ends_the_job(tmp_path):
    status, _, err = run_with_input(tmp_path, "q\n")
    assert status == 1
    assert "BdbQuit" in err
    assert not (tmp_path / "sum0").exists()


def test_without_anything_to_read_from_nobody_waits(tmp_path):
    body = SCRIPT.replace("dist.breakpoint(1, skip=1)", "stop()").replace(
        "dist.init_process_group()\n",
        """dist.init_process_group()
def stop():
    try:
        dist.breakpoint(1)
    except RuntimeError as error:
        tell(f"refused{rank}", error)
""",
    )
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", write_script(tmp_path, body), stdin=subprocess.DEVNULL)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 0, err
    assert "there is nothing to read commands from" in (tmp_path / "refused1").read_text()
    assert not (tmp_path / "refused0").exists()
    assert (tmp_path / "sum0").read_text() == "14"


def test_the_others_wait_no_longer_than_they_are_told(tmp_path):
    body = "import meshdist as dist\ndist.init_process_group()\ndist.breakpoint(1, timeout_s=0.5)\n"
    process = start_meshrun(tmp_path, "--nproc-per-node", "2", write_script(tmp_path, body), stdin=subprocess.PIPE)
    try:
        assert process.wait(timeout=40) == 1  # rank 1 is at its prompt all the time
        assert "rank 0" in (err := process.stderr.read())
        assert "DistTimeoutError: barrier on group 'world' (rank 0 of 2): timed out after 0.5 s" in err
    finally:
        process.kill()
        process.communicate()


def wrong_ranks():
    for rank in (2, -1):
        with pytest.raises(ValueError, match=f"breakpoint: rank must be 0 to 1, got {rank}"):
            dist.breakpoint(rank)
    with pytest.raises(TypeError):
        dist.breakpoint("0")
    dist.barrier()


def test_wrong_ranks():
    with pytest.raises(ValueError, match="init_process_group"):
        dist.breakpoint()
    dist.run(wrong_ranks, 2, timeout=20)
