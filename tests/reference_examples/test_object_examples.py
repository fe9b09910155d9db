"""The documented examples of collectives over objects."""

import pytest
from documented import check, place

import meshdist as dist

pytestmark = pytest.mark.timeout(60)
# The pages have three; a fourth for four ranks.
OBJECTS = ["foo", 12, {1: 2}, ("bar", None)]
PRINTED = ["foo", 12, {1: 2}]


def broadcast(device):
    rank, size = place()
    objects = OBJECTS[:size] if rank == 0 else [None] * size
    dist.broadcast_object_list(objects, src=0, device=device)
    return objects


@pytest.mark.parametrize("device", [None, "cpu"])
def test_broadcast(initialised, device):
    check(initialised, broadcast, [OBJECTS[: initialised.size]] * initialised.size, {3: [PRINTED] * 3}, (device,))


def all_gather():
    rank, size = place()
    gathered = OBJECTS[:size]
    output = [None for _ in gathered]
    dist.all_gather_object(output, gathered[rank])
    return output


def test_all_gather(initialised):
    check(initialised, all_gather, [OBJECTS[: initialised.size]] * initialised.size, {3: [PRINTED] * 3})


def gather():
    rank, size = place()
    gathered = OBJECTS[:size]
    output = [None for _ in gathered]
    dist.gather_object(gathered[rank], output if rank == 0 else None, dst=0)
    return output


def test_gather(initialised):
    size = initialised.size
    expected = [OBJECTS[:size], *[[None] * size] * (size - 1)]
    check(initialised, gather, expected, {3: [PRINTED, [None] * 3, [None] * 3]})


def scatter():
    rank, size = place()
    output_list = [None]
    # Other ranks than the source may pass any list; its elements are not used.
    dist.scatter_object_list(output_list, OBJECTS[:size] if rank == 0 else [None] * size, src=0)
    return output_list


def test_scatter(initialised):
    check(initialised, scatter, [[item] for item in OBJECTS[: initialised.size]], {3: [["foo"], [12], [{1: 2}]]})
