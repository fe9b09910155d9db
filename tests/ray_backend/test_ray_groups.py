"""Backend MESHDIST of ray.util.collective: groups of actors on one cluster, and the errors of wrong calls."""

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
    with driven("ray_driver.py", program("As a backend of Ray's collectives"), limit_s=480) as said:
        yield said


def test_the_program_of_the_page(said: dict[str, Any]) -> None:
    assert said["page"] == [[[3.0] * 3] * 2]


def test_all_calls_of_ray(said: dict[str, Any]) -> None:
    assert said["made"] == [None] * 3
    assert said["calls of Ray"] == [[]] * 3


def test_calls_that_ray_lacks(said: dict[str, Any]) -> None:
    blocks = [[rank + 1.0, rank + 2.0, rank + 3.0, rank + 1.0] for rank in range(3)]
    for rank, found in enumerate(said["calls of meshdist"]):
        assert found == {
            "gather": blocks if rank == 1 else None,
            "scatter": blocks[rank],
            "all_to_all": [[x + 10 * rank for x in block] for block in blocks],
            "objects": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
            "bor": [7],
            "async": [6.0, 9.0, 12.0, 6.0],
        }


def test_a_mesh_of_actors(said: dict[str, Any]) -> None:
    assert said["mesh"] == [[4, False, [1]], [4, False, [1]], [4, False, [5]], [4, False, [5]]]


def test_two_groups_at_once_and_one_of_them_destroyed(said: dict[str, Any]) -> None:
    three, declared = [[6.0] * 3] * 3, [[3.0] * 3] * 2
    assert said["declared"] == declared
    assert said["both groups"] == [three, declared]
    assert said["one is destroyed"] == three


def test_a_group_under_the_name_of_a_destroyed_one(said: dict[str, Any]) -> None:
    assert said["again"] == [[[3.0] * 3] * 2] * 3


def test_a_group_of_rays_experimental_module(said: dict[str, Any]) -> None:
    if said["experimental"] is None:
        pytest.skip("ray.experimental.collective needs torch; pip install torch")
    assert said["experimental"] == [[3.0] * 3] * 2


def test_the_driver_catches_the_errors_of_meshdist(said: dict[str, Any]) -> None:
    assert said["caught"] is True


def test_the_secret_is_nowhere_when_the_group_is_there(said: dict[str, Any]) -> None:
    assert said["entries"] == []
    assert said["secrets"] == [{}] * 4


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "objects",
            r"TypeError: all_reduce on group 'three' \(rank RANK of 3\): tensor has the unsupported dtype object",
        ),
        (
            "op",
            r"ValueError: all_reduce on group 'three' \(rank RANK of 3\): unknown op 'mean'; choose from sum, product",
        ),
        ("two arrays", r"ValueError: all_reduce on group 'three' .*expected one array.*got 2; .*an actor for each"),
        (
            "part",
            r"ValueError: send on group 'three' .*n_elements is not supported; pass the part, such as tensor\[:2\]",
        ),
        ("shape", r"ValueError: all_gather on group 'three' \(rank RANK of 3\): .*float64\[2\], got float64\[3\]"),
        ("read-only", r"ValueError: all_reduce on group 'three' .*read-only.*pass tensor\.copy\(\)"),
        ("no group", r"RuntimeError: The collective group 'none' is not initialized"),
    ],
)
def test_wrong_calls(case: str, words: str, said: dict[str, Any]) -> None:
    for rank, refused in enumerate(said["refused"]):
        assert re.match(words.replace("RANK", str(rank)), refused[case]), refused[case]
        assert refused["still works"] == [6.0] * 3


def test_a_group_of_another_backend(said: dict[str, Any]) -> None:
    assert said["other backend"].startswith("ValueError: group 'other' of Ray has backend OTHER, not MESHDIST")


def test_calls_that_differ_name_both_and_the_line_of_the_user(said: dict[str, Any]) -> None:
    for text in said["differ"]:
        assert re.search(
            r"the ranks disagree\n  rank 0 calls all_reduce\(float64\[2\], op=sum\) at ray_driver\.py:\d+", text
        )


def test_ranks_that_do_not_come_are_named(said: dict[str, Any]) -> None:
    late, later, two = said["missing"]
    assert re.match(
        r"DistTimeoutError: .*'late' \(rank 0 of 2\): 1 of 2 ranks joined within 0.5 s; rank 1 did not", late
    )
    assert re.match(r"DistTimeoutError: .*'later' \(rank 1 of 2\): rank 0 did not join within", later)
    for text in two:
        assert re.search(r"2 of 3 ranks joined within 0.5 s; rank 2 did not join: all actors of the group call", text)


def test_an_actor_that_leaves_the_group_is_named(said: dict[str, Any]) -> None:
    for text in said["destroyed"]:
        assert re.search(r"all_reduce on group 'four' .*rank 2 \(pid \d+ on .*called destroy_process_group", text)


def test_an_actor_that_is_killed_is_named_within_seconds(said: dict[str, Any]) -> None:
    killed = said["killed"]
    for text in killed["errors"]:
        assert re.search(rf"all_reduce on group 'three' .*rank 2 \(pid {killed['pid']} on ", text)
    assert killed["seconds"] < loaded(5.0)


def test_an_actor_that_ends_is_named(said: dict[str, Any]) -> None:
    assert re.search(r"all_reduce on group 'pair' \(rank 0 of 2\): rank 1 \(pid \d+ on .*ended", said["ended"][0])
