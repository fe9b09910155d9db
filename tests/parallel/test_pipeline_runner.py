"""PipelineRunner computes what one process computes, on threads, processes and MPI; failures reach all ranks."""

import numpy as np
import pytest
from pipeline_programs import assert_as_one_process, batch_of, loss, reference, stage_of, trained
from worlds import needs_linux

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


@needs_linux
def test_between_hosts_where_receives_are_posted_ahead(worlds):
    schedule = zbv(4, 4)
    assert_as_one_process(schedule, worlds.world("gloo-hosts", 4).run(trained, schedule.to_csv()))


def averaged():
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    schedule = one_f_one_b(2, 2)
    x, target = batch_of(4)
    rows = slice(4 * mesh.get_local_rank("dp"), 4 * mesh.get_local_rank("dp") + 4)

    def mean_loss(y, t):
        return loss(y, t)[0] / len(y), loss(y, t)[1] / len(y)

    stages = [stage_of(number) for number in schedule.stages_of(mesh["pp"].get_local_rank())]
    runner = PipelineRunner(stages, schedule, mesh["pp"], loss=mean_loss)
    ((stage, gradients),) = runner.step(x[rows], target[rows], return_outputs=False).gradients.items()
    return stage, mesh["dp"].all_reduce(gradients["w"], op="avg")


def test_gradients_of_a_mean_are_divided_and_average_over_data_parallel_ranks():
    _, _, gradients = reference(2, 4)
    for stage, found in dist.run(averaged, 4, timeout=20):
        np.testing.assert_array_equal(found, gradients[stage]["w"] / 8)


def evaluated():
    schedule = zbv(2, 4)
    x, target = batch_of(4)
    stages = {number: stage_of(number) for number in schedule.stages_of(dist.get_rank())}
    runner = PipelineRunner(stages, schedule, loss=loss)
    return tuple(runner.eval(x)), tuple(runner.eval(x, target)), len(runner.timeline().rows[0])


def test_eval_goes_forward_only_and_needs_no_target():
    outputs, losses, _ = reference(4, 4)
    first, second = dist.run(evaluated, 2, timeout=20)
    for (found, no_losses, gradients), (again, found_losses, _), num_spans in (first,):
        np.testing.assert_array_equal(found, outputs)
        np.testing.assert_array_equal(again, outputs)
        assert (no_losses, found_losses, gradients, num_spans) == (None, losses, {}, 8)
    assert second[:2] == ((None, None, {}), (None, None, {}))


def tree_stage(number):
    """Return a stage whose values are trees with a mask that has no gradient, scaled by a keyword argument."""

    def forward(x, scale, shift):
        return {"h": x["h"] * scale + shift, "more": (x["h"].sum(axis=0), [np.arange(3, dtype=np.int32)])}, scale

    return PipelineStage(forward, lambda scale, dy: ({"h": dy["h"] * scale}, np.float64(number)))


def trees():
    schedule = one_f_one_b(3, 2)
    mesh_rank = dist.get_rank()
    runner = PipelineRunner([tree_stage(mesh_rank)], schedule, loss=lambda y, t: (t, {"h": np.ones_like(y["h"])}))
    x, shift = {"h": np.arange(4.0).reshape(4, 1)}, np.array([[0.0], [0.0], [1.0], [1.0]])
    step = runner.step(x, np.arange(2), scale=np.float32(2), shift=shift)
    runner.forget_shapes()
    larger = runner.step({"h": np.ones((6, 2))}, np.arange(2), scale=1, shift=np.zeros((6, 1)))
    return step, larger


def test_values_are_trees_keywords_are_cut_and_shapes_may_change_between_steps():
    step, larger = dist.run(trees, 3, timeout=20)[2]
    assert step.outputs["h"].tolist() == [[0.0], [8.0], [23.0], [31.0]]
    assert step.outputs["more"][1][0].tolist() == [0, 1, 2] * 2
    assert [loss.tolist() for loss in step.losses] == [[0], [1]]
    assert step.gradients == {2: 2.0}
    assert larger.outputs["h"].shape == (6, 2)


def by_hand():
    schedule = Schedule(
        [
            "0F1 0SEND_F1 0F0 0SEND_F0 0RECV_B0 0RECV_B1 0B1 0B0",
            "1RECV_F0 1RECV_F1 1F0 1F1 1B1 1B0 1SEND_B0 1SEND_B1",
        ]
    )
    x, target = batch_of(2)
    runner = PipelineRunner([stage_of(dist.get_rank())], schedule, loss=loss, scale_grads=False)
    for _ in range(3):
        step = runner.step(x, target)
    return tuple(step)


def test_messages_of_a_schedule_by_hand_may_cross():
    assert_as_one_process(one_f_one_b(2, 2), dist.run(by_hand, 2, timeout=20))


