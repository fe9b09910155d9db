"""Messages of all kinds, received in all ways, in random orders: each once, in the order of its sender and tag."""

import random

import numpy as np
import pytest

import meshdist as dist

pytestmark = pytest.mark.timeout(120)

TAGS = (0, 1, 5)
NUM_MESSAGES = 60
EAGER_BYTES = 64 << 10


def message(rng, sender, number):
    """Return what is sent as message `number` of a sender: an array, or a list of objects."""
    size = rng.choice((1, 1, 1, 2, 300, 9_000, 20_000))
    if rng.random() < 0.5:
        return [number, bytes(size)][: rng.choice((1, 2))]
    return np.full(size, sender + 10.0 * number)


def plan(seed, sender):
    rng = random.Random(f"{seed} {sender}")
    return [(rng.choice(TAGS), message(rng, sender, number)) for number in range(NUM_MESSAGES)]


def send_all(group, seed):
    rng, works = random.Random(seed), []
    for tag, given in plan(seed, group.rank()):
        is_list = isinstance(given, list)
        # Only a message that is buffered may be sent before an earlier one is received.
        if rng.random() < 0.5 or (not is_list and given.nbytes > EAGER_BYTES):
            works.append((group.isend_object_list if is_list else group.isend)(given, 0, tag=tag))
        else:
            (group.send_object_list if is_list else group.send)(given, 0, tag=tag)
    for work in works:
        work.wait()


def receive_all(group, seed):
    """Receive every message in a random way; return those that were not what the sender's next one of that tag is."""
    rng, wrong = random.Random(seed), []
    awaited = {}
    for sender in range(1, group.size()):
        for tag, given in plan(seed, sender):
            awaited.setdefault((sender, tag), []).append(given)
    while awaited:
        sender, tag = rng.choice(sorted(awaited))
        src, any_tag = rng.choice((sender, None)), rng.choice((tag, None))
        found = group.probe(src, tag=any_tag) if rng.random() < 0.5 else None
        while found is None:
            found = group.iprobe(src, tag=any_tag)
        sender, tag = found.source, found.tag
        given = awaited[sender, tag].pop(0)
        if not awaited[sender, tag]:
            del awaited[sender, tag]
        # Nothing but this message fits a receive from its sender; one from any rank may get that of another one.
        if found.num_objects is None:
            into = np.zeros(found.count(), found.dtype)
            if rng.random() < 0.5:
                group.recv(into, sender, tag=tag)
            else:
                group.irecv(into, sender, tag=tag).wait()
            same = isinstance(given, np.ndarray) and np.array_equal(into, given)
        elif rng.random() < 0.5:
            objects = [None] * found.num_objects
            group.recv_object_list(objects, sender, tag=tag)
            same = objects == given
        else:
            same = group.irecv_object_list(sender, tag=tag).result() == given
        if not same:
            wrong.append((sender, tag, given))
    return wrong


def exchange(seeds):
    group, wrong = dist.new_group(), []
    for seed in seeds:
        wrong += send_all(group, seed) or [] if group.rank() else receive_all(group, seed)
        group.barrier()
    return wrong


@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp", "gloo-hosts"])
@pytest.mark.parametrize("size", [2, 4])
def test_each_message_is_received_once_and_in_order(worlds, backend, size):
    assert worlds.world(backend, size).run(exchange, range(4)) == [[]] * size


def from_whoever_sends(turns):
    """Rank 0 receives arrays from any rank, and returns what each sender's came as."""
    group = dist.new_group()
    x, came = np.zeros(1), {rank: [] for rank in range(1, group.size())}
    if group.rank():
        for turn in range(turns):
            group.send(np.array([float(turn)]), 0)
        return None
    for turn in range(turns * (group.size() - 1)):
        work = group.irecv(x) if turn % 3 == 0 else None
        source = group.recv(x) if work is None else (work.wait(), work.source_rank())[1]
        came[source].append(x.item())
    return came


@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp", "gloo-hosts"])
def test_from_any_rank_the_messages_of_each_come_in_order(worlds, backend):
    came = worlds.world(backend, 4).run(from_whoever_sends, 200)[0]
    assert came == {rank: [float(turn) for turn in range(200)] for rank in (1, 2, 3)}
