"""The documented ways to start the processes: the launcher's command line, and a function that is spawned."""

import socket

import pytest
from scripts import run_script

import meshdist as dist

pytestmark = pytest.mark.timeout(90)
SIZES = [2, 3, 4]

SCRIPT = """
import argparse
import os

import numpy as np

import meshdist as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int, default=int(os.environ["LOCAL_RANK"]))
parser.add_argument("--arg1", default="none")
args = parser.parse_args()

dist.init_process_group(backend="gloo", init_method="env://")
total = np.array([args.local_rank])
dist.all_reduce(total)
print(f"{dist.get_rank()} {args.local_rank} {args.arg1} {total.item()} {dist.is_torchelastic_launched()}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", SIZES)
def test_several_processes_on_one_machine(tmp_path, size):
    launcher = ("-m", "meshdist.launch", f"--nproc-per-node={size}")
    status, out, err = run_script(tmp_path, SCRIPT, "--arg1", "given", launcher=launcher)
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"{rank} {rank} given {sum(range(size))} True" for rank in range(size)]


def test_address_and_port_of_the_first_machine(tmp_path, port):
    options = ("--nproc-per-node=2", "--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={port}")
    status, out, err = run_script(tmp_path, SCRIPT, launcher=("-m", "meshdist.launch", *options))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == ["0 0 none 1 True", "1 1 none 1 True"]


def test_help_says_what_the_launcher_takes(tmp_path):
    status, out, _ = run_script(tmp_path, "", launcher=("-m", "meshdist.launch", "--help"))
    assert status == 0
    for option in ("--nproc-per-node", "--nnodes", "--master-addr", "--master-port"):
        assert option in out


SPAWNING = """
import sys

import numpy as np

import meshdist as dist


def worker(rank, size, url):
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    total = np.array([rank])
    dist.all_reduce(total)
    print(f"{rank} {total.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    size = int(sys.argv[1])
    dist.spawn(worker, nprocs=size, args=(size, sys.argv[2]))
"""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("url", ["env://", "tcp://127.0.0.1:{port}"])
def test_spawn(tmp_path, port, size, url):
    status, out, err = run_script(tmp_path, SPAWNING, str(size), url.format(port=port))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"{rank} {sum(range(size))}" for rank in range(size)]


def test_spawn_on_a_port_that_the_script_chose(tmp_path, port):
    text = SPAWNING.replace(
        "    size = int", '    import os\n    os.environ["MASTER_ADDR"] = "localhost"\n    size = int'
    )
    status, out, err = run_script(tmp_path, text, "2", "env://", MASTER_PORT=str(port))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == ["0 1", "1 1"]


def test_host_names_are_looked_up():
    with dist.TCPStore(socket.gethostbyname("localhost"), 0, 1, True) as store:
        assert store.port > 0
