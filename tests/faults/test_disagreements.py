"""Ranks whose calls disagree: an error on every rank, within a second, that names both calls and where they stand."""

import inspect
import re
import sys

import numpy as np
import pytest
from trying import attempt
from until import loaded
from worlds import BACKENDS

import meshdist as dist
from meshdist.runtime.call import Signature

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
DETECTED_S = 1.0


def ones(count, dtype="float32"):
    return np.ones(count, dtype)


# What is different -> the call of most ranks, that of one; and both in the words of the message.
PAIRS = {
    "size": (
        lambda g: g.all_reduce(ones(4)),
        lambda g: g.all_reduce(ones(5)),
        ("all_reduce(float32[4], op=sum)", "all_reduce(float32[5], op=sum)"),
    ),
    "size of large arrays": (
        lambda g: g.all_reduce(ones(600_000)),
        lambda g: g.all_reduce(ones(600_001)),
        ("all_reduce(float32[600000], op=sum)", "all_reduce(float32[600001], op=sum)"),
    ),
    "small and large": (
        lambda g: g.broadcast(ones(3), 0),
        lambda g: g.broadcast(ones(300_000), 0),
        ("broadcast(float32[3], root=0)", "broadcast(float32[300000], root=0)"),
    ),
    "dtype": (
        lambda g: g.all_reduce(ones(4)),
        lambda g: g.all_reduce(ones(4, "int32")),
        ("all_reduce(float32[4], op=sum)", "all_reduce(int32[4], op=sum)"),
    ),
    "op": (
        lambda g: g.all_reduce(ones(4)),
        lambda g: g.all_reduce(ones(4), "max"),
        ("all_reduce(float32[4], op=sum)", "all_reduce(float32[4], op=max)"),
    ),
    "root of broadcast": (
        lambda g: g.broadcast(ones(4), 0),
        lambda g: g.broadcast(ones(4), 1),
        ("broadcast(float32[4], root=0)", "broadcast(float32[4], root=1)"),
    ),
    "root of reduce": (
        lambda g: g.reduce(ones(400_000), 0),
        lambda g: g.reduce(ones(400_000), 1),
        ("reduce(float32[400000], op=sum, root=0)", "reduce(float32[400000], op=sum, root=1)"),
    ),
    "collective": (
        lambda g: g.all_reduce(ones(4)),
        lambda g: g.barrier(),
        ("all_reduce(float32[4], op=sum)", "barrier()"),
    ),
    "collective of the same array": (
        lambda g: g.all_reduce(ones(4)),
        lambda g: g.broadcast(ones(4), 0),
        ("all_reduce(float32[4], op=sum)", "broadcast(float32[4], root=0)"),
    ),
    "block of all_gather": (
        lambda g: g.all_gather_into_tensor(ones(4 * g.size()), ones(4)),
        lambda g: g.all_gather_into_tensor(ones(6 * g.size()), ones(6)),
        ("x float32[4])", "x float32[6])"),
    ),
    "calls of one CRC-32": (
        lambda g: g.all_reduce(np.ones(874_116, np.float32), "product"),
        lambda g: g.all_reduce(np.ones(920_877, np.int64), "sum"),
        ("all_reduce(float32[874116], op=product)", "all_reduce(int64[920877], op=sum)"),
    ),
    "other calls of one CRC-32": (
        lambda g: g.all_reduce(np.ones(362_086, np.float16), "product"),
        lambda g: g.all_reduce(np.ones(768_160, np.int32), "max"),
        ("all_reduce(float16[362086], op=product)", "all_reduce(int32[768160], op=max)"),
    ),
    "splits or not": (
        lambda g: g.all_to_all_single(ones(g.size()), ones(g.size())),
        lambda g: g.all_to_all_single(ones(g.size()), ones(g.size()), [1] * g.size(), [1] * g.size()),
        ("all_to_all_single(float32[", "all_to_all_single(float32[split sizes"),
    ),
}
# Ranks may return from a call of few bytes from one rank before the others have come: the next call tells them.
RETURNS_EARLY = ("small and large", "root of broadcast", "collective of the same array")


