"""The digits example: its data, its gradients, and that every mesh computes the same run."""

import contextlib
import fcntl
import importlib.util
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_digits.py"
DATA = ROOT / "examples" / "data" / "digits.npz"
LAUNCH = ["-m", "meshdist.launch.meshrun", "--nproc-per-node"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_digits", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPT.parent))  # where its network is
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


def environment():
    """Return this process's environment without what a launcher would set, and with meshdist to import."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RANK", "LOCAL_", "WORLD_", "MASTER_", "OMPI_", "PMI", "SLURM_", "MESHDIST_"))
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))}


def start(*args, ranks=None):
    """Run the example with these arguments: under the launcher with `ranks` ranks, or without one."""
    command = [sys.executable, *([] if ranks is None else [*LAUNCH, str(ranks)]), str(SCRIPT), *args]
    return subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)


def train(folder, *args, ranks=None):
    """Run the example to its end; return what it wrote with --json, and the lines it printed."""
    path = folder / "run.json"
    done = start(*args, "--json", str(path), ranks=ranks)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout.splitlines()


@pytest.fixture(scope="module", params=["float64", "float32"])
def alone(request, tmp_path_factory):
    """One rank's run, which those on every mesh must equal."""
    args = ["--mesh", "1x1", "--dtype", request.param]
    return train(tmp_path_factory.mktemp("alone"), *args, ranks=1)[0]


# Data


def test_data_is_the_whole_test_part_of_the_uci_digits():
    with np.load(DATA) as digits:
        assert sorted(digits.files) == ["images", "labels"]
        images, labels = digits["images"], digits["labels"]
    assert (images.shape, images.dtype, images.min(), images.max()) == ((1797, 8, 8), np.uint8, 0, 16)
    assert labels.dtype == np.uint8
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_data_is_small_and_attributed():
    assert DATA.stat().st_size < 200_000
    attribution = (DATA.parent / "README.md").read_text()
    for part in ("Optical Recognition of Handwritten Digits", "Alpaydin", "Kaynak", "10.24432/C50P49", "CC BY 4.0"):
        assert part in attribution


def test_shuffling_keeps_every_image_with_its_label(example):
    images, labels = example.load_digits(np.random.default_rng(1), "float64")
    with np.load(DATA) as digits:
        original = {(image.tobytes(), label) for image, label in zip(digits["images"], digits["labels"], strict=True)}
    assert images.shape == (1797, 64)
    assert original == {
        ((image * 16).astype(np.uint8).tobytes(), label) for image, label in zip(images, labels, strict=True)
    }


# Gradients


@pytest.fixture
def problem(example):
    """Weights of one rank with non-zero biases, and 24 images with their labels."""
    rng = np.random.default_rng(7)
    images, labels = example.load_digits(rng, "float64")
    weights = [weight + 0.1 * rng.standard_normal(weight.shape) for weight in example.first_weights(rng, 0, 1)]
    return weights, images[:24], labels[:24]


@pytest.mark.parametrize("index", range(4), ids=["w1", "b1", "w2", "b2"])
def test_gradients_equal_finite_differences(example, problem, index):
    weights, x, y = problem
    gradient = example.loss_and_gradients(weights, x, y, lambda partial: partial)[1][index]
    assert gradient.shape == weights[index].shape
    direction = np.random.default_rng(index).standard_normal(gradient.shape)

    def loss(distance):
        moved = list(weights)
        moved[index] = weights[index] + distance * direction
        return example.loss_and_gradients(moved, x, y, lambda partial: partial)[0]

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-7)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_tensor_parallel_gradients_are_the_pieces_of_the_whole(example, problem, tp):
    weights, x, y = problem
    w1, b1, w2, b2 = weights
    units = np.split(np.arange(w1.shape[1]), tp)
    shares = [[w1[:, mine], b1[mine], w2[mine], b2] for mine in units]
    partials = [example.forward(share, x, lambda partial: partial)[0] @ share[2] for share in shares]
    loss, (d_w1, d_b1, d_w2, d_b2) = example.loss_and_gradients(weights, x, y, lambda partial: partial)
    for share, mine in zip(shares, units, strict=True):
        share_loss, gradients = example.loss_and_gradients(share, x, y, lambda partial: sum(partials))
        assert share_loss == pytest.approx(loss, rel=1e-12)
        for got, expected in zip(gradients, [d_w1[:, mine], d_b1[mine], d_w2[mine], d_b2], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-14)


