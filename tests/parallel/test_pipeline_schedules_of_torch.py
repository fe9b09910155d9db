"""The schedules are those of torch.distributed.pipelining, step for step."""

import pytest

from meshdist.parallel import (
    Schedule,
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zbv,
    zero_bubble,
)

RANKS = (1, 2, 3, 4, 5, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)


@pytest.fixture
def schedules(torch):
    from torch.distributed.pipelining import schedules

    return schedules


def table(schedules, name, num_ranks, num_microbatches, num_stages):
    """Return torch's table, which only some of its constructor makes."""
    made = object.__new__(schedules.get_schedule_class(name))
    made.pp_group_size, made._num_stages, made._n_microbatches = num_ranks, num_stages, num_microbatches
    made.num_stages, made.n_local_stages = num_stages, num_stages // num_ranks
    made._stages = [None] * made.n_local_stages
    made.number_of_rounds = max(1, num_microbatches // num_ranks)
    made.microbatches_per_round = num_microbatches // made.number_of_rounds
    if name in ("GPipe", "1F1B"):
        order = made._get_pipeline_order()
    else:
        made.pipeline_order = order = {rank: made._calculate_single_rank_operations(rank) for rank in range(num_ranks)}
    if name == "InterleavedZeroBubble":
        order = made._add_bubbles_to_actions(num_stages)
    return order


def as_schedule(order):
    return Schedule([["" if action is None else str(action) for action in order[rank]] for rank in sorted(order)])


def divides(num_ranks, num_microbatches):
    return num_microbatches % max(1, num_microbatches // num_ranks) == 0


@pytest.mark.parametrize("num_ranks", RANKS)
def test_gpipe_and_1f1b(schedules, num_ranks):
    for num_microbatches in MICROBATCHES:
        theirs = table(schedules, "GPipe", num_ranks, num_microbatches, num_ranks)
        assert as_schedule(theirs) == gpipe(num_ranks, num_microbatches)
        if num_microbatches < num_ranks:  # torch refuses them
            continue
        theirs = table(schedules, "1F1B", num_ranks, num_microbatches, num_ranks)
        ours = one_f_one_b(num_ranks, num_microbatches)
        assert as_schedule(theirs).rows[:-1] == ours.rows[:-1]
        # torch's table counts the forward passes of the last rank from 1 on; what torch runs counts them from 0 on.
        shifted = [action._replace(microbatch=action.microbatch + (action.kind == "F")) for action in ours.rows[-1]]
        assert as_schedule(theirs).rows[-1] == tuple(shifted)


@pytest.mark.parametrize("num_local_stages", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_schedules_of_several_stages(schedules, num_ranks, num_local_stages):
    builders = {"LoopedBFS": looped_bfs, "Interleaved1F1B": interleaved, "InterleavedZeroBubble": zero_bubble}
    for name, builder in builders.items():
        for num_microbatches in MICROBATCHES:
            if name != "LoopedBFS" and not divides(num_ranks, num_microbatches):
                continue
            theirs = table(schedules, name, num_ranks, num_microbatches, num_ranks * num_local_stages)
            assert as_schedule(theirs) == builder(num_ranks, num_microbatches, num_local_stages), name


@pytest.mark.parametrize("num_ranks", RANKS)
def test_schedules_in_the_shape_of_a_v(schedules, num_ranks):
    for num_microbatches in MICROBATCHES:
        theirs = table(schedules, "ZBVZeroBubble", num_ranks, num_microbatches, 2 * num_ranks)
        assert as_schedule(theirs) == zbv(num_ranks, num_microbatches)
        if num_microbatches >= 2 * num_ranks:
            theirs = table(schedules, "DualPipeV", num_ranks, num_microbatches, 2 * num_ranks)
            assert as_schedule(theirs) == dualpipe_v(num_ranks, num_microbatches)


@pytest.mark.parametrize(
    "ours",
    [gpipe(4, 6), one_f_one_b(4, 6), interleaved(3, 6), looped_bfs(2, 3), zero_bubble(4, 8, 2), zbv(3, 7)],
    ids=repr,
)
def test_the_messages_between_ranks_are_those_of_torch(schedules, ours):
    actions = {
        rank: [schedules._Action.from_str(str(action)) for action in row if action is not None]
        for rank, row in enumerate(ours.rows)
    }
    lowered = schedules._add_send_recv(actions, ours.rank_of, ours.num_stages)
    assert as_schedule(lowered) == ours.with_messages()


def test_a_table_that_torch_wrote_is_read(schedules, tmp_path):
    order = table(schedules, "DualPipeV", 2, 6, 4)
    lowered = schedules._add_reduce_grad(schedules._add_unshard_reshard(order[1]), 6)
    (tmp_path / "torch.csv").write_text("\n".join(",".join(map(str, row)) for row in (order[0], lowered)))
    assert Schedule.from_csv(tmp_path / "torch.csv") == dualpipe_v(2, 6)
