"""PipelineRunner computes what one process computes, on threads, processes and MPI; failures reach all ranks."""

import numpy as np
import pytest
from pipeline_programs import assert_as_one_process, batch_of, loss, reference, stage_of, trained

import meshdist as dist
from meshdist.parallel import (
    PipelineRunner,
    PipelineStage,
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

pytestmark = pytest.mark.timeout(60)

SCHEDULES = [
    gpipe(1, 2),
    gpipe(3, 4),
    one_f_one_b(4, 4),
    one_f_one_b(3, 1),
    looped_bfs(2, 3),
    interleaved(2, 4),
    interleaved(3, 6, stages_per_rank=3),
    zero_bubble(4, 4),
    zero_bubble(2, 4, stages_per_rank=2),
    zbv(3, 5),
    dualpipe_v(2, 5),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_pipeline_computes_what_one_process_does(schedule):
    results = dist.run(trained, schedule.num_ranks, args=(schedule.to_csv(),), timeout=20)
    assert_as_one_process(schedule, results)


@pytest.mark.parametrize("kinds", ["whole", "halves"])
@pytest.mark.parametrize("schedule", [gpipe(2, 2), zero_bubble(2, 2)], ids=repr)
def test_stages_may_have_a_whole_backward_or_its_halves(schedule, kinds):
    assert_as_one_process(schedule, dist.run(trained, 2, args=(schedule.to_csv(), kinds), timeout=20))


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), zbv(3, 4)], ids=repr)
def test_on_every_backend(world_of_3, schedule):
    assert_as_one_process(schedule, world_of_3.run(trained, schedule.to_csv()))
