"""GradientReducer, ShardedOptimizer and broadcast_parameters with gradients in GPU memory."""

import numpy as np
import pytest
from standin_gpu import MACHINE

import meshdist as dist
from meshdist.parallel import GradientReducer, ShardedOptimizer, broadcast_parameters

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
