"""Several launchers on this machine, as if each were a host: they meet, agree, and end together."""

import json
import signal
import socket
import time

import pytest
from launching import all_gone, finish, reported, start_meshrun, write_script
from until import until

from meshdist.launch.job_verdict import Report, judge
from meshdist.launch.node_numbering import NodeCard, check_card, number_nodes

pytestmark = pytest.mark.timeout(90)

MEET = """
from meshdist.bootstrap.rendezvous import rendezvous
store, found, size = rendezvous("env://", timeout=30)
assert found == rank
if store.add("there", 1) == size:
    store.set("all", "")
store.wait(["all"])
"""
WAIT = MEET + "tell(f'pid{rank}', os.getpid())\nwhile True: time.sleep(60)\n"


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Job:
    """Launchers that were told to meet at one port; they are gone at the end of the test."""

    def __init__(self, directory, port):
        self.directory, self.port, self.launchers = directory, port, []

    def start(self, *arguments, num_nodes=2, variables=None):
        where = ["--nnodes", str(num_nodes), "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        self.launchers.append(start_meshrun(self.directory, *where, *arguments, variables=variables))
        return self.launchers[-1]

    def finish(self):
        """Return the exit status and stderr of each launcher, in the order in which they were started."""
        return [(launcher.returncode, text) for launcher, text in [(each, finish(each)) for each in self.launchers]]


@pytest.fixture
def job(tmp_path, port):
    job = Job(tmp_path, port)
    yield job
    for launcher in job.launchers:
        launcher.kill()
        launcher.communicate()


def environment_of(directory, rank):
    return json.loads(reported(directory, f"env{rank}"))


def test_launchers_agree_on_ranks_of_unequal_hosts(job, tmp_path):
    write_script(tmp_path, MEET + "import json; tell(f'env{rank}', json.dumps(dict(os.environ)))")
    for num_ranks in ("2", "1", "3"):
        job.start("--nproc-per-node", num_ranks, "--max-restarts", "1", "script.py", num_nodes=3)
    assert job.finish() == [(0, "")] * 3
    found = [environment_of(tmp_path, rank) for rank in range(6)]
    nodes = [int(variables["GROUP_RANK"]) for variables in found]
    sizes = [nodes.count(node) for node in range(3)]
    assert nodes == sorted(nodes)
    assert sorted(sizes) == [1, 2, 3]
    assert [variables["LOCAL_RANK"] for variables in found] == [str(local) for size in sizes for local in range(size)]
    for rank, variables in enumerate(found):
        assert variables["RANK"] == variables["ROLE_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == "6"
        assert variables["GROUP_WORLD_SIZE"] == "3"
        assert variables["LOCAL_WORLD_SIZE"] == str(sizes[nodes[rank]])
        assert variables["TORCHELASTIC_MAX_RESTARTS"] == "1"
        assert variables["RESTART_COUNT"] == variables["TORCHELASTIC_RESTART_COUNT"] == "0"
    for name in ("MASTER_ADDR", "MASTER_PORT", "MESHDIST_SECRET", "TORCHELASTIC_RUN_ID"):
        assert len({variables[name] for variables in found}) == 1, name


def test_ranks_of_two_launchers_on_one_machine_share_its_memory(job, tmp_path):
    body = """
import numpy as np
import meshdist as dist
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
assert mesh.get_coordinate() == (int(os.environ["GROUP_RANK"]), dist.get_node_local_rank())
tell(f"sum{rank}", mesh["node"].all_reduce(np.array([rank])).item())
dist.destroy_process_group()
"""
    write_script(tmp_path, body)
    job.start("--nproc-per-node", "2", "script.py")
    job.start("--nproc-per-node", "2", "script.py")
    assert job.finish() == [(0, "")] * 2
    assert [reported(tmp_path, f"sum{rank}") for rank in range(4)] == ["2", "4", "2", "4"]


def test_given_node_ranks_are_kept(job, tmp_path):
    write_script(tmp_path, MEET + "tell(f'group{rank}', os.environ['GROUP_RANK'] + os.environ['MINE'])")
    for node in ("1", "0"):
        job.start("--node-rank", node, "--rdzv-id", "run7", "script.py", variables={"MINE": node})
    assert job.finish() == [(0, "")] * 2
    assert [reported(tmp_path, f"group{rank}") for rank in range(2)] == ["00", "11"]


def test_master_addr_and_port_do_as_well(tmp_path, port, job):
    write_script(tmp_path, MEET + "tell(f'run{rank}', os.environ['TORCHELASTIC_RUN_ID'])")
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    for node in range(2):
        job.launchers.append(start_meshrun(tmp_path, *where, "--node-rank", str(node), "script.py"))
    assert job.finish() == [(0, "")] * 2
    assert reported(tmp_path, "run0") == reported(tmp_path, "run1")


@pytest.mark.parametrize("started_by", ["srun", "kubernetes"])
def test_one_launcher_a_host_started_by_another_finds_the_rest(tmp_path, job, started_by):
    write_script(tmp_path, MEET + "tell(f'group{rank}', os.environ['GROUP_RANK'])")
    for node in range(2):
        if started_by == "srun":
            variables = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(node), "SLURM_STEP_NODELIST": "localhost,b"}
            where = []
        else:
            variables = {"JOB_COMPLETION_INDEX": str(node)}
            where = ["--master-addr", "localhost", "--node-rank", str(node)]
        variables = {**variables, "SLURM_JOB_ID": job.port, "SLURM_STEP_ID": "0", "MESHDIST_SECRET": "s"}
        command = ["--nnodes", "2", *where, "--nproc-per-node", "2", "script.py"]
        job.launchers.append(start_meshrun(tmp_path, *command, variables=variables))
    assert job.finish() == [(0, "")] * 2
    assert [reported(tmp_path, f"group{rank}") for rank in range(4)] == ["0", "0", "1", "1"]


def test_failure_ends_all_hosts_and_is_shown_first_with_its_host_and_rank(job, tmp_path):
    body = WAIT.replace(
        "while True",
        "if rank == 3:\n    hear('pid0'), hear('pid1'), hear('pid2')\n    raise ValueError('boom')\nwhile True",
    )
    write_script(tmp_path, body)
    job.start("--node-rank", "0", "--nproc-per-node", "2", "script.py")
    job.start("--node-rank", "1", "--nproc-per-node", "2", "script.py")
    reported(tmp_path, "pid3")
    began = time.monotonic()
    (status0, err0), (status1, err1) = job.finish()
    assert time.monotonic() - began < 5
    assert status0 == status1 == 1
    host = socket.gethostname()
    assert err0.startswith(f"meshrun: first failure: node 1 ({host}), rank 3 (pid ")
    assert err0.splitlines()[0].endswith("exited with status 1: ValueError: boom")
    assert "Traceback" not in err0
    assert err0.splitlines()[-1] == "meshrun: terminated ranks 0, 1 after the first failure"
    assert err1.startswith(f"meshrun: first failure: node 1 ({host}), rank 3 (pid ")
    assert err1.count("ValueError: boom") == 1
    assert err1.splitlines()[-1] == "meshrun: terminated rank 2 after the first failure"
    all_gone([int(reported(tmp_path, f"pid{rank}")) for rank in range(4)])


def test_failure_that_follows_from_another_hosts_is_not_the_cause(job, tmp_path):
    body = (
        MEET
        + """
from meshdist.errors import DistBackendError
if rank == 1:
    tell("dead")
    hear("noticed")
    raise KeyError("the cause")
hear("dead")
tell("noticed")
raise DistBackendError("rank 1 is gone", peer_failed=True)
"""
    )
    write_script(tmp_path, body)
    for node in ("0", "1"):
        job.start("--node-rank", node, "script.py")
    (status0, err0), (status1, err1) = job.finish()
    assert (status0, status1) == (1, 1)
    assert err0.startswith("meshrun: first failure: node 1 ")
    assert "KeyError: 'the cause'" in err0.splitlines()[0]
    assert "first failure: node 1" in err1
    assert err1.count("KeyError: 'the cause'") == 1


def test_exit_status_is_that_of_the_first_failure_on_all_hosts(job, tmp_path):
    write_script(tmp_path, WAIT.replace("while True", "if rank == 0: hear('pid1'); os._exit(7)\nwhile True"))
    job.start("script.py")
    job.start("script.py")
    assert [status for status, _ in job.finish()] == [7, 7]


def test_early_end_of_one_hosts_ranks_ends_nobody(job, tmp_path):
    body = MEET + "tell(f'pid{rank}', os.getpid())\nif rank == 1: hear('go on')\ntell(f'end{rank}')"
    write_script(tmp_path, body)
    job.start("--node-rank", "0", "script.py")
    job.start("--node-rank", "1", "script.py")
    reported(tmp_path, "end0")
    assert [launcher.poll() for launcher in job.launchers] == [None, None]
    (tmp_path / "go on").touch()
    assert job.finish() == [(0, "")] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_signal_to_one_launcher_ends_all_hosts(job, tmp_path, victim):
    write_script(tmp_path, WAIT)
    for node in ("0", "1"):
        job.start("--node-rank", node, "--nproc-per-node", "2", "script.py")
    pids = [int(reported(tmp_path, f"pid{rank}")) for rank in range(4)]
    job.launchers[victim].send_signal(signal.SIGTERM)
    ended = job.finish()
    assert [status for status, _ in ended] == [143, 143]
    assert ended[victim][1].startswith("meshrun: stopped by SIGTERM\n")
    assert f"meshrun: node {victim} ({socket.gethostname()}) was stopped by SIGTERM\n" in ended[1 - victim][1]
    all_gone(pids)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_launcher_ends_all_hosts_within_seconds(job, tmp_path, victim):
    write_script(tmp_path, WAIT)
    for node in ("0", "1"):
        here = ("--node-rank", node, "--nproc-per-node", "2", "--max-restarts", "5", "--error-dir", "errors")
        job.start(*here, "script.py")
    pids = [int(reported(tmp_path, f"pid{rank}")) for rank in range(4)]
    job.launchers[victim].kill()
    began = time.monotonic()
    all_gone(pids, timeout_s=5)
    ended = job.finish()
    assert time.monotonic() - began < 8
    status, err = ended[1 - victim]
    assert status == 1
    assert f"meshrun: node {victim} ({socket.gethostname()}) " in err
    assert ("keeps the store of the launchers" if victim == 0 else "was killed, or the network to it is cut") in err
    first = 2 - 2 * victim
    why = "keeps the store of the launchers, which is gone" if victim == 0 else "is lost"
    assert err.splitlines()[-1] == (
        f"meshrun: ranks {first}, {first + 1} ended because node {victim} ({socket.gethostname()}) {why};"
        f" how: errors/rank{first}.error.json (rank {first + 1}: same directory)"
    )
    how = json.loads((tmp_path / f"errors/rank{first}.error.json").read_text())["how"]
    assert how == f"was terminated because node {victim} {why}"


def test_stopped_launcher_is_not_taken_for_a_dead_one(job, tmp_path):
    write_script(tmp_path, MEET + "tell(f'pid{rank}', os.getpid())\nhear('go on')")
    job.start("--node-rank", "0", "script.py")
    job.start("--node-rank", "1", "script.py")
    reported(tmp_path, "pid0"), reported(tmp_path, "pid1")
    job.launchers[1].send_signal(signal.SIGSTOP)
    (tmp_path / "go on").touch()
    job.launchers[1].send_signal(signal.SIGCONT)
    assert job.finish() == [(0, "")] * 2


def test_restart_is_of_all_ranks_on_all_hosts_with_another_secret(job, tmp_path):
    body = (
        MEET
        + """
count = os.environ["RESTART_COUNT"]
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == count and os.environ["TORCHELASTIC_MAX_RESTARTS"] == "2"
tell(f"secret{rank}.{count}", os.environ["MESHDIST_SECRET"])
if count < "2" and rank == 1 + int(count):
    hear(f"secret0.{count}"), hear(f"secret1.{count}"), hear(f"secret2.{count}")
    raise ValueError(f"try {count}")
while count < "2": time.sleep(60)
"""
    )
    write_script(tmp_path, body)
    job.start("--node-rank", "0", "--nproc-per-node", "2", "--max-restarts", "2", "script.py")
    job.start("--node-rank", "1", "--max-restarts", "2", "script.py")
    (status0, err0), (status1, err1) = job.finish()
    assert (status0, status1) == (0, 0)
    for err in (err0, err1):
        assert [line for line in err.splitlines() if "again" in line] == [
            "meshrun: starting all ranks again, restart 1 of at most 2",
            "meshrun: starting all ranks again, restart 2 of at most 2",
        ]
        assert "ValueError: try 0" in err
        assert "ValueError: try 1" in err
    secrets = [{reported(tmp_path, f"secret{rank}.{count}") for rank in range(3)} for count in range(3)]
    assert [len(each) for each in secrets] == [1, 1, 1]
    assert len(set.union(*secrets)) == 3


def test_restarts_come_to_an_end(job, tmp_path):
    write_script(tmp_path, MEET + "if rank == 1: raise ValueError('always')\nwhile True: time.sleep(60)")
    job.start("--max-restarts", "1", "script.py")
    job.start("--max-restarts", "1", "script.py")
    for status, err in job.finish():
        assert status == 1
        assert err.count("starting all ranks again") == 1
        assert err.count("ValueError: always") == 2


def test_secret_is_asked_for_before_anybody_waits(tmp_path):
    write_script(tmp_path, "tell('ran')")
    for node in ("0", "1"):
        where = ["--nnodes", "2", "--rdzv-endpoint", "192.0.2.1:29400", "--node-rank", node]
        process = start_meshrun(tmp_path, *where, "script.py")
        err = finish(process)
        assert process.returncode == 1
        assert "set MESHDIST_SECRET to the same random string on all hosts, or MESHDIST_SECRET_FILE" in err
    assert not (tmp_path / "ran").exists()


def test_launcher_with_another_secret_is_refused_and_the_others_go_on(job, tmp_path):
    write_script(tmp_path, MEET)
    (tmp_path / "secret").write_text("ours")
    (tmp_path / "secret").chmod(0o600)
    job.start("--node-rank", "0", "script.py", variables={"MESHDIST_SECRET": "ours"})
    stranger = job.start("--node-rank", "1", "script.py", variables={"MESHDIST_SECRET": "another"})
    assert "belongs to another job" in finish(stranger)
    job.start("--node-rank", "1", "script.py", variables={"MESHDIST_SECRET_FILE": str(tmp_path / "secret")})
    assert [status for status, _ in job.finish()] == [0, 1, 0]


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (["--rdzv-id", "a"], ["--rdzv-id", "b"], "disagree on --rdzv-id"),
        (["--node-rank", "0"], ["--nnodes", "3", "--node-rank", "1"], "disagree on --nnodes"),
        (
            ["--nnodes", "3", "--node-rank", "1"],
            ["--nnodes", "3", "--node-rank", "1"],
            "two launchers were given --node-rank 1",
        ),
    ],
)
def test_launchers_that_were_told_different_things_all_say_so(job, tmp_path, first, second, says):
    write_script(tmp_path, "tell('ran')")
    job.start(*first, "script.py")
    job.start(*second, "script.py")
    if "3" in first:
        job.start("--nnodes", "3", "--node-rank", "0", "script.py")
    for status, err in job.finish():
        assert status == 1
        assert says in err
    assert not (tmp_path / "ran").exists()


