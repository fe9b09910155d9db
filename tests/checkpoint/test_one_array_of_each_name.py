"""Two arrays of one name are an error, and so is an array that should be the same on all ranks and is not."""

import numpy as np
import pytest
from checkpoint_trees import mesh_of

import meshdist
from meshdist.checkpoint import load, per_rank, save
from meshdist.tensor import Partial, Replicate, Shard, distribute_tensor


def check_refused(tmp_path, size, tree, message, **options):
    """Have ranks save what `tree` returns, and expect a ValueError on all of them."""

    def program():
        with pytest.raises(ValueError, match=message) as caught:
            save(tmp_path / "run", tree(meshdist.get_rank()), **options)
        return str(caught.value)

    assert len(set(meshdist.run(program, size))) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_stages_whose_parameters_have_the_same_names(tmp_path, placement, asynchronous):
    def tree(rank):
        dp = mesh_of((2, 2))["b"]
        return {"w": distribute_tensor(np.full((4, 2), rank // 2), dp, [placement], src_data_rank=None)}

    message = (
        r"\(rank 2 of 4\): 'w' is int64\[4, 2\] as .* on a mesh \(2,\) of ranks 0, 1 on rank 0 and .* of ranks 2, 3 on"
        " rank 2, with different elements: these are two arrays of one name; give those of each mesh, .*, a key"
    )
    check_refused(tmp_path, 4, tree, message, asynchronous=asynchronous)


def test_arrays_of_one_name_with_other_placements(tmp_path):
    def tree(rank):
        dp = mesh_of((2, 2))["b"]
        return {"w": distribute_tensor(np.ones((4, 2)), dp, [Shard(rank // 2)], src_data_rank=None)}

    message = r"'w' is .*Shard\(0\).* of ranks 0, 1 on rank 0 and .*Shard\(1\).* of ranks 2, 3 on rank 2: these are two"
    check_refused(tmp_path, 4, tree, message)


def test_an_array_over_a_mesh_and_a_plain_one(tmp_path):
    def tree(rank):
        pair = meshdist.DeviceMesh("cpu", [0, 1])
        x = np.ones(4)
        return {"w": x if rank == 2 else distribute_tensor(x, pair, [Shard(0)], src_data_rank=None)}

    check_refused(tmp_path, 3, tree, r"'w' is float64\[4\] as .* on rank 0 and float64\[4\] on rank 2: these are two")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (lambda rank: {"a": per_rank(np.ones(2)), "a.rank00000": np.zeros(3)}, "'a.rank00000' is the name of two arr"),
        (
            lambda rank: {"a.rank00001": np.zeros(3)} if rank == 0 else {"a": per_rank(np.ones(2))},
            "'a.rank00001' is the name of two arrays: per_rank arrays 'a' are stored under such names; rename a key",
        ),
        (
            lambda rank: {"a": {"b": np.ones(2)}} if rank == 0 else {"a.b": np.ones(2)},
            "'a.b' is the name of two arrays, on different ranks; rename a key",
        ),
    ],
)
def test_names_that_stand_for_two_arrays(tmp_path, tree, message):
    check_refused(tmp_path, 2, tree, message)


def test_a_name_that_ends_in_a_rank(tmp_path):
    tree = {"a.rank00000": np.zeros(3), "b": per_rank(np.ones(2))}
    meshdist.run(lambda: save(tmp_path, tree), 2)
    assert load(tmp_path)["a.rank00000"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "array",
    [
        lambda rank: np.full(400_000, rank),
        lambda rank: np.full((20, 1000), float(rank)).T,
        lambda rank: np.arange(3) == rank,
        lambda rank: np.float32(rank),
        lambda rank: np.full(2, complex(0, rank)),
        lambda rank: np.random.default_rng(rank).random(10_000, np.float32),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_forgotten_per_rank(tmp_path, array, asynchronous):
    def tree(rank):
        return {"same": np.ones(2), "w": array(rank // 2)}

    message = r"\(rank 2 of 4\): 'w', .* has different elements on ranks 0 and 2; .* save per_rank\(array\)"
    check_refused(tmp_path, 4, tree, message, asynchronous=asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((4, 2), [Replicate(), Shard(0)]),
        ((600, 2), [Replicate(), Shard(1)]),  # columns, which are written as rows
        ((4, 2), [Replicate(), Partial()]),
    ],
)
def test_replicas_that_differ(tmp_path, shape, placements, asynchronous):
    def tree(rank):
        x = np.full(shape, rank // 2 + 1)
        return {"w": distribute_tensor(x, mesh_of((2, 2)), placements, src_data_rank=None)}

    message = r"'w', .* has different elements on ranks 0 and 2, which hold the same block"
    check_refused(tmp_path, 4, tree, message, asynchronous=asynchronous)


def test_arrays_of_one_name_that_are_written_alike(tmp_path):
    """The columns of one stage become rows, as those of the other are."""

    def tree(rank):
        stage = rank // 2
        return {"w": distribute_tensor(np.ones((600, 2)), mesh_of((2, 2))["b"], [Shard(1 - stage)], src_data_rank=None)}

    message = r"'w' is .*Shard\(1\).* of ranks 0, 1 on rank 0 and .*Shard\(0\).* of ranks 2, 3 on rank 2: these are two"
    check_refused(tmp_path, 4, tree, message)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_arrays_that_differ_since_the_save_before(tmp_path, asynchronous):
    def program():
        w = distribute_tensor(np.zeros((600, 2)), mesh_of((2, 2)), [Replicate(), Shard(1)], src_data_rank=None)
        b = np.zeros(3)

        def write(step):
            return save(tmp_path, {"w": w, "b": b}, step=step, asynchronous=asynchronous)

        write(0)
        for x, name in ((b, "'b'"), (w.to_local(), "'w'")):
            x[...] = meshdist.get_rank() // 2
            with pytest.raises(ValueError, match=rf"\(rank 2 of 4\): {name}, .* different elements on ranks 0 and 2"):
                write(1)
            x[...] = 2
        write(2)
        return load(tmp_path, {"b": np.empty(3)}, strict=False)["b"].tolist()

    assert meshdist.run(program, 4) == [[2, 2, 2]] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0", "step-2"]


def test_what_rounding_changes_is_the_same(tmp_path):
    def program():
        x = np.random.default_rng(0).random(1000)
        x[3:5] = np.nan, np.inf
        rank = meshdist.get_rank()
        tree = {"x": x * (1 + 1e-6 * rank), "zeros": np.zeros(3), "order": np.arange(9).astype("<>"[rank] + "i4")}
        save(tmp_path, tree)
        return np.nanmax(np.abs(load(tmp_path)["x"][5:] - x[5:])) < 1e-5

    assert meshdist.run(program, 2) == [True, True]
