"""python -m meshdist.bench: every collective is measured and checked, and wrong input says what to do."""

import csv
import importlib.util
import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from meshdist import ReduceOp
from meshdist.backends.base import Choice
from meshdist.bench import measuring
from meshdist.bench.command_line import main
from meshdist.bench.operations import OPERATIONS
from meshdist.bench.values import Part, Values
from meshdist.collectives.registry import sent_bytes

pytestmark = pytest.mark.timeout(120)
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")
FEW = ["-i", "3", "-w", "0"]
THREADS = ["--backend", "threads", *FEW]


def bench(*args, launcher=()):
    command = [sys.executable, *launcher, "-m", "meshdist.bench", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def rows_of(path):
    return json.loads(path.read_text())["results"]


# ---- Which ways are chosen


class SlowlyDecided:
    """Stands in for a world whose backend has chosen after so many calls, and for the operation that is called.

    Of another kind of call, trials have been left when the processors moved; `moves` makes others for this one then.
    """

    def __init__(self, calls, moves=False):
        self.calls = self.left = calls
        self.moves = moves
        self.default_group = self

    def usable_backend(self, of):
        return self

    def choices(self):
        left = Choice("broadcast", 512, ("a", "b"), None, {})
        if self.left == self.calls:
            return [left]
        own = left._replace(kind="all_reduce")
        chosen = own._replace(chosen=None if self.left > 0 else 1, is_far=self.moves)
        return [left, own, chosen] if self.moves else [left, chosen]

    def prepare(self, setting, give, take):
        return self.call

    def call(self):
        self.left -= 1


@pytest.mark.parametrize("calls", [1, 43])  # on a busy machine, calls are repeated
@pytest.mark.parametrize("moves", [False, True])
def test_tuning_goes_on_until_a_way_is_chosen(monkeypatch, calls, moves):
    world = SlowlyDecided(calls, moves)
    monkeypatch.setattr(measuring, "current_world", lambda: world)
    monkeypatch.setattr(measuring, "arrays", lambda *_: (np.zeros(1), np.zeros(1)))
    monkeypatch.setattr(measuring, "OPERATIONS", {"all_reduce": world})
    monkeypatch.setattr(measuring.dist, "barrier", lambda: None)
    assert [choice.chosen for choice in measuring.tune("all_reduce", 512, None)] == [1]
    assert -measuring._TUNING_CALLS_IN_A_ROW < world.left <= 0


@needs_linux
def test_tuning_shows_the_ways_and_remembers_the_choice(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHDIST_CACHE_DIR", str(tmp_path))
    pytest.importorskip("matplotlib")
    plot = tmp_path / "algorithms.png"
    done = bench("all_reduce,broadcast", "--tune", "-e", "512K", "--plot", plot)
    assert done.returncode == 0, done.stderr
    assert "broadcast float32" in done.stdout
    kinds = 7  # broadcasts from 32 KiB on, and reductions from 256 KiB on
    assert done.stdout.count("chosen") == kinds
    assert done.stdout.count("default") == kinds
    assert plot.stat().st_size > 10_000
    [kept] = tmp_path.glob("tuning-*.json")
    assert len(json.loads(kept.read_text())["choices"]["2"]) == kinds


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--backend", "threads"], "--tune is for the gloo backend"),
        (["--shared"], "--tune is not for --shared, --json and --csv"),
    ],
)
def test_tuning_refuses_what_it_cannot_do(options, words):
    done = bench("--tune", *options)
    assert done.returncode == 2
    assert words in done.stderr


def test_tuning_that_is_turned_off_is_told(monkeypatch):
    monkeypatch.setenv("MESHDIST_TUNING", "off")
    assert "--tune measures, which MESHDIST_TUNING=off turns off" in bench("--tune").stderr


# ---- What is measured


@needs_linux
def test_every_collective_with_processes(tmp_path):
    found, table = tmp_path / "found.json", tmp_path / "table.csv"
    done = bench("all", "-b", 8, "-e", "2K", "-f", 16, *FEW, "--json", found, "--csv", table)
    assert done.returncode == 0, done.stderr
    rows = rows_of(found)
    sizes = {name: [0] if name == "barrier" else [8, 128, 2048] for name in OPERATIONS}
    assert [(row["collective"], row["num_bytes"]) for row in rows] == [(k, size) for k in sizes for size in sizes[k]]
    assert {row["wrong"] for row in rows} == {0}
    assert {row["collective"] for row in rows if row["in_place"]} == {"all_reduce", "reduce", "broadcast"}
    for row in rows:
        assert row["iterations"] == 3
        assert 0 < row["min_us"] <= row["median_us"] <= row["p90_us"] <= row["p99_us"]
        assert row["algorithm_gbps"] == pytest.approx(row["num_bytes"] / row["median_us"] / 1e3)
        name = "barrier" if row["collective"] == "barrier" else OPERATIONS[row["collective"]].volume
        assert row["bus_gbps"] == pytest.approx(sent_bytes(name, row["num_bytes"], 2) / row["median_us"] / 1e3)
    with table.open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["collective"], int(line["num_bytes"])) for line in lines] == [
        (row["collective"], row["num_bytes"]) for row in rows
    ]
    assert {line["ranks"] for line in lines} == {"2"}
    assert "0 wrong elements." in done.stdout
    assert done.stdout.splitlines()[0].startswith("meshdist ")
    assert f"wrote {found}" in done.stdout


