"""A rank dies in the middle of calls that are repeated so often that the ranks have chosen how to carry them out."""

import signal

import numpy as np
import pytest
from trying import attempt
from until import loaded
from worlds import needs_linux

import meshdist as dist

pytestmark = [pytest.mark.timeout(60), needs_linux]
VICTIM, SIZE = 1, 3
UNTIL_CHOSEN = 100  # calls, of which 15 to 60 are trials
LONG = 2_000_000  # float32: in one copy
CALLS = {
    "through slots": lambda x, y: dist.all_gather_into_tensor(x, y),
    "reduced": lambda x, y: dist.all_reduce(x),
    "to all": lambda x, y: dist.broadcast(x, 0),
    "lists": lambda x, y: dist.all_to_all(np.split(x, SIZE), [y] * SIZE),
    "scattered": lambda x, y: dist.scatter(y, np.split(x, SIZE) if dist.get_rank() == 0 else None, 0),
}


def repeated(name, count):
    x, y = np.ones(SIZE * count, np.float32), np.ones(count, np.float32)
    for _ in range(UNTIL_CHOSEN):
        CALLS[name](x, y)

    def until_it_fails():
        while True:
            CALLS[name](x, y)

    return attempt(until_it_fails, announce=True)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("through slots", 6000),
        ("reduced", 100_000),
        ("reduced", LONG),
        ("to all", LONG),
        ("lists", 50_000),
        ("lists", LONG),
        ("scattered", LONG),
    ],
)
def test_the_others_name_it(new_workers, name, count):
    workers = new_workers(SIZE, "gloo")
    workers.start(repeated, name, count)
    for rank in range(SIZE):
        workers.reported(rank)
    killed_s = workers.signal(VICTIM, signal.SIGKILL)
    for rank in {*range(SIZE)} - {VICTIM}:
        failure = workers.outcome(rank)
        assert issubclass(failure.kind, dist.DistBackendError), failure
        assert f"rank {VICTIM} (pid {workers.pids[VICTIM]} on " in failure.message, failure
        assert failure.ended_s - killed_s < loaded(1.0), failure