def disagree(name, odd_one, warm):
    group = dist.new_group(group_desc="at odds")
    if warm:
        group.barrier()
    most, one, _ = PAIRS[name]
    failure = attempt(lambda: (one if dist.get_rank() == odd_one else most)(group))
    if failure.kind is None and name in RETURNS_EARLY:
        failure = attempt(lambda: group.barrier())
    return failure, attempt(group.barrier)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_names_both_calls(worlds, backend, size, name):
    *calls, (most, one) = PAIRS[name]
    for odd_one, warm in ((size - 1, True), (0, False)):
        outcomes = worlds.world(backend, size).run(disagree, name, odd_one, warm)
        last_came_s = max(failure.began_s for failure, _ in outcomes)
        for rank, (failure, after) in enumerate(outcomes):
            assert failure.kind is dist.DistBackendError, failure
            assert failure.ended_s - last_came_s < loaded(DETECTED_S), failure
            assert re.match(rf"\w+ on group 'at odds' \(rank {rank} of {size}\): ", failure.message), failure
            assert most in failure.message, failure
            assert one in failure.message, failure
            assert re.search(rf"rank {odd_one} call(s|ed) ", failure.message), failure
            for call in calls:  # also of those from which ranks have returned
                assert re.search(rf"test_disagreements.py:{call.__code__.co_firstlineno}\b", failure.message), failure
            assert after.kind is dist.DistBackendError, after
            assert "after an earlier failure" in after.message, after
            assert "\n" not in after.message, after  # what each rank calls was told


def split_sizes(receives):
    """Every rank sends one row to each; rank 1 expects two from rank 0."""
    group = dist.new_group(group_desc="at odds")
    size = group.size()
    rows_from = [receives if dist.get_rank() == 1 and peer == 0 else 1 for peer in range(size)]
    out = np.zeros((sum(rows_from), 1000))
    return attempt(lambda: group.all_to_all_single(out, np.ones((size, 1000)), rows_from, [1] * size))


@pytest.mark.parametrize("receives", [0, 2])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_split_sizes_that_disagree(worlds, backend, size, receives):
    outcomes = worlds.world(backend, size).run(split_sizes, receives)
    last_came_s = max(failure.began_s for failure in outcomes)
    for failure in outcomes:
        assert failure.kind is dist.DistBackendError, failure
        assert failure.ended_s - last_came_s < loaded(DETECTED_S), failure
        assert "all_to_all_single on group 'at odds'" in failure.message, failure
    said = " ".join(failure.message for failure in outcomes)
    assert re.search(rf"rank 0 sends 1 row to rank 1, which expects {receives}", said)


def half_of_the_fingerprint_differs(known):
    whole = Signature.fingerprint
    Signature.fingerprint = property(lambda self: 7 << 32 | whole.__get__(self) & 0xFFFFFFFF)
    try:
        group = dist.new_group(group_desc="at odds")
        for _ in range(3 * known):
            group.all_reduce(ones(4))
            group.all_reduce(ones(5))
        return attempt(lambda: group.all_reduce(ones(4 + dist.get_rank() % 2)))
    finally:
        Signature.fingerprint = whole


