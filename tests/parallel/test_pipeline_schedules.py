"""Schedules: written and read, complete and free of deadlock; what is wrong is named by rank, step and action."""

import pytest

from meshdist.parallel import (
    Action,
    Schedule,
    ScheduleError,
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)

BUILDERS = [
    *(gpipe, one_f_one_b, zbv, dualpipe_v),
    *(
        lambda p, m, v=v, build=build: build(p, m, v)
        for build in (looped_bfs, interleaved, zero_bubble)
        for v in (1, 2, 3, 4)
    ),
]


def proven(ranks, microbatches):
    """Check all schedules of so many ranks and micro-batches that can be built; return their number."""
    count = 0
    for build in BUILDERS:
        for num_ranks in ranks:
            for num_microbatches in microbatches:
                try:
                    schedule = build(num_ranks, num_microbatches)
                except ValueError:  # the numbers do not divide
                    continue
                schedule.check()
                if num_ranks * num_microbatches <= 24:
                    schedule.with_messages().check()
                assert schedule.num_microbatches == num_microbatches
                count += 1
    return count


def test_schedules_are_complete_and_free_of_deadlock():
    assert proven((1, 2, 3, 5, 8), (1, 2, 3, 7, 8, 12)) == 446


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_all_schedules_of_up_to_16_ranks_and_64_microbatches_are_proven():
    assert proven(range(1, 17), range(1, 65)) == 12496


@pytest.mark.parametrize("schedule", [gpipe(3, 2), interleaved(2, 4), zero_bubble(3, 6, 2), zbv(2, 3)], ids=repr)
def test_with_messages_it_is_proven_as_well_and_computes_in_the_same_order(schedule):
    full = schedule.with_messages().check()
    assert full.has_messages
    assert full.with_messages() is full
    for row, plain in zip(full.rows, schedule.rows, strict=True):
        assert [a for a in row if len(a.kind) == 1] == [a for a in plain if a is not None]


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), zbv(2, 4), interleaved(2, 4).with_messages()], ids=repr)
def test_csv_and_text_are_read_as_they_are_written(schedule, tmp_path):
    path = tmp_path / "table.csv"
    assert schedule.to_csv(path) == path.read_text() == schedule.to_csv()
    found = Schedule.from_csv(path)
    assert (found, found.name, found.digest, hash(found)) == (schedule, "table", schedule.digest, hash(schedule))
    assert Schedule.from_text(schedule.to_csv()) == schedule
    assert Schedule.from_text(str(one_f_one_b(3, 4))) == one_f_one_b(3, 4)


def test_idle_steps_are_empty_cells():
    schedule = looped_bfs(2, 1, stages_per_rank=1)
    assert schedule.to_csv() == "0F0,,,0B0\n,1F0,1B0\n"
    assert str(schedule) == "rank 0: 0F0         0B0\nrank 1:     1F0 1B0"
    assert schedule.rows[0][1:3] == (None, None)