def failing(change):
    """Run a step that `change` spoils, and return what each rank raises."""
    seen = [None] * 3

    def main():
        rank = dist.get_rank()
        given = {"schedule": one_f_one_b(3, 4), "stages": [stage_of(rank)], "batch": batch_of(4), "loss": loss}
        change(rank, given)
        x, target = given["batch"]
        try:
            PipelineRunner(given["stages"], given["schedule"], loss=given["loss"]).step(x, target)
        except Exception as error:
            seen[rank] = error

    dist.run(main, 3, timeout=20)
    return seen


def set_for(rank, name, value):
    return lambda at, given: given.update({name: value}) if at == rank else None


def wrapped(forward=None, backward=None):
    plain = stage_of(1)
    return [PipelineStage(forward or plain.forward, backward or plain.backward)]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            set_for(0, "schedule", gpipe(3, 4)),
            ScheduleError,
            "the ranks have different schedules: rank 0: <Schedule GPipe: 3 ranks, 3 stages, 4 micro-batches>",
        ),
        (
            lambda rank, given: given.update(schedule=Schedule(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", "2F0 2F1"])),
            ScheduleError,
            "rank 2 never does 2B0, the backward pass of micro-batch 0 through stage 2",
        ),
        (set_for(1, "stages", {}), ValueError, "on rank 1: stage 1 is missing; the schedule has stage 1 on this rank"),
        (set_for(1, "stages", {1: stage_of(1), 2: stage_of(2)}), ValueError, "on rank 1: stage 2 is not this rank's"),
        (set_for(1, "stages", []), ValueError, "on rank 1: the schedule has stage 1 on this rank, and 0 were given"),
        (
            set_for(1, "stages", 3),
            TypeError,
            "on rank 1: stages must be a PipelineStage, a list or a dict of them, got int",
        ),
        (
            set_for(1, "schedule", "1F1B"),
            TypeError,
            "on rank 1: schedule must be a Schedule, such as one_f_one_b(4, 8)",
        ),
        (set_for(1, "stages", [print]), TypeError, "stage 1 must be a PipelineStage, got builtin_function_or_method"),
        (
            set_for(0, "stages", [PipelineStage(lambda x: (x, x))]),
            ValueError,
            "on rank 0: stage 0 has no backward function, and the schedule goes backward",
        ),
        (set_for(2, "loss", None), ValueError, "on rank 2: the rank of the last stage needs loss="),
        (
            lambda rank, given: given.update(schedule=one_f_one_b(2, 4)),
            ValueError,
            "the schedule is for 2 ranks, and the group has 3",
        ),
    ],
)
def test_what_is_wrong_with_a_pipeline_is_raised_on_all_ranks(change, kind, words):
    for rank, error in enumerate(failing(change)):
        assert type(error) is kind
        assert f"PipelineRunner on group 'world' (rank {rank} of 3): " in str(error)
        assert words in str(error)


def narrow_third():
    calls = []

    def forward(x):
        calls.append(x)
        y, saved = stage_of(1).forward(x)
        return (y[:, :2] if len(calls) == 3 else y), saved

    return wrapped(forward)


def raising(*_):
    raise RuntimeError("no luck")


@pytest.mark.parametrize(
    ("rank", "change", "kind", "words"),
    [
        (0, ("batch", (np.ones((10, 3)), None)), ValueError, "x has 10 rows, which would be 2 micro-batches of 3 and"),
        (0, ("batch", (None, None)), ValueError, "x is None on the rank of the first stage"),
        (2, ("batch", (None, np.ones((3, 3)))), ValueError, "target has 3 rows"),
        (2, ("batch", (None, None)), ValueError, "target is None on the rank of the last stage"),
        (1, ("stages", narrow_third()), ValueError, "1SEND_F2, the send of activations of micro-batch 2 through st"),
        (1, ("stages", wrapped(raising)), RuntimeError, "no luck"),
        (1, ("stages", wrapped(backward=raising)), RuntimeError, "no luck"),
        (1, ("stages", wrapped(lambda x: x)), TypeError, "forward must return the tuple (y, saved), got ndarray"),
        (1, ("stages", wrapped(backward=lambda saved, dy: (None, dy))), ValueError, "dx is None, and the stage before"),
        (
            1,
            ("stages", wrapped(backward=lambda saved, dy: (dy[:, :1], None))),
            ValueError,
            "dx must be like x, float64[2, 3], got float64[2, 1]",
        ),
        (
            1,
            ("stages", wrapped(backward=lambda saved, dy: (dy.astype(np.float32), None))),
            ValueError,
            "dx must be like x, float64[2, 3], got float32[2, 3]",
        ),
        (
            1,
            ("stages", wrapped(backward=lambda saved, dy: ({"h": dy}, None))),
            ValueError,
            "dx['h'] is a gradient of x['h'], and there is no x['h']",
        ),
        (2, ("loss", lambda y, t: (0.0, y.sum())), ValueError, "dy must be like y, float64[2, 3], got float64[]"),
    ],
)
def test_what_fails_in_a_step_is_told_to_all_ranks(rank, change, kind, words):
    errors = failing(set_for(rank, *change))
    assert type(errors[rank]) is kind
    assert words in str(errors[rank])
    for other in {0, 1, 2} - {rank}:
        assert isinstance(errors[other], dist.DistBackendError)
        assert f"rank {rank} failed: PipelineRunner.step on group 'world' (rank {rank} of 3): " in str(errors[other])
        assert f"{kind.__name__}: {words}" in str(errors[other]) or f": {words}" in str(errors[other])


