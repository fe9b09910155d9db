"""The output of workers: sorted by rank, equal lines once, and not held back for long."""

import pytest

from meshdist.notebook.rank_output import RankOutput, merged, rank_label


@pytest.mark.parametrize(
    ("ranks", "label"),
    [([0], "[0]"), ([0, 1], "[0,1]"), ([0, 1, 2], "[0-2]"), ([1, 3, 4, 5, 9], "[1,3-5,9]")],
)
def test_a_label_has_runs(ranks, label):
    assert rank_label(ranks) == label


def test_lines_are_sorted_by_rank_and_each_keeps_its_order():
    assert merged({1: ["b", "a"], 0: ["z"]}) == ["[0] z", "[1] b", "[1] a"]


def test_equal_output_is_written_once():
    assert merged({2: ["x", "y"], 0: ["x", "y"], 1: ["x", "y"]}) == ["[0-2] x", "[0-2] y"]


def test_a_common_beginning_is_written_once_and_the_rest_by_rank():
    assert merged({0: ["same", "0", "end"], 1: ["same", "1", "end"]}) == [
        "[0,1] same",
        "[0] 0",
        "[0] end",
        "[1] 1",
        "[1] end",
    ]


def test_empty_lines_have_no_ranks():
    assert merged({0: ["a", "", "b"], 1: ["a", "", "c"]}) == ["[0,1] a", "", "[0] b", "[1] c"]


def test_nothing_was_printed():
    assert merged({}) == []


def test_lines_are_held_for_half_a_second():
    now, written = [0.0], []
    output = RankOutput(written.append, lambda: now[0])
    output.add(1, "one")
    now[0] = 0.4
    output.add(0, "zero")
    output.flush_if_due()
    assert written == []
    now[0] = 0.5
    output.flush_if_due()
    assert written == ["[0] zero", "[1] one"]
    output.flush()
    assert len(written) == 2
