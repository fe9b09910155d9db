"""What meshrun runs, with which arguments and environment, and how it complains about a wrong command."""

import json
import os
import socket
import sys

import pytest
from interpreters import Interpreter
from launching import environment, meshrun, reported, start_meshrun, write_script
from until import until


def test_script_gets_its_arguments_untouched(tmp_path):
    write_script(tmp_path, "tell(f'argv{rank}', repr(sys.argv))")
    status, _, err = meshrun(tmp_path, "--nproc-per-node", "2", "script.py", "-m", "--grace", "1", "--", "--x=a b")
    assert (status, err) == (0, "")
    expected = repr(["script.py", "-m", "--grace", "1", "--", "--x=a b"])
    assert [reported(tmp_path, f"argv{rank}") for rank in range(2)] == [expected] * 2


@pytest.mark.parametrize(
    "after", [("-n", "2"), ("-n2",), ("-np", "2"), ("--nproc-per-node=2",), ("--nproc_per_node", "2")]
)
def test_a_number_of_ranks_after_the_script_is_said_to_be_the_scripts(tmp_path, after):
    write_script(tmp_path, "tell(f'argv{rank}', repr(sys.argv[1:]))")
    said = (
        f"meshrun: starting 1 rank: {' '.join(after)} comes after script.py, so the script gets it; "
        "for more ranks, put it before script.py\n"
    )
    assert meshrun(tmp_path, "--standalone", "script.py", "--x", *after) == (0, "", said)
    assert reported(tmp_path, "argv0") == repr(["--x", *after])
    assert not (tmp_path / "argv1").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("-n", "1", "script.py", "-n", "2"),
        ("script.py", "--", "-n", "2"),
        ("script.py", "-n"),
        ("script.py", "-n", "name"),
    ],
)
def test_nothing_is_said_where_the_script_is_to_have_it(tmp_path, words):
    write_script(tmp_path, "tell('done', '')")
    assert meshrun(tmp_path, *words) == (0, "", "")


