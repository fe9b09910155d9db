"""What a rank says at the end of a group about messages that have arrived and were never received."""

import numpy as np
import pytest
from last_warnings import warnings_at_the_end

import meshdist as dist
from meshdist import DistBackendError

pytestmark = pytest.mark.timeout(60)
PLACES = pytest.mark.parametrize("backend", ["gloo", "threads", "mpi-openmpi"])


def some_are_left(group):
    if dist.get_rank() == 0:
        for tag in (7, 44, 44, 3):
            dist.isend(np.ones(4), 1, group=group, tag=tag)
    else:
        dist.recv(np.ones(4), 0, group=group, tag=7)
    group.barrier()


def those_before_the_last_are_left(group):
    if dist.get_rank() == 0:
        for tag in range(12):
            dist.isend(np.ones(4), 1, group=group, tag=tag)
    else:
        dist.recv(np.ones(4), 0, group=group, tag=11)
    group.barrier()


def one_to_itself_is_left(group):
    dist.isend(np.ones(4), dist.get_rank(), group=group, tag=5)


def one_from_a_rank_that_was_not_listened_to_is_left(group):
    x = np.ones(4)
    if group.rank() == 1:
        group.send(x, 0, tag=7)
    group.all_reduce(x)
    group.all_reduce(x)


def one_is_sent_before_the_first_call(group):
    one_from_a_rank_that_was_not_listened_to_is_left(group)


def one_is_sent_after_the_first_call(group):
    group.all_reduce(np.ones(4))
    one_from_a_rank_that_was_not_listened_to_is_left(group)


def a_list_of_objects_is_left(group):
    if group.rank() == 1:
        group.send_object_list(["a", {"b": 1}], 0, tag=7)
    group.barrier()


def nobody_calls_a_collective(group):
    if group.rank() == 1:
        group.send(np.ones(4), 0, tag=7)
        group.send(np.ones(4), 2)
    if group.rank() == 2:
        group.recv(np.ones(4), 1)
        group.send(np.ones(4), 0)
    if group.rank() == 0:
        group.recv(np.ones(4), 2)


def one_was_looked_for_too_early(group):
    if group.rank() == 0:
        assert group.iprobe(1) is None
    one_is_sent_after_the_first_call(group)


def all_is_received_from_a_rank_and_none_from_another(group):
    x = np.ones(4)
    if group.rank() == 1:
        group.send(x, 0)
    if group.rank() == 0:
        group.recv(x, 1)
    group.all_reduce(x)


def all_are_received(group):
    x = np.ones(4)
    if dist.get_rank() == 0:
        dist.isend(x, 1, group=group, tag=7)
        group.send_object_list(["a"], 1)
    else:
        work = dist.irecv(x, 0, group=group, tag=7)
        group.recv_object_list([None], 0)
        work.wait()
    group.all_gather_object([None, None], "object")
    group.all_reduce(x)


def a_call_has_failed(group):
    some_are_left(group)
    with pytest.raises(DistBackendError):
        group.all_reduce(np.ones(2 + dist.get_rank()))


@PLACES
def test_how_many_from_whom_and_with_which_tags(worlds, backend):
    of_sender, of_receiver = worlds.world(backend, 2).run(warnings_at_the_end, some_are_left)
    assert of_sender == []
    assert of_receiver == [
        "group 'pair' was destroyed, and 3 messages that had arrived were never received: 1 from rank 0 with"
        " tag 3, 2 from rank 0 with tag 44"
    ]


@PLACES
def test_a_long_list_is_cut(worlds, backend):
    _, (warning,) = worlds.world(backend, 2).run(warnings_at_the_end, those_before_the_last_are_left)
    assert "and 11 messages that had arrived were never received: 1 from rank 0 with tag 0, " in warning
    assert warning.endswith("1 from rank 0 with tag 7, ...")


@PLACES
def test_messages_to_oneself_count(worlds, backend):
    for rank, (warning,) in enumerate(worlds.world(backend, 2).run(warnings_at_the_end, one_to_itself_is_left)):
        assert warning.endswith(f"1 message that had arrived was never received: 1 from rank {rank} with tag 5")


@PLACES
@pytest.mark.parametrize(
    "use",
    [
        one_is_sent_before_the_first_call,
        one_is_sent_after_the_first_call,
        a_list_of_objects_is_left,
        nobody_calls_a_collective,
        one_was_looked_for_too_early,
    ],
)
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2, 3)])
def test_also_from_a_rank_that_nothing_was_received_from(worlds, backend, use, ranks):
    told = worlds.world(backend, 4).run(warnings_at_the_end, use, ranks)
    sender = "rank 1" if ranks[0] == 0 else "global rank 2"
    assert told.pop(ranks[0]) == [
        f"group 'pair' was destroyed, and 1 message that had arrived was never received: 1 from {sender} with tag 7"
    ]
    assert told == [[], [], []]


@PLACES
def test_silent_where_some_ranks_have_sent_nothing(worlds, backend):
    told = worlds.world(backend, 3).run(warnings_at_the_end, all_is_received_from_a_rank_and_none_from_another)
    assert told == [[], [], []]


@PLACES
@pytest.mark.parametrize("use", [all_are_received, a_call_has_failed])
def test_silent_after_a_failure_and_where_none_is_left(worlds, backend, use):
    assert worlds.world(backend, 2).run(warnings_at_the_end, use) == [[], []]


FIRST_MESSAGES = {
    "send": lambda group: group.send(np.ones(4), 1),
    "isend": lambda group: group.isend(np.ones(4), 1).wait(),
}


def to_a_rank_that_has_left(name):
    group = dist.new_group()
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
        dist.barrier()
        return
    dist.barrier()
    with pytest.raises(DistBackendError, match="rank 1 .*has destroyed the group without receiving the message"):
        FIRST_MESSAGES[name](group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["gloo", "gloo-tcp", "threads"])
@pytest.mark.parametrize("name", FIRST_MESSAGES)
def test_the_first_message_to_a_rank_that_has_left_raises(worlds, backend, name):
    worlds.world(backend, 2).run(to_a_rank_that_has_left, name)
