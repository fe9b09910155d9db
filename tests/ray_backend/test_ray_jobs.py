"""`meshdist.ray.run` and a group of Ray, on one cluster: results, failures, what is left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from ray_clusters import driven, marks, program
from until import loaded

pytestmark = [*marks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def said() -> Iterator[dict[str, Any]]:
    """What the driver says; the cluster starts and ends once for all tests of this file."""
    with driven("job_driver.py", program("A job"), limit_s=480) as said:
        yield said


def test_the_program_of_the_page(said: dict[str, Any]) -> None:
    assert said["page"] == [[[0, 1.5], [1, 1.5]]]


def test_ranks_have_a_world_and_their_results_are_in_order(said: dict[str, Any]) -> None:
    results = said["job"]
    assert [(each["rank"], each["total"], each["local rank"]) for each in results] == [(i, 6, i) for i in range(2)]
    assert len({each["pid"] for each in results}) == 2
    assert [each["secrets"] for each in results] == [[]] * 2


def test_ranks_of_a_job_make_a_group_of_rays_collectives(said: dict[str, Any]) -> None:
    assert [each["collectives"] for each in said["job"]] == [[3.0, 3.0, 2.0]] * 2


def test_the_first_cause_is_raised_with_rank_and_node(said: dict[str, Any]) -> None:
    raised = said["raised"]
    assert (raised["type"], raised["rank"], raised["cause"]) == ("ProcessRaisedException", 1, "KeyError('weights')")
    assert re.match(r"rank 1 of 2 \(pid \d+ on [^)]+, [\d.]+\) raised:\nTraceback", raised["text"])
    assert "rank_task.py" not in raised["text"]
    assert raised["text"].endswith("KeyError: 'weights'\n")


def test_an_exception_that_cannot_be_unpickled_is_no_cause(said: dict[str, Any]) -> None:
    assert said["odd"] == "None"


def test_a_result_that_cannot_be_pickled_is_told_in_a_sentence(said: dict[str, Any]) -> None:
    none = said["no result"]
    assert (none["type"], none["rank"]) == ("ProcessRaisedException", 1)
    assert re.fullmatch(
        r"rank 1 of 2 \([^)]+\) raised:\nTypeError: the result of rank 1, of type lock, cannot be pickled: TypeError:"
        r" cannot pickle '_thread\.lock' object; return arrays, numbers and other plain values\n",
        none["text"],
    )


def test_a_rank_that_is_killed_is_named_within_seconds(said: dict[str, Any]) -> None:
    killed = said["killed"]
    assert (killed["type"], killed["rank"]) == ("ProcessException", 1)
    assert re.match(r"rank 1 of 2 \(pid \d+ on [^)]+\) ended: .*", killed["text"])
    assert killed["seconds"] < loaded(10.0)


def test_a_cluster_that_is_too_small_is_told_and_nothing_is_left(said: dict[str, Any]) -> None:
    assert re.match(
        r"meshdist\.ray\.run: 5 ranks with 1 CPU each \(strategy PACK\) found no place within 0\.5 s; the cluster has 4"
        r" CPU on 1 node, of which [\d.]+ CPU are free\. Ask for less",
        said["no place"]["text"],
    )
    assert "2 ranks with 1 CPU, 1 GPU each" in said["no gpu"]["text"]
    assert "the cluster has 4 CPU, 0 GPU on 1 node" in said["no gpu"]["text"]
    assert min(said[case]["seconds"] for case in ("no place", "no gpu")) >= 0.5
    assert said["no place"]["type"] == said["no gpu"]["type"] == "DistTimeoutError"


def test_a_wait_for_places_is_told(said: dict[str, Any]) -> None:
    (told,) = said["told"]  # the next one would come after 10 s
    assert re.fullmatch(
        r"meshdist\.ray\.run: 2 ranks with 1 CPU each \(strategy STRICT_SPREAD\) have found no place for \d s; the"
        r" cluster has 4 CPU on 1 node, of which [\d.]+ CPU are free; these nodes can never hold them: waiting for"
        r" other nodes to join, for up to \d s more",
        told,
    )


@pytest.mark.parametrize(
    ("ranks", "bundle", "strategy", "fit"),
    [
        (6, {"CPU": 1}, "PACK", True),
        (7, {"CPU": 1}, "SPREAD", False),
        (4, {"CPU": 1}, "STRICT_PACK", True),
        (5, {"CPU": 1}, "STRICT_PACK", False),
        (2, {"CPU": 1}, "STRICT_SPREAD", True),
        (3, {"CPU": 1}, "STRICT_SPREAD", False),
        (3, {"GPU": 0.1}, "PACK", True),
        (4, {"GPU": 0.1}, "PACK", False),
        (2, {"CPU": 2, "GPU": 0.1}, "PACK", False),
        (1, {"TPU": 1}, "PACK", False),
    ],
)
def test_what_two_nodes_can_hold(ranks: int, bundle: dict[str, float], strategy: str, fit: bool) -> None:
    from meshdist.ray.rank_bundles import fits  # needs Ray

    assert fits([{"CPU": 4}, {"CPU": 2, "GPU": 0.3}], ranks, bundle, strategy) is fit


def test_ranks_that_have_not_started_in_time_are_named(said: dict[str, Any]) -> None:
    slow = said["too fast"]
    assert slow["type"] == "DistTimeoutError"
    assert re.match(
        r"meshdist\.ray\.run: (4 ranks with 1 CPU each .* found no place|\d of 4 ranks started)", slow["text"]
    )


def test_a_function_that_cannot_be_imported_there_is_told(said: dict[str, Any]) -> None:
    missing = said["not there"]
    assert missing["type"] == "ProcessException"
    assert re.fullmatch(
        r"rank \d of 2 \(pid \d+ on [^)]+\) could not call the function: ModuleNotFoundError: No module named"
        r" 'only_here'",
        missing["text"],
    )
    assert missing["cause"].startswith("ModuleNotFoundError(")


def test_ctrl_c_ends_the_job(said: dict[str, Any]) -> None:
    assert said["ctrl-c"] == "interrupted"


def test_no_job_leaves_anything_in_the_cluster(said: dict[str, Any]) -> None:
    assert said["left"] == {"entries": []}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("fn", r"TypeError: meshdist\.ray\.run: fn must be callable, as in run\(main, 4\), got int"),
        ("ranks", r"ValueError: .*ranks must be at least 1, got 0"),
        ("half a rank", r"TypeError: .*ranks must be an integer, got 1\.5"),
        ("args", r"TypeError: .*args must be a tuple or list, as in args=\(1,\), got int"),
        ("strategy", r"ValueError: .*unknown strategy 'NEAR'; choose from PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
        ("resources", r"ValueError: .*GPU in resources; pass num_gpus"),
        ("amount", r"ValueError: .*at least 0 of CPU, got -1"),
        ("nothing", r"ValueError: .*ask for num_cpus, num_gpus or resources"),
        ("timeout", r"ValueError: timeout must not be negative"),
        (
            "lock",
            r"TypeError: meshdist\.ray\.run: kill_1 or its arguments cannot be pickled: cannot pickle '_thread\.lock'",
        ),
    ],
)
def test_wrong_calls(case: str, words: str, said: dict[str, Any]) -> None:
    assert re.search(words, said["wrong"][case], re.DOTALL), said["wrong"][case]
