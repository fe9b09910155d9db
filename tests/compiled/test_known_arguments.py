"""Arguments that are compared by their values: the core makes such calls again without Python."""

import sys

import numpy as np
import pytest
from python_calls import fewest_functions, python_functions

import meshdist as dist
from meshdist import core

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]
KINDS = ("width by name", "widths", "widths in a list", "periodic axes", "periodic by name", "dims by name", "halo tag")
KINDS += ("shift by", "shift tag", "shift periodic", "sendrecv ranks", "sendrecv tag", "send and recv", "columns")
KINDS += ("columns of a view", "send and recv of columns", "irecv and isend of columns", "halo of columns")
# What checks arguments, or begins a message.
CHECKS = {"halo_exchange", "shift", "sendrecv", "send", "isend", "irecv", "peer"}
CHECKS |= {"_per_axis", "_sendable", "_check_tag"}


def exchange_columns(square, peer):
    receiving = dist.irecv(square[:, 0], peer)
    dist.isend(square[:, -1], peer).wait()
    receiving.wait()


def made_again(name):
    """Return the functions that run in Python in a later call; each call has new objects as arguments."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    rank, block, x, out = dist.get_rank(), np.ones((6, 2)), np.ones(3), np.zeros(3)

    square = np.ones((6, 6))
    count, wraps = 1, True  # not constants: each call makes a new tuple

    def other():
        return np.int64(1 - rank)

    calls = {
        "width by name": lambda: mesh.halo_exchange(block, {"x": 1}),
        "widths": lambda: mesh.halo_exchange(block, width=(count,)),
        "widths in a list": lambda: mesh.halo_exchange(block, width=[np.int64(1)]),
        "periodic axes": lambda: mesh.halo_exchange(block, periodic=(wraps,)),
        "periodic by name": lambda: mesh.halo_exchange(block, periodic={"x": np.True_}),
        "dims by name": lambda: mesh.halo_exchange(block, dims={"x": 0}),
        "halo tag": lambda: mesh.halo_exchange(block, tag=np.int64(1000)),
        "shift by": lambda: mesh.shift(x, np.int64(1), out=out),
        "shift tag": lambda: mesh.shift(x, out=out, tag=np.int64(1000)),
        "shift periodic": lambda: mesh.shift(x, periodic=np.True_, out=out),
        "sendrecv ranks": lambda: mesh.sendrecv(x, out, other(), other()),
        "sendrecv tag": lambda: mesh.sendrecv(x, out, 1 - rank, 1 - rank, tag=np.int64(1000)),
        "send and recv": lambda: (
            dist.send(x, other(), tag=np.int64(7)) if rank == 0 else dist.recv(out, other(), tag=7)
        ),
        "columns": lambda: mesh.sendrecv(square[:, -2], square[:, 0], 1 - rank, 1 - rank),
        "columns of a view": lambda: mesh.shift(square[1:-1, 4:], out=square[1:-1, :2]),
        "send and recv of columns": lambda: (
            dist.send(square[:, 1], other()) if rank == 0 else dist.recv(square[:, 3], other())
        ),
        "irecv and isend of columns": lambda: exchange_columns(square, 1 - rank),
        "halo of columns": lambda: mesh.halo_exchange(square[:, 1:], dims=[1]),
    }
    for _ in range(5):
        calls[name]()
        dist.barrier()  # a sender that is far ahead would keep messages back
    return fewest_functions(calls[name])


@pytest.mark.parametrize("name", KINDS)
def test_arguments_are_not_checked_again(worlds, name):
    first, second = worlds.world("gloo", 2).run(made_again, name)
    assert CHECKS.isdisjoint(first)
    assert CHECKS.isdisjoint(second)


def another_value():
    """Return whether each call was made by Python: an equal dict, others, and others of equal contents."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    block = np.ones((8, 2))
    for _ in range(5):
        mesh.halo_exchange(block, {"x": 1})
    found = []
    for width in ({"x": 1}, {"x": 2}, {0: 1}, {}, (1,), [1], {"x": 1}):
        found.append("halo_exchange" in python_functions(lambda width=width: mesh.halo_exchange(block, width)))
    return found


def test_a_known_call_is_told_from_others_by_what_its_dict_holds(worlds):
    wanted = [False, True, True, True, True, True, False]
    assert worlds.world("gloo", 2).run(another_value) == [wanted] * 2


def released():
    """Return how many references there are to what the arguments hold, more than before."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    block, number = np.ones((8, 2)), np.int64(1)
    before = sys.getrefcount(number)
    for _ in range(50):
        mesh.halo_exchange(block, {"x": number}, [True], dims=(0,))
    return sys.getrefcount(number) - before


def test_no_references_to_items_are_lost(worlds):
    assert worlds.world("gloo", 2).run(released) == [0, 0]
