"""What errors of arrays over a mesh say: the call, what it got, and what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from placed_arrays import mesh_2x2, place

import meshdist
from meshdist import functional
from meshdist.tensor import DTensor, Partial, PlacementError, Replicate, Shard, distribute_tensor, local_map, zeros

_numpy: Any = np  # whose stubs do not know of DTensors
WHOLE = np.arange(12.0).reshape(4, 3)


def _pending(mesh: Any) -> Any:
    return place(WHOLE, mesh, {"tp": Partial()})


def _sharded(mesh: Any) -> Any:
    return place(WHOLE, mesh, {"dp": Shard(0)})


def _added_in_place(y: Any, x: Any) -> None:
    y += x


_TEXTS = "encode texts and objects as numbers, for example by np.unique"

MESSAGES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "assignment to a pending sum": (
        lambda mesh: _pending(mesh).__setitem__(slice(None), 1),
        PlacementError,
        r"^x\[key\] = value: the array is \(4, 3\) as .*Partial\('sum'\).*write x = x.redistribute",
    ),
    "fill": (lambda mesh: _pending(mesh).fill(2), PlacementError, r"^x.fill: the array is .*Partial"),
    "copyto": (lambda mesh: np.copyto(_pending(mesh), 1), PlacementError, r"^np.copyto: the array is .*Partial"),
    "putmask": (
        lambda mesh: np.putmask(_pending(mesh), WHOLE > 1, 1),
        PlacementError,
        r"^np.putmask: the array is .*Partial",
    ),
    "a DTensor to distribute": (
        lambda mesh: distribute_tensor(_sharded(mesh), mesh, {}),
        TypeError,
        r"^distribute_tensor: expected an array that is not distributed yet, got a DTensor; write x.redistribute",
    ),
    "a DTensor as a block": (
        lambda mesh: DTensor.from_local(_sharded(mesh), mesh, {}),
        TypeError,
        r"^DTensor.from_local: expected an array that is not distributed yet",
    ),
    "a DTensor from local_map": (
        lambda mesh: local_map(lambda block: _sharded(mesh), {})(_sharded(mesh)),
        TypeError,
        r"^local_map: expected an array that is not distributed yet",
    ),
    "texts": (
        lambda mesh: distribute_tensor(np.array(["a"]), mesh, {}),
        TypeError,
        f"^distribute_tensor: array has the unsupported dtype <U1; .*{_TEXTS}",
    ),
    "a list of texts": (
        lambda mesh: distribute_tensor(["a"], mesh, {}, None),
        TypeError,
        f"^distribute_tensor: array has the unsupported dtype <U1; .*{_TEXTS}",
    ),
    "objects": (lambda mesh: distribute_tensor(np.array([None]), mesh, {}), TypeError, _TEXTS),
    "dates": (
        lambda mesh: distribute_tensor(np.array(["2020"], "M8[D]"), mesh, {}),
        TypeError,
        r"pass array.view\('int64'\)",
    ),
    "fields": (
        lambda mesh: distribute_tensor(np.zeros(1, [("a", int)]), mesh, {}),
        TypeError,
        r"make an array of each field: array\['name'\]",
    ),
    "astype": (
        lambda mesh: _sharded(mesh).astype("U3"),
        TypeError,
        f"^astype: the result has the unsupported dtype <U3; .*{_TEXTS}",
    ),
    "reshape, rows that fit no rank": (
        lambda mesh: np.reshape(place(np.zeros((7, 5)), mesh, {"dp": Shard(0), "tp": Shard(0)}), (5, 7)),
        PlacementError,
        r"Call x.redistribute\({'dp': Replicate\(\), 'tp': Replicate\(\)}\), which sends",
    ),
    "reshape, other blocks": (
        lambda mesh: np.reshape(place(np.zeros(10), mesh, {"dp": Shard(0, sizes=(3, 7))}), (5, 2)),
        PlacementError,
        r"Call x.redistribute\({'dp': Shard\(0, sizes=\(4, 6\)\), 'tp': Replicate\(\)}\), which sends",
    ),
    "a class in a dict": (lambda mesh: zeros(4, mesh=mesh, placements={"dp": Shard}), TypeError, r"mean Shard\(0\)\?"),  # type: ignore[dict-item]
    "a class in a list": (
        lambda mesh: zeros(4, mesh=mesh, placements=[Shard, Replicate()]),  # type: ignore[list-item]
        TypeError,
        r"did you mean Shard\(0\)\?",
    ),
    "a class alone": (lambda mesh: zeros(4, mesh=mesh, placements=Partial), TypeError, r"did you mean Partial\(\)\?"),  # type: ignore[arg-type]
    "an int in a list": (
        lambda mesh: zeros(4, mesh=mesh, placements=[0, Replicate()]),  # type: ignore[list-item]
        TypeError,
        r"did you mean Shard\(0\)\?",
    ),
    "a name": (lambda mesh: zeros(4, mesh=mesh, placements="dp"), TypeError, "a dict by axis, got 'dp'"),  # type: ignore[arg-type]
    "out= with where=": (
        lambda mesh: _numpy.add(_sharded(mesh), 1, out=place(WHOLE, mesh, {"dp": Shard(1)}), where=WHOLE > 3),
        PlacementError,
        r"placements",
    ),
    "out= with where=, free": (
        lambda mesh: _numpy.add(_sharded(mesh), 1, out=place(WHOLE, mesh, {}), where=WHOLE > 3),
        PlacementError,
        r"which is \(4, 3\) as .*; out= is \(4, 3\) as .* Write out = out.redistribute\({'dp': Shard\(0\), .*before",
    ),
    "a plain array in place": (
        lambda mesh: _added_in_place(WHOLE.copy(), _sharded(mesh)),
        TypeError,
        r"would write a DTensor x into a plain array y; write y = y [+] x, .*, or y [+]= x.full\(\)",
    ),
    "a plain out=": (
        lambda mesh: _numpy.add(_sharded(mesh), 1, out=WHOLE.copy()),
        TypeError,
        r"out= must be a DTensor where an operand is one.*x.full\(\)",
    ),
    "an array made of objects": (
        lambda mesh: zeros((3,), object, mesh=mesh),
        TypeError,
        "^zeros: the array has the unsupported dtype obj",
    ),
    "an array of dates like another": (
        lambda mesh: np.zeros_like(_sharded(mesh), dtype="M8[s]"),
        TypeError,
        "^np.zeros_like: the array has the unsupported dtype datetime64",
    ),
    "a function of objects": (
        lambda mesh: np.frompyfunc(abs, 1, 1)(_sharded(mesh)),
        TypeError,
        r"the result would be an array of objects; use x.full\(\)",
    ),
    "a file": (
        lambda mesh: np.save("never.npy", place(WHOLE, mesh, {})),
        TypeError,
        r"np.save does not take DTensors, since all ranks would write one file; call x.full\(root=0\) on all",
    ),
    "a function by another": (
        lambda mesh: np.vstack([_sharded(mesh), _sharded(mesh)]),
        PlacementError,
        "^np.vstack: joining along dimension 0, which is sharded",
    ),
    "a shape of two arguments": (
        lambda mesh: zeros(6, 8, mesh=mesh),
        TypeError,
        r"^zeros: expected a dtype after the shape, got 8; write a shape of several dimensions as one tuple",
    ),
    "a shape of three arguments": (
        lambda mesh: zeros(6, 8, 2, mesh=mesh),  # type: ignore[misc]
        TypeError,
        "; the shape is one argument, a tuple, and these are keywords: mesh=, placements=$",
    ),
    "a view of another dtype": (
        lambda mesh: _sharded(mesh).view("f4"),
        TypeError,
        r"^view: .* write x.astype\('f4'\) to convert the numbers, or x.to_local\(\).view\('f4'\)",
    ),
    "a view of another shape": (
        lambda mesh: _sharded(mesh).view(2, 6),
        TypeError,
        r"^view: to change the shape, write x.reshape\(2, 6\)$",
    ),
    "dim=": (lambda mesh: _sharded(mesh).sum(dim=0), TypeError, "'dim'; did you mean axis=?"),
    "keepdim=": (lambda mesh: _sharded(mesh).mean(keepdim=True), TypeError, "'keepdim'; did you mean keepdims=?"),
    "a method of its own, with dim=": (
        lambda mesh: _sharded(mesh).squeeze(dim=0),
        TypeError,
        r"^DTensor.squeeze\(\) got an unexpected keyword argument 'dim'",
    ),
    "the constructor": (
        lambda mesh: DTensor(WHOLE, mesh, {"dp": Shard(0)}),
        TypeError,
        r"^DTensor: write distribute_tensor\(array, .* or DTensor.from_local\(block,",
    ),
    "a product of tiles": (
        lambda mesh: _numpy.matmul(*[place(np.ones((4, 4)), mesh, {"dp": Shard(0), "tp": Shard(1)})] * 2),
        PlacementError,
        r"To keep both matrices sharded along both axes, write `meshdist.tensor.summa\(a, b\)`",
    ),
    "a number from local_map": (
        lambda mesh: local_map(lambda block: 1, {"dp": Shard(0)})(_sharded(mesh)),
        PlacementError,
        r"^local_map: Shard\(0\) shards a dimension that blocks of 0 dimensions do not have",
    ),
    "a vector to transform": (
        lambda mesh: np.fft.fft(place(np.ones(4), mesh, {"dp": Shard(0)})),
        PlacementError,
        r"^np.fft.fft: dimension 0 must not be sharded, since the array has no other dimension to shard; x is",
    ),
    "a tile of a sharded dimension": (
        lambda mesh: np.tile(_sharded(mesh), (2, 1)),
        PlacementError,
        r"^np.tile: the repeated dimensions must not be sharded; x is",
    ),
    "a norm of singular values": (
        lambda mesh: np.linalg.norm(_sharded(mesh), 2),
        PlacementError,
        r"^np.linalg.norm: with ord=2, the dimensions that it reduces must not be sharded; x is",
    ),
    "an axis for a list": (
        lambda mesh: functional.reduce_scatter([WHOLE], axis=0),
        TypeError,
        r"reduce_scatter on group 'world' \(.*\): x must be an array, got list; axis= and dim= split one array; a list",
    ),
    "a dim for a list": (
        lambda mesh: functional.all_to_all([WHOLE], dim=0),
        TypeError,
        r"all_to_all on group 'world' \(.*\): x must be an array, got list",
    ),
}


OF_NUMPY = {
    "array": "write `distribute_tensor",
    "identity": r"write `eye\(n",
    "distribute": "write `distribute_tensor",
    "redistribute": r"it is a method of DTensor; write `x.redistribute\(",
    "concatenate": "NumPy's functions take arrays over a mesh; write `np.concatenate`",
}


@pytest.mark.parametrize(("name", "said"), OF_NUMPY.items())
def test_names_of_numpy_that_are_not_there(name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        getattr(meshdist.tensor, name)


OF_TORCH = {
    "to": r"write `x.astype\(dtype\)` for another dtype, .* `x.redistribute\(placements\)`",
    "permute": r"write `x.transpose\(",
    "unsqueeze": r"write `np.expand_dims\(x, axis\)`",
    "float": r"write `x.astype\('float32'\)`",
    "numel": "write `x.size`",
    "grad": "`meshdist.autograd.grad",
    "redistribut": "did you mean 'redistribute'",
}


@pytest.mark.parametrize(("name", "said"), OF_TORCH.items())
def test_attributes_of_other_arrays_that_are_not_there(name: str, said: str) -> None:
    def program() -> None:
        x = _sharded(mesh_2x2())
        with pytest.raises(AttributeError, match=f"^DTensor has no attribute '{name}'.*{said}"):
            getattr(x, name)

    meshdist.run(program, 4, timeout=30)


@pytest.mark.parametrize("call", [np.unique, np.sort, np.median])
def test_the_error_of_a_call_that_other_ranks_leave_out_names_the_operation(call: Callable[[Any], Any]) -> None:
    def program() -> None:
        x = place(WHOLE.reshape(-1), mesh_2x2(), {"dp": Shard(0)})
        if meshdist.get_rank() == 3:
            call(x)

    with pytest.raises(
        meshdist.DistBackendError, match=rf"without making this call; .* in np\.{call.__name__} of \[Sh"
    ):
        meshdist.run(program, 4, timeout=30)


def test_the_ranks_are_told_which_function_exchanges_objects() -> None:
    def program() -> None:
        mesh = mesh_2x2()
        if meshdist.get_rank():
            DTensor.from_local(WHOLE, mesh, {})
        else:
            distribute_tensor(WHOLE, mesh, {})

    with pytest.raises(meshdist.DistBackendError, match="the ranks disagree") as info:
        meshdist.run(program, 4, timeout=30)
    for rank, name in ((0, "distribute_tensor"), (1, "DTensor.from_local")):
        assert re.search(rf"ranks? {rank}\b.* calls? all_gather_object\(.*in {name}\)", str(info.value))


@pytest.mark.parametrize("case", MESSAGES)
def test_messages_say_what_to_write(case: str) -> None:
    call, error, said = MESSAGES[case]

    def program() -> None:
        with pytest.raises(error, match=said):
            call(mesh_2x2())

    meshdist.run(program, 4, timeout=30)


def test_arrays_of_another_shape_are_sharded_where_they_have_the_dimension() -> None:
    def program() -> None:
        mesh = mesh_2x2()
        for placements in ({"dp": Shard(0, sizes=(0, 7))}, {"dp": Shard(1), "tp": Shard(0)}):
            x = place(np.arange(35).reshape(7, 5), mesh, placements)
            for shape in ((2, 2), (4,), (), (3, 0, 2)):
                made = np.full_like(x, 3, shape=shape)  # type: ignore[call-overload]
                assert np.array_equal(made.full(), np.full(shape, 3))

    meshdist.run(program, 4, timeout=30)


def test_whole_rows_are_advised_where_all_would_go_to_one_rank() -> None:
    def program() -> None:
        x = place(np.arange(35).reshape(7, 5), mesh_2x2(), {"dp": Shard(0), "tp": Shard(0)})
        advised = x.redistribute({"dp": Replicate(), "tp": Replicate()})
        np.testing.assert_array_equal(_numpy.reshape(advised, (5, 7)).full(), np.arange(35).reshape(5, 7))

    meshdist.run(program, 4, timeout=30)
