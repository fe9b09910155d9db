"""The place of a process in its job, from the variables of launchers."""

import os
import stat

import pytest

from meshdist.bootstrap.from_environment import place_from_environment
from meshdist.cluster import find_place, local_rank_here
from meshdist.security.credentials import secret_from_environment

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[3-4]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-a-1@1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4", "PMI_FD": "7"}
POD = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4"}
PLAIN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    ("variables", "rank", "size", "local_rank", "address"),
    [
        (SLURM, 5, 8, 1, "node3"),
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "3"}, 5, 8, 1, "node3"),  # srun --mpi=pmi2
        ({**SLURM, "PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.77.0"}, 5, 8, 1, "node3"),  # srun --mpi=pmix
        ({**SLURM, "SLURM_NTASKS": "64"}, 5, 8, 1, "node3"),  # the step has fewer tasks than the job
        ({name: SLURM[name] for name in SLURM if name != "SLURM_STEP_NUM_TASKS"}, 5, 8, 1, "node3"),
        ({**SLURM, "SLURM_STEP_NODELIST": "node3"}, 5, 8, 1, "127.0.0.1"),
        (OPEN_MPI, 1, 4, 1, None),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1, 4, 1, "127.0.0.1"),
        # mpirun within a Slurm job: one helper a host is started by srun, whose variables the ranks inherit.
        ({**SLURM, "SLURM_PROCID": "1", "SLURM_JOB_NODELIST": "c[1-2]", **OPEN_MPI}, 1, 4, 1, "c1"),
        ({**SLURM, "SLURM_PROCID": "1", "SLURM_JOB_NODELIST": "c[1-2]", **HYDRA}, 2, 4, 2, "127.0.0.1"),
        (HYDRA, 2, 4, 2, "127.0.0.1"),
        ({**HYDRA, "MPI_LOCALNRANKS": "2"}, 2, 4, 2, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1, 2, None, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1"}, 1, 2, 0, None),
        ({"PMIX_RANK": "1", "WORLD_SIZE": "2"}, 1, 2, None, None),
        (POD, 3, 4, None, "job-0.svc.default.svc.cluster.local"),
        ({"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "1"}, 0, 1, None, "127.0.0.1"),
    ],
)
def test_place(variables, rank, size, local_rank, address):
    place = find_place(variables, full_host_name=lambda: "job-3.svc.default.svc.cluster.local")
    assert (place.rank, place.world_size, place.address) == (rank, size, address)
    assert local_rank_here(variables) == local_rank
    if address is None:
        assert "MASTER_ADDR" in place.no_address


def test_nobody_started_it():
    assert find_place({"PATH": "/bin", "RANK": "1", "WORLD_SIZE": "2"}) is None
    # The batch script of a Slurm job is no rank of it, whatever it inherits.
    assert find_place({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODEID": "0"}) is None
    assert local_rank_here({}) is None


def test_port_is_the_same_in_one_start_and_another_in_the_next():
    ranks = [find_place({**SLURM, "SLURM_PROCID": str(rank)}).port for rank in range(8)]
    steps = [find_place({**SLURM, "SLURM_STEP_ID": str(step)}).port for step in range(8)]
    assert len(set(ranks)) == 1
    assert len(set(steps)) == 8
    assert all(61_000 <= port <= 65_535 for port in steps)
    assert find_place(HYDRA).port == 29500
    assert find_place({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}).port == 0


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1"}, "Open MPI.* started this process .* but OMPI_COMM_WORLD_SIZE is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not set"),
        ({"MPI_LOCALRANKID": "0", "PMI_RANK": "0"}, "MPICH.*PMI_SIZE is not set: set it .mpiexec -genv NAME VALUE."),
        ({"PMIX_RANK": "0"}, "WORLD_SIZE is not set"),
        ({"JOB_COMPLETION_INDEX": "0"}, "Kubernetes .Indexed Job.*WORLD_SIZE is not set: set it .env: in the pod"),
        ({"SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "2"}, "SLURM_PROCID is not set"),
        ({"SLURM_STEP_NODELIST": "a", "SLURM_PROCID": "0"}, "SLURM_STEP_NUM_TASKS or SLURM_NTASKS is not set"),
        ({**SLURM, "SLURM_PROCID": "8"}, "SLURM_PROCID=8, but there are 8 ranks, 0 to 7"),
        ({**SLURM, "SLURM_PROCID": "first"}, "variable SLURM_PROCID must be a whole number, got 'first'"),
        ({**SLURM, "PMI_RANK": "0"}, "SLURM_PROCID=5, but PMI_RANK=0: these are of two launchers"),
        ({**OPEN_MPI, "PMIX_RANK": "3"}, "OMPI_COMM_WORLD_RANK=1, but PMIX_RANK=3"),
        ({**SLURM, "SLURM_STEP_NODELIST": "node[3"}, "the nodelist 'node.3'"),
    ],
)
def test_incomplete_and_contradictory_variables(variables, says):
    with pytest.raises(ValueError, match=says):
        find_place(variables)


def test_pod_without_a_subdomain():
    place = find_place(POD, full_host_name=lambda: "job-3")
    assert place.address is None
    assert "headless Service" in place.no_address
    assert find_place(POD, full_host_name=lambda: "web.example.org").address is None


@pytest.fixture
def environ(monkeypatch):
    for name in [*PLAIN, *(name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI", "MPI_LOCAL")))]:
        monkeypatch.delenv(name, raising=False)

    def set_all(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_env_takes_all_from_the_launcher(environ):
    environ(**SLURM)
    place = place_from_environment(-1, -1)
    assert place == (5, 8, "node3", find_place(SLURM).port)


def test_plain_variables_win_where_they_are_complete(environ):
    environ(**SLURM, RANK="1", WORLD_SIZE="2", MASTER_ADDR="me", MASTER_PORT="4")
    assert place_from_environment(-1, -1) == (1, 2, "me", 4)


def test_plain_variables_replace_what_they_name(environ):
    environ(**OPEN_MPI, MASTER_ADDR="[::1]")
    assert place_from_environment(-1, -1) == (1, 4, "::1", find_place(OPEN_MPI).port)
    environ(RANK="1", MASTER_PORT="5")
    assert place_from_environment(-1, -1) == (1, 4, "::1", 5)
    assert place_from_environment(-1, 4) == (1, 4, "::1", 5)


def test_number_of_ranks_may_be_an_argument(environ):
    environ(JOB_COMPLETION_INDEX="1", MASTER_ADDR="job-0.svc")
    assert place_from_environment(-1, 2) == (1, 2, "job-0.svc", 29500)


@pytest.mark.parametrize(("secret", "host"), [("", "localhost"), ("known to all", "::")])
def test_rank_0_needs_no_address(environ, secret, host):
    environ(RANK="0", WORLD_SIZE="2", MASTER_PORT="4", MESHDIST_SECRET=secret)
    assert place_from_environment(-1, -1) == (0, 2, host, 4)
    with pytest.raises(ValueError, match="MASTER_ADDR is missing"):
        place_from_environment(1, 2)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({**SLURM, "RANK": "2"}, "RANK is 2, but srun .Slurm. says that this is rank 5 of 8; set RANK, WORLD_SIZE"),
        ({**SLURM, "WORLD_SIZE": "3"}, "WORLD_SIZE is 3, but srun"),
        ({**SLURM, "WORLD_SIZE": "9", "RANK": "5"}, "WORLD_SIZE is 9, but srun"),
        (
            OPEN_MPI,
            "MASTER_ADDR is missing from the environment: mpirun .Open MPI. does not tell.*mpirun -x NAME=V",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT are missing"),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, "MASTER_ADDR, .*only what `srun` starts is a rank"),
    ],
)
def test_env_refuses_what_does_not_fit(environ, variables, says):
    environ(**variables)
    with pytest.raises(ValueError, match=says):
        place_from_environment(-1, -1)


def secret_file(directory, content="s3cret\n", mode=0o600):
    path = directory / "secret"
    path.write_text(content)
    path.chmod(mode)
    return str(path)


def test_secret_from_a_file(environ, monkeypatch, tmp_path):
    monkeypatch.delenv("MESHDIST_SECRET", raising=False)
    environ(MESHDIST_SECRET_FILE=secret_file(tmp_path))
    assert secret_from_environment() == b"s3cret"
    environ(MESHDIST_SECRET="s3cret")
    assert secret_from_environment() == b"s3cret"
    environ(MESHDIST_SECRET="another")
    with pytest.raises(ValueError, match="differ: set only one of them") as raised:
        secret_from_environment()
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_secret_that_others_can_read_is_refused(environ, tmp_path, mode):
    environ(MESHDIST_SECRET_FILE=secret_file(tmp_path, mode=mode))
    with pytest.raises(ValueError, match=stat.filemode(mode | stat.S_IFREG) + ".*chmod 600"):
        secret_from_environment()


def test_secret_file_that_cannot_be_used(environ, tmp_path):
    for content in ("", " \n", "x" * 5000, "a\0b", "é"):
        environ(MESHDIST_SECRET_FILE=secret_file(tmp_path, content))
        with pytest.raises(ValueError, match="must hold 1 to 4096 ASCII characters"):
            secret_from_environment()
    environ(MESHDIST_SECRET_FILE=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="nowhere cannot be read: No such file"):
        secret_from_environment()
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in (".", "pipe"):
        environ(MESHDIST_SECRET_FILE=str(tmp_path / name))
        with pytest.raises(ValueError, match="must be a file|cannot be read"):
            secret_from_environment()
