"""The environment of a rank: what a launcher sets, and init_process_group reads."""

from __future__ import annotations

import os
from typing import NamedTuple

from meshdist.handshake import SECRET_VARIABLE, secret_from_environment
from meshdist.launch.worker import ERROR_FILE_VARIABLE
from meshdist.secret_file import SECRET_FILE_VARIABLE
from meshdist.systems import available_cores

LOOPBACK = "127.0.0.1"


def is_torchelastic_launched() -> bool:
    """Return True if a launcher (meshrun, spawn or torchrun) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class Job(NamedTuple):
    """All that the ranks of one start of a job have in common on this host.

    Attributes:
        run_id: Names the job.
        world_size: The number of ranks, on all hosts.
        error_directory: Where the ranks of this host describe their failures.
        first_rank: The first of the ranks of this host, which follow each other.
        num_local: How many they are; all where None.
        node: The number of this host.
        num_nodes: The number of hosts.
        num_restarts: How many starts of the ranks came before this one.
        max_restarts: How many there may be.

    Example:
        >>> job = new_job(world_size=2, secret="s", master_addr="127.0.0.1", master_port=29500)
        >>> worker_environment(job, rank=1)["RANK"]
        '1'
    """

    run_id: str
    secret: str
    world_size: int
    master_addr: str
    master_port: int
    error_directory: str
    first_rank: int = 0
    num_local: int | None = None
    node: int = 0
    num_nodes: int = 1
    num_restarts: int = 0
    max_restarts: int = 0

    @property
    def local_ranks(self) -> range:
        """The ranks of this host."""
        num_local = self.world_size if self.num_local is None else self.num_local
        return range(self.first_rank, self.first_rank + num_local)

    def error_file(self, rank: int) -> str:
        """Return where `rank` describes its failure."""
        return os.path.join(self.error_directory, f"rank{rank}.json")


def job_secret() -> str:
    """Return the secret that this process was given, by variable or file, or a new random one."""
    import secrets

    return secret_from_environment().decode() or secrets.token_hex(32)


def new_job(world_size: int, secret: str, master_addr: str, master_port: int, run_id: str | None = None) -> Job:
    """Describe a new job whose store listens at `master_addr`:`master_port`.

    Its error directory has an unguessable name and does not exist until a rank fails.
    """
    import secrets
    import tempfile

    run_id = run_id or secrets.token_hex(8)
    directory = os.path.join(tempfile.gettempdir(), f"meshdist-{secrets.token_hex(16)}")
    return Job(run_id, secret, world_size, master_addr, master_port, directory)


def worker_environment(job: Job, rank: int) -> dict[str, str]:
    """Return the variables to set for `rank` of `job`, one of the ranks of this host."""
    size, restarts = str(job.world_size), str(job.num_restarts)
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(rank - job.first_rank),
        "LOCAL_WORLD_SIZE": str(len(job.local_ranks)),
        "GROUP_RANK": str(job.node),
        "GROUP_WORLD_SIZE": str(job.num_nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": str(job.master_port),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "RESTART_COUNT": restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Which store the launcher keeps: a script that sets MASTER_PORT itself means another one.
        "MESHDIST_AGENT_STORE": f"{job.master_addr}:{job.master_port}",
        SECRET_VARIABLE: job.secret,
        ERROR_FILE_VARIABLE: job.error_file(rank),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, available_cores() // len(job.local_ranks)))
    if os.environ.get(SECRET_FILE_VARIABLE):
        variables[SECRET_FILE_VARIABLE] = ""  # the secret is handed down already, and may be another one
    return variables
