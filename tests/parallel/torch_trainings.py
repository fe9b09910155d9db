"""Gradients of several steps, and programs that average them by torch's hooks, or train with torch, on its ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

SHAPES = {"w1": (12, 9), "b1": (9,), "w2": (9, 4, 3), "scalar": (), "w3": (7, 40)}
STEPS = 5


def gradients_of(step: int, rank: int) -> dict[str, Any]:
    rng = np.random.default_rng([step, rank])
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


class Drawn:
    """Stands for torch's generator, so that torch draws the numbers that NumPy draws."""

    def __init__(self) -> None:
        self._state = np.random.RandomState(0)

    def manual_seed(self, seed: int) -> None:
        self._state = np.random.RandomState(seed)

    def randn(self, *shape: int, dtype: Any = None, device: Any = None) -> Any:
        import torch

        return torch.from_numpy(self._state.standard_normal(shape).astype(np.float32))


class TorchBucket:
    """What torch's hooks use of a GradBucket: one bucket with all gradients, in reverse order."""

    def __init__(self, gradients: dict[str, Any]) -> None:
        import torch

        arrays = [gradients[name] for name in reversed(SHAPES)]
        self._flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays])).clone()  # resizable
        self._shapes = [array.shape for array in arrays]

    def buffer(self) -> Any:
        return self._flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[Any]:
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        # torch's PowerSGD takes the first dim of every gradient, which a scalar does not have.
        shapes = [shape or (1,) for shape in self._shapes]
        return [part.view(shape) for part, shape in zip(self._flat.split(sizes), shapes, strict=True)]


class StackedGather:
    """Stands for `torch.distributed.all_gather`: the quantization hooks take the result of backend nccl, one tensor."""

    def __init__(self, all_gather: Any) -> None:
        self._all_gather = all_gather

    def __call__(self, outputs: list[Any], *args: Any, **options: Any) -> StackedGather:
        import torch

        work = self._all_gather(outputs, *args, **options)
        self._future = work.get_future().then(lambda done: [torch.stack(outputs)])
        return self

    def get_future(self) -> Any:
        return self._future


def by_torch(name: str, options: dict[str, Any]) -> list[Any]:
    """Return the averages of each step, as one flat array, by the hook of torch of this name."""
    import torch
    import torch.distributed as torch_dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

    drawn = Drawn()
    torch.manual_seed, torch.randn = drawn.manual_seed, drawn.randn
    group = torch_dist.group.WORLD
    if not isinstance(torch_dist.all_gather, StackedGather):
        torch_dist.all_gather = StackedGather(torch_dist.all_gather)
        orthogonalize = powerSGD_hook._orthogonalize
        # The batched hook passes it one matrix, which it refuses: it takes a batch of them.
        powerSGD_hook._orthogonalize = lambda matrices, epsilon=0: orthogonalize(
            matrices if matrices.ndim == 3 else matrices.unsqueeze(0), epsilon
        )
    modules = (default_hooks, quantization_hooks, powerSGD_hook)
    hook = next(getattr(module, name) for module in modules if hasattr(module, name))
    state = group if not options else powerSGD_hook.PowerSGDState(group, **options)
    found = []
    for step in range(STEPS):
        bucket = TorchBucket(gradients_of(step, torch_dist.get_rank()))
        result = hook(state, bucket).wait()
        found.append(np.array(result[0] if isinstance(result, (list, tuple)) else result))
    return found


def batch(step: int, rank: int) -> Any:
    return np.random.default_rng([step, rank]).standard_normal((4, 3)).astype(np.float32)


def joined_by_torch(num_batches: list[int], divide_by_initial_world_size: bool) -> Any:
    """Return the weights after a training with DistributedDataParallel and Join; each rank has so many batches."""
    import torch
    from torch.distributed.algorithms.join import Join

    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    rank = torch.distributed.get_rank()
    with Join([wrapped], divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(num_batches[rank]):
            optimizer.zero_grad()
            (wrapped(torch.from_numpy(batch(step, rank))) ** 2).mean().backward()
            optimizer.step()
    return model.weight.detach().numpy().copy()


def averaged_by_torch(num_steps: int) -> list[list[int]]:
    """Return the steps in which torch's averagers change the parameter of a rank, which is the rank."""
    import torch
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager

    rank, size = float(torch.distributed.get_rank()), torch.distributed.get_world_size()
    averagers = (PeriodicModelAverager(3, 2), HierarchicalModelAverager({2: 2, 4: size}, 1))
    found = []
    for averager in averagers:
        values = []
        for _ in range(num_steps):
            parameter = torch.nn.Parameter(torch.tensor([rank]))
            parameter.grad = torch.zeros(1)
            averager.average_parameters([parameter])
            values.append(parameter.item())
        found.append(values)
    return found
