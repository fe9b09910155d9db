"""What the flight recorders of the ranks write when a job ends because of one of them."""

import json

import pytest
from launching import environment, meshrun, write_script

from meshdist.debug.__main__ import main

pytestmark = pytest.mark.timeout(120)

LATE = """
import numpy as np
import meshdist as dist
{before}
dist.init_process_group(timeout=1.5)
x = np.ones(4)
dist.all_reduce(x)
if rank == 1:
    time.sleep(60)  # the late one
dist.all_reduce(x)
"""

OPPOSITE = """
import numpy as np
import meshdist as dist
dist.init_process_group(timeout=20)
a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
first, second = (a, b) if rank == 0 else (b, a)
dist.barrier(group=first)
dist.barrier(group=second)
"""


def page_after(directory, capsys, body):
    write_script(directory, body)
    variables = {"MESHDIST_FLIGHT_RECORDER_DIR": str(directory / "records")}
    status, _, err = meshrun(directory, "-n", "2", "script.py", variables=variables)
    assert status == 1, err
    assert main(["report", str(directory / "records")]) == 0
    return capsys.readouterr().out, err


def test_the_late_rank_has_a_file(tmp_path, capsys):
    page, _ = page_after(tmp_path, capsys, LATE.format(before=""))
    assert page.startswith("Flight records of all 2 ranks")
    assert "rank 1 has not reached all_reduce(float64[4], op=sum), call 2 on 'world'" in page
    assert "rank 1 was not in a meshdist call; it had been at script.py:" in page
    assert json.loads((tmp_path / "records" / "rank_1.json").read_text())["reason"] == "SIGTERM"


def test_ranks_that_wait_for_each_other_have_files(tmp_path, capsys):
    page, _ = page_after(tmp_path, capsys, OPPOSITE)
    assert page.startswith("Flight records of all 2 ranks")
    assert "the ranks call their groups in different orders" in page
    assert page.count("deadlock") == 1


RAISING = """
import numpy as np
import meshdist as dist
dist.init_process_group(timeout=20)
x = np.ones(4)
dist.all_reduce(x)
if rank == 1:
    work = dist.all_reduce(x, async_op=True)  # fails as the rank gives up
    {end}
dist.all_reduce(x)
dist.all_reduce(x)
"""


@pytest.mark.parametrize(
    ("end", "error"), [("raise RuntimeError('bad batch')", "RuntimeError: bad batch"), ("sys.exit(1)", "SystemExit: 1")]
)
def test_an_exception_comes_first(tmp_path, capsys, end, error):
    page, _ = page_after(tmp_path, capsys, RAISING.format(end=end))
    assert page.startswith("Flight records of all 2 ranks")
    _, _, faults = page.partition("What went wrong\n")
    assert faults.startswith("  +0.000 s, rank 1 (pid ")
    assert faults.partition("\n")[0].endswith(f": {error}")
    assert f"rank 1 raised {error}, at script.py:" in page


TERMINATED_IN_IMPORT = """
import os, signal, sys
import meshdist as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0?rank=0&world_size=1")
class Terminate:
    def find_spec(self, name, path=None, target=None):
        os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Terminate())
{end}
"""


@pytest.mark.parametrize("end", ["raise ValueError", "import wave"])
def test_a_signal_within_an_import_leaves_a_file(tmp_path, end):
    import subprocess
    import sys

    (tmp_path / "script.py").write_text(TERMINATED_IN_IMPORT.format(end=end))
    records = tmp_path / "records"
    variables = environment(MESHDIST_FLIGHT_RECORDER_DIR=str(records))
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=variables, timeout=60)
    assert [file.name for file in records.iterdir()] == ["rank_0.json"]


def test_a_handler_of_the_script_has_its_turn(tmp_path, capsys):
    before = """
def mine(*args):
    print("my own handler", file=sys.stderr, flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, mine)
"""
    page, err = page_after(tmp_path, capsys, LATE.format(before=before))
    assert page.startswith("Flight records of all 2 ranks")
    assert err.count("my own handler") == 1


ENDS = """
import os, signal, sys
import meshdist as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0?rank=0&world_size=1")
if "destroyed" in sys.argv:
    dist.destroy_process_group()
if "forked" in sys.argv:
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(("how", "status"), [("there", -15), ("destroyed", -15), ("forked", 0)])
def test_the_signal_ends_the_process_as_before(tmp_path, how, status):
    import subprocess
    import sys

    (tmp_path / "script.py").write_text(ENDS)
    done = subprocess.run(
        [sys.executable, "script.py", how],
        cwd=tmp_path,
        env=environment(MESHDIST_FLIGHT_RECORDER_DIR=str(tmp_path / "records")),
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert (tmp_path / "records" / "rank_0.json").exists() == (how == "there")


OF_A_LAUNCHER = """
import signal, sys
import meshdist as dist
def mine(*args):
    print("my own handler", flush=True)
    sys.exit(3)
if "handles" in sys.argv:
    signal.signal(signal.SIGTERM, mine)
before = signal.getsignal(signal.SIGTERM)
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0?rank=0&world_size=1")
ours = signal.getsignal(signal.SIGTERM)
assert (ours is before) == ("handles" in sys.argv), ours
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize(("how", "status", "said"), [("handles", 3, "my own handler\n"), ("default", -15, "")])
def test_the_report_of_a_hang_replaces_no_handler_and_keeps_the_exit_status(tmp_path, how, status, said):
    import subprocess
    import sys

    (tmp_path / "script.py").write_text(OF_A_LAUNCHER)
    place = {"SLURM_STEP_NODELIST": "node1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py", how],
        cwd=tmp_path,
        env=environment(**place),
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (status, said), done.stderr
    assert "terminated" not in done.stderr  # it was in no hang
