"""Messages about groups with other rank numbers than the world's have both numbers."""

import re

import numpy as np
import pytest

import meshdist as dist


def failing(make_call, ranks):
    """Return what a call on the group of `ranks` says, on the ranks that are in it; None on the others."""
    group = dist.new_group(list(ranks), timeout=5.0, group_desc="pair", sort_ranks=False)
    if dist.get_rank() not in ranks:
        return None
    try:
        make_call(group)
    except (dist.DistError, ValueError) as error:
        return str(error)
    return "nothing"


def disagree(group):
    group.all_reduce(np.zeros(2 + group.rank()))


def unequal_splits(group):
    x = np.zeros(2)
    group.all_to_all_single(x, x, [1, 1], [1, 1] if group.rank() else [2, 0])


def wrong_size(group):
    if group.rank():
        group.send(np.zeros(3), 0)
    else:
        group.recv(np.zeros(2), 1)


def leave_alone(group):
    if group.rank():
        dist.abort_process_group()
    group.barrier()


CALLS = {
    disagree: (
        r"the ranks disagree\n  rank 0 \(global rank {0}\) calls all_reduce\(.*\n  rank 1 \(global rank {1}\) calls"
    ),
    unequal_splits: r"the sizes disagree: rank 0 \(global rank {0}\) sends 2 \w+ to rank 0 \(global rank {0}\), which",
    wrong_size: r"rank 1 \(global rank {1}[^)]*\) sent float64",
    leave_alone: r"rank 1 \(global rank {1}[,)].* (failed|has finished)",
}


@pytest.mark.parametrize("ranks", [(1, 2), (2, 0)])
@pytest.mark.parametrize("make_call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo-tcp", "gloo-hosts"])
def test_both_numbers_are_said(make_call, ranks, backend, request):
    if backend == "threads":
        said = dist.run(failing, 3, (make_call, ranks))
    else:
        workers = request.getfixturevalue("new_workers")(3, backend)
        workers.start(failing, make_call, ranks)
        said = [workers.outcome(rank) for rank in range(3)]
    message = said[ranks[0]]
    assert re.match(rf"\w+ on group 'pair' \(rank 0 of 2, global rank {ranks[0]}\): ", message), message
    assert re.search(CALLS[make_call].format(*ranks), message), message


def test_numbers_that_are_the_same_are_said_once():
    said = dist.run(failing, 3, (disagree, (0, 1)))
    assert "on group 'pair' (rank 0 of 2): " in said[0]
    assert "global rank" not in said[0]