@needs_linux
def test_under_meshrun(tmp_path):
    found = tmp_path / "found.json"
    done = bench(
        "broadcast",
        "-b",
        "4K",
        "-e",
        "4K",
        *FEW,
        "--json",
        found,
        launcher=["-m", "meshdist.launch.meshrun", "--nproc-per-node", "2"],
    )
    assert done.returncode == 0, done.stderr
    assert [(row["num_bytes"], row["wrong"]) for row in rows_of(found)] == [(4096, 0)]
    assert done.stdout.count("broadcast: float32, root 0, in place") == 1


@needs_linux
def test_shared_arrays(tmp_path):
    done = bench("all", "-b", "256K", "-e", "256K", *FEW, "--shared", "-n", 3, "--json", tmp_path / "found.json")
    assert done.returncode == 0, done.stderr
    assert {row["wrong"] for row in rows_of(tmp_path / "found.json")} == {0}
    assert "all_reduce: float32, sum, in place, arrays of meshdist.empty" in done.stdout


@pytest.mark.parametrize("ranks", ["1", "3", "4"])
@pytest.mark.parametrize("in_place", [[], ["--in-place"]])
def test_every_collective_with_threads(capsys, ranks, in_place):
    names = [name for name, operation in OPERATIONS.items() if not in_place or operation.in_place != "never"]
    names = [name for name in names if OPERATIONS[name].trips == 1 or ranks != "1"]
    assert main([",".join(names), "-n", ranks, "-b", "1", "-e", "100", "-f", "7", *in_place, *THREADS]) == 0
    assert "0 wrong elements." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("int8", "sum"),
        ("uint16", "bxor"),
        ("bool", "max"),
        ("float16", "sum"),
        ("complex64", "avg"),
        ("int64", "min"),
        ("float64", "product"),
        ("float32", "avg"),
        ("bfloat16", "sum"),
        ("float8_e4m3fn", "sum"),
    ],
)
def test_dtypes_and_ops(capsys, dtype, op):
    if dtype.startswith(("bf", "float8")):
        pytest.importorskip("ml_dtypes", reason="bfloat16 and float8 need ml_dtypes")
    args = ["all_reduce", "reduce_scatter", "reduce", "--root", "2", "-n", "3", "--dtype", dtype, "--op", op]
    assert main([*args, "-b", "3", "-e", "3K", "-f", "31", *THREADS]) == 0
    assert f"all_reduce: {dtype}, {op}, in place" in capsys.readouterr().out


def test_iterations_by_time(tmp_path):
    found = tmp_path / "found.json"
    args = ["barrier", "--backend", "threads", "--seconds", "0.01", "--no-check", "--json", str(found)]
    assert main(args) == 0
    (row,) = rows_of(found)
    assert row["iterations"] >= 5
    assert row["wrong"] is None


