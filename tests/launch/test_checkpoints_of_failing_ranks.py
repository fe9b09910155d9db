"""What becomes of checkpoints under meshrun if ranks fail, and what errors of checkpoints look like."""

import re

import pytest
from launching import meshrun, write_script
from worlds import needs_linux


@needs_linux
@pytest.mark.parametrize("who", ["True", "rank == 1"])
@pytest.mark.parametrize("ending", ["raise RuntimeError('mine')", "sys.exit(3)"])
def test_a_save_in_progress_is_completed_though_ranks_raise(tmp_path, who, ending):
    body = f"""
import sys, threading
import numpy as np
import meshdist as dist
from meshdist.checkpoint import save

dist.init_process_group()
raising, real = threading.Event(), os.posix_fallocate

def posix_fallocate(*args):
    assert raising.wait(20)
    real(*args)

os.posix_fallocate = posix_fallocate
save("saves", {{"w": np.ones(4_000_000)}}, step=1, asynchronous=True)
raising.set()
if {who}:
    {ending}
dist.barrier()
"""
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    assert status == (1 if "raise" in ending else 3), err
    assert [path.name for path in (tmp_path / "saves").iterdir()] == ["step-1"]


CALLS = {
    "save_of_an_old_step": ("save('saves', {}, step=1)", "FileExistsError: save to saves "),
    "save_of_a_wrong_step": ("save('saves', {}, step=-1)", "ValueError: save to saves "),
    "wait": ("save('saves', {}, step=1, asynchronous=True).wait()", "FileExistsError: asynchronous save to "),
    "load": (
        "load('saves', {'w': np.ones(4)})",
        "meshdist.checkpoint.rank_agreement.CheckpointError: load from saves ",
    ),
    "load_of_nothing": ("load('none')", "FileNotFoundError: load from none "),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_traceback_ends_at_the_call(tmp_path, name):
    call, words = CALLS[name]
    body = f"""
import numpy as np
import meshdist as dist
from meshdist.checkpoint import load, save

dist.init_process_group()
save("saves", {{}}, step=1)
{call}
"""
    write_script(tmp_path, body)
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "script.py")
    assert status == 1
    assert re.findall(r'^ +File "([^"]*)"', err, re.MULTILINE) == [f"{tmp_path}/script.py"], err
    assert f"\n{words}" in err