def test_a_schedule_knows_its_sizes_and_the_rank_of_each_stage():
    schedule = zbv(3, 4)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (3, 6, 4)
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [schedule.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert repr(schedule) == "<Schedule ZBV: 3 ranks, 6 stages, 4 micro-batches>"
    assert schedule.has_backward
    assert not schedule.forward_only().check().has_backward
    with pytest.raises(ValueError, match="the schedule has stages 0 to 5, and no stage 6"):
        schedule.rank_of(6)


def test_1f1b_has_one_forward_and_one_backward_in_turn():
    assert one_f_one_b(2, 3).rows[0] == tuple(map(Action.parse, ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]))
    assert str(one_f_one_b(4, 2).rows[3][1]) == "3B0"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2X0", "rank 1, step 2: '2X0' is not an action of a pipeline; write the stage, one of F, B, I, W, SEND_F"),
        ("2F", "'2F' is not an action"),
        ("2UNSHARD3", "'2UNSHARD3' is not an action"),
        ("(0F0;1B0", r"'\(0F0;1B0' is not an action"),
    ],
)
def test_a_cell_that_is_no_action_is_named(text, words):
    with pytest.raises(ValueError, match=words):
        Schedule([["0F0"], ["1F0", None, text]])
    with pytest.raises(TypeError, match="rows must have a row for each rank"):
        Schedule(text)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[], []], "the schedule has no actions"),
        (["0F0 0F0"], "rank 0, step 1: 0F0 is in the schedule twice, first on rank 0, step 0"),
        (["0F0 1F0", "1F1"], "rank 1, step 0: 1F1 is of stage 1, which rank 0 has; a stage is on one rank"),
        (["0F0", "2F0"], "no rank has stage 1, while the last stage is 2"),
        (["0F0", ""], "rank 1 has no actions; the rows are the ranks"),
        (["0F0 0F1", "1F1"], "rank 1 never does 1F0, the forward pass of micro-batch 0 through stage 1"),
        (["0F0 0F2"], "rank 0 never does 0F1, the forward pass of micro-batch 1 through stage 0"),
        (["0F0 0F1 0B1"], "rank 0 never does 0B0, the backward pass of micro-batch 0 through stage 0"),
        (["0F0 0W0"], "rank 0 never does 0I0, the backward pass of the input of micro-batch 0 through stage 0"),
        (["0F0 0I0"], "rank 0 never does 0W0, the backward pass of the weights of micro-batch 0 through stage 0"),
        (["0F0 0B0 0W0"], "rank 0, step 2: 0W0 repeats 0B0 of rank 0, step 1, which is the whole backward pass"),
        (["0B0 0F0"], "rank 0, step 0: 0B0 comes before 0F0, at step 1, which it needs"),
        (["0I0 0F0 0W0"], "rank 0, step 0: 0I0 comes before 0F0, at step 1"),
        (["0F0 0W0 0I0"], "rank 0, step 1: 0W0 comes before 0I0, at step 2"),
        (["0F0 1F0 0B0 1B0"], "rank 0, step 2: 0B0 needs 1B0, which comes later on this rank, at step 3"),
        (
            ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"],
            r"the schedule deadlocks: rank 0, step 1 \(0B0\) waits for 1B0 of rank 1, step 3; rank 1, step 0 \(1F1\)"
            " waits for 0F1 of rank 0, step 2",
        ),
        (["0F0 0SEND_F0", "1F0"], "rank 1, step 0: 1F0 has no 1RECV_F0, its receive of activations"),
        (["0F0", "1RECV_F0 1F0"], "rank 0, step 0: 0F0 has no 0SEND_F0, its send of activations"),
        (["0SEND_F0 0F0", "1RECV_F0 1F0"], "rank 0, step 0: 0SEND_F0 comes before 0F0"),
        (["0F0 0SEND_F0", "1F0 1RECV_F0"], "rank 1, step 0: 1F0 comes before 1RECV_F0, at step 1"),
        (["0F0 0SEND_F0 0SEND_B0", "1RECV_F0 1F0"], "rank 0, step 2: 0SEND_B0 is a message that no stage of another"),
        (
            [
                "0F0 0F1 0RECV_B0 0B0 0SEND_F0 0SEND_F1 0RECV_B1 0B1",
                "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
            ],
            r"deadlocks: rank 0, step 3 \(0B0\) waits for 1SEND_B0 of rank 1, step 5; rank 1, step 2 \(1F0\) waits for"
            " 0SEND_F0 of rank 0, step 4",
        ),
    ],
)
def test_what_is_wrong_is_named_by_rank_step_and_action(rows, words):
    with pytest.raises(ScheduleError, match=words):
        Schedule(rows).check()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: gpipe(0, 2), "gpipe: num_ranks must be at least 1, got 0"),
        (lambda: zbv(2, 0), "zbv: num_microbatches must be at least 1, got 0"),
        (lambda: looped_bfs(2, 2, 0), "looped_bfs: stages_per_rank must be at least 1, got 0"),
        (
            lambda: interleaved(4, 9),
            "interleaved: 9 micro-batches do not divide into 2 rounds of about 4; take a multiple of the 4 ranks, such"
            " as 8 or 12",
        ),
        (lambda: dualpipe_v(4, 7), "dualpipe_v: num_microbatches must be at least the number of stages, 8, got 7"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
