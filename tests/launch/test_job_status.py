"""What `meshrun status` and `meshrun --dashboard` show of running jobs."""

import os
import re
import struct
import subprocess
import sys
import uuid

import pytest
from launching import environment, finish, meshrun, reported, start_meshrun, write_script
from test_several_nodes import port  # noqa: F401 - a fixture
from until import until

from meshdist.debug.attach import jobs_here
from meshdist.launch.dashboard import render, why_no_dashboard
from meshdist.launch.job_status import JobStatus, RankStatus, duration
from meshdist.launch.rank_board import NodeEntry, RankEntry
from meshdist.launch.status_command import main

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="finds jobs and asks ranks as on Linux"),
]

# Rank 0 waits for rank 2, which computes until it is told to go on; rank 1 has ended.
HANG = """
import numpy as np
import meshdist as dist
dist.init_process_group()
x = np.ones(3)
dist.all_reduce(x)
tell(f"there{rank}")
if rank == 0:
    dist.recv(x, 2)
if rank == 2:
    hear("go on")
    dist.send(x, 0)
dist.destroy_process_group()
"""


@pytest.fixture
def status(capsys, monkeypatch):
    """Return a function that runs `meshrun status` and returns its exit status, stdout and stderr."""

    def run(*arguments, secret=None):
        if secret is not None:
            monkeypatch.setenv("MESHDIST_SECRET", secret)
        code = main(arguments)
        return (code, *capsys.readouterr())

    monkeypatch.delenv("MESHDIST_SECRET", raising=False)
    return run


