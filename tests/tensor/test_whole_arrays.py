"""Functions of NumPy that have no rule for DTensors are computed on arrays that every axis replicates."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from placed_arrays import mesh_2x2

import meshdist
from meshdist.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

MATRIX = np.array([[4.0, 1, 2], [1, 5, 3], [2, 3, 6], [0, 1, 7]])
VECTOR = np.array([0.0, 1, 9, 10])

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "polyfit": lambda a, v: np.polyfit(v, a, 1),
    "polyfit, full=": lambda a, v: np.polyfit(v, a, 1, full=True),
    "unwrap": lambda a, v: np.unwrap(v),
    "kron": np.kron,
    "kron with a plain array": lambda a, v: np.kron(a, [1, 2]),
    "piecewise": lambda a, v: np.piecewise(a, [a < 3, a >= 3], [lambda x: -x, 7]),
    "pinv": lambda a, v: np.linalg.pinv(a),
    "cond": lambda a, v: np.linalg.cond(a),
    "matrix_rank": lambda a, v: np.linalg.matrix_rank(a),
    "partition": lambda a, v: np.partition(a, 1),
    "insert": lambda a, v: np.insert(v, 1, a[0]),
    "block": lambda a, v: np.block([[a], [a]]),
    "choose": lambda a, v: np.choose([0, 1, 0, 1], [v, v + 1]),
    "meshgrid": lambda a, v: np.meshgrid(v, v),
    "histogram2d": lambda a, v: np.histogram2d(v, v, bins=2),
    "unravel_index": lambda a, v: np.unravel_index(v.astype(int), (3, 4)),
    "apply_over_axes": lambda a, v: np.apply_over_axes(np.sum, a, [0, 1]),
    "a part": lambda a, v: np.rot90(a)[0],
    "two calls": lambda a, v: np.vander(v, 3) @ np.diagflat(v[:3]),
    "add.outer": lambda a, v: np.add.outer(a, v),
    "multiply.outer with a plain array": lambda a, v: np.multiply.outer([1, 2], v),
    "add.reduceat": lambda a, v: np.add.reduceat(v, [0, 2]),
    "maximum.reduceat": lambda a, v: np.maximum.reduceat(a, np.array([0, 1]), axis=1),
    "shares_memory": lambda a, v: np.shares_memory(a, v),
}


def _compare(result: Any, wanted: Any) -> None:
    if isinstance(wanted, (tuple, list)):
        assert type(result) is type(wanted)
        for one, other in zip(result, wanted, strict=True):
            _compare(one, other)
    elif isinstance(wanted, (np.ndarray, np.generic)):
        assert isinstance(result, DTensor)
        assert result.placements == (Replicate(), Replicate())
        assert result.dtype == wanted.dtype
        np.testing.assert_array_equal(result.to_local(), wanted, strict=True)
    else:
        assert type(result) is type(wanted)
        assert result == wanted


@pytest.mark.parametrize("case", CALLS)
def test_results_are_numpys_and_nothing_is_sent(case: str) -> None:
    def program() -> None:
        mesh, call = mesh_2x2(), CALLS[case]
        with mesh.account() as account:
            result = call(distribute_tensor(MATRIX, mesh, {}, None), distribute_tensor(VECTOR, mesh, {}, None))
        assert account.total().calls == 0
        _compare(result, call(MATRIX, VECTOR))

    meshdist.run(program, 4, timeout=30)


@pytest.mark.parametrize("placement", [Shard(0), Partial()])
@pytest.mark.parametrize(
    "call",
    [
        np.unwrap,
        lambda v: np.kron(VECTOR, v),
        lambda v: np.block([[v, VECTOR]]),
        lambda v: np.add.outer(v, VECTOR),
        lambda v: np.add.at(v, [0], 1),
        lambda v: np.add.reduceat(v, [0, 2]),
    ],
)
def test_what_is_sharded_or_pending_is_refused(placement: Any, call: Any) -> None:
    def program() -> None:
        v = distribute_tensor(VECTOR, mesh_2x2(), {"tp": placement}, None)
        with pytest.raises(TypeError, match=r"np\.[\w.]+ does not take sharded or pending DTensors; (pass|assign)"):
            call(v)

    meshdist.run(program, 4, timeout=30)


def test_what_an_argument_becomes() -> None:
    def program() -> None:
        x = distribute_tensor(MATRIX, mesh_2x2(), {}, None)
        np.fill_diagonal(x, 0)
        assert x.full().trace() == 0
        out = distribute_tensor(np.zeros(3), x.mesh, {}, None)
        assert np.choose([0, 1, 0], [x[1], x[2]], out=out) is out
        assert out.full().tolist() == [1, 3, 3]
        assert np.real_if_close(x) is x
        changed: Any = np.add.at(x, ([0, 0], [1, 1]), 5)
        assert changed is None
        assert x.full()[0, 1] == 11
        outer = distribute_tensor(np.zeros((3, 3)), x.mesh, {}, None)
        assert np.add.outer(x[1], x[1], out=outer) is outer
        assert outer.full()[2, 2] == 6

    meshdist.run(program, 4, timeout=30)


def test_what_stays_refused() -> None:
    def program() -> None:
        x = distribute_tensor(VECTOR, mesh_2x2(), {}, None)
        with tempfile.TemporaryDirectory() as folder:
            with pytest.raises(
                TypeError, match=r"np.save does not take DTensors, .* call x.full\(root=0\) on all ranks"
            ):
                np.save(Path(folder) / "x", x)
            with pytest.raises(TypeError, match="np.zeros is not available for DTensors"):
                np.zeros(3, like=x)
            assert not list(Path(folder).iterdir())
        with pytest.raises(np.linalg.LinAlgError):  # an error of NumPy, on all ranks
            np.linalg.pinv(x)

    meshdist.run(program, 4, timeout=30)
