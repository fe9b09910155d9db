"""Objects: any that can be pickled, of any size; lists that do not fit."""

import traceback

import cases
import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(120)


def some_object(rank):
    return {"rank": rank, "text": "x" * (10 ** (rank % 3 + 1)), "array": np.arange(20_000 * rank), "none": None}


def same_object(actual, expected, what):
    cases.same(actual.pop("array").tolist(), expected.pop("array").tolist(), what)
    cases.same(actual, expected, what)


def collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    for root in range(size):
        objects = [some_object(rank), ("a", rank), None]
        assert dist.broadcast_object_list(objects, root) is objects
        same_object(objects[0], some_object(root), "broadcast_object_list")
        cases.same(objects[1:], [("a", root), None], "broadcast_object_list")
        taken = [None] * size if rank == root else None
        assert dist.gather_object(some_object(rank), taken, root) is taken
        for other, item in enumerate(taken or []):
            same_object(item, some_object(other), "gather_object")
        out = [None, "kept"]
        given = [some_object(other) for other in range(size)] if rank == root else None
        assert dist.scatter_object_list(out, given, root) is out
        same_object(out[0], some_object(rank), "scatter_object_list")
        cases.same(out[1:], ["kept"], "scatter_object_list")
    taken = [None] * size
    assert dist.all_gather_object(taken, some_object(rank)) is taken
    for other, item in enumerate(taken):
        same_object(item, some_object(other), "all_gather_object")
    dist.broadcast_object_list([], 0)


def test_collectives_of_objects(world):
    world.run(collectives)


def without_root_and_in_groups():
    rank, size = dist.get_rank(), dist.get_world_size()
    taken = [None] * size if rank == 0 else None
    dist.gather_object(rank, taken)
    cases.same(taken, list(range(size)) if rank == 0 else None, "gather_object to the first rank")
    group = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    objects, out, everyone = [rank], [None], [None] * size
    group.broadcast_object_list(objects, 0)
    group.scatter_object_list(out, list("abcde"[:size]) if group.rank() == 0 else None, src=0)
    group.all_gather_object(everyone, rank)
    cases.same((objects, out, everyone), ([size - 1], ["abcde"[group.rank()]], list(group.ranks)), "methods")


def test_without_root_and_in_groups(world):
    world.run(without_root_and_in_groups)


def messages():
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = [some_object(3), "text", []]
    if rank == 0:
        dist.send_object_list(sent, size - 1)
        dist.send_object_list([], size - 1)
    elif rank == size - 1:
        objects = [None] * 3
        cases.same(dist.recv_object_list(objects, 0), 0, "what recv_object_list returns")
        same_object(objects[0], some_object(3), "recv_object_list")
        cases.same(objects[1:], ["text", []], "recv_object_list")
        dist.recv_object_list([], 0)


def test_messages_of_objects(world_of_several):
    world_of_several.run(messages)


def not_picklable():
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = lambda: None  # noqa: E731 - what pickle refuses
    for name, call in (
        ("broadcast_object_list", lambda: dist.broadcast_object_list([1, wrong], rank)),
        ("all_gather_object", lambda: dist.all_gather_object([None] * size, wrong)),
        ("gather_object", lambda: dist.gather_object(wrong, [None] * size, rank)),
        ("scatter_object_list", lambda: dist.scatter_object_list([None], [wrong] * size, rank)),
        ("send_object_list", lambda: dist.send_object_list([wrong], (rank + 1) % size)),
    ):
        where = rf"{name} on group 'world' \(rank {rank} of {size}\)"
        words = rf"^{where}: an object of type function cannot be pickled: .*<lambda>.*; pass data, or functions"
        with pytest.raises(TypeError, match=words) as caught:
            call()
        told = "".join(traceback.format_exception(caught.value))
        assert told.count("Traceback (most recent call last)") == 1


class Fails:
    def __reduce__(self):
        raise ZeroDivisionError("of the object's own")


def not_picklable_by_its_own_code():
    """The traceback of the object's code comes before that of the call, once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    words = "an object of type Fails cannot be pickled: of the object's own; pass data"
    for call in (
        lambda: dist.all_gather_object([None] * size, Fails()),
        lambda: dist.send_object_list([1, Fails()], (rank + 1) % size),
    ):
        with pytest.raises(TypeError, match=words) as caught:
            call()
        told = "".join(traceback.format_exception(caught.value))
        assert told.count("Traceback (most recent call last)") == 2
        assert told.count("in __reduce__") == 1


def refused():
    rank, size = dist.get_rank(), dist.get_world_size()
    other = (rank + 1) % size
    for kind, text, call in (
        (ValueError, f"must hold {size} objects", lambda: dist.all_gather_object([None] * (size + 1), 1)),
        (ValueError, f"must hold {size} objects", lambda: dist.gather_object(1, [], rank)),
        (ValueError, "is for the destination", lambda: dist.gather_object(1, [None] * size, other)),
        (ValueError, f"must hold {size} objects", lambda: dist.scatter_object_list([None], [1] * (size + 1), rank)),
        (ValueError, "at least one element", lambda: dist.scatter_object_list([], [1] * size, rank)),
        (TypeError, "must be a list", lambda: dist.broadcast_object_list("abc", rank)),
    ):
        with pytest.raises(kind, match=text):
            call()


@pytest.mark.parametrize("program", [not_picklable, not_picklable_by_its_own_code, refused])
def test_what_is_refused_before_anything_is_sent(world_of_several, program):
    world_of_several.run(program)


def lengths_that_differ():
    rank, group = dist.get_rank(), dist.new_group()

    def broadcast_and_meet():
        dist.broadcast_object_list([None] * (3 if rank == 0 else 2), 0, group)
        group.barrier()  # the root may have returned before the others came

    with pytest.raises(
        dist.DistBackendError, match=r"disagree[^\n]*\n.*\(3 objects, root=0\).*\n.*\(2 objects, root=0\)"
    ):
        broadcast_and_meet()


def test_lists_of_unequal_length_raise_on_all_ranks(world_of_several):
    world_of_several.run(lengths_that_differ)


def from_any_rank():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        came = {other: [] for other in range(1, size)}
        for _ in range(2 * (size - 1)):
            objects = [None, None]
            source = dist.recv_object_list(objects)
            cases.same(objects[0], source, "the sender")
            came[source].append(len(objects[1]))
        cases.same(came, {other: [1000 * other, 1000 * other + 1] for other in range(1, size)}, "recv_object_list")
    else:
        for number in range(2):
            dist.send_object_list([rank, "x" * (1000 * rank + number)], 0)


def test_the_bytes_come_from_the_rank_that_sent_the_sizes(world_of_several):
    world_of_several.run(from_any_rank)
