"""Wrong arguments: the exact class, before anything is sent, and a message that says where, what was due, what came."""

import re

import numpy as np
import pytest
from wrong_calls import ROWS, SIZE

import meshdist as dist

pytestmark = pytest.mark.timeout(60)


def attempt(row):
    """Make the wrong call; return what it raised, and what the next call gives."""
    call, _, _ = ROWS[row]
    try:
        call()
    except Exception as error:
        raised = type(error), str(error)
    else:
        raised = None, "nothing was raised"
    return raised, int(dist.all_reduce(np.array(dist.get_rank())))


@pytest.mark.parametrize("row", ROWS)
def test_wrong_arguments(world_of_3, row):
    _, kind, words = ROWS[row]
    collective = row.partition(":")[0]
    for rank, ((raised, message), total) in enumerate(world_of_3.run(attempt, row)):
        assert raised is kind, message
        assert re.search(rf"^{collective} on group 'world' \(rank {rank} of 3\): .*{words}", message, re.DOTALL), (
            message
        )
        assert total == sum(range(SIZE)), "the group is not in step any more"


def on_another_group():
    group = dist.new_group(group_desc="my group")
    found = []
    for call in (
        lambda: group.all_reduce("text"),
        lambda: dist.all_reduce("text", group=group),
        lambda: group.broadcast(np.zeros(3), src=9),
        lambda: dist.broadcast(np.zeros(3), src=9, group=group),
        lambda: group.send(np.zeros(3), group.rank()),
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        found.append(str(raised.value))
    group.barrier()
    return found


def test_the_message_names_the_group(world_of_3):
    for messages in world_of_3.run(on_another_group):
        assert [message for message in messages if "on group 'my group' (rank" not in message] == []


def no_group(value, words):
    words = f"group must be a ProcessGroup, a DeviceMesh or None, got {words}"
    for name, call in {
        "all_reduce": lambda: dist.all_reduce(np.zeros(3), group=value),
        "send": lambda: dist.send(np.zeros(3), 1, group=value),
        "all_gather_object": lambda: dist.all_gather_object([None] * 3, 1, group=value),
        "get_rank": lambda: dist.get_rank(value),
    }.items():
        with pytest.raises(TypeError) as raised:
            call()
        hint = "; for a tag, write tag=0" if name == "send" and value == 0 else ""
        assert str(raised.value) == f"{name}: {words}{hint}"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "int"),
        ("tp", """'tp'; for an axis of a mesh, write mesh["tp"]"""),
        ([0, 1], "list; to create a group of these ranks, call new_group([0, 1])"),
        (range(2), "range; to create a group of these ranks, call new_group([0, 1])"),
        (tuple(range(9)), "tuple; to create a group of these ranks, call new_group(ranks)"),
        (["tp"], "list"),
    ],
    ids=repr,
)
def test_what_is_no_group(world_of_3, value, words):
    world_of_3.run(no_group, value, words)


def subclasses():
    size = dist.get_world_size()
    matrix = np.matrix(np.ones((5, 5)))
    assert dist.all_reduce(matrix) is matrix
    np.testing.assert_array_equal(np.asarray(matrix), np.full((5, 5), size))
    out = np.zeros((size * 5, 5)).view(type(matrix))
    dist.all_gather_into_tensor(out, matrix)
    np.testing.assert_array_equal(np.asarray(out), np.full((size * 5, 5), size))


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_subclasses_of_ndarray_are_taken_as_the_arrays_they_are(world_of_3):
    world_of_3.run(subclasses)


class WithInterface:
    """An array of another library."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


def interfaces():
    size = dist.get_world_size()
    for count in (3, 40_000):
        mine = WithInterface(np.full(count, dist.get_rank()))
        assert dist.all_reduce(mine) is mine
        assert set(mine.array.tolist()) == {sum(range(size))}
        blocks = [WithInterface(np.zeros(count, int)) for _ in range(size)]
        dist.all_gather(blocks, WithInterface(np.full(count, dist.get_rank())))
        assert [set(block.array.tolist()) for block in blocks] == [{rank} for rank in range(size)]


def test_arrays_of_other_libraries_are_written_in_place(world_of_3):
    world_of_3.run(interfaces)