def test_sizes_that_round_to_one_are_measured_once(capsys):
    assert main(["all_gather", "-n", "3", "-b", "1", "-e", "24", "-f", "2", *THREADS]) == 0
    sizes = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " B " in line]
    assert sizes == ["12", "24"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.slow
def test_plot(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    path = tmp_path / f"picture{suffix}"
    assert main(["all_reduce,barrier", "-e", "1K", "--plot", str(path), *THREADS]) == 0
    assert path.stat().st_size > 1000


# ---- What is wrong


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_backend_mpi_says_how_to_start(capsys):
    assert main(["--backend", "mpi", "-n", "3"]) == 2
    assert "mpirun -n 3 python -m meshdist.bench --backend mpi" in capsys.readouterr().err


def test_wrong_results_are_counted_and_end_with_status_1(capsys, monkeypatch):
    lazy = OPERATIONS["all_reduce"]._replace(prepare=lambda setting, give, take: lambda: None)
    monkeypatch.setitem(OPERATIONS, "all_reduce", lazy)
    assert main(["-b", "40", "-e", "40", *THREADS]) == 1
    out = capsys.readouterr().out
    # Ten elements, of two ranks, in three calls.
    assert "60 wrong elements." in out


def test_every_wrong_element_counts():
    values, parts = Values(np.dtype(np.int32), 3, ReduceOp.SUM), [Part(0, (0, 1, 2), 5, 4), Part(4, (1,), 0, 4)]
    due = [sum(int(values.of(rank, 5 + k, 6 + k, 1)[0]) for rank in range(3)) for k in range(4)]
    taken = np.array([*due, *values.of(1, 0, 4, 1)], np.int32)
    assert values.wrong(taken, parts, 1) == 0
    assert values.wrong(taken, parts, 2) == 8
    taken[[0, 5]] += 1
    assert values.wrong(taken, parts, 1) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["all_reduced"], "'all_reduced' is not known; choose from all, all_reduce, reduce, broadcast"),
        (["allreduce"], "barrier; did you mean all_reduce?"),
        (["-b", "8x"], "-b/--begin: expected a size above 0, such as 8, 64K, 16M or 1G, got '8x'"),
        (["-b", "0"], "expected a size above 0"),
        (["-b", "1M", "-e", "1K"], "-e must not be below -b: sizes go from 1048576 to 1024 bytes"),
        (["-f", "1"], "-f/--factor: expected a factor above 1, such as 2, got '1'"),
        (["-f", "two"], "expected a number, got 'two'"),
        (["-n", "0"], "-n/--ranks: expected a number of at least 1, got '0'"),
        (["-i", "0"], "expected a number of at least 1, got '0'"),
        (["-w", "-1"], "expected a number of at least 0, got '-1'"),
        (["--seconds", "0"], "expected seconds above 0, got '0'"),
        (["--dtype", "float33"], "'float33' is not a dtype; use one of NumPy's, such as float32"),
        (["--dtype", "object"], "--dtype has the unsupported dtype object"),
        (["--op", "mean"], "unknown op 'mean'; choose from sum, product, min, max, band, bor, bxor, avg; did you mean"),
        (["--op", "bxor"], "--op: op BXOR is not defined for float32: it takes integers and bool"),
        (["--backend", "nope"], "unknown backend 'nope'; choose from"),
        (["scatter", "--in-place"], "--in-place is not for scatter; it is for all_reduce, reduce, broadcast"),
        (["--json", "/no/such/place/out.json"], "--json: there is no directory '/no/such/place'; make it first"),
        (["--csv", "/"], "--csv must be a file, and '/' is a directory"),
        (["--csv", "a.json", "--json", "a.json"], "--json, --csv and --plot must be different files"),
        (["--plot", "out.txt"], "--plot must end in .png, .svg, .pdf, got 'out.txt'"),
    ],
)
def test_wrong_options(capsys, args, message):
    assert main(args) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("python -m meshdist.bench: ")
    assert said.endswith(("; see --help\n", "?\n"))
    assert said.count("\n") == 1


def test_shared_arrays_where_no_memory_is_shared(capsys, monkeypatch):
    monkeypatch.setenv("MESHDIST_DISABLE_SHM", "1")
    assert main(["--shared"]) == 2
    assert "--shared needs the shared memory that MESHDIST_DISABLE_SHM=1 turns off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--root", "2"], "--root must be one of the ranks 0 to 1, got 2"),
        (["send_recv", "-n", "1", *THREADS], "send_recv needs two ranks at least"),
        (["-e", "1000000G", *THREADS], "choose a smaller -e, or fewer ranks"),
    ],
)
def test_options_that_do_not_fit_the_ranks(capsys, args, message):
    assert main(args) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@needs_linux
@pytest.mark.parametrize("options", [["nosuch"], ["-n", "4"], ["--root", "9"]])
def test_under_a_launcher_the_first_rank_alone_says_what_is_wrong_before_any_ends(options):
    done = bench(*options, launcher=["-m", "meshdist.launch.meshrun", "--nproc-per-node", "3"])
    said, *launchers = done.stderr.splitlines()
    assert said.startswith("python -m meshdist.bench: ")
    # The launcher may end ranks that are still on their way out when it notices the first.
    assert 2 <= len(launchers) <= 3
    assert "exited with status 2" in launchers[0]
    assert not any("meshdist.bench" in line for line in launchers)


@needs_linux
def test_what_was_measured_before_an_interrupt_is_kept(tmp_path):
    table = tmp_path / "table.csv"
    command = [sys.executable, "-m", "meshdist.bench", "-e", "4K", "--seconds", "0.02", "--csv", str(table)]
    listening = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", listening, *command, "all"]  # what runs in the background may not have listened
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        for row in running.stdout:
            if row.split()[:2] == ["32", "B"]:
                break
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said == f"interrupted; results so far are in {table}\n"
    with table.open() as file:
        assert [line["num_bytes"] for line in csv.DictReader(file)][:1] == ["8"]


@needs_linux
def test_a_reader_that_goes_ends_it_without_a_word():
    command = [sys.executable, "-m", "meshdist.bench", "all", "-e", "1K", *FEW]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline().startswith("meshdist ")
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait(60) == 141


@pytest.mark.parametrize(("variable", "option"), [("RANK", ["-n", "4"]), ("RANK", ["--backend", "threads"])])
def test_what_is_not_for_ranks_that_a_launcher_started(capsys, monkeypatch, variable, option):
    monkeypatch.setenv(variable, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(option) == 2
    assert "a launcher" in capsys.readouterr().err


def test_help_shows_every_collective_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in OPERATIONS)
    assert max(map(len, said.splitlines())) <= 80


def test_a_terminal_of_80_columns_gets_lines_that_fit(capsys, terminal):
    terminal(80)
    assert main(["--backend", "threads", "-b", "8", "-e", "1K", "-i", "2"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert all(word in said for word in ("median", "busbw", "0 wrong elements."))