def test_one_launcher_too_many_is_told_so(job, tmp_path):
    write_script(tmp_path, WAIT)
    job.start("script.py")
    job.start("script.py")
    reported(tmp_path, "pid0"), reported(tmp_path, "pid1")
    late = job.start("script.py")
    assert "the 2 launchers of this job (--nnodes) have already joined" in finish(late)
    assert late.returncode == 1
    assert [launcher.poll() for launcher in job.launchers[:2]] == [None, None]


@pytest.mark.parametrize("node", ["0", "1"])
def test_host_that_does_not_come_is_waited_for_so_long(job, tmp_path, node):
    write_script(tmp_path, "")
    began = time.monotonic()
    job.start("--node-rank", node, "--rdzv-timeout", "1", "script.py")
    ((status, err),) = job.finish()
    assert time.monotonic() - began < 6
    assert status == 1
    assert (
        "1 of 2 hosts (--nnodes) joined within 1 s" if node == "0" else "no launcher opened a store at 127.0.0.1:"
    ) in err


def test_why_the_other_launcher_was_not_reached(job, tmp_path):
    write_script(tmp_path, "")
    job.start("--node-rank", "1", "--rdzv-endpoint", "nosuchhost.invalid:29400", "--rdzv-timeout", "1", "script.py")
    ((status, err),) = job.finish()
    assert status == 1
    assert (
        "no launcher opened a store at nosuchhost.invalid:29400 within 1 s (the name 'nosuchhost.invalid' cannot" in err
    )


