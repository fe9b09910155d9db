"""The benchmarks run, refuse wrong results, and leave nothing behind. What they measure is not looked at."""

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from interpreters import Interpreter
from until import until

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
COLLECTIVES = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "all_to_all_single",
    "all_to_all",
    "scan",
    "all_reduce_outstanding",
    "all_reduce_coalesced",
    "send_recv",
    "recv_from_any",
    "probe_and_recv",
    "send_object",
    "exchange",
    "sendrecv",
    "irecv_and_send",
    "barrier",
]
# The MPI libraries come with an environment of their own, which is made when it is needed.
TORCH = pytest.param(
    "torch",
    marks=[
        pytest.mark.torch,
        pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
    ],
)
QUICK = ["--rounds", "2", "--seconds", "0.001"]


def processes_with(text):
    """Return the processes that were started with `text` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        # A process may end while it is looked at, or belong to somebody else.
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and text.encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
    return found


def none_left(text):
    return until(lambda: not processes_with(text), "its processes have ended")


@pytest.fixture
def script():
    """Run one of the scripts to its end, and see that it leaves no process."""

    def run(name, *args, **variables):
        mark = f"BENCHMARK_TEST={uuid.uuid4().hex}"
        environment = {**os.environ, **variables, "BENCHMARK_TEST": mark.partition("=")[2]}
        command = [sys.executable, str(BENCHMARKS / name), *map(str, args)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
        assert none_left(mark)
        return done

    return run


@pytest.fixture(scope="module")
def interpreter():
    """Forks with meshdist imported, for scripts that do nothing but complain."""
    with Interpreter(("meshdist",), os.environ) as interpreter:
        yield interpreter


@pytest.fixture
def sidebyside(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_an_environment_that_another_process_makes_is_waited_for(sidebyside, tmp_path, monkeypatch):
    from sidebyside import environments

    monkeypatch.setenv(environments.VARIABLE, str(tmp_path))
    monkeypatch.setattr(environments, "_run", lambda *command: pytest.fail("it makes one too"))
    folder = tmp_path / f"openmpi-{sys.version_info.major}.{sys.version_info.minor}"
    with ThreadPoolExecutor(1) as pool:
        with open(tmp_path / f"{folder.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = pool.submit(environments.python_with.__wrapped__, "openmpi")
            (folder / "lib" / "python3" / "site-packages").mkdir(parents=True)
            (folder / "complete").touch()
        assert found.result(30) == str(folder / "bin" / "python")


@pytest.mark.slow
def test_backend_mpi_is_compared_with_mpi_itself(script):
    done = script(
        "compare.py", "--libraries", "meshdist-mpi,openmpi", "--collectives", "all_reduce", "--sizes", "8", *QUICK
    )
    if "is left out" in done.stderr:
        pytest.skip(done.stderr.splitlines()[0])
    assert done.returncode == 0, done.stderr
    assert "| Open MPI / meshdist on MPI |" in done.stdout


@pytest.mark.slow
def test_between_hosts_measures(script):
    done = script("between_hosts.py", "--per-host", "2", "--collectives", "all_reduce,barrier", "--sizes", "8", *QUICK)
    if "between_hosts.py: ip" in done.stderr or "needs the program ip" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert "| 2 x 2 ranks | size | meshdist |" in done.stdout


@pytest.mark.slow
def test_the_start_on_two_hosts_is_timed(script, tmp_path):
    path = tmp_path / "out.json"
    done = script("start_between_hosts.py", "--per-host", "2", "--rounds", "1", "--json", path)
    if "start_between_hosts.py: ip" in done.stderr or "needs the program ip" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert "| all ranks have met |" in done.stdout
    results = json.loads(path.read_text())["results"]
    assert results["met"] < results["called"] < results["ended"]


@pytest.mark.parametrize("library", ["meshdist", "torch", "openmpi", "mpich"])
@pytest.mark.slow
def test_compare_measures_every_collective(script, tmp_path, library):
    libraries = ["meshdist"] if library == "meshdist" else ["meshdist", library]
    paths = ["--json", tmp_path / "out.json", "--markdown", tmp_path / "page.md"]
    done = script("compare.py", "--libraries", ",".join(libraries), "--sizes", "8,100", *QUICK, *paths)
    assert done.returncode == 0, done.stderr
    if "is left out" in done.stderr:
        pytest.skip(done.stderr.splitlines()[0])
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(written["machine"]) >= {"CPU", "cores", "kernel", "Python", "NumPy", "meshdist"}
    measured = [(found["collective"], found["nbytes"]) for found in written["results"]]
    sizes = {name: [0] if name == "barrier" else [8, 100] for name in COLLECTIVES}
    assert measured == [(name, nbytes) for name in COLLECTIVES for nbytes in sizes[name]]
    for found in written["results"]:
        lacks = {"torch"} if found["collective"] in ("scan", "probe_and_recv") else set()
        assert list(found["times"]) == [name for name in libraries if name not in lacks]
        assert all(len(times) == 2 and min(times) > 0 for times in found["times"].values())
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# Results\n")
    rows = [line for line in page.splitlines() if line.startswith("| all_reduce |")]
    ratios = len(libraries) - 1
    assert [line.split("|")[2].strip() for line in rows] == ["8 B", "100 B"]
    assert {line.count("|") for line in rows} == {3 + len(libraries) + ratios}


@pytest.mark.slow
def test_shared_arrays_are_a_column_for_all_reduce(script, tmp_path):
    libraries = ["--libraries", "meshdist,meshdist-shared", "--collectives", "all_reduce,broadcast"]
    done = script("compare.py", *libraries, "--sizes", "300000", *QUICK, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [list(found["times"]) for found in results] == [["meshdist", "meshdist-shared"], ["meshdist"]]


@pytest.mark.slow
def test_several_numbers_of_ranks(script, tmp_path):
    args = ["--libraries", "meshdist", "--ranks", "2,3", "--collectives", "all_reduce,barrier", "--sizes", "8,100"]
    done = script("compare.py", *args, *QUICK, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    assert "## Collectives, 2 ranks" in done.stdout
    assert "## Collectives, 3 ranks" in done.stdout
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(found["ranks"], found["nbytes"]) for found in results] == [
        (n, size) for n in (2, 3) for size in (8, 100, 0)
    ]


def test_the_picture_has_the_ratios_to_the_fastest_other_library(sidebyside, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    from sidebyside import report
    from sidebyside.columns import Columns
    from sidebyside.drawing import Point, draw, points_of, points_of_page
    from sidebyside.libraries import LIBRARIES, SHARED

    def result(ranks, nbytes, **times):
        return {"collective": "all_reduce", "ranks": ranks, "nbytes": nbytes, "times": times}

    own = {"meshdist": [1.0], "meshdist-shared": [0.5], "torch": [40.0]}
    results = [
        result(2, 8, **own, openmpi=[2.0], mpich=[3.0]),
        result(2, 65536, **own, openmpi=[0.5], mpich=[3.0]),
        result(2, 0, **own, openmpi=[0.5], mpich=[3.0]),  # a barrier
    ]
    expected = [Point("all_reduce", 2, 8, 2.0), Point("all_reduce", 2, 65536, 0.5)]
    assert points_of(results) == expected
    columns = Columns([*LIBRARIES, SHARED])
    rows = [*map(columns.row, results), *columns.means(results)]
    page = (
        f"# Results\n\n## Collectives, 2 ranks, on AMD EPYC\n\n{report.table(columns.head(2), rows, text_columns=2)}\n"
    )
    assert points_of_page(page, "AMD EPYC") == expected
    with pytest.raises(ValueError, match="no section"):
        points_of_page(page, "Intel Xeon")
    draw(tmp_path / "out.svg", expected)
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


def test_means_are_those_of_the_ratios(sidebyside):
    from sidebyside.columns import Columns
    from sidebyside.libraries import LIBRARIES, SHARED

    columns = Columns([*(each for each in LIBRARIES if each.name != "mpich"), SHARED])
    times = {"meshdist": [1.0], "torch": [4.0], "openmpi": [2.0]}
    results = [
        {"collective": "all_reduce", "nbytes": 65536, "times": {**times, "meshdist-shared": [0.5]}},
        {"collective": "broadcast", "nbytes": 8, "times": {**times, "openmpi": [0.5]}},
        {"collective": "all_reduce_coalesced", "nbytes": 65536, "times": {**times, "openmpi": [0.01]}},
    ]
    ratios = [
        "torch (gloo) / meshdist",
        "Open MPI / meshdist",
        "Open MPI / shared arrays",
        "the fastest other / meshdist",
        "the fastest other / shared arrays",
    ]
    assert columns.head(2)[6:] == ratios
    assert columns.row(results[0])[6:] == ["4.00", "2.00", "4.00", "2.00", "4.00"]
    assert columns.row(results[1])[6:] == ["4.00", "0.50", "", "0.50", ""]
    assert [row[6:] for row in columns.means(results)] == [
        ["4.00", "2.00", "4.00", "2.00", "4.00"],
        ["4.00", "1.00", "4.00", "1.00", "4.00"],
    ]


@pytest.mark.slow
def test_overlap_measures_every_kind(script, tmp_path):
    done = script("overlap.py", "--size", "100000", "--rounds", "2", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {kind: len(rounds) for kind, rounds in results.items()} == {
        "matmul": 2,
        "ufuncs": 2,
        "Python": 2,
        "waits": 2,
    }
    assert all(seconds > 0 for rounds in results.values() for times in rounds for seconds in times)
    assert "| waits |" in done.stdout


def test_sizes_that_ranks_do_not_divide(script):
    done = script("compare.py", "--libraries", "meshdist", "--ranks", "3", "--sizes", "1,8,100", *QUICK)
    assert done.returncode == 0, done.stderr
    done = script("compare.py", "--libraries", "meshdist", "--sizes", "1,24", "--dtype", "float64", *QUICK)
    assert done.returncode == 0, done.stderr


def test_a_library_that_is_missing_is_left_out_in_one_line(script, tmp_path):
    for module in ("torch", "mpi4py"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not here')")
    done = script("compare.py", "--collectives", "barrier", *QUICK, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if " is left out: " in line]
    assert [line.partition(" is left out: ")[0] for line in lines] == ["torch", "openmpi", "mpich"]
    assert lines[0].endswith("ImportError: not here")
    assert "| 2 ranks | size | meshdist |" in done.stdout
    assert "/ meshdist" not in done.stdout


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("compare", ["--collectives", "barrier,gossip"], "'gossip' is not known; choose from all_reduce, broadcast"),
        (
            "compare",
            ["--libraries", "meshdist,nccl"],
            "'nccl' is not known; choose from meshdist, torch, openmpi",
        ),
        ("compare", ["--libraries", "torch"], "--libraries must name meshdist"),
        ("compare", ["--json", "."], "must be a file in a folder that can be written to, got '.'"),
        ("compare", ["--plot", "out.gif"], "must end in .svg, .png or .pdf, got 'out.gif'"),
        ("compare", ["--plot", "out.svg", "--collectives", "barrier"], "must name one that moves something"),
        ("compare", ["--ranks", "1"], "--ranks must be at least 2, got 1"),
        ("compare", ["--sizes", "8,-8"], "must be a number of at least 1, got '-8'"),
        ("compare", ["--seconds", "0"], "must be a number above 0, got '0'"),
        ("mesh_start", ["--ranks", "6"], "--ranks must be a multiple of 4, for a mesh of 2 x 2 x (ranks / 4), got 6"),
        ("startup", ["--ranks", "3"], "--ranks must be even, for a mesh of (ranks / 2) x 2, got 3"),
        ("overlap", ["--ranks", "2,1"], "--ranks must be at least 2, got 1"),
        ("overlap", ["--size", "0"], "must be a number of at least 1, got '0'"),
        ("mesh_scale", ["--rounds", "0"], "--rounds: must be a number of at least 1, got '0'"),
        ("mesh_scale", ["--libraries", "mpi"], "'mpi' is not known; choose from meshdist, torch"),
        ("startup", ["--libraries", "openmpi"], "--libraries must name meshdist"),
        ("cost_model", ["--ranks", "2,1"], "--ranks must be at least 2 each, got 1"),
        ("cost_model", ["--collectives", "all_reduce,barrier"], "'barrier' is not known; choose from all_reduce, "),
        ("training", ["--meshes", "2x2,4"], "a mesh of train_digits.py is DPxTP, such as 1x4, got '4'"),
        ("training", ["--dtypes", "int8"], "'int8' is not known; choose from float64, float32"),
    ],
)
def test_wrong_options_are_refused(interpreter, name, args, message):
    command = [str(BENCHMARKS / f"{name}.py"), *args]
    done = interpreter.run(
        f"""
