"""The documented ways to start the processes: the launcher's command line, and a function that is spawned."""

import contextlib
import re
import socket
import subprocess
import sys

import pytest
from scripts import environment, run_script
from until import until

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


LOCAL_RANK = """
import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int)
parser.add_argument("data")
args = parser.parse_args()
print(f"{args.local_rank} {os.environ['LOCAL_RANK']} {args.data}\\n", end="")
"""


@pytest.mark.parametrize(
    ("module", "options", "passes"),
    [
        ("launch", (), True),
        ("launch", ("--use-env=False",), True),
        ("launch", ("--use-env",), False),
        ("launch", ("--use-env=True",), False),
        ("launch", ("--use_env",), False),
        ("launch.meshrun", (), False),
        ("launch.meshrun", ("--use-env",), False),
    ],
)
def test_local_rank_is_an_argument_of_the_script(tmp_path, module, options, passes):
    launcher = ("-m", f"meshdist.{module}", "--nproc-per-node=2", *options)
    status, out, err = run_script(tmp_path, LOCAL_RANK, "digits.npz", launcher=launcher)
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"{rank if passes else None} {rank} digits.npz" for rank in range(2)]


def test_use_env_takes_a_truth_value_alone(tmp_path):
    status, _, err = run_script(tmp_path, LOCAL_RANK, launcher=("-m", "meshdist.launch", "--use-env=maybe"))
    assert status == 2
    assert "expected True or False, got 'maybe'" in err


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


# The starting part of PyTorch's ImageNet example: a spawn on each node, and the node's number as --rank.
IMAGENET = """
import argparse

import numpy as np

import meshdist as dist

parser = argparse.ArgumentParser()
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--dist-url", default="env://", type=str)


def main():
    args = parser.parse_args()
    ngpus_per_node = 2
    args.world_size = ngpus_per_node * args.world_size
    dist.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))


def main_worker(gpu, ngpus_per_node, args):
    args.rank = args.rank * ngpus_per_node + gpu
    dist.init_process_group(
        backend="gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank
    )
    total = np.array([args.rank])
    dist.all_reduce(total)
    print(f"{dist.get_rank()} of {dist.get_world_size()}: {total.item()}\\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


@contextlib.contextmanager
def imagenet_node(directory, url, node, text=IMAGENET, **variables):
    """Start the example as one of two nodes of two ranks each."""
    (directory / "imagenet.py").write_text(text)
    with subprocess.Popen(
        [sys.executable, "imagenet.py", "--world-size=2", f"--dist-url={url}", f"--rank={node}"],
        cwd=directory,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def end_of(node):
    return (*node.communicate(timeout=60), node.returncode)


def imagenet(directory, url, **variables):
    """Run the example as two nodes; return the stdout, stderr and status of both."""
    with (
        imagenet_node(directory, url, 0, **variables) as first,
        imagenet_node(directory, url, 1, **variables) as second,
    ):
        return [end_of(first), end_of(second)]


@pytest.mark.parametrize("url", ["env://", "tcp://127.0.0.1:{port}", "file://{path}/meet"])
def test_a_spawn_on_each_node(tmp_path, port, url):
    url = url.format(port=port, path=tmp_path)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if url == "env://" else {}
    nodes = imagenet(tmp_path, url, MESHDIST_SECRET="common", **address)
    assert [(err, status) for _, err, status in nodes] == [("", 0)] * 2
    for node, (out, _, _) in enumerate(nodes):
        assert sorted(out.splitlines()) == [f"{2 * node + gpu} of 4: 6" for gpu in range(2)]


@pytest.mark.parametrize("url", ["env://", "tcp://127.0.0.1:{port}", "file://{path}/meet"])
def test_spawns_with_secrets_of_their_own_fail_at_once_on_both_nodes(tmp_path, port, url):
    url = url.format(port=port, path=tmp_path)
    for _, err, status in imagenet(tmp_path, url, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)):
        assert status == 1
        assert "ValueError" in err
        assert "world_size is 4, and this spawn started 2 ranks, with its own secret" in err
        assert "set MESHDIST_SECRET to one value before each of them" in err


OWN = "this spawn started 1 rank, with its own secret; for a world of several spawns, set MESHDIST_SECRET"
REFUSED = "refused 127.0.0.1:{}, which belongs to job {}, not to {}: it has another MESHDIST_SECRET"
BELONGS = "belongs to another job (its id is {}, ours {}): choose another port, or start all processes of this job with"


@pytest.mark.parametrize(
    ("secrets", "errors"),
    [
        (({}, {"MESHDIST_SECRET": "common"}), (OWN, BELONGS)),
        (({"MESHDIST_SECRET": "common"}, {}), (REFUSED, OWN)),
        (({"MESHDIST_SECRET": "common"}, {"MESHDIST_SECRET": "other"}), (REFUSED, BELONGS)),
    ],
    ids=["missing on the first", "missing on the second", "different"],
)
def test_a_wrong_secret_on_one_node_is_an_error_at_once_on_both(tmp_path, port, secrets, errors):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    text = IMAGENET.replace("ngpus_per_node = 2", "ngpus_per_node = 1")
    waits = 0 if secrets[0] else 1  # the node that is there first, and would wait for 30 minutes
    with contextlib.ExitStack() as stack:
        nodes = {}
        for node in (waits, 1 - waits):
            process = imagenet_node(tmp_path, "env://", node, text, **address, **secrets[node])
            nodes[node] = stack.enter_context(process)
            if node == waits == 0:
                until(lambda: can_connect(port), "the first node listens", timeout_s=40)
            elif node == waits:
                with socket.create_server(("127.0.0.1", port)) as listener:
                    listener.settimeout(40)
                    listener.accept()[0].close()
        for node, error in enumerate(errors):
            _, err, status = end_of(nodes[node])
            assert status == 1
            assert re.search(re.escape(error).replace(r"\{\}", r"\w+"), err), err


def can_connect(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_spawns_that_have_no_address_fail_at_once_on_both_nodes(tmp_path):
    for _, err, status in imagenet(tmp_path, "env://", MESHDIST_SECRET="common"):
        assert status == 1
        assert "world_size is 4, and this spawn started 2 ranks; for a world of several spawns, set MASTER_ADDR" in err


def test_host_names_are_looked_up():
    with dist.TCPStore(socket.gethostbyname("localhost"), 0, 1, True) as store:
        assert store.port > 0
