"""Trees with dataclasses and named tuples; checkpoints in dry runs; folders that have lost their manifest."""

import shutil
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

import meshdist
from meshdist.checkpoint import CheckpointError, load, save


class Moments(NamedTuple):
    first: Any
    second: Any


class Rates(NamedTuple):
    start: float
    end: float


@dataclass(frozen=True)
class Config:
    rates: Rates
    width: int = 3
    doubled: int = field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "doubled", 2 * self.width)


@dataclass
class State:
    weights: dict
    moments: Moments
    config: Config


def state_of(number):
    moments = Moments(np.full(2, number), [np.full(1, number)])
    return State({"w": np.full(3, number)}, moments, Config(Rates(0.5 * number, 0.1), number))


def save_and_load(directory):
    save(directory, {"state": state_of(7)}, step=1)
    return (
        load(directory),
        load(directory, {"state": state_of(1)}),
        load(directory, {"state": state_of(1)}, in_place=True),
    )


def test_dataclasses_and_named_tuples_come_back_where_like_has_them(tmp_path):
    for plain, *found in meshdist.run(save_and_load, 2, args=(tmp_path,)):
        assert plain["state"]["config"] == {"rates": (3.5, 0.1), "width": 7}
        assert type(plain["state"]["moments"]) is tuple
        for tree in found:
            state = tree["state"]
            assert (type(state), type(state.moments), type(state.config.rates)) == (State, Moments, Rates)
            assert state.config == Config(Rates(3.5, 0.1), 7)
            assert state.config.doubled == 14
            assert state.weights["w"].tolist() == [7, 7, 7]
            assert state.moments.second[0].tolist() == [7]


@dataclass
class Other:
    speed: float = 1.0


class Three(NamedTuple):
    a: int = 0
    b: int = 0
    c: int = 0


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"config": Other(), "rates": Rates(1, 2)}, "Other has no field 'rates', which the checkpoint has"),
        ({"config": Config(Rates(1, 2)), "rates": Three()}, "Three has 3 fields, and the checkpoint has 2"),
    ],
)
def test_types_with_other_fields_are_named(tmp_path, like, message):
    meshdist.run(save, 1, args=(tmp_path, {"config": Config(Rates(1, 2)), "rates": Rates(3, 4)}))
    with pytest.raises(ValueError, match=message):
        load(tmp_path, like)


@pytest.mark.parametrize("call", [save, load])
def test_a_dry_run_has_no_checkpoints(tmp_path, call):
    with meshdist.dry_run(world_size=64, rank=3):
        meshdist.init_process_group()
        with pytest.raises(ValueError, match=r"this is a dry run of rank 3 of 64, and the other ranks do not exist"):
            call(tmp_path, {"w": np.ones(3)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("max_file_bytes", [1000, 8])
def test_a_folder_that_has_lost_its_manifest_is_told_from_those_of_others(tmp_path, caplog, max_file_bytes):
    tree = {"a": np.ones(2), "b": {"c": np.arange(3)}, "epoch": 3}
    folder = meshdist.run(lambda: save(tmp_path, tree, max_file_bytes=max_file_bytes), 1)[0]
    copied = shutil.copytree(folder, tmp_path / "copied")
    assert load(copied)["epoch"] == 3
    assert not caplog.messages
    (copied / "checkpoint.json").unlink()
    found = load(copied)
    assert {name: array.tolist() for name, array in found.items()} == {"a": [1, 1], "b.c": [0, 1, 2]}
    assert [text.startswith(f"{copied} was written by meshdist.checkpoint.save") for text in caplog.messages] == [True]
    assert "its checkpoint.json is missing" in caplog.text


def test_values_that_safetensors_files_cannot_have_are_missing(tmp_path):
    folder = meshdist.run(lambda: save(tmp_path, {"a": np.ones(2), "epoch": 3}), 1)[0]
    (folder / "checkpoint.json").unlink()
    like = {"a": np.zeros(2), "epoch": 7, "lr": [0.1], "bias": None}
    for path in (folder, folder / "model.safetensors"):
        with pytest.raises(
            CheckpointError,
            match=r"lacks 'epoch', 'lr.0': without checkpoint.json, safetensors files have arrays alone; pass strict=F",
        ):
            load(path, like)
        found = load(path, like, strict=False)
        assert found["a"].tolist() == [1, 1]
        assert (found["epoch"], found["lr"], found["bias"]) == (7, [0.1], None)
        assert load(path, {"a": like["a"], "bias": None})["bias"] is None
