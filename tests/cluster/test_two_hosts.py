"""meshrun and the stores between two hosts, which are two network namespaces."""

import sys
import time

import pytest
from two_hosts import MESHRUN, ROOT
from until import until

pytestmark = pytest.mark.timeout(120)

MEET = """
import os, sys, time
from meshdist.bootstrap.rendezvous import rendezvous
store, rank, size = rendezvous("env://", timeout=60)
if store.add("there", 1) == size:
    store.set("all", "")
store.wait(["all"])
if rank == 0:
    print("met", flush=True)
"""


def finish(process, timeout_s=60):
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def start_both(hosts, tmp_path, *arguments, secret="s"):
    where = ["--nnodes", "2", "--rdzv-endpoint", f"{hosts.addresses[0]}:29400"]
    variables = {"MESHDIST_SECRET": secret} if secret else {}
    return [hosts.start(host, [*MESHRUN, *where, *arguments], tmp_path, **variables) for host in (0, 1)]


def test_two_times_eight_ranks_meet(two_hosts, tmp_path):
    (tmp_path / "script.py").write_text(MEET)
    ended = [finish(process) for process in start_both(two_hosts, tmp_path, "--nproc-per-node", "8", "script.py")]
    assert [(status, err) for status, _, err in ended] == [(0, ""), (0, "")]
    assert "met" in ended[0][1]  # how soon is what benchmarks/start_between_hosts.py says


def test_host_with_the_address_keeps_the_store_and_has_rank_0(two_hosts, tmp_path):
    (tmp_path / "script.py").write_text(MEET + "print(rank, os.environ['GROUP_RANK'], os.environ['MASTER_ADDR'])")
    both = start_both(two_hosts, tmp_path, "--nproc-per-node", "2", "script.py")
    for host, process in enumerate(both):
        status, out, err = finish(process)
        assert (status, err) == (0, "")
        found = sorted(line for line in out.splitlines() if "met" not in line)
        assert found == [f"{2 * host + local} {host} {two_hosts.addresses[0]}" for local in range(2)]


def test_failure_on_one_host_ends_the_other(two_hosts, tmp_path):
    (tmp_path / "script.py").write_text(MEET + "if rank == 1: raise ValueError('boom')\ntime.sleep(60)")
    began = time.monotonic()
    ended = [finish(process) for process in start_both(two_hosts, tmp_path, "script.py")]
    assert time.monotonic() - began < 15
    assert [status for status, _, _ in ended] == [1, 1]
    assert all("first failure: node 1" in err and "ValueError: boom" in err for _, _, err in ended)


def test_no_secret_no_network(two_hosts, tmp_path):
    (tmp_path / "script.py").write_text(MEET)
    for status, _, err in [finish(process) for process in start_both(two_hosts, tmp_path, "script.py", secret="")]:
        assert status == 1
        assert "this job has no secret" in err
        assert "MESHDIST_SECRET_FILE" in err


def test_cut_cable_ends_both_hosts_in_seconds(two_hosts, tmp_path):
    (tmp_path / "script.py").write_text(MEET + "open(f'there{rank}', 'w').close()\ntime.sleep(120)")
    both = start_both(two_hosts, tmp_path, "script.py")
    until(lambda: all((tmp_path / f"there{rank}").exists() for rank in range(2)), "both are there", 30)
    began = time.monotonic()
    two_hosts.cut()
    ended = [finish(process) for process in both]
    assert time.monotonic() - began < 30
    assert [status for status, _, _ in ended] == [1, 1]
    assert "node 1" in ended[0][2]
    assert "was killed, or the network to it is cut" in ended[0][2]
    assert "node 0" in ended[1][2]


def test_elastic_job_goes_on_without_a_host_that_has_vanished(two_hosts, tmp_path):
    body = "start = os.environ['RESTART_COUNT']\nopen(f'there{start}.{rank}', 'w').close()\n"
    body += "if start == '0': time.sleep(120)"
    (tmp_path / "script.py").write_text(MEET + body)
    options = ["--nnodes", "1:2", "--rdzv-last-call", "30", "script.py"]
    both = start_both(two_hosts, tmp_path, *options)
    until(lambda: all((tmp_path / f"there0.{rank}").exists() for rank in range(2)), "both are there", 30)
    two_hosts.cut()
    (status, _, said), (other, _, _) = [finish(process) for process in both]
    assert (status, other) == (0, 1)
    assert "was killed, or the network to it is cut" in said
    assert "meshrun: start 1 has 1 rank\n" in said
    assert (tmp_path / "there1.0").exists()


def test_ranks_of_srun_meet_between_hosts(two_hosts, tmp_path):
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text(f"127.0.0.1 localhost\n{two_hosts.addresses[0]} a1\n{two_hosts.addresses[1]} a2\n")
    (tmp_path / "script.py").write_text(
        "import meshdist as dist\n"
        "dist.init_process_group()\n"
        "print(dist.get_rank(), dist.get_world_size())\n"
        "dist.destroy_process_group()\n"
    )
    step = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a[1-2]"}
    inside = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts_file)]
    processes = [
        two_hosts.start(
            host, [*inside, sys.executable, "script.py"], tmp_path, **step, SLURM_PROCID=str(host), MESHDIST_SECRET="s"
        )
        for host in range(2)
    ]
    ended = [finish(process) for process in processes]
    if any("unshare" in err or "mount" in err for _, _, err in ended):
        pytest.skip(f"a host file of one's own cannot be had here: {ended[0][2]}")
    assert [(status, err) for status, _, err in ended] == [(0, "")] * 2
    assert [out for _, out, _ in ended] == ["0 2\n", "1 2\n"]


def test_pods_of_the_indexed_job_find_each_other(two_hosts, tmp_path):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML to read the job file")
    documents = list(yaml.safe_load_all((ROOT / "examples/cluster/indexed_job.yaml").read_text()))
    job = documents[1]
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    # What Kubernetes gives to the pods: a host name, its full name in the hosts file, and names of the others.
    names = [f"{name}-{index}.{pod['subdomain']}.default.svc.cluster.local {name}-{index}" for index in range(2)]
    lines = [f"{address} {each}" for address, each in zip(two_hosts.addresses, names, strict=True)]
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
    command = [*MESHRUN, *pod["containers"][0]["command"][1:]]
    command[-1] = str(ROOT / "examples/cluster" / command[-1])
    inside = ["unshare", "-mu", "sh", "-c", 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"']
    processes = [
        two_hosts.start(
            index,
            [*inside, str(hosts_file), f"{name}-{index}", *command],
            tmp_path,
            JOB_COMPLETION_INDEX=str(index),
            MESHDIST_SECRET="s",
        )
        for index in range(2)
    ]
    ended = [finish(process) for process in processes]
    if any("unshare:" in err or "mount:" in err for _, _, err in ended):
        pytest.skip(f"a host name of one's own cannot be had here: {ended[0][2]}")
    assert [(status, err) for status, _, err in ended] == [(0, "")] * 2
    assert ended[0][1].splitlines()[1:] == [f"{name}-0: ranks 0, 1, 2, 3", f"{name}-1: ranks 4, 5, 6, 7"]
