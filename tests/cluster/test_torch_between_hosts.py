"""Backend meshdist of torch between two hosts, which are two network namespaces; started by meshrun and by torchrun."""

import sys

import pytest
from two_hosts import MESHRUN

pytestmark = pytest.mark.timeout(60)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SCRIPT = """
import sys

import torch
import torch.distributed as dist

import meshdist.torch

dist.init_process_group("meshdist")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
whole = torch.zeros(4)
dist.all_gather_into_tensor(whole, torch.full((1,), float(dist.get_rank())))
sys.stdout.write(f"{model.module.weight.grad[0].tolist()} {whole.tolist()}\\n")
dist.destroy_process_group()
"""


def ended(two_hosts, tmp_path, launcher, **variables):
    (tmp_path / "script.py").write_text(SCRIPT)
    both = []
    for host in (0, 1):
        if launcher is TORCHRUN:
            where = ["--node-rank", str(host), "--master-addr", two_hosts.addresses[0], "--master-port", "29400"]
        else:
            where = ["--rdzv-endpoint", f"{two_hosts.addresses[0]}:29400"]
        command = [*launcher, "--nnodes", "2", "--nproc-per-node", "2", *where, "script.py"]
        both.append(two_hosts.start(host, command, tmp_path, OMP_NUM_THREADS="1", **variables))
    return [(process.communicate(timeout=50), process.returncode) for process in both]


@pytest.mark.parametrize("launcher", [MESHRUN, TORCHRUN], ids=["meshrun", "torchrun"])
def test_ddp_between_hosts(two_hosts, tmp_path, torch, launcher):
    for (out, err), status in ended(two_hosts, tmp_path, launcher, MESHDIST_SECRET="s"):
        assert status == 0, err
        assert out.splitlines() == ["[2.5, 2.5, 2.5, 2.5] [0.0, 1.0, 2.0, 3.0]"] * 2


def test_without_a_secret_all_ranks_are_told(two_hosts, tmp_path, torch):
    for (_, err), status in ended(two_hosts, tmp_path, TORCHRUN):
        assert status
        assert "this job has no secret that keeps others out" in err
