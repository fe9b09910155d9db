"""The transformer example: every mesh, schedule and checkpoint computes the run of one rank."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from worlds import needs_linux

import meshdist

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STEPS = 5
TINY = "--steps 5 --batch 8 --context 16 --width 16 --heads 2 --layers 4 --dtype float64 --sample 3"

pytestmark = pytest.mark.timeout(100)
MORE = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def example():
    """Return the example, whose common modules are beside it."""
    modules = ("network", "plain", "tools")
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("train_transformer")
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in ("train_transformer", "digits_tools", *(f"transformer_{name}" for name in modules)):
            sys.modules.pop(name, None)


def on_mesh(train, mesh, example, *options):
    """Run on threads as ranks; return what rank 0 has."""
    shape = tuple(map(int, mesh.split("x")))
    args = example.parser().parse_args([*TINY.split(), *options])

    def program():
        return train(meshdist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "pp")), args)

    return meshdist.run(program, int(np.prod(shape)))[0]


@pytest.fixture(scope="module")
def alone(example):
    """One rank's run, which those on every mesh must equal."""
    return on_mesh(example.train, "1x1x1", example)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("2x1x1", ""),
        ("1x2x1", ""),
        ("1x1x2", ""),
        ("2x2x1", "--zero --sequence-parallel"),
        ("2x2x1", ""),
        ("2x1x2", ""),
        ("1x2x2", ""),
        ("1x2x2", "--sequence-parallel --schedule zbv"),
        pytest.param("2x1x2", "--zero --schedule interleaved --micro-batches 2", marks=MORE),
        *(pytest.param("1x1x2", f"--schedule {name}", marks=MORE) for name in ("gpipe", "looped-bfs", "dualpipe-v")),
        ("1x1x2", "--schedule zero-bubble"),
    ],
)
def test_every_mesh_computes_the_run_of_one_rank(example, alone, mesh, options):
    run = on_mesh(example.train, mesh, example, *options.split())
    assert (run["mesh"], len(run["losses"])) == (mesh, STEPS)
    np.testing.assert_allclose(run["losses"], alone["losses"], rtol=1e-9)
    assert run["sample"] == alone["sample"]
    assert len(run["sample"]) == len("The ") + 3


@pytest.mark.parametrize("mesh", ["1x2x1", "1x1x2", pytest.param("2x1x2", marks=MORE)])
def test_the_plain_program_computes_it_too(example, alone, mesh):
    plain = importlib.import_module("transformer_plain")
    np.testing.assert_allclose(on_mesh(plain.train, mesh, example)["losses"], alone["losses"], rtol=1e-9)


@pytest.mark.parametrize(
    ("first", "then"),
    [(("1x2x1",), ("2x1x1", "--zero")), pytest.param(("2x1x2", "--zero"), ("1x2x1",), marks=MORE)],
)
def test_a_checkpoint_goes_on_on_another_mesh(example, alone, tmp_path, first, then):
    folder = ["--checkpoint", str(tmp_path), "--save-every", "2"]
    on_mesh(example.train, first[0], example, *first[1:], *folder)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-2", "step-4", "step-5"]
    (tmp_path / "step-5").rename(tmp_path / ".step-5-part")  # as if the job had ended while it was written
    resumed = on_mesh(example.train, then[0], example, *then[1:], *folder, "--resume")
    np.testing.assert_allclose(resumed["losses"], alone["losses"], rtol=1e-9)


def test_without_a_checkpoint_there_is_nothing_to_resume(example, tmp_path):
    with pytest.raises(FileNotFoundError, match="--resume: there is no checkpoint in .*; start without --resume"):
        on_mesh(example.train, "1x1x1", example, "--checkpoint", str(tmp_path), "--resume")


def test_a_checkpoint_of_another_network_is_refused(example, tmp_path):
    folder = ["--checkpoint", str(tmp_path), "--sample", "0"]
    on_mesh(example.train, "1x1x1", example, *folder, "--steps", "1")
    with pytest.raises(
        ValueError, match="--resume: .* is of a network with --context 16 --width 16 --heads 2 --layers 4"
    ):
        on_mesh(example.train, "1x1x1", example, *folder, "--resume", "--layers", "3")


