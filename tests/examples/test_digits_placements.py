"""The digits examples with placements: every mesh computes the run of train_digits.py on one rank."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import meshdist
from meshdist.autograd import value_and_grad

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 12

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def examples():
    """Return the two examples, whose common modules are beside them."""
    names = ("digits_autograd", "digits_placements", "train_digits", "digits_network", "digits_tools")
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("digits_placements"), importlib.import_module("train_digits")
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in names:
            sys.modules.pop(name, None)


def on_mesh(shape, train):
    def program():
        return train(meshdist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")))

    return meshdist.run(program, shape[0] * shape[1])[0]


@pytest.fixture(scope="module")
def alone(examples):
    _, train_digits = examples
    return on_mesh((1, 1), lambda mesh: train_digits.train(mesh, np, STEPS, "float64"))


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_every_mesh_computes_the_run_of_one_rank(examples, alone, shape):
    placed, _ = examples
    run = on_mesh(shape, lambda mesh: placed.train(mesh, STEPS, "float64"))
    assert run["mesh"] == "x".join(map(str, shape))
    np.testing.assert_allclose(run["losses"], alone["losses"], rtol=1e-10)
    assert run["test_accuracy"] == alone["test_accuracy"]


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_gradients_of_the_loss_make_the_same_run(examples, alone, shape):
    placed, _ = examples
    loss = importlib.import_module("digits_autograd").loss
    run = on_mesh(shape, lambda mesh: placed.train(mesh, STEPS, "float64", value_and_grad(loss)))
    np.testing.assert_allclose(run["losses"], alone["losses"], rtol=1e-10)
    assert run["test_accuracy"] == alone["test_accuracy"]


def test_the_script_writes_its_run(examples, monkeypatch, tmp_path, capsys):
    placed, _ = examples
    for name in placed.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run.json"
    monkeypatch.setattr(sys, "argv", ["digits_placements.py", "--steps", "3", "--json", str(path)])
    placed.main()
    assert len(json.loads(path.read_text())["losses"]) == 3
    assert "mesh 1x1 float32: loss " in capsys.readouterr().out