def test_status_shows_who_waits_for_whom_who_has_ended_and_where_the_output_is(tmp_path, status):
    write_script(tmp_path, HANG)
    name = f"job-{uuid.uuid4().hex[:8]}"
    job = start_meshrun(tmp_path, "-n", "3", "--rdzv-id", name, "--log-dir", "logs", "script.py")
    for rank in range(3):
        reported(tmp_path, f"there{rank}")
    until(lambda: "succeeded" in status(name)[1], "rank 1 has ended", 30)
    code, out, err = status(name)
    assert (code, err) == (0, "")
    headline, head, *rows, logs = out.splitlines()
    assert re.fullmatch(rf"job {name}: 3 ranks on 1 host, no restarts, for [0-9.]+ s: script.py", headline)
    assert head.split() == ["rank", "host", "pid", "state", "for", "call,", "or", "the", "last", "one"]
    assert re.match(r" +0 .* waiting for rank 2 .* recv\(float64\[3\] from rank 2, .*, at script.py:2\d$", rows[0])
    assert re.search(r" +1 .* succeeded$", rows[1])
    assert re.match(r" +2 .* running, at script.py:\d+ in hear .* s  all_reduce\(float64\[3\], op=sum\)", rows[2])
    directory = tmp_path / "logs"
    assert logs == f"output of ranks 0, 1, 2: rankN.stdout.log and rankN.stderr.log in {directory}"
    watching = subprocess.Popen(
        [sys.executable, "-m", "meshdist.launch.meshrun", "status", name, "--watch", "--interval", "0.1"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout.readline().startswith(f"job {name}: 3 ranks")
    (tmp_path / "go on").touch()
    assert finish(job) == ""
    assert watching.communicate(timeout=40)[0].splitlines()[-1] == f"{name} has ended"
    code, _, err = status(name)
    assert code == 1
    assert f"there is no job '{name}'" in err
    assert "pass HOST:PORT for a job elsewhere" in err


@pytest.mark.parametrize("interval", ["-1", "inf", "soon"])
def test_status_refuses_a_pause_that_is_none(interval, capsys):
    with pytest.raises(SystemExit):
        main(["--watch", "--interval", interval])
    assert f"--interval: expected a number of seconds, at least 0, got '{interval}'" in capsys.readouterr().err


def test_status_where_launchers_meet_needs_their_secret_and_shows_all_hosts(tmp_path, port, status, monkeypatch):  # noqa: F811
    write_script(tmp_path, "tell(f'there{rank}.' + os.environ['RESTART_COUNT'])\nhear('go on')")
    where = ["--nnodes", "2:3", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-last-call", "0", "script.py"]
    first = start_meshrun(tmp_path, *where, variables={"MESHDIST_SECRET": "a"})
    there, needs_rank = f"127.0.0.1:{port}", jobs_here
    monkeypatch.setattr("meshdist.launch.status_command.jobs_here", list)  # as on a host without ranks of the job
    until(lambda: status(there, secret="a")[0] == 0, "the launcher waits", 30)
    _, out, _ = status(there)
    assert out.startswith(f"job at {there}: waiting for hosts; there is 1 host: ")
    code, _, err = status(there, secret="b")
    assert code == 1
    assert f"the store at {there} requires the job's secret: set MESHDIST_SECRET" in err
    second = start_meshrun(tmp_path, *where, variables={"MESHDIST_SECRET": "a"})
    for rank in range(2):
        reported(tmp_path, f"there{rank}.0")
    by_secret = status(there, secret="a")[1].splitlines()
    monkeypatch.setattr("meshdist.launch.status_command.jobs_here", needs_rank)
    by_user = status(there, secret="")[1].splitlines()  # the same user, on a host with ranks
    for headline, _, *rows in (by_secret, by_user):
        assert "2 ranks on 2 hosts" in headline
        assert [row.split()[0] for row in rows] == ["0", "1"]
        assert all("running, before init_process_group" in row for row in rows)
    (tmp_path / "go on").touch()
    finish(first), finish(second)
    assert (first.returncode, second.returncode) == (0, 0)


def test_script_called_status_is_run_where_there_is_one(tmp_path):
    (tmp_path / "status").write_text("print('a script')")
    assert meshrun(tmp_path, "status")[:2] == (0, "a script\n")
    os.unlink(tmp_path / "status")
    assert "List the ranks of a running job" in meshrun(tmp_path, "status", "--help")[1]


def on_a_terminal(place, rows=40, columns=120):
    """Start the script of two ranks with a dashboard; return the job, and the terminal."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    command = [sys.executable, "-m", "meshdist.launch.meshrun", "-n", "2", "--dashboard", "script.py"]
    known = {name: value for name, value in environment(TERM="xterm").items() if name not in ("COLUMNS", "LINES")}
    job = subprocess.Popen(command, cwd=place, env=known, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    return job, ours


def rest_of(terminal):
    """Return what is shown until the terminal has no process any more."""
    shown = b""
    try:
        while True:
            shown += os.read(terminal, 1 << 16)
    except OSError:
        os.close(terminal)
    return shown.decode(errors="replace")


def test_dashboard_shows_a_live_table_on_a_terminal(tmp_path):
    pytest.importorskip("rich", reason="rich is not installed")
    write_script(tmp_path, "print('hello from', rank)\nhear('go on')")
    job, terminal = on_a_terminal(tmp_path)
    shown = ""
    while "hello from 1" not in shown or "running" not in shown:
        shown += os.read(terminal, 1 << 16).decode(errors="replace")
    (tmp_path / "go on").touch()
    shown += rest_of(terminal)
    assert job.wait(20) == 0
    assert "2 ranks on 1 host" in shown
    assert "[rank0] hello from 0" in shown
    assert shown.count("succeeded") >= 2


def test_dashboard_tells_the_failed_rank_from_those_that_the_job_ended(tmp_path):
    pytest.importorskip("rich", reason="rich is not installed")
    # The failed rank has told of its error when it is terminated.
    write_script(tmp_path, "import atexit\natexit.register(hear, 'never')\nif rank: raise ValueError\nhear('never')")
    job, terminal = on_a_terminal(tmp_path)
    shown = rest_of(terminal)
    assert job.wait(20) == 1
    assert "failed first: exited with status 1" in shown.rpartition("state")[2]
    assert "terminated" in shown.rpartition("state")[2]
    assert "SIGTERM" not in shown


def test_dashboard_shows_the_last_call_of_a_rank_that_failed(tmp_path):
    pytest.importorskip("rich", reason="rich is not installed")
    write_script(
        tmp_path, "import meshdist as dist\ndist.init_process_group()\ndist.barrier()\nhear('fail')\nraise ValueError"
    )
    job, terminal = on_a_terminal(tmp_path, columns=160)
    shown = ""
    while "barrier(), call 1 on 'world'" not in shown:
        shown += os.read(terminal, 1 << 16).decode(errors="replace")
    (tmp_path / "fail").touch()
    shown += rest_of(terminal)
    assert job.wait(20) == 1
    assert "last seen: barrier(), call 1 on 'world'" in shown.rpartition("state")[2]


def test_dashboard_on_a_terminal_without_a_size_is_lines(tmp_path):
    pytest.importorskip("rich", reason="rich is not installed")
    write_script(tmp_path, "print('hello from', rank)")
    job, terminal = on_a_terminal(tmp_path, 0, 0)
    shown = rest_of(terminal)
    assert job.wait(20) == 0
    assert sorted(shown.splitlines()) == ["[rank0] hello from 0", "[rank1] hello from 1"]


def test_dashboard_without_a_terminal_is_lines(tmp_path):
    write_script(tmp_path, "print('hello from', rank)")
    code, out, err = meshrun(tmp_path, "-n", "2", "--dashboard", "script.py")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[rank0] hello from 0", "[rank1] hello from 1"]


def test_dashboard_needs_rich(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_no_dashboard() == "--dashboard needs the package rich: pip install rich"


def a_status():
    ranks = {rank: RankEntry(rank, 70 + rank, logs=[f"/logs/rank{rank}.restart2.stdout.log"]) for rank in range(3)}
    node = NodeEntry(0, 1, "node1", "job7", "train.py", 3, 2, 2, 5, 0.0, "", ranks)
    rows = [
        RankStatus(0, "node1", "70", "waiting for rank 2", 3.21, "barrier(), call 2 on 'world', at train.py:7"),
        RankStatus(1, "node1", "71", "was killed by SIGKILL"),
        RankStatus(2, "node1", "72", "running, at train.py:9", 150.0, "none yet"),
    ]
    return JobStatus([NodeEntry.decode(node.encode().encode())], rows, "127.0.0.1:5")


def test_table_in_plain_text():
    headline, *rows = a_status().lines()
    assert headline.startswith("job job7: 3 ranks on 1 host, restart 2 of at most 5, for ")
    assert rows == [
        "rank  host   pid  state                     for  call, or the last one",
        "   0  node1   70  waiting for rank 2      3.2 s  barrier(), call 2 on 'world', at train.py:7",
        "   1  node1   71  was killed by SIGKILL",
        "   2  node1   72  running, at train.py:9  2 min  none yet",
        "output of ranks 0, 1, 2: rankN.restart2.stdout.log in /logs",
    ]
    assert a_status().names() == {"127.0.0.1:5", "job7"}
    assert [duration(each) for each in (0.04, 99.0, 5900.0, 7200.0)] == ["0.0 s", "99.0 s", "98 min", "2.0 h"]


def test_table_in_plain_text_for_a_terminal_of_80_columns():
    assert a_status().lines(80)[1:] == [
        "rank  host   pid  state                     for  call, or the last one",
        "   0  node1   70  waiting for rank 2      3.2 s  barrier(), call 2 on 'world',",
        "                                                 at train.py:7",
        "   1  node1   71  was killed by SIGKILL",
        "   2  node1   72  running, at train.py:9  2 min  none yet",
        "output of ranks 0, 1, 2: rankN.restart2.stdout.log in /logs",
    ]
    assert max(map(len, a_status().lines(60))) <= 60
    assert a_status().lines(120) == a_status().lines()


@pytest.mark.parametrize(
    ("number", "changes", "most", "words"),
    [
        (0, 0, 0, ", no restarts, for "),
        (0, 0, 3, ", no restarts yet, at most 3, for "),
        (1, 0, 3, ", restart 1 of at most 3, for "),
        (0, 1, 3, ", no restarts yet, at most 3, hosts changed 1 time, for "),
        (1, 4, 3, ", restart 1 of at most 3, hosts changed 4 times, for "),
    ],
)
def test_restarts_so_far_and_at_most(number, changes, most, words):
    status = a_status()
    first = status.nodes[0]._replace(num_restarts=number + changes, num_failed_starts=number, max_restarts=most)
    assert words in status._replace(nodes=[first]).headline()


def test_table_of_rich():
    console = pytest.importorskip("rich.console", reason="rich is not installed").Console(width=110)
    with console.capture() as captured:
        console.print(render(a_status(), {0: ["step 1", "step 2"], 2: ["loading"]}))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    assert lines[-3:] == ["[rank0] step 1", "[rank0] step 2", "[rank2] loading"]
    assert any(line.split()[:3] == ["1", "71", "was"] for line in lines)  # the headline counts hosts


@pytest.mark.parametrize("hosts", [("node1",) * 3, ("node1", "node2", "node2")])
def test_at_80_columns_no_word_of_a_state_is_cut(hosts):
    console = pytest.importorskip("rich.console", reason="rich is not installed").Console(width=80)
    call = "all_reduce(float64[10], op=sum), call 20 on 'world', at train.py:5"
    states = ["called destroy_process_group()", "waiting for rank 0", "running, at train.py:9"]
    ranks = [RankStatus(rank, host, "18259", states[rank], 12.3, call) for rank, host in enumerate(hosts)]
    with console.capture() as captured:
        console.print(render(a_status()._replace(ranks=ranks), {}))
    shown = captured.get()
    assert "destroy_process_group()" in shown
    assert "…" not in shown.partition("train.py")[2]  # beyond the headline
    assert ("node2" in shown) == ("node2" in hosts)