def test_a_resumed_run_counts_its_steps_on(example, tmp_path, capsys):
    folder = ["--checkpoint", str(tmp_path), "--sample", "0"]
    on_mesh(example.train, "1x1x1", example, *folder, "--steps", "1")
    on_mesh(example.train, "1x1x1", example, *folder, "--resume", "--steps", "3")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "step 1 of 1",
        "step 2 of 3",
        "step 3 of 3",
    ]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_loss_that_is_no_number_ends_the_run(example):
    with pytest.raises(FloatingPointError, match="the loss of step 2 is nan: try a lower --lr"):
        on_mesh(example.train, "1x1x2", example, "--lr", "1e300")


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (
            "1x1x1",
            "--micro-batches 3",
            "--batch 8 must be a multiple of 3, the ranks along dp times the micro-batches: 1 x 3",
        ),
        ("1x1x1", "--heads 3", "--heads 3 must be a multiple of 1, the ranks along tp, and divide --width"),
        ("1x2x1", "--heads 1", "--heads 1 must be a multiple of 2, the ranks along tp, and divide --width"),
        ("1x2x1", "--context 15 --sequence-parallel", "--context 15 must be a multiple of 2, the ranks along tp"),
        ("1x3x1", "--heads 3 --width 18", "the vocabulary, 128, must be a multiple of 3, the ranks along tp"),
        ("1x1x1", "--context 200000", "--context 200000 must be less than the text is long, 110593"),
        ("1x1x2", "--schedule zbv --layers 3", "--layers 3 must be at least 4, the stages of the pipeline"),
    ],
)
def test_sizes_that_do_not_fit_are_explained(example, mesh, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        on_mesh(example.train, mesh, example, *options.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--resume", "--resume needs --checkpoint, the folder to go on from"),
        ("--layers 0", "--layers must be at least 1, got 0"),
        ("--lr nan", "--lr must be a positive number, got nan"),
        ("--temperature 0", "--temperature must be a positive number, got 0.0"),
        ("--prompt é", "--prompt must have one or more characters, all of them ASCII, got 'é'"),
        ("--json nowhere/run.json", "there is no folder to write nowhere/run.json to"),
        ("--plain --schedule 1f1b", "--plain has no schedule but gpipe, got 1f1b"),
        ("--plain --zero", "--plain has no --zero, --sequence-parallel, --checkpoint, --plot and --device cuda"),
    ],
)
def test_options_that_do_not_fit_are_explained(example, monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "argv", ["train_transformer.py", *options.split()])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        ("2x2", 4, "must be DPxTPxPP, three positive numbers such as 2x2x1, got '2x2'"),
        ("2x2x0", 4, "must be DPxTPxPP, three positive numbers such as 2x2x1, got '2x2x0'"),
        ("2x2x2", 4, "--mesh 2x2x2 needs 8 ranks, but 4 run: meshrun -n 8"),
    ],
)
def test_bad_mesh_is_explained(example, text, world_size, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        example.mesh_shape(text, world_size)


def test_without_a_mesh_all_ranks_are_data_parallel(example):
    assert example.mesh_shape(None, 4) == (4, 1, 1)


def test_the_text_is_ascii_and_attributed():
    text = EXAMPLES / "data" / "documentation.txt"
    assert 90_000 < text.stat().st_size < 130_000
    assert text.read_bytes().isascii()
    assert "documentation.txt" in (text.parent / "README.md").read_text()
    assert "Apache" in (text.parent / "README.md").read_text()


def run_script(folder, mesh, *options):
    """Run the script under meshrun; return what it wrote with --json, and its output."""
    left_out = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "OMPI_", "PMI", "SLURM_", "MESHDIST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    launch = [sys.executable, "-m", "meshdist.launch.meshrun", "-n", str(np.prod([int(n) for n in mesh.split("x")]))]
    files = ["--json", str(folder / "run.json"), "--plot", str(folder / "run.png")]
    done = subprocess.run(
        [*launch, str(EXAMPLES / "train_transformer.py"), "--mesh", mesh, *TINY.split(), *files, *options],
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads((folder / "run.json").read_text()), done.stdout.decode()


@needs_linux
def test_the_script_runs_as_processes(alone, tmp_path):
    run, output = run_script(tmp_path, "1x1x2")
    np.testing.assert_allclose(run["losses"], alone["losses"], rtol=1e-9)
    assert 0 < run["bubble"] < 1
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert run["sample"] in output
    assert output.splitlines()[-1].startswith(f"mesh 1x1x2 float64: loss {run['losses'][-1]:.4f}, ")


@needs_linux
@pytest.mark.parametrize("mesh", ["1x2x1", pytest.param("2x1x2", marks=MORE)])
def test_float32_stays_near_the_run_of_one_rank(example, tmp_path, mesh):
    options = ["--steps", "100", "--dtype", "float32", "--layers", "2"]
    alone = on_mesh(example.train, "1x1x1", example, *options)["losses"]
    assert alone[-1] < alone[0] - 1.5  # it learns
    np.testing.assert_allclose(run_script(tmp_path, mesh, *options)[0]["losses"], alone, rtol=1e-4)