@pytest.mark.parametrize("node", ["0", "1"])
def test_ctrl_c_while_the_others_are_waited_for(job, tmp_path, node):
    write_script(tmp_path, "")
    launcher = job.start("--node-rank", node, "script.py")
    until(lambda: listens(job.port) if node == "0" else notes_signals(launcher), "the launcher waits for others")
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher) == "meshrun: stopped by SIGINT\n"
    assert launcher.returncode == 130


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


def notes_signals(process):
    """Return True once meshrun notes SIGTERM itself, which a Python process does not do from its start."""
    with open(f"/proc/{process.pid}/status") as file:
        caught = int(dict(line.split(":", 1) for line in file)["SigCgt"], 16)
    return bool(caught & 1 << signal.SIGTERM - 1)


def test_port_of_a_stranger_is_named(job, tmp_path):
    write_script(tmp_path, "")
    with socket.create_server(("127.0.0.1", int(job.port))):
        job.start("--node-rank", "0", "script.py")
        ((status, err),) = job.finish()
    assert status == 1
    assert f"127.0.0.1:{job.port} is taken by another socket" in err


def test_next_job_may_begin_while_the_one_before_ends(job, tmp_path):
    write_script(tmp_path, MEET)
    for _ in range(3):
        job.start("script.py")
        job.start("script.py")
        assert job.finish() == [(0, "")] * 2
        job.launchers.clear()


def card(host="h", node=None, **more):
    return NodeCard(host, 1, 2, node, **more)


def test_hosts_are_numbered():
    assert number_nodes([card(), card(), card()], leader=2) == [1, 2, 0]
    assert number_nodes([card(node=2), card(), card(node=0)], leader=2) == [2, 1, 0]
    assert number_nodes([card(node=1), card(), card()], leader=0) == [1, 0, 2]
    with pytest.raises(ValueError, match="two launchers were given --node-rank 1, on a and on b"):
        number_nodes([card("a", 1), card("b", 1)], leader=0)


def test_cards_of_another_job():
    for theirs in (card(run_id="x"), card(version="2"), card()._replace(num_nodes=3), card(node=2), card(node=-1)):
        with pytest.raises(ValueError, match="disagree|--node-rank on h must be 0 to 1"):
            check_card(theirs, card())


def test_verdict():
    assert judge([Report(0), Report(1)], may_restart=True).status == 0
    assert judge([Report(0), Report(1, signal=2)], may_restart=True)[:3] == (False, 130, 1)
    lost = judge([Report(0), Report(1, problem="was killed")], may_restart=True)
    assert (lost.is_restart, lost.status, lost.problem) == (False, 1, "was killed")