def test_ranks_find_their_place_in_the_environment(tmp_path):
    write_script(tmp_path, "import json; tell(f'env{rank}', json.dumps(dict(os.environ)))")
    assert meshrun(tmp_path, "--nproc_per_node=3", "--standalone", "script.py")[0] == 0
    found = [json.loads(reported(tmp_path, f"env{rank}")) for rank in range(3)]
    for rank, variables in enumerate(found):
        for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
            assert variables[name] == str(rank), name
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            assert variables[name] == "3", name
        assert (variables["GROUP_RANK"], variables["GROUP_WORLD_SIZE"], variables["ROLE_NAME"]) == ("0", "1", "default")
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert variables["TORCHELASTIC_RESTART_COUNT"] == variables["TORCHELASTIC_MAX_RESTARTS"] == "0"
        assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert variables["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
    for name in ("MASTER_PORT", "MESHDIST_SECRET", "TORCHELASTIC_RUN_ID"):
        assert len({variables[name] for variables in found}) == 1, name
    assert len({variables["MESHDIST_ERROR_FILE"] for variables in found}) == 3


def test_what_the_user_set_is_kept(tmp_path):
    write_script(
        tmp_path, "tell('set', ' '.join(os.environ[n] for n in ('OMP_NUM_THREADS', 'MESHDIST_SECRET', 'MINE')))"
    )
    variables = {"OMP_NUM_THREADS": "7", "MESHDIST_SECRET": "given", "MINE": "x"}
    assert meshrun(tmp_path, "script.py", variables=variables)[0] == 0
    assert reported(tmp_path, "set") == "7 given x"


def test_ranks_meet_in_the_launchers_store(tmp_path):
    body = """
from meshdist.launch.worker_env import is_torchelastic_launched
from meshdist.store import TCPStore
assert is_torchelastic_launched()
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
assert store.add("arrived", 1) in (1, 2, 3)
store.set(f"from{rank}", str(rank * 10))
assert store.get(f"from{(rank + 1) % 3}") == str((rank + 1) % 3 * 10).encode()
tell(f"met{rank}", os.environ["MASTER_PORT"])
"""
    write_script(tmp_path, body)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    assert meshrun(tmp_path, "--nproc-per-node", "3", "--master-port", port, "script.py") == (0, "", "")
    assert [reported(tmp_path, f"met{rank}") for rank in range(3)] == [port] * 3


def test_script_is_the_main_module_and_finds_its_neighbours(tmp_path):
    package = tmp_path / "code"
    package.mkdir()
    (package / "neighbour.py").write_text("value = 5")
    body = """
import neighbour, pickle, __main__
class Thing:
    pass
assert __name__ == "__main__" and __main__.Thing is Thing
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
tell("file", __file__)
"""
    write_script(package, body)
    assert meshrun(tmp_path, "code/script.py") == (0, "", "")
    assert reported(tmp_path, "file") == str(package / "script.py")


def test_script_may_start_processes_of_its_own_by_name(tmp_path):
    body = """
import multiprocessing
from meshdist.launch.spawn import spawn

def square(number):
    return number * number

def rank_of_rank(inner, directory):
    tell(f"inner{inner}", os.environ["RANK"])

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(square, [3]) == [9]
    spawn(rank_of_rank, (".",), nprocs=2)
"""
    write_script(tmp_path, body)
    assert meshrun(tmp_path, "script.py") == (0, "", "")
    assert [reported(tmp_path, f"inner{rank}") for rank in range(2)] == ["0", "1"]


def test_module_package_and_directory_run_as_with_python(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("value = 5")
    write_script(
        package, "from . import value; tell('module', (__name__, value, sys.argv[1:], sys.path[0]))", "part.py"
    )
    write_script(package, "tell(sys.argv[1], __package__)", "__main__.py")
    assert meshrun(tmp_path, "-m", "package.part", "-a", "1") == (0, "", "")
    assert reported(tmp_path, "module") == repr(("__main__", 5, ["-a", "1"], str(tmp_path)))
    assert meshrun(tmp_path, "--module", "package", "as_package") == (0, "", "")
    assert reported(tmp_path, "as_package") == "package"
    assert meshrun(tmp_path, "package", "as_directory") == (0, "", "")
    assert reported(tmp_path, "as_directory") == ""


def test_program_without_python(tmp_path):
    status, out, _ = meshrun(
        tmp_path, "--nproc-per-node", "2", "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE"'
    )
    assert status == 0
    assert sorted(out.splitlines()) == ["0 of 2", "1 of 2"]
    assert meshrun(tmp_path, "--no-python", "sh", "-c", "exit 5")[0] == 5


def test_output_passes_through_in_whole_lines(tmp_path):
    write_script(tmp_path, "for i in range(200): print(f'{rank}:{i}', 'x' * 50)\nprint('err', file=sys.stderr)")
    status, out, err = meshrun(tmp_path, "--nproc-per-node", "3", "script.py")
    assert (status, err) == (0, "err\n" * 3)
    assert sorted(out.splitlines()) == sorted(f"{rank}:{i} {'x' * 50}" for rank in range(3) for i in range(200))


def test_log_dir_takes_the_output_and_is_named_at_a_failure(tmp_path):
    write_script(
        tmp_path,
        "print(f'out {rank}')\nprint(f'err {rank}', file=sys.stderr)\nif rank == 1: os._exit(4)\ntime.sleep(30)",
    )
    status, out, err = meshrun(tmp_path, "--nproc-per-node", "2", "--log-dir", "logs/run", "script.py")
    assert (status, out) == (4, "")
    assert "logs/run/rank1.stderr.log" in err
    assert (tmp_path / "logs/run/rank1.stdout.log").read_text() == "out 1\n"
    assert (tmp_path / "logs/run/rank1.stderr.log").read_text() == "err 1\n"
    assert sorted(os.listdir(tmp_path / "logs/run")) == sorted(
        f"rank{rank}.{kind}" for rank in range(2) for kind in ("stdout.log", "stderr.log", "error.json")
    )


@pytest.fixture(scope="module")
def interpreter():
    """Forks with meshrun imported, for the commands that do nothing but complain."""
    with Interpreter(("meshdist.launch.meshrun",), environment()) as interpreter:
        yield interpreter


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc-per-node", "0", "script.py"], "expected a positive number, auto, cpu or gpu, got '0'"),
        (["-n", "500000000", "script.py"], "500000000 processes take at least 3,906,250 GiB of memory, and this host"),
        (["--nproc-per-node", "-2", "script.py"], "got '-2'"),
        (["-np", "2", "script.py"], "-np is an option of mpirun: write -n"),
        (["--nproc-per-node", "many", "script.py"], "got 'many'"),
        (["--nproc-per-node"], "expected one argument"),
        (["--nnodes", "2", "script.py"], "the launchers need a rendezvous endpoint"),
        (["--nnodes", "4:1", "script.py"], "or the fewest and the most of them as in 2:4, got '4:1'"),
        (["-n", "4:1", "script.py"], "expected the fewest and the most ranks, as in 2:4, got '4:1'"),
        (["--nnodes", "1:4", "script.py"], "--nnodes 1:4: the launchers need a rendezvous endpoint"),
        (["--nnodes", "0", "script.py"], "or the fewest and the most of them as in 2:4, got '0'"),
        (["--nnodes", "2", "--standalone", "script.py"], "pass one of them"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "h", "script.py"], "must be 0 to 1, got 2"),
        (["--node-rank", "1", "script.py"], "with one host (--nnodes 1) it must be 0"),
        (["--rdzv-endpoint", "::1:29400", "script.py"], "write an IPv6 address in brackets"),
        (["--rdzv-endpoint", "host:", "script.py"], "expected host:port, got 'host:'"),
        (["--rdzv-backend", "etcd", "script.py"], "expected c10d or static"),
        (["--max-restarts", "-3", "script.py"], "expected a whole number, at least 0, got '-3'"),
        (["--tee", "4", "script.py"], "expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both)"),
        (["--redirects", "0:1,b", "script.py"], "got '0:1,b'"),
        (["--redirects", "3", "script.py"], "--redirects needs --log-dir"),
        (
            ["--min-restarts", "3", "script.py"],
            "--min-restarts is not an option of meshrun; did you mean",
        ),
        (["--timout", "3", "script.py"], "meshrun: --timout is not an option of meshrun; see meshrun --help"),
        (["--foo", "script.py"], "meshrun: --foo is not an option of meshrun; see meshrun --help"),
        (["stat"], "no such file: 'stat'; did you mean status?"),
        (
            ["--start_method", "fork", "script.py"],
            "--start-method is an option of torchrun that meshrun does not have: every",
        ),
        (["--rdzv-conf=a=1", "script.py"], "--rdzv-conf is an option of torchrun"),
        (["--master-port", "70000", "script.py"], "expected a port from 0 to 65535, got '70000'"),
        (["--grace", "soon", "script.py"], "expected a number of seconds, at least 0, got 'soon'"),
        (["nowhere.py"], "no such file: 'nowhere.py'"),
        (["python", "train.py"], "no such file: 'python'; leave out python, meshrun runs scripts with /"),
        (["2", "train.py"], "no such file: '2'; for that many ranks, write meshrun -n 2 train.py"),
        (["."], "'.' is a directory without a __main__.py"),
        (["-m", "nowhere.module"], "no module named 'nowhere.module'"),
        (["-m", "os.nowhere"], "no module named 'os.nowhere'"),
        (["-m", "script.py"], "no module named 'script.py'; to run a file, leave out -m: meshrun script.py"),
        (["--no-python", "nowhere"], "no such program: 'nowhere'"),
        (["-m", "--no-python", "x"], "exclude each other"),
        ([], "expected a script to run"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(interpreter, tmp_path, arguments, message):
    write_script(tmp_path, "tell('ran')")
    # What `python -m meshdist.launch.meshrun` and the program meshrun do.
    program = f"""
import os, sys
from meshdist.launch.meshrun import main
os.chdir({str(tmp_path)!r})
sys.argv = ["meshrun", *{arguments!r}]
raise SystemExit(main())
"""
    done = interpreter.run(program, timeout_s=40)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("meshrun: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()


def test_bad_usage_of_the_command_itself(tmp_path):
    status, out, err = meshrun(tmp_path, "nowhere.py")
    assert (status, out) == (2, "")
    assert err == "meshrun: no such file: 'nowhere.py'; see meshrun --help\n"


def test_help_names_every_option(tmp_path):
    status, out, _ = meshrun(tmp_path, "--help")
    assert status == 0
    for option in ("--nproc-per-node", "--module", "--no-python", "--standalone", "--master-addr", "--master-port"):
        assert option in out
    assert "--nproc_per_node" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_cpu_means_a_rank_per_processor(tmp_path):
    write_script(tmp_path, "tell(f'size{rank}', os.environ['WORLD_SIZE'])")
    assert meshrun(tmp_path, "--nproc-per-node", "cpu", "script.py")[0] == 0
    assert reported(tmp_path, "size0") == str(len(os.sched_getaffinity(0)))


def test_taken_port_is_an_error_before_any_rank_starts(tmp_path):
    write_script(tmp_path, "tell('ran')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, err = meshrun(tmp_path, "--master-port", str(port), "script.py")
    assert status == 1
    assert f"127.0.0.1:{port}" in err
    assert "Traceback" not in err
    assert not (tmp_path / "ran").exists()


def test_secret_is_random_and_in_no_command_line(tmp_path):
    write_script(tmp_path, "tell(f'secret{rank}', os.environ['MESHDIST_SECRET'])\nhear(sys.argv[1])")
    secrets = []
    for end in ("end1", "end2"):
        process = start_meshrun(tmp_path, "--nproc-per-node", "2", "script.py", end)
        secret = reported(tmp_path, "secret1")
        assert reported(tmp_path, "secret0") == secret
        assert len(secret) == 64
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    assert secret.encode() not in file.read()
            except (FileNotFoundError, ProcessLookupError):
                continue
        (tmp_path / end).touch()
        until(lambda process=process: process.poll() is not None, "the job ends")
        assert process.communicate() == ("", "")
        secrets.append(secret)
        (tmp_path / "secret0").unlink()
        (tmp_path / "secret1").unlink()
    assert secrets[0] != secrets[1]


def test_a_script_that_does_not_use_meshdist_does_not_load_it(tmp_path):
    write_script(
        tmp_path, "tell('loaded', sorted({'meshdist', 'numpy', 'argparse', 'runpy', 'typing'} & set(sys.modules)))"
    )
    # Nothing but the ranks' own start counts here, so no site packages, which may load modules of their own.
    assert meshrun(tmp_path, "script.py")[0] == 0
    loaded = reported(tmp_path, "loaded")
    assert "meshdist" not in loaded, sys.version
    assert "numpy" not in loaded
