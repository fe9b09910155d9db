"""uneven_inputs: ranks with different numbers of batches, as torch's Join."""

from __future__ import annotations

import numpy as np
import pytest

import meshdist as dist
from meshdist.parallel import GradientReducer, Joinable, JoinHook, ShardedOptimizer, uneven_inputs
from meshdist.parallel.communication_hooks import fp16_compress


def trained(num_batches, **options):
    """Return the weight and the number of steps of each rank; a gradient is 6, and a rank steps by the average."""

    def program():
        weights = {"w": np.zeros(2)}
        reducer = GradientReducer(weights, hook=options.pop("hook", None) if dist.get_world_size() == 1 else hook)
        steps = 0
        with uneven_inputs(None, reducer, **options):
            for _ in range(num_batches[dist.get_rank()]):
                reducer.ready("w", np.full(2, 6.0))
                reducer.wait()
                weights["w"] -= reducer.gradients["w"]
                steps += 1
        reducer.ready("w", np.full(2, 6.0))  # in step again
        reducer.wait()
        assert reducer.gradients["w"].tolist() == [6.0, 6.0]
        return float(weights["w"][1]), steps

    hook = options.pop("hook", None)
    return dist.run(program, len(num_batches), timeout=30)


@pytest.mark.parametrize("hook", [None, fp16_compress])
@pytest.mark.parametrize(
    ("num_batches", "divide_by_initial", "weight"),
    [
        ((1, 3, 2), True, -6 - 4 - 2),
        ((1, 3, 2), False, -18),
        ((2, 0), True, -6),
        ((0, 2), False, -12),
        ((2, 2), True, -12),
        ((0, 0), True, 0),
        ((3,), False, -18),
    ],
)
def test_all_ranks_end_with_the_weights_of_the_longest(num_batches, divide_by_initial, weight, hook):
    found = trained(num_batches, divide_by_initial_world_size=divide_by_initial, hook=hook)
    assert [steps for _, steps in found] == list(num_batches)
    np.testing.assert_allclose([weight for weight, _ in found], weight, rtol=2e-3)


def test_parameters_that_the_loop_replaces():
    def program():
        tree = {"w": np.zeros(1)}
        reducer = GradientReducer({"w": np.zeros(1)})
        with uneven_inputs(None, reducer, parameters=tree):
            for _ in range(dist.get_rank()):
                reducer.ready("w", np.ones(1))
                reducer.wait()
                tree["w"] = tree["w"] - reducer.gradients["w"]
        return float(tree["w"][0])

    assert dist.run(program, 3) == 3 * [-2 / 3 - 1 / 3]


def test_steps_that_accumulate():
    def program():
        reducer = GradientReducer({"w": np.zeros(1)})
        found = []
        with uneven_inputs(None, reducer):
            for _ in range(1 + dist.get_rank()):
                with reducer.no_sync():
                    reducer.ready("w", np.ones(1))
                reducer.ready("w", np.ones(1))
                reducer.wait()
                found.append(float(reducer.gradients["w"][0]))
        return found

    assert dist.run(program, 2) == [[2.0], [2.0, 1.0]]


def loop(reducer, num_batches, steps):
    with uneven_inputs(None, reducer, throw_on_early_termination=True):
        for step in range(num_batches):
            reducer.ready("w", np.ones(1))
            reducer.wait()
            steps.append(step)


def test_throw_on_early_termination_raises_on_all_ranks():
    def program():
        reducer = GradientReducer({"w": np.zeros(1)})
        steps = []
        with pytest.raises(dist.DistBackendError) as caught:
            loop(reducer, 1 if dist.get_rank() == 1 else 3, steps)
        reducer.ready("w")
        reducer.wait()
        return len(steps), str(caught.value).partition("): ")[2].partition(";")[0]

    assert dist.run(program, 3) == [
        (1, "rank 1 ran out of batches, and this rank has more"),
        (1, "rank 1 ran out of batches, and others have more"),
        (1, "rank 1 ran out of batches, and this rank has more"),
    ]


def test_a_loop_that_is_left_within_a_step_is_refused():
    def program():
        reducer = GradientReducer({"w": np.zeros(1), "b": np.zeros(1)})
        told = r"uneven_inputs ends in the middle of a step; call wait\(\) before it"
        with pytest.raises(RuntimeError, match=told), uneven_inputs(None, reducer):
            reducer.ready("b", np.ones(1))

    dist.run(program, 2)


def test_without_enable_nothing_is_sent():
    def program():
        reducer = GradientReducer({"w": np.zeros(1)})
        with dist.init_device_mesh("cpu", (2,)).account() as account, uneven_inputs(None, reducer, enable=False):
            pass
        return account.total().calls

    assert dist.run(program, 2) == [0, 0]


def test_an_exception_of_the_block_is_not_held_up():
    def program():
        reducer = GradientReducer({"w": np.zeros(1)})
        with uneven_inputs(None, reducer):
            raise KeyError("data")

    with pytest.raises(KeyError, match="data"):
        dist.run(program, 2)


@pytest.mark.parametrize("divide_by_initial", [True, False])
def test_a_sharded_optimizer_goes_on_updating_its_block(divide_by_initial):
    def descent(parameters, gradients, state, lr):
        state["steps"] = state.get("steps", 0) + 1
        parameters -= lr * gradients

    def program():
        optimizer = ShardedOptimizer({"w": np.zeros(3)}, descent, lr=1.0)
        with uneven_inputs(None, optimizer, divide_by_initial_world_size=divide_by_initial):
            for _ in range(1 + dist.get_rank()):
                optimizer.step({"w": np.full(3, 2.0)})
        return optimizer.parameters["w"].tolist(), optimizer.state[0]["steps"]

    weight = -3.0 if divide_by_initial else -4.0
    assert dist.run(program, 2) == 2 * [([weight] * 3, 2)]


class Counted(Joinable):
    """A Joinable of the user: sums over the active ranks."""

    def __init__(self):
        self.shadowed, self.ended = 0, None

    @property
    def join_process_group(self):
        return dist.group.WORLD

    def sum(self, value):
        self.notify_join_context()
        return int(dist.all_reduce(np.array(value)))

    def join_hook(self):
        return CountedHook(self)


class CountedHook(JoinHook):
    def __init__(self, counted):
        self.counted = counted

    def main_hook(self):
        dist.all_reduce(np.array(0))
        self.counted.shadowed += 1

    def post_hook(self, is_last_joiner):
        self.counted.ended = is_last_joiner


def test_a_joinable_of_the_user():
    def program():
        counted = Counted()
        with uneven_inputs(None, counted):
            sums = [counted.sum(1) for _ in range(1 + dist.get_rank())]
        return sums, counted.shadowed, counted.ended

    assert dist.run(program, 3) == [([3], 2, False), ([3, 2], 1, False), ([3, 2, 1], 0, True)]


def test_wrong_arguments():
    def program():
        reducer = GradientReducer({"w": np.zeros(1)})
        with pytest.raises(TypeError, match="pass at least one reducer or optimizer"), uneven_inputs(None):
            pass
        with pytest.raises(TypeError, match="expected reducers, optimizers and other Joinables, got 'w'"):
            uneven_inputs(None, "w").__enter__()
        with pytest.raises(ValueError, match="GradientReducer is of group 'world'; pass that group"):
            uneven_inputs(dist.new_group([0, 1]), reducer).__enter__()
        with (
            uneven_inputs(None, reducer),
            pytest.raises(ValueError, match="is in another such block already"),
            uneven_inputs(None, reducer),
        ):
            pass

    dist.run(program, 2)
