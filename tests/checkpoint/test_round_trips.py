"""What is saved on one mesh is loaded on another, in every format."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoint_trees import load_random, mesh_of, save_random
from worlds import needs_linux

import meshdist
from meshdist.checkpoint import CheckpointError, latest, load, per_rank, save
from meshdist.checkpoint.__main__ import main
from meshdist.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

MESHES = [((2, 2), (3, 1)), ((1,), (4,)), ((3,), (2,)), ((2, 1, 2), (2, 2))]
FORMATS = ["safetensors", "npy", "zarr"]


def needs(format):
    if format == "zarr":
        pytest.importorskip("zarr", minversion="3", reason="zarr 3 is not installed")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("first", "then"), MESHES[:2])
def test_any_tree_on_any_mesh(tmp_path, format, first, then):
    needs(format)
    check(tmp_path, first, then, 0, {"format": format})


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("first", "then"), MESHES)
@pytest.mark.parametrize("seed", range(1, 6))
def test_more_trees_on_more_meshes(tmp_path, format, first, then, seed):
    needs(format)
    check(tmp_path, first, then, seed, {"format": format, "max_file_bytes": 200})


def check(tmp_path, first, then, seed, options):
    directory = str(tmp_path / "run")
    paths = meshdist.run(save_random, math.prod(first), args=(directory, first, seed, options), timeout=60)
    assert set(paths) == {str(tmp_path / "run" / "step-0")}
    wrong = meshdist.run(load_random, math.prod(then), args=(directory, then, seed, seed + 1), timeout=60)
    assert wrong == [[]] * math.prod(then)


@needs_linux
def test_ranks_that_are_processes(worlds, tmp_path):
    directory = str(tmp_path)
    worlds.world("gloo", 3).run(save_random, directory, (3,), 1, {"asynchronous": False, "max_file_bytes": 1000})
    assert worlds.world("gloo", 2).run(load_random, directory, (2,), 1, 2) == [[]] * 2


def save_large(directory, shape, placements):
    mesh = mesh_of(shape)
    whole = np.arange(700 * 1111, dtype=np.float32).reshape(700, 1111)
    save(directory, {"w": distribute_tensor(whole, mesh, placements, src_data_rank=None)})
    wanted = [[Shard(1)], placements]
    likes = [distribute_tensor(np.zeros_like(whole), mesh, p, src_data_rank=None) for p in wanted]
    return [load(directory, {"w": like})["w"].full() for like in likes]


@pytest.mark.parametrize("placements", [[Shard(1)], [Shard(0)], [Partial()]])
def test_large_arrays_in_short_and_long_runs(tmp_path, placements):
    whole = np.arange(700 * 1111, dtype=np.float32).reshape(700, 1111)
    for found in meshdist.run(save_large, 3, args=(tmp_path, (3,), placements)):
        for array in found:
            np.testing.assert_array_equal(array, whole)


def test_lists_of_values_have_the_length_that_was_saved(tmp_path):
    def program():
        save(tmp_path, {"w": np.ones(2), "losses": [3.0, 2.5], "state": {"rng": {"kind": "PCG64", "seed": [1, (2,)]}}})
        found = load(tmp_path, {"w": np.zeros(2), "losses": [], "state": {"rng": {}}})
        with pytest.raises(CheckpointError, match="has 'losses', which like lacks, or has as None, on all ranks"):
            load(tmp_path, {"w": np.zeros(2), "state": {}})
        return found["losses"], found["state"]

    expected = [3.0, 2.5], {"rng": {"kind": "PCG64", "seed": [1, (2,)]}}
    assert meshdist.run(program, 2) == [expected] * 2


def test_arrays_are_read_in_place(tmp_path):
    def program():
        mesh = mesh_of((2,))
        w = distribute_tensor(np.arange(12.0).reshape(3, 4), mesh, [Shard(1)], src_data_rank=None)
        own = np.arange(meshdist.get_rank() + 1)
        tree = {"w": w, "t": np.arange(6).reshape(2, 3).T, "n": 1, "s": np.float32(3), "own": per_rank(own)}
        save(tmp_path, tree)
        expected = w.to_local().copy(), tree["t"].copy()
        w.to_local()[...] = 0
        tree["t"][...] = 0
        own[...] = -1
        found = load(tmp_path, tree, in_place=True)
        assert found["w"] is w
        assert found["t"] is tree["t"]
        assert found["own"].array is own
        assert own.tolist() == list(range(meshdist.get_rank() + 1))
        np.testing.assert_array_equal(w.to_local(), expected[0])
        np.testing.assert_array_equal(tree["t"], expected[1])
        return found["s"]

    assert meshdist.run(program, 2) == [3, 3]


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: per_rank(read_only(np.zeros(2))), "cannot read into 'x.rank00000', which is read-only; pass"),
        (lambda: read_only(np.zeros(2)), "cannot read into 'x', which is read-only; pass in_place=False, or a copy"),
        (
            lambda: DTensor.from_local(read_only(np.zeros(2)), mesh_of((2,)), [Replicate()]),
            "cannot read into 'x', which is read-only",
        ),
        (
            lambda: distribute_tensor(np.zeros(2), mesh_of((2,)), [Partial()], src_data_rank=None),
            "cannot read into 'x', a DTensor with Partial placements; pass in_place=False, or one with Replicate",
        ),
    ],
)
def test_arrays_that_cannot_be_read_into_are_named_before_any_is(tmp_path, wrong, message):
    def program():
        x = wrong()
        save(tmp_path, {"a": np.ones(3), "x": x})
        a = np.zeros(3)
        with pytest.raises(ValueError, match=message):
            load(tmp_path, {"a": a, "x": x}, in_place=True)
        return a.tolist(), type(load(tmp_path, {"a": a, "x": x})["x"]) is type(x)

    assert meshdist.run(program, 2) == [([0, 0, 0], True)] * 2


def test_stages_with_arrays_of_their_own(tmp_path):
    def program():
        pp, tp = mesh_of((2, 2))["a"], mesh_of((2, 2))["b"]
        stage = pp.get_local_rank()
        w = distribute_tensor(np.full((4, 2), stage), tp, [Shard(0)], src_data_rank=None)
        tree = {"layers": {str(stage): w}, "head": np.ones(2) if stage == 1 else None}
        save(tmp_path, tree)
        mine = load(tmp_path, tree)
        return load(tmp_path), mine["layers"][str(stage)].full().tolist()

    for rank, (whole, mine) in enumerate(meshdist.run(program, 4)):
        assert sorted(whole["layers"]) == ["0", "1"]
        assert whole["head"].tolist() == [1, 1]
        assert mine == [[rank // 2] * 2] * 4


def test_the_index_of_a_rank_in_a_list_is_its_number(tmp_path):
    def program():
        rank = meshdist.get_rank()
        save(tmp_path, {"p": per_rank(np.arange(rank)) if rank % 2 else None})
        return [None if array is None else array.tolist() for array in load(tmp_path)["p"]]

    assert meshdist.run(program, 5) == [[None, [0], None, [0, 1, 2]]] * 5


def test_none_stands_for_the_arrays_of_other_ranks(tmp_path):
    def program():
        tree = {"p": per_rank(np.arange(3)) if meshdist.get_rank() == 1 else None, "n": 1}
        save(tmp_path, tree)
        with pytest.raises(CheckpointError, match="'p' is an array in .*, and int in like"):
            load(tmp_path, {"p": 3, "n": 1})
        found = load(tmp_path, tree)["p"]
        return None if found is None else found.array.tolist()

    assert meshdist.run(program, 2) == [None, [0, 1, 2]]


def test_an_array_that_like_has_as_none_on_all_ranks_is_not_dropped(tmp_path):
    """Optimizers mark state so that they make at their first step."""

    def program():
        own = per_rank(np.arange(2))
        save(tmp_path, {"w": np.ones(3), "momentum": {"w": np.full(3, 5.0)}, "own": own, "step": 7})
        for none, named in (("momentum", "'momentum.w'"), ("own", "'own'")):
            like = {"w": np.zeros(3), "momentum": {"w": np.zeros(3)}, "own": own, "step": 0, none: None}
            with pytest.raises(CheckpointError, match=f"step-0 has {named}, which like lacks, or has as None, on all"):
                load(tmp_path, like)
            assert load(tmp_path, like, strict=False)[none] is None
        like = {**like, "own": own, "momentum": {"w": np.zeros(3)} if meshdist.get_rank() else None, "step": None}
        found = load(tmp_path, like)
        return found["momentum"] and found["momentum"]["w"].tolist(), found["step"]

    assert meshdist.run(program, 2) == [(None, 7), ([5, 5, 5], 7)]


def test_an_array_of_each_rank_that_like_has_as_one_array(tmp_path):
    def program():
        save(tmp_path, {"n": per_rank(np.arange(2))})
        with pytest.raises(CheckpointError, match=r"lacks 'n'; it has 'n.rank00000'; 'n' was saved as per_rank: put"):
            load(tmp_path, {"n": np.zeros(2, int)})

    meshdist.run(program, 1)


def test_none_on_the_first_rank_hides_no_value_of_another(tmp_path):
    def program():
        rank = meshdist.get_rank()
        tree = {"n": [None, 2, 3][rank], "text": ["a", None, "b"][rank], "none": None}
        save(tmp_path, tree)
        return load(tmp_path), load(tmp_path, tree)["n"]

    assert meshdist.run(program, 3) == [({"n": 2, "text": "a", "none": None}, 2)] * 3


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(9, np.int64), r"'p.rank00001' is int64 of shape \(2,\), but like has int64 of shape \(9,\)"),
        (np.zeros(2, np.float32), r"'p.rank00001' is int64 of shape \(2,\), but like has float32 of shape \(2,\)"),
    ],
)
def test_an_array_of_one_rank_that_does_not_fit(tmp_path, array, message):
    def program():
        tree = {"p": per_rank(np.arange(meshdist.get_rank() + 1))}
        save(tmp_path, tree)
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path, {"p": per_rank(array)} if meshdist.get_rank() == 1 else tree)

    meshdist.run(program, 2)


def test_fewer_ranks_do_not_drop_the_arrays_of_others(tmp_path):
    meshdist.run(lambda: save(tmp_path, {"p": per_rank(np.full(2, meshdist.get_rank()))}), 3)
    like = {"p": per_rank(np.zeros(2, int))}

    def program():
        with pytest.raises(
            CheckpointError, match=r"saved by 3 ranks, and has 'p.rank00002', which like lacks on all of the 2 that"
        ):
            load(tmp_path, like)
        return load(tmp_path, like, strict=False)["p"].array.tolist()

    assert meshdist.run(program, 2) == [[0, 0], [1, 1]]


def test_replicas_on_meshes_of_their_own(tmp_path):
    def program():
        tp = mesh_of((2, 2))["b"]
        save(tmp_path, {"w": distribute_tensor(np.arange(6), tp, [Shard(0)], src_data_rank=None)})
        return load(tmp_path)["w"].tolist()

    assert meshdist.run(program, 4) == [[0, 1, 2, 3, 4, 5]] * 4


def test_the_newest_is_loaded_and_steps_are_counted(tmp_path):
    def program():
        paths = [save(tmp_path, {"n": n}, step=step).name for n, step in enumerate((None, 9, None))]
        save(tmp_path, {"n": 7}, step=100, keep=2)
        return paths, load(tmp_path), load(tmp_path / "step-10")

    assert latest(tmp_path) is None
    assert meshdist.run(program, 2) == [(["step-0", "step-9", "step-10"], {"n": 7}, {"n": 2})] * 2
    assert latest(tmp_path) == tmp_path / "step-100"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-100"]


def test_without_a_world_one_process_loads(tmp_path):
    meshdist.run(lambda: save(tmp_path, [np.arange(3), "x"]), 2)
    found = load(tmp_path)
    assert found[0].tolist() == [0, 1, 2]
    assert found[1] == "x"
    assert load(tmp_path, [np.zeros(3, int), None])[1] == "x"


def test_npy_is_mapped_and_stays_as_it_is(tmp_path):
    meshdist.run(lambda: save(tmp_path, {"w": np.arange(3)}, format="npy"), 1)
    found = load(tmp_path)["w"]
    assert isinstance(found, np.memmap)
    found[0] = 7
    assert np.load(tmp_path / "step-0" / "w.npy").tolist() == [0, 1, 2]


SAVED = {"w": np.ones((2, 3)), "b": np.ones(2), "n": 1}


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({**SAVED, "w": np.ones((3, 2))}, r"'w' is float64 of shape \(2, 3\), but like has float64 of shape \(3, 2\)"),
        ({**SAVED, "w": np.ones((2, 3), "f")}, r"model.safetensors: array 'w' is float64 .*, but like has float32 of"),
        ({**SAVED, "v": np.ones(1)}, r"step-0 lacks 'v'; it has 'b', 'w'; pass strict=False to leave"),
        ({**SAVED, "m": 1}, "step-0 lacks 'm'"),
        ({"w": SAVED["w"], "n": 1}, "step-0 has 'b', which like lacks, or has as None, on all ranks; add it"),
        ({**SAVED, "b": None}, "step-0 has 'b', which like lacks, or has as None, on all ranks; add it"),
        ({"w": SAVED["w"], "b": None, "n": None}, "step-0 has 'b', which like lacks, or has as None, on all ranks"),
        ({**SAVED, "v": None}, "step-0 lacks 'v'"),
        ({**SAVED, "w": 3}, "'w' is an array in .*, and int in like"),
        ({**SAVED, "n": np.ones(1)}, "'n' is the value 1 in .*, and an array in like"),
        ({**SAVED, "r": per_rank(np.ones(1))}, r"lacks 'r.rank00000' \(saved by 2 ranks\)"),
    ],
)
def test_what_does_not_fit_is_named_on_all_ranks(tmp_path, like, message):
    def program():
        save(tmp_path, SAVED)
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path, like)
        meshdist.barrier()

    meshdist.run(program, 2)


def test_a_warning_says_that_nothing_matches(tmp_path, caplog):
    def program():
        save(tmp_path, SAVED)
        for like in ({"w": np.zeros((2, 3)), "m": 1}, {}, {"v": np.zeros(1), "m": 1}):
            found = load(tmp_path, like, strict=False)
        return found["v"].tolist()

    assert meshdist.run(program, 2) == [[0.0]] * 2
    assert [text.partition("/step-0 ")[2] for text in caplog.messages] == [
        "has nothing of what like has: it has 'b', 'n', 'w', like has 'm', 'v'; load returns the values of like"
    ]


def test_one_rank_alone_asks_for_what_is_missing(tmp_path):
    def program():
        save(tmp_path, SAVED)
        like = {**SAVED, "v": np.ones(1)} if meshdist.get_rank() == 1 else SAVED
        with pytest.raises(CheckpointError, match=r"load from .* \(rank 1 of 2\): .* lacks 'v'"):
            load(tmp_path, like)
        found = load(tmp_path, {"w": np.zeros((2, 3)), "v": np.zeros(1), "k": "kept"}, strict=False)
        return found["w"].sum(), found["v"].tolist(), found["k"], sorted(found)

    assert meshdist.run(program, 2) == [(6.0, [0.0], "kept", ["k", "v", "w"])] * 2


@pytest.mark.parametrize(
    ("tree", "options", "error", "message"),
    [
        (
            lambda rank: {"w": np.ones(2 + rank)},
            {},
            ValueError,
            r"'w' is float64\[2\] on rank 0 and float64\[3\] on rank",
        ),
        (lambda rank: [1] * (1 + rank), {}, ValueError, "tree is a list of 1 on one rank and of 2 on another"),
        (lambda rank: {"w": {1}} if rank else {}, {}, TypeError, r"\(rank 1 of 2\): tree\['w'\]: expected arrays"),
        (lambda rank: {}, {"format": "pickle"}, ValueError, "format must be one of 'safetensors', 'npy', 'zarr', got"),
        (lambda rank: {}, {"step": -1}, ValueError, "step must be an integer of at least 0, got -1"),
        (lambda rank: {}, {"keep": 0}, ValueError, "keep must be an integer of at least 1, got 0"),
        (lambda rank: {"w": np.ones(1, np.longdouble)}, {}, TypeError, "differs between machines"),
    ],
)
def test_what_cannot_be_saved_is_named_on_all_ranks(tmp_path, tree, options, error, message):
    def program():
        with pytest.raises(error, match=message):
            save(tmp_path / "run", tree(meshdist.get_rank()), **options)

    meshdist.run(program, 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["step", "asynchronous", "overwrite"])
def test_ranks_that_pass_different_options(tmp_path, option):
    def program():
        rank = meshdist.get_rank()
        with pytest.raises(ValueError, match=f"rank 0 passed {option}=.*, and rank 1 {option}="):
            save(tmp_path, {}, **{option: bool(rank) if option != "step" else rank})
        with pytest.raises(ValueError, match="rank 0 passed strict=False, and rank 1 strict=True"):
            load(tmp_path, strict=bool(rank))

    meshdist.run(program, 2)


def test_ranks_in_different_calls(tmp_path):
    def program():
        path = save(tmp_path, {"w": np.ones(3)}, step=np.int64(3))
        with pytest.raises(CheckpointError, match="in different calls: rank 0 in load from .*, rank 1 in save to"):
            load(tmp_path) if meshdist.get_rank() == 0 else save(tmp_path, {})
        with pytest.raises(CheckpointError, match="calls: rank 0 in load from .*0, rank 1 in load from .*1"):
            load(tmp_path / f"step-{meshdist.get_rank()}")
        return load(path)["w"].tolist()

    assert meshdist.run(program, 2) == [[1, 1, 1]] * 2


def test_a_folder_is_named(tmp_path):
    def program():
        for directory in (None, ""):
            with pytest.raises(TypeError, match="directory must be the path of a folder, got"):
                save(directory, {})
        with pytest.raises(ValueError, match="is a checkpoint; pass the folder above it"):
            save(save(tmp_path, {}), {})

    meshdist.run(program, 2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://bucket/run", r"s3:/+bucket/run is a URL \(s3\), and checkpoints are in folders of a file system"),
        (Path("s3://bucket/run"), r"is a URL \(s3\)"),
        ("file:///run", r"is a URL \(file\)"),
        ("~/run", "~/run begins with ~, which only a shell expands: pass os.path.expanduser"),
    ],
)
def test_paths_that_are_not_local_are_refused(tmp_path, monkeypatch, capsys, path, message):
    monkeypatch.chdir(tmp_path)

    def program():
        for call in (lambda: save(path, {}), lambda: load(path), lambda: latest(path)):
            with pytest.raises(ValueError, match=message):
                call()

    meshdist.run(program, 2)
    assert main(["info", str(path)]) == 1
    meshdist.run(lambda: save("C:", {"n": 1}, step=1), 1)
    assert main(["convert", "C:", str(path)]) == 1
    assert len(re.findall(message, capsys.readouterr().err)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["C:"]


def test_names_of_any_characters(tmp_path):
    tree = {"a/b": np.ones(1), "..": np.ones(2), "é" * 300: np.ones(3), " ": np.ones(0)}

    def program(format):
        save(tmp_path / format, tree, format=format)
        return {name: len(array) for name, array in load(tmp_path / format).items()}

    for format in FORMATS[:2]:
        assert meshdist.run(program, 1, args=(format,))[0] == {name: len(array) for name, array in tree.items()}


def test_strided_arrays(tmp_path):
    tree = {"t": np.arange(12).reshape(3, 4).T, "s": np.arange(10)[::3]}
    meshdist.run(lambda: save(tmp_path, tree), 2)
    for name, array in load(tmp_path).items():
        np.testing.assert_array_equal(array, tree[name])


def swapped_tree():
    """Return plain arrays, DTensors and arrays of each rank in both byte orders."""
    mesh, tree = mesh_of((2,)), {}
    for order in "<>":
        for kind in ("f2", "f4", "f8", "i2", "i4", "i8", "u2", "u4", "u8", "c8", "c16", "b1"):
            array = np.arange(1, 7).reshape(2, 3).astype(order + kind)
            tree[order + kind] = {
                "plain": array,
                "over": distribute_tensor(array, mesh, [Shard(0)], src_data_rank=None),
                "own": per_rank(array[meshdist.get_rank()]),
            }
    return tree


def as_lists(tree):
    return {
        name: [of["plain"].tolist(), of["over"].full().tolist(), of["own"].array.tolist()] for name, of in tree.items()
    }


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_arrays_in_either_byte_order(tmp_path, format, asynchronous):
    needs(format)

    def program():
        tree = swapped_tree()
        saved = save(tmp_path, tree, format=format, asynchronous=asynchronous)
        path = saved.wait() if asynchronous else saved
        whole = load(path)
        found = {name: [of["plain"].tolist(), of["over"].tolist()] for name, of in whole.items()}
        expected = as_lists(tree)
        assert found == {name: lists[:2] for name, lists in expected.items()}
        for in_place in (False, True):
            assert as_lists(load(path, swapped_tree(), in_place=in_place)) == expected

    meshdist.run(program, 2)