def test_at_detail_nan_is_named():
    stages = wrapped(backward=lambda saved, dy: (dy * np.nan, {"w": dy, "b": dy}))
    assert failing(set_for(1, "stages", stages)) == [None] * 3
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    errors = failing(set_for(1, "stages", stages))
    assert type(errors[1]) is FloatingPointError
    assert "1B0, the backward pass of micro-batch 0 through stage 1: dx has NaN" in str(errors[1])
    assert "FloatingPointError" in str(errors[0])


def test_stages_are_checked_when_they_are_made():
    with pytest.raises(TypeError, match="PipelineStage: forward must be callable, got int"):
        PipelineStage(3)
    with pytest.raises(ValueError, match="backward_input is given without backward_weight; pass both"):
        PipelineStage(print, backward_input=print)


def told_on_a_group():
    group = dist.new_group([0, 1, 2])
    stages = wrapped(raising) if dist.get_rank() == 1 else [stage_of(dist.get_rank())]
    runner = PipelineRunner(stages, one_f_one_b(3, 4), group, loss=loss)
    try:
        runner.step(*batch_of(4))
    except (RuntimeError, dist.DistBackendError) as error:
        return str(error)


@pytest.mark.parametrize("backend", ["threads", pytest.param("gloo", marks=needs_linux)])
def test_a_failure_breaks_the_group_of_the_pipeline_alone(worlds, backend):
    first, cause, last = worlds.world(backend, 3).run(told_on_a_group)
    assert cause == "no luck"
    for words in (first, last):
        assert "failed: PipelineRunner.step on group" in words
        assert "1F0, the forward pass of micro-batch 0 through stage 1: RuntimeError: no luck" in words


def test_a_dry_run_says_that_it_knows_no_other_stage():
    with dist.dry_run(world_size=4, rank=1):
        runner = PipelineRunner([stage_of(1)], one_f_one_b(4, 2), loss=loss)
        with pytest.raises(ValueError, match="1F0, the forward .* a dry run does not know what another stage returns"):
            runner.step()


def random_schedule(rng):
    """Return a schedule of actions in a random order that can be done; two of them are swapped half of the time."""
    num_ranks, per_rank, num_microbatches = rng.integers(1, 4), rng.integers(1, 3), rng.integers(1, 4)
    home = rng.permutation(np.repeat(np.arange(num_ranks), per_rank))
    rows = [[] for _ in range(num_ranks)]
    # For each micro-batch the actions that come next, and after a backward pass of the input also that of the weights.
    ready = [(0, "F", number) for number in range(num_microbatches)]
    while ready:
        stage, kind, number = ready.pop(rng.integers(len(ready)))
        rows[home[stage]].append(f"{stage}{kind}{number}")
        backward = "B" if rng.random() < 0.5 else "I"
        if kind == "F":
            ready.append((stage, backward, number) if stage + 1 == len(home) else (stage + 1, "F", number))
        elif kind != "W" and stage:
            ready.append((stage - 1, backward, number))
        if kind == "I":
            ready.append((stage, "W", number))
    row = rows[rng.integers(num_ranks)]
    if rng.random() < 0.5:
        first, second = rng.integers(len(row), size=2)
        row[first], row[second] = row[second], row[first]
    return Schedule(rows, "random")


def test_random_schedules_compute_what_one_process_does_or_do_not_pass_the_check():
    rng, passed, refused = np.random.default_rng(0), 0, 0
    for _ in range(60):
        schedule = random_schedule(rng)
        try:
            schedule.check()
        except ScheduleError:
            refused += 1
            continue
        passed += 1
        results = dist.run(trained, schedule.num_ranks, args=(schedule.to_csv(), "both", 1), timeout=20)
        assert_as_one_process(schedule, results)
    assert min(passed, refused) > 10