@pytest.mark.parametrize("known", [False, True], ids=["first calls", "known calls"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_that_differ_in_half_of_their_fingerprint(worlds, backend, size, known):
    for failure in worlds.world(backend, size).run(half_of_the_fingerprint_differs, known):
        assert failure.kind is dist.DistBackendError, failure
        assert "all_reduce(float32[4], op=sum)" in failure.message, failure
        assert "all_reduce(float32[5], op=sum)" in failure.message, failure


def one_comes_late():
    group = dist.new_group(group_desc="at odds")
    group.barrier()
    if dist.get_rank() == 2:
        dist.recv(np.zeros(1), 0)  # rank 0 has had its error
        return attempt(lambda: group.all_reduce(ones(4)))
    failure = attempt(lambda: group.all_reduce(ones(4 + dist.get_rank())))
    if dist.get_rank() == 0:
        dist.send(np.zeros(1), 2)
    return failure


@pytest.mark.parametrize("backend", ["gloo"])
def test_nobody_waits_for_a_rank_that_is_late(worlds, backend):
    outcomes = worlds.world(backend, 3).run(one_comes_late)
    for failure in outcomes:
        assert failure.kind is dist.DistBackendError, failure
        assert "float32[4]" in failure.message, failure
        assert "float32[5]" in failure.message, failure
    last_came_s = max(failure.began_s for failure in outcomes[:2])
    assert max(failure.ended_s for failure in outcomes[:2]) - last_came_s < loaded(DETECTED_S)
    assert outcomes[2].took_s < loaded(DETECTED_S)


def disagree_async():
    group = dist.new_group(group_desc="at odds")
    work = group.all_reduce(ones(4 + dist.get_rank()), async_op=True)
    return attempt(lambda: work.wait(timeout=20.0)), attempt(group.barrier)


@pytest.mark.parametrize("backend", BACKENDS)
def test_async_calls_that_disagree(worlds, backend):
    outcomes = worlds.world(backend, 2).run(disagree_async)
    for failure, after in outcomes:
        assert failure.kind is after.kind is dist.DistBackendError, failure
        assert "all_reduce(float32[4], op=sum)" in failure.message, failure
        assert "all_reduce(float32[5], op=sum)" in failure.message, failure
        assert "after an earlier failure" in after.message, after
        # Each says where it was made, though a thread of the package has carried it out.
        line = inspect.getsourcelines(disagree_async)[1] + 2
        assert failure.message.count(f" at test_disagreements.py:{line}") == 2, failure


def disagree_between_async_calls():
    group = dist.new_group(group_desc="at odds")
    works = [group.all_reduce(ones(3), async_op=True), dist.all_reduce(ones(3), async_op=True)]
    if dist.get_rank() == 0:
        works.append(group.all_gather([ones(3), ones(3)], ones(3), async_op=True))
    else:
        works.append(group.all_reduce(ones(3), "max", async_op=True))
    works[1].wait(timeout=20.0)
    return attempt(lambda: works[2].wait(timeout=20.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_lines_of_async_calls_of_several_groups_are_told_apart(worlds, backend):
    line = inspect.getsourcelines(disagree_between_async_calls)[1]
    for failure in worlds.world(backend, 2).run(disagree_between_async_calls):
        for call, offset in (("all_gather(", 4), ("all_reduce(", 6)):
            assert re.search(
                rf"calls {re.escape(call)}[^)]*\) at test_disagreements.py:{line + offset}\b", failure.message
            )


# ---- Messages


MISFITS = {
    "longer": (ones(5), ones(4)),
    "shorter": (ones(3), ones(4)),
    "another dtype": (ones(4), ones(4, "int32")),
    "another dtype of other size": (ones(4, "float64"), ones(8)),
    "large and longer": (ones(50_000), ones(40_000)),
    "large and shorter": (ones(40_000), ones(50_000)),
    "large, of a different dtype": (ones(40_000), ones(40_000, "int32")),
    "small for a large array": (ones(3), ones(40_000)),
    "large for a small array": (ones(40_000), ones(3)),
    "empty": (ones(0), ones(1)),
}


def misfit(name):
    group = dist.new_group(group_desc="post", timeout=5)
    sent, expected = MISFITS[name]
    if dist.get_rank() == 0:
        # A short message is on its way when send returns: then the next call of the group has the error.
        return attempt(lambda: (group.send(sent, 1), group.barrier()))
    received = expected.copy()
    failure = attempt(lambda: group.recv(received, 0))
    assert (received == expected).all()
    return failure


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_message_that_does_not_fit_raises_on_both_sides(worlds, backend, name):
    sent, expected = MISFITS[name]
    sender, receiver = worlds.world(backend, 2).run(misfit, name)
    assert receiver.kind is dist.DistBackendError, receiver
    assert "recv on group 'post' (rank 1 of 2)" in receiver.message
    for word in ("rank 0", sent.dtype.name, f"{expected.dtype}[{expected.size}]"):
        assert word in receiver.message, receiver
    assert sender.kind is dist.DistBackendError, sender
    assert "rank 1" in sender.message, sender
    assert sent.dtype.name in sender.message, sender
    assert sender.ended_s - max(sender.began_s, receiver.began_s) < loaded(DETECTED_S), sender
