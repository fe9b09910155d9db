"""GradientReducer, ShardedOptimizer and broadcast_parameters with gradients in GPU memory."""

import numpy as np
import pytest
from standin_gpu import MACHINE

import meshdist as dist
from meshdist.parallel import (
    GradientReducer,
    PipelineRunner,
    ShardedOptimizer,
    autograd_stage,
    broadcast_parameters,
    interleaved,
    one_f_one_b,
    zbv,
)

pytestmark = pytest.mark.timeout(60)


def on_two_gpus(program, cupy):
    MACHINE.num_devices = 2

    def main():
        cupy.cuda.Device(dist.get_rank()).use()
        overrides = {"dp": "standin"}
        mesh = dist.init_device_mesh("cuda", (2,), mesh_dim_names=("dp",), backend_override=overrides)
        return program(mesh["dp"])

    return dist.run(main, 2, timeout=20)


def test_gradients_in_gpu_memory(standin, cupy):
    def program(dp):
        reducer = GradientReducer({"w": cupy.zeros((2, 3)), "b": cupy.zeros(2)}, dp, 1, 1)
        for step in range(2):
            reducer.gradients["b"] = cupy.asarray(np.full(2, 2.0 * dp.get_rank() + step))
            reducer.ready("b")
            reducer.ready("w", cupy.asarray(np.full((2, 3), 4.0 * dp.get_rank())))
            reducer.wait()
            assert reducer.gradients["b"].get().tolist() == [1.0 + step] * 2
            assert reducer.gradients["w"].get().tolist() == [[2.0] * 3] * 2
        if dp.get_rank() == 0:
            reducer.ready("b", np.zeros(2))
        with pytest.raises(dist.DistBackendError) as caught:
            reducer.wait()
        return str(caught.value).partition("): ")[2]

    one, other = on_two_gpus(program, cupy)
    assert one == other
    assert "rank 0: the gradient of 'b' must be float64[2], got float64[2] of numpy, not " in one
    assert "rank 1: no gradient for 'w', 'b'" in one


def test_a_sharded_update_in_gpu_memory(standin, cupy):
    def descent(parameters, gradients, state):
        return np.add(parameters, gradients)

    def program(dp):
        weights = broadcast_parameters({"w": cupy.asarray(np.full(3, 1.0 + dp.get_rank()))}, dp)
        optimizer = ShardedOptimizer(weights, descent, dp)
        optimizer.step({"w": cupy.asarray(np.full(3, 2.0 * dp.get_rank()))})
        return optimizer.parameters["w"].get().tolist()

    assert on_two_gpus(program, cupy) == [[2.0] * 3] * 2


@pytest.mark.parametrize("backend", ["standin", "threads"])
@pytest.mark.parametrize(
    "schedule", [one_f_one_b(2, 4), interleaved(2, 4, 2), zbv(2, 4)], ids=lambda schedule: schedule.name
)
def test_a_pipeline_sends_gpu_arrays_with_and_without_tags(standin, cupy, schedule, backend):
    pytest.importorskip("autograd")
    batch, target = np.arange(24.0).reshape(8, 3) / 10, np.ones((8, 3))
    factors = [1.0 + number for number in range(schedule.num_stages)]

    def loss(y, target):
        return np.sum((y - target) ** 2), 2 * (y - target)

    def main(xp, **overrides):
        if xp is cupy:
            cupy.cuda.Device(dist.get_rank()).use()
        mesh = dist.init_device_mesh("cpu" if xp is np else "cuda", (2,), mesh_dim_names=("pp",), **overrides)
        stages = {
            s: autograd_stage(lambda w, x: w * x + x, xp.asarray(np.full(3, factors[s])))
            for s in schedule.stages_of(mesh.get_rank())
        }
        runner = PipelineRunner(stages, schedule, mesh["pp"], loss=loss)
        given = [xp.asarray(x) for x in (batch, target)]
        found = []
        for _ in range(2):
            step, outputs = runner.step(*given), runner.eval(given[0]).outputs
            found += [*step.gradients.values(), *(step.losses or []), *([] if outputs is None else [outputs])]
        return [x.get() if hasattr(x, "get") else np.asarray(x) for x in found]

    MACHINE.num_devices = 2
    overrides = {"backend_override": {"pp": f"cpu:threads,cuda:{backend}"}}
    of_gpus = dist.run(lambda: main(cupy, **overrides), 2, timeout=40)
    for found, want in zip(of_gpus, dist.run(lambda: main(np), 2, timeout=40), strict=True):
        assert len(found) == len(want)
        for here, there in zip(found, want, strict=True):
            np.testing.assert_allclose(here, there)


@pytest.mark.parametrize(
    "hook",
    ["fp16_compress", "bf16_compress", "quantization_pertensor", "quantization_perchannel", "power_sgd"],
)
def test_hooks_on_gradients_in_gpu_memory(standin, cupy, hook):
    from meshdist.parallel import communication_hooks

    rng = np.random.default_rng(0)
    own = [rng.standard_normal((40, 30)).astype(np.float32) for _ in range(2)]

    def reduced(dp, xp):
        chosen = getattr(communication_hooks, hook)
        chosen = chosen(start_iteration=2) if hook == "power_sgd" else chosen
        reducer = GradientReducer({"w": xp.zeros((40, 30), np.float32)}, dp, hook=chosen)
        for _ in range(4):
            reducer.ready("w", xp.asarray(own[dp.get_rank()]))
            reducer.wait()
        return np.array(reducer.gradients["w"].tolist())

    def on_the_cpu():
        return reduced(dist.init_device_mesh("cpu", (2,)), np)

    want = dist.run(on_the_cpu, 2, timeout=20)
    for found, wanted in zip(on_two_gpus(lambda dp: reduced(dp, cupy), cupy), want, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zigzag", [False, True])
def test_ring_attention_in_gpu_memory(standin, cupy, zigzag):
    pytest.importorskip("autograd")
    import autograd.numpy as anp

    from meshdist.autograd import value_and_grad
    from meshdist.parallel import ring_attention

    whole = np.random.default_rng(0).standard_normal((3, 1, 2, 8, 4))

    def attended(axis, xp):
        blocks = [xp.asarray(block) for block in np.split(whole, 2, axis=3)[axis.get_rank()]]

        def loss(q, k, v):
            return anp.sum(ring_attention(q, k, v, axis=axis, causal=True, zigzag=zigzag) ** 2)

        value, gradients = value_and_grad(loss, (0, 1, 2))(*blocks)
        return [np.array(x.tolist()) for x in (value, *gradients)]

    want = dist.run(lambda: attended(dist.init_device_mesh("cpu", (2,)), np), 2, timeout=20)
    for found, wanted in zip(on_two_gpus(lambda axis: attended(axis, cupy), cupy), want, strict=True):
        for here, there in zip(found, wanted, strict=True):
            np.testing.assert_allclose(here, there, rtol=1e-10)
