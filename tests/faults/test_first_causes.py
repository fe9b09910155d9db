"""What ranks are told that fail because others did: the first cause, once."""

from __future__ import annotations

import pytest

from meshdist.farewell import gave_up, peer_gone

WHERE = "all_reduce on group 'world' (rank {} of 4)"


@pytest.mark.parametrize("story", ["", "\n  who waits for whom:\n  rank 0 is in no call"])
def test_the_first_cause_is_said_once_however_many_pass_it_on(story):
    words = f"{WHERE.format(3)}: KeyboardInterrupt{story}"
    for rank in (3, 2, 1):
        error = str(peer_gone(f"rank {rank} (global rank {rank + 4}, pid 7 on n)", gave_up(words), "making this call"))
        first_line, newline, rest = error.partition("\n")
        words = f"{WHERE.format(rank - 1)}: {first_line}; this is call {rank}, at a.py:17{newline}{rest}"
    assert words == (
        f"{WHERE.format(0)}: rank 1 (global rank 5, pid 7 on n) gave up,"
        " as rank 3 (global rank 7, pid 7 on n) gave up: "
        f"{WHERE.format(3)}: KeyboardInterrupt; this is call 1, at a.py:17{story}"
    )


@pytest.mark.parametrize("words", ["it raised ValueError: the pump gave up: no oil", "rank 2 (pid 7 on n) has died"])
def test_what_is_no_chain_is_said_as_it_is(words):
    assert gave_up(words) == f"gave up: {words}"
