"""The records of ranks that meet in the store: who is there, who is missing, and whether all have met."""

import pytest

from meshdist.backends.arrivals import Records


@pytest.mark.parametrize(
    ("text", "have_met"),
    [
        ("", False),
        ("+0 +1 ", False),
        ("+0 +1 +2 ", True),
        ("+0 +1 -1 +2 ", False),
        ("+0 +1 -1 +2 +1 ", True),
        ("+2 +1 +0 -0 -1 ", True),  # too late
    ],
)
def test_all_have_met_at_the_first_record_with_which_all_are_there(text, have_met):
    assert Records(3, text).have_met == have_met


@pytest.mark.parametrize(
    ("text", "mine", "absent"),
    [
        ("+0 ", 0, [1, 2]),
        ("+0 +2 ", 0, [1]),
        ("+0 +2 -0 ", 2, [1]),  # rank 0 came as well, and gave up a moment before
        ("+0 -0 +2 ", 2, [0, 1]),  # rank 0 had given up before
        ("+0 +2 -0 +0 -2 ", 0, [1, 2]),  # rank 2 gave up the attempt before this one
        ("+0 +1 +2 -0 +0 ", 0, []),
        ("+0 +1 -1 +2 -2 ", 0, [1, 2]),  # both have come and gone
    ],
)
def test_who_is_missing(text, mine, absent):
    assert Records(3, text).absent(mine) == absent