import runpy, sys
sys.argv = {command!r}
sys.path.insert(0, {str(BENCHMARKS)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
""",
        timeout_s=60,
    )
    assert done.returncode == 2
    assert message in done.stderr


def test_a_script_refuses_wrong_options(script):
    done = script("compare.py", "--ranks", "1")
    assert done.returncode == 2
    assert "--ranks must be at least 2, got 1" in done.stderr


@pytest.mark.slow
def test_startup_times_import_and_launch(script, tmp_path):
    done = script(
        "startup.py", "--libraries", "meshdist", "--ranks", "2", "--rounds", "1", "--json", tmp_path / "out.json"
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {what: {name: len(times) for name, times in found.items()} for what, found in results.items()} == {
        "import": {"meshdist": 1, "numpy": 1},
        "launch": {"meshdist": 1},
    }
    assert "| launch of 2 ranks |" in done.stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads TOML with tomli, which need not be installed")
@pytest.mark.slow
def test_cost_model_is_calibrated_and_compared(script, tmp_path):
    paths = ["--json", tmp_path / "out.json", "--markdown", tmp_path / "page.md", "--model", tmp_path / "cost.toml"]
    few = ["--sizes", "4096,65536", "--seconds", "0.1", "--rounds", "2", "--turn", "0.001"]
    done = script("cost_model.py", "--ranks", "2,3", *few, "--collectives", "all_reduce,broadcast", *paths)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(found["collective"], found["ranks"], found["nbytes"]) for found in results] == [
        (name, ranks, nbytes) for ranks in (2, 3) for name in ("all_reduce", "broadcast") for nbytes in (4096, 65536)
    ]
    assert all(len(found["times"]) == 2 and found["predicted"] > 0 and found["ratio"] > 0 for found in results)
    assert "| all_reduce | 3 | 64 KiB |" in (tmp_path / "page.md").read_text()
    assert "[[measured]]" in (tmp_path / "cost.toml").read_text()


def test_how_many_predictions_are_near(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from cost_model import within

    ratios = [{"ratio": ratio} for ratio in (0.5, 0.7, 1.0, 1.4, 1.9)]
    assert within(ratios) == "3 of 5 within a factor of 1.5; the farthest is 0.50"


@pytest.mark.parametrize("library", [TORCH, "openmpi", "mpich"])
@pytest.mark.slow
def test_launched_script_works_with_each_library(sidebyside, library):
    from sidebyside.libraries import BENCHMARKS as folder
    from sidebyside.libraries import environment, installed

    found = {each.name: each for each in installed([library])}
    if library not in found:
        pytest.skip(f"{library} does not work here")
    command = [*found[library].launcher(2), str(folder / "sidebyside" / f"launch_{found[library].script}.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_mesh_scale_times_meshes(script, tmp_path):
    path = tmp_path / "out.json"
    done = script("mesh_scale.py", "--libraries", "meshdist", "--rounds", "2", "--json", path)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())["results"]
    assert {name for found in results.values() for name in found} == {"meshdist"}
    assert all(len(found["meshdist"]) == 2 for found in results.values())
    assert "| init_device_mesh of 256 x 256 |" in done.stdout


@pytest.mark.slow
def test_mesh_start_counts_one_request_of_each_rank(script, tmp_path):
    path = tmp_path / "out.json"
    done = script("mesh_start.py", "--ranks", "4", "--rounds", "1", "--json", path)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())["results"]
    assert results["mesh"]["requests"] == [1]
    assert results["nothing"]["requests"] == [0]
    assert "| requests to the store of a rank, for the mesh | 1 |" in done.stdout


def test_ways_to_reduce_many_gradients_are_timed(script):
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = script("many_gradients.py", "--arrays", "3", "--elements", "2", "--rounds", "2", **place)
    assert done.returncode == 0, done.stderr
    title, *lines = done.stdout.splitlines()
    assert title == "1 ranks, 3 arrays of 2 float32"
    names = ["one all_reduce each", "all_reduce_coalesced", "all_reduce of a flat array"]
    assert [line.partition(":")[0] for line in lines] == names


def test_bubbles_of_pipelines_are_simulated_and_measured(script, tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    path = tmp_path / "bubbles.md"
    options = ["--microbatches", "2", "--seconds", "0.001", "--steps", "1", "--markdown", path]
    done = script("pipeline_bubble.py", *options, **place)
    assert done.returncode == 0, done.stderr
    section = path.read_text()
    assert "## Pipelines, 1 ranks, on " in section
    assert "`meshrun -n 1 " in section
    names = re.findall(r"^\| (\w[\w-]*) \| \d", section, re.MULTILINE)
    assert names == ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZB-H1", "ZBV"]


def test_checkpoints_are_timed_beside_dd(script, tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    options = ["--gib", "0.01", "--rounds", "1", "--no-torch", "--folder", tmp_path]
    done = script("checkpoint.py", *options, "--json", tmp_path / "times.json", **place)
    assert done.returncode == 0, done.stderr
    times = json.loads((tmp_path / "times.json").read_text())["results"]
    assert {name.partition(",")[0] for name in times} == {"dd", "meshdist", "memcpy", "asynchronous save"}
    assert {"asynchronous save, stall, columns", "asynchronous save, stall, small arrays"} <= times.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["times.json"]


@pytest.mark.slow
def test_checkpoints_of_killed_jobs_are_counted(script, tmp_path):
    done = script("checkpoint_kills.py", "--kills", "3", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| last checkpoints whole | 3 of 3 |" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_cells_of_a_notebook_are_timed(script, tmp_path):
    path = tmp_path / "times.json"
    done = script("notebook_cell.py", "--workers", "2", "--rounds", "1", "--cells", "2", "--json", path)
    assert done.returncode == 0, done.stderr
    times = json.loads(path.read_text())["results"]
    assert list(times)[:2] == ["the first cell", "a later cell"]
    assert all(0 < begun <= over for rounds in times.values() for begun, over in rounds)


@pytest.mark.slow
def test_what_waiting_costs_is_measured(script, tmp_path):
    path = tmp_path / "times.json"
    done = script("waiting.py", "--rounds", "1", "--messages", "2", "--libraries", "meshdist", "--json", path)
    assert done.returncode == 0, done.stderr
    [waits] = json.loads(path.read_text())["results"]["meshdist"]
    assert len(waits) == 4
    assert all(time_s > 0 and 0 <= share < 2 for time_s, share in waits)
    assert "| after 100 ms |" in done.stdout


@pytest.mark.slow
def test_what_a_call_costs_above_its_plan_is_measured(script, tmp_path):
    path = tmp_path / "times.json"
    done = script("call_overhead.py", "--rounds", "2", "--calls", "3", "--json", path)
    assert not done.stderr  # its status is about the goals
    times = json.loads(path.read_text())["results"]
    assert "all_reduce" in times
    assert all(call > 0 and plan > 0 and record > 0 for call, plan, record in times.values())


def test_the_way_from_a_clone_to_a_model_is_that_of_the_readme():
    # What it times is what .ci/run does; here only that it finds the parts of the line.
    commands = subprocess.run([ROOT / ".ci" / "run", "--commands"], capture_output=True, text=True, check=True).stdout
    assert [part.split()[0] for part in commands.splitlines()[0].split(" && ")] == [
        "python3",
        ".venv/bin/pip",
        ".venv/bin/meshrun",
    ]


@pytest.mark.parametrize("library", ["meshdist", TORCH])
@pytest.mark.slow
def test_the_same_meshes_are_timed_with_each_library(sidebyside, library):
    from sidebyside import scale

    found = scale.square(getattr(scale, library)(), 2)
    assert set(found) == {"world of 4", "mesh of 2 x 2", "first slice of 4", "slice of 4"}
    assert all(seconds > 0 for seconds in found.values())


@pytest.mark.slow
def test_training_compares_meshes_with_one_rank(script, tmp_path):
    path = tmp_path / "out.json"
    done = script("training.py", "--meshes", "2x1", "--steps", "3", "--rounds", "1", "--json", path)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())["results"]
    assert [(found["dtype"], found["mesh"], found["ranks"]) for found in results] == [
        ("float64", "1x1", 1),
        ("float64", "2x1", 2),
        ("float32", "1x1", 1),
        ("float32", "2x1", 2),
    ]
    assert all(found["difference"] <= found["tolerance"] for found in results)


@pytest.mark.slow
def test_scaling_measures_each_number_of_ranks(script, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    options = ("--hidden", "24", "--steps", "2", "--ranks", "1,2", "--rounds", "1", "--plot", tmp_path / "scaling.svg")
    done = script("scaling.py", *options, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert set(found["24"]) == {"1", "2"}
    assert (
        "24 hidden units" in (tmp_path / "scaling.svg").read_text() or (tmp_path / "scaling.svg").stat().st_size > 1000
    )


class LazyRank:
    """A rank of a library whose all_to_all_single works so many times, and then does nothing."""

    rank, size = 0, 2

    def __init__(self, works):
        self.works = works

    def array(self, count, dtype):
        return np.empty(count, dtype)

    def all_to_all_single(self, give, take):
        def call():
            self.works -= 1
            if self.works >= 0:
                # What the peer gives: the same numbers, seven further.
                take[:] = [give[0], (give[0] - 1 + 7) % 61 + 1]

        return call


@pytest.mark.parametrize("works", [0, 1])
def test_wrong_results_are_refused_at_the_first_call_and_later(sidebyside, works):
    from sidebyside.cases import Case, prepare

    with pytest.raises(ArithmeticError, match=r"all_to_all_single of 8 bytes of float32, rank 0 of 2: 2 of 2 elem"):
        prepare(LazyRank(works), Case("all_to_all_single", 8, "float32"))


def test_right_results_are_accepted(sidebyside):
    from sidebyside.cases import Case, prepare

    prepare(LazyRank(100), Case("all_to_all_single", 8, "float32"))


def test_what_every_rank_must_take(sidebyside):
    from sidebyside.cases import COLLECTIVES as SHAPES

    everyone = [np.array([1, 2, 3, 4]), np.array([10, 20, 30, 40])]
    assert {name: shape.expected(everyone, 1).tolist() for name, shape in SHAPES.items() if shape} == {
        "all_reduce": [11, 22, 33, 44],
        "all_reduce_outstanding": [11, 22, 33, 44],
        "all_reduce_coalesced": [11, 22, 33, 44],
        "broadcast": [1, 2, 3, 4],
        "reduce": [11, 22, 33, 44],
        "all_gather_into_tensor": [1, 2, 3, 4, 10, 20, 30, 40],
        "all_gather": [1, 2, 3, 4, 10, 20, 30, 40],
        "gather": [1, 2, 3, 4, 10, 20, 30, 40],
        "scatter": [3, 4],
        "reduce_scatter_tensor": [33, 44],
        "reduce_scatter": [33, 44],
        "all_to_all_single": [3, 4, 30, 40],
        "all_to_all": [3, 4, 30, 40],
        "scan": [11, 22, 33, 44],
        "send_recv": [1, 2, 3, 4],
        "recv_from_any": [1, 2, 3, 4],
        "probe_and_recv": [1, 2, 3, 4],
        "send_object": [1, 2, 3, 4],
        "exchange": [1, 2, 3, 4],
        "sendrecv": [1, 2, 3, 4],
        "irecv_and_send": [1, 2, 3, 4],
    }


@pytest.fixture
def job(sidebyside, monkeypatch):
    from sidebyside.jobs import Job
    from sidebyside.libraries import LIBRARIES

    mark = uuid.uuid4().hex
    monkeypatch.setenv("BENCHMARK_TEST", mark)
    yield Job(LIBRARIES[0], 2)
    assert none_left(f"BENCHMARK_TEST={mark}")


def test_a_call_that_raises_ends_the_job_and_says_why(job):
    from sidebyside.cases import Case
    from sidebyside.jobs import JobError

    with pytest.raises(JobError, match=r"(?s)a rank of meshdist failed at Case\(collective='gossip'.*KeyError"), job:
        job.prepare(Case("gossip", 8, "float32"))


def test_a_rank_that_is_killed_ends_the_job(job):
    from sidebyside.cases import Case
    from sidebyside.jobs import JobError

    def kill_and_go_on():
        job.prepare(Case("all_reduce", 8, "float32"))
        os.kill(job.pids[0], signal.SIGKILL)
        job.time(1)

    # Which of the two is seen first: the end of the rank, or the failed call of the other.
    with pytest.raises(JobError, match="a rank of meshdist (has ended|failed at 1)"), job:
        kill_and_go_on()


def test_an_order_to_ranks_that_have_ended_ends_the_job(job):
    from sidebyside.jobs import JobError

    def kill_and_go_on():
        handles = [os.pidfd_open(pid) for pid in job.pids]
        for pid in job.pids:
            os.kill(pid, signal.SIGKILL)
        for handle in handles:
            select.select([handle], [], [], 20)
            os.close(handle)
        job.time(1)

    with pytest.raises(JobError, match="a rank of meshdist has ended"), job:
        kill_and_go_on()


def test_ratio_is_taken_within_each_round(sidebyside):
    from sidebyside.rounds import ratio

    # The machine was ten times slower in the second round: for all of them.
    times = {"meshdist": [1.0, 10.0, 1.0], "torch": [3.0, 30.0, 3.0], "mpi": [2.0, 50.0, 2.0]}
    assert ratio(times, ["torch"]) == 3.0
    assert ratio(times, ["mpi"]) == 2.0
    assert ratio(times, ["torch", "mpi"]) == 2.0


def test_a_section_takes_the_place_of_its_like(sidebyside):
    from sidebyside.report import with_section

    page = with_section("# Results\n", "Start", "## Start\n\nold\n")
    page = with_section(page, "Training", "## Training\n\n### kept\n")
    page = with_section(page, "Start", "## Start\n\nnew \\1\n")
    assert page == "# Results\n\n## Start\n\nnew \\1\n\n## Training\n\n### kept\n"


def test_times_and_sizes_are_readable(sidebyside):
    from sidebyside.report import duration, median_and_least, size

    assert [duration(seconds) for seconds in (6.5e-7, 0.0000123, 0.00999, 0.9996, 12)] == [
        "0.65 us",
        "12.3 us",
        "9.99 ms",
        "1.00 s",
        "12.0 s",
    ]
    assert median_and_least([0.003, 0.001, 0.002]) == "2.00 ms (1.00 ms)"
    assert [size(nbytes) for nbytes in (0, 8, 1000, 65536, 1 << 24, 3 << 30)] == [
        "",
        "8 B",
        "1000 B",
        "64 KiB",
        "16 MiB",
        "3 GiB",
    ]


# The programs of the last begin with messages while the group's first collective is on its way, in another thread.
@pytest.mark.parametrize(
    "way",
    [["--seed", "5"], ["--tcp", "--seed", "5"], ["--hosts", "2", "--seed", "1747188", "--first", "19"]],
    ids=["shared memory", "tcp", "hosts"],
)
@pytest.mark.slow
def test_soak_finds_no_wrong_value(script, way):
    done = script("soak.py", "--seconds", "0.3", "--steps", "12", "--timeout", "20", *way)
    assert done.returncode == 0, done.stderr
    assert "No value was wrong" in done.stdout
    assert "| all_reduce |" in done.stdout
    assert "| at the end |" in done.stdout


@pytest.mark.slow
def test_soak_over_a_link_with_faults(script):
    done = script("soak.py", "--link", "--seconds", "4", "--steps", "12", "--ranks", "2", "--seed", "5")
    if "cannot be made here" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert "No value was wrong" in done.stdout
    assert "| delay | 1 |" in done.stdout


@pytest.mark.slow
def test_groups_and_worlds_are_made_and_destroyed(script):
    done = script("soak_worlds.py", "--groups", "10", "--worlds", "3", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert "10 groups and then 3 worlds" in done.stdout
    assert "| in world 3 |" in done.stdout


@pytest.mark.parametrize("way", [[], ["--hosts", "2"]], ids=["shared memory", "hosts"])
@pytest.mark.slow
def test_faults_are_noticed(script, way):
    faults = ["kill", "raise", "mismatch"]
    limits = ["--trials", "3", "--seconds", "60", "--slack", "15"]
    done = script("soak_faults.py", "--seed", "3", "--faults", ",".join(faults), *limits, *way)
    assert done.returncode == 0, done.stderr
    assert "3 faults" in done.stdout
    assert all(f"| {fault} | 1 |" in done.stdout for fault in faults)


@pytest.mark.slow
def test_who_raises_is_named_by_those_that_it_never_met(script):
    trial = ["--seed", "3801853", "--first", "26", "--trials", "1", "--seconds", "60"]
    done = script("soak_faults.py", "--tcp", "--timeout", "40", "--slack", "15", *trial)
    assert done.returncode == 0, done.stderr
    assert "| raise | 1 |" in done.stdout


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_backends_of_torch_are_compared():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(BENCHMARKS / "torch_backend.py"), "--turns", "1", "--most-bytes", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [line.rsplit(maxsplit=3)[0] for line in done.stdout.splitlines()[2:]]
    assert [row.partition(",")[0] for row in rows] == [
        "all_reduce",
        *["DDP step"] * 2,
        *["FSDP2 step"] * 2,
        *["S(0) to R", "S(0) to S(1)"] * 2,
    ]


@pytest.mark.slow
def test_arrays_are_compared(tmp_path):
    command = [sys.executable, "-m", "meshdist.launch", "--use-env", "--nproc-per-node", "2"]
    command += [str(BENCHMARKS / "arrays.py"), "--turns", "1", "--most-bytes", "8192"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [line[:36].strip() for line in done.stdout.splitlines()[2:]]
    assert rows[0] == "a + b, sharded the same way"
    assert rows[-4:] == [
        f"{move}, 8 KiB"
        for move in ("Shard(0) to Shard(1)", "Shard(0) to Replicate", "Partial to Replicate", "Partial to Shard(0)")
    ]


@pytest.mark.slow
def test_data_parallel_training_is_compared():
    command = [sys.executable, "-m", "meshdist.launch", "--use-env", "--nproc-per-node", "2"]
    command += [str(BENCHMARKS / "data_parallel.py"), "--turns", "1", "--most-bytes", str(1 << 20), "--steps", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert "1 MiB" in [row[0] for row in cells if row]
    errors = {row[0]: row[2] for row in cells if len(row) == 4}
    assert list(errors)[2:4] == ["none", "fp16_compress"]
    assert all(float(error) < 1 for error in list(errors.values())[2:])
