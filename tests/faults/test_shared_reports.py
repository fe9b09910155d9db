"""Which of the ranks of an MPI job shows an error that several of them have."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

import meshdist as dist
from meshdist.backends.mpi.shared_report import SharedReport
from meshdist.store import HashStore


def follows(rank):
    return dist.DistBackendError(
        "rank 0 raised ValueError: no", peer_failed=True, error_prefix=f"recv (rank {rank} of 3)"
    )


def told(errors, store=None):
    """Return the ranks that show their errors, which the ranks have at the same time; `errors` is by rank."""
    store, shown = store or HashStore(), []

    def rank(number, error):
        SharedReport(store, number, linger_s=0.0).tell(lambda: shown.append(number), error)

    with ThreadPoolExecutor(len(errors)) as pool:
        list(pool.map(rank, errors, errors.values()))
    return sorted(shown)


def test_the_same_error_is_shown_once(capsys):
    shown = told({rank: ValueError("no") for rank in range(4)})
    assert len(shown) == 1
    others = ", ".join(str(rank) for rank in range(4) if rank not in shown)
    assert capsys.readouterr().err == f"meshdist: ranks {others}: the same, or an error that follows from it\n"


def test_the_cause_is_shown_and_nothing_that_follows_from_it(capsys):
    assert told({0: ValueError("no"), 1: follows(1), 2: follows(2)}) == [0]
    assert re.search("ranks 1, 2", capsys.readouterr().err)


def test_without_the_cause_one_consequence_is_shown():
    assert len(told({1: follows(1), 2: follows(2)})) == 1


def test_different_errors_are_all_shown():
    assert told({0: ValueError("no"), 1: ValueError("not this either")}) == [0, 1]


def test_a_rank_shows_its_error_if_the_first_died_before_it_has():
    store = HashStore()
    store.set("told/first", '[0, "ValueError: no"]')
    assert told({1: ValueError("no")}, store) == [1]


class LostStore(HashStore):
    def compare_set(self, key, expected_value, desired_value):
        raise dist.DistNetworkError("the store is lost")


@pytest.mark.parametrize("error", [ValueError("no"), follows(1)], ids=["cause", "follows"])
def test_without_a_store_every_rank_shows_its_error(error):
    assert told({0: error, 1: error}, LostStore()) == [0, 1]