def test_ranks_draw_pieces_of_the_same_weights(example):
    w1, b1, w2, b2 = example.first_weights(np.random.default_rng(0), 0, 1)
    shares = [example.first_weights(np.random.default_rng(0), rank, 4) for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate([share[0] for share in shares], axis=1), w1)
    np.testing.assert_array_equal(np.concatenate([share[2] for share in shares]), w2)
    assert [share[1].shape for share in shares] == [(len(b1) // 4,)] * 4
    assert [share[3].shape for share in shares] == [b2.shape] * 4


# The choice of the mesh


@pytest.mark.parametrize(
    ("text", "world_size", "shape"),
    [
        ("2x2", 4, (2, 2)),
        ("1x4", 4, (1, 4)),
        (None, 1, (1, 1)),
        (None, 2, (2, 1)),
        (None, 4, (2, 2)),
        (None, 6, (3, 2)),
    ],
)
def test_mesh_shape(example, text, world_size, shape):
    assert example.mesh_shape(text, world_size) == shape


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        ("2by2", 4, "must be DPxTP, two positive numbers such as 2x2, got '2by2'"),
        ("4", 4, "must be DPxTP, two positive numbers such as 2x2, got '4'"),
        ("0x4", 4, "must be DPxTP, two positive numbers such as 2x2, got '0x4'"),
        ("2x2x1", 4, "must be DPxTP, two positive numbers such as 2x2, got '2x2x1'"),
        ("2x3", 4, "--mesh 2x3 needs 6 ranks, but 4 run; set --nproc-per-node 6"),
        ("7x1", 7, "--mesh 7x1: dp must divide the 240 images of a batch, tp the 120 hidden units"),
        ("1x7", 7, "--mesh 1x7: dp must divide the 240 images of a batch, tp the 120 hidden units"),
        (None, 7, "--mesh 7x1: dp must divide the 240 images of a batch, tp the 120 hidden units"),
    ],
)
def test_bad_mesh_is_explained(example, text, world_size, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        example.mesh_shape(text, world_size)


def test_hidden_units_may_be_chosen(example):
    assert example.mesh_shape("1x7", 7, num_hidden=700) == (1, 7)
    with pytest.raises(ValueError, match="tp the 50 hidden units"):
        example.mesh_shape("1x4", 4, num_hidden=50)


# Whole runs


# The whole default run on the mesh that has both axes; the first steps of it on the others, which says the same sooner.
@pytest.mark.parametrize(("mesh", "steps"), [("2x2", 600), ("2x1", 150), ("1x2", 150), ("4x1", 150), ("1x4", 150)])
@pytest.mark.slow
def test_every_mesh_computes_the_run_of_one_rank(alone, mesh, steps, tmp_path):
    dp, tp = map(int, mesh.split("x"))
    run, _ = train(tmp_path, "--mesh", mesh, "--steps", str(steps), "--dtype", alone["dtype"], ranks=dp * tp)
    assert (run["mesh"], run["world_size"], run["steps"], len(run["losses"])) == (mesh, dp * tp, steps, steps)
    tolerance = {"float64": 1e-10, "float32": 1e-4}[alone["dtype"]]
    np.testing.assert_allclose(run["losses"], alone["losses"][:steps], rtol=tolerance)


@pytest.mark.slow
def test_default_run_on_four_ranks_learns_the_digits(tmp_path):
    run, lines = train(tmp_path, ranks=4)
    assert run["test_accuracy"] >= 0.95
    assert run["losses"][-1] < run["losses"][0] / 20
    assert (run["mesh"], run["backend"], run["dtype"], run["steps"]) == ("2x2", "gloo", "float32", len(run["losses"]))
    assert run["steps_per_s"] > 0
    assert 0 < run["comm_share"] < 1
    assert len(lines) <= 6
    assert lines[-1].startswith(f"mesh 2x2 float32: loss {run['losses'][-1]:.4f}, test accuracy ")
    assert lines[-1].endswith("of the time in communication")


@pytest.mark.slow
def test_without_a_launcher_it_is_the_run_of_one_rank(alone, tmp_path):
    picture = tmp_path / "losses.png"
    run, _ = train(tmp_path, "--steps", "150", "--dtype", alone["dtype"], "--plot", str(picture))
    assert (run["mesh"], run["world_size"]) == ("1x1", 1)
    tolerance = {"float64": 1e-10, "float32": 1e-4}[alone["dtype"]]
    np.testing.assert_allclose(run["losses"], alone["losses"][:150], rtol=tolerance)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_terminal_shows_a_progress_bar():
    terminal, their_end = pty.openpty()
    fcntl.ioctl(their_end, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
    command = [sys.executable, str(SCRIPT), "--steps", "40"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=their_end) as process:
        os.close(their_end)
        shown = b""
        with contextlib.suppress(OSError):  # Linux: EIO once the other end is closed
            while piece := os.read(terminal, 4096):
                shown += piece
        lines = process.stdout.read().splitlines()
    os.close(terminal)
    assert process.returncode == 0
    assert b"40/40" in shown
    assert b"loss " in shown
    assert len(lines) == 1


def test_bad_mesh_ends_the_job_with_one_traceback():
    done = start("--mesh", "2x3", ranks=2)
    assert done.returncode != 0
    assert "ValueError: --mesh 2x3 needs 6 ranks, but 2 run; set --nproc-per-node 6" in done.stderr
    assert done.stderr.count("Traceback") == 1


def test_bad_number_of_steps_is_explained():
    done = start("--steps", "0")
    assert done.returncode == 2
    assert "--steps must be at least 1, got 0" in done.stderr
    assert "Traceback" not in done.stderr


NO_CUPY = "raise ImportError('no CuPy here')"
NO_DRIVER = """
from types import SimpleNamespace
def getDeviceCount():
    raise CUDARuntimeError("cudaErrorInsufficientDriver")
class CUDARuntimeError(RuntimeError):
    pass
cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=getDeviceCount, CUDARuntimeError=CUDARuntimeError))
"""


@pytest.mark.parametrize(
    ("cupy", "said"),
    [
        (NO_CUPY, "--device cuda needs CuPy: `pip install cupy-cuda12x` (no CuPy here)"),
        (NO_DRIVER, "--device cuda needs a GPU and its driver, CuPy finds none here (cudaErrorInsufficientDriver)"),
    ],
)
def test_a_machine_without_gpus_is_told_so_in_a_sentence(tmp_path, monkeypatch, cupy, said):
    (tmp_path / "cupy.py").write_text(cupy)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = start("--backend", "gloo", "--device", "cuda")
    assert (done.returncode, done.stderr) == (1, f"train_digits.py: {said}\n")


def test_unknown_backend_is_named():
    done = start("--backend", "carrier-pigeon")
    assert done.returncode != 0
    assert "carrier-pigeon" in done.stderr
    assert "gloo" in done.stderr
