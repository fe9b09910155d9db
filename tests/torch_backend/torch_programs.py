"""What the ranks of torch's worlds do: the same over Gloo and over meshdist; each program returns what it got."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh
from worlds import report

import meshdist
import meshdist.tensor
import meshdist.torch
from meshdist.torch import requirements


def _input(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype.is_floating_point or dtype.is_complex:
        # Small integers: their sums are the same in any order.
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def _cases() -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16, torch.float16):
        yield (5,), dtype
    for shape in ((), (0,), (3, 4), (50_000,)):
        yield shape, torch.float32


def all_reduce() -> Any:
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
    results = []
    for shape, dtype in _cases():
        for op in ops:
            x = _input(shape, dtype)
            dist.all_reduce(x, op)
            results.append(x)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        x = _input((7,), torch.int32)
        dist.all_reduce(x, op)
        results.append(x)
    return results


def all_reduce_of_views() -> Any:
    base = _input((6, 8), torch.float32)
    dist.all_reduce(base.t())
    dist.all_reduce(base[:, ::2].contiguous())
    parameter = nn.Parameter(_input((3,), torch.float32))
    dist.all_reduce(parameter)
    z = _input((4,), torch.complex64)
    dist.all_reduce(z)
    return base, parameter.detach(), z


def all_reduce_async() -> Any:
    tensors = [_input((100,), torch.float32, seed) for seed in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    futures = [work.get_future() for work in works[:10]]
    doubled = [future.then(lambda done: done.value()[0] * 2) for future in futures]
    for work in reversed(works):
        assert work.wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    return tensors, [future.wait() for future in doubled], works[-1].result()


def all_reduce_coalesced() -> Any:
    tensors = [_input((size,), torch.float32, size) for size in (1, 5, 7)]
    with dist.distributed_c10d._coalescing_manager():
        for x in tensors:
            dist.all_reduce(x)
    return tensors


def sparse() -> Any:
    rank, results = dist.get_rank(), []
    for shape in ((6,), (6, 3), (0, 2)):
        dense = _input(shape, torch.float32)
        for sparse_dim in range(1, len(shape) + 1):
            x = dense.to_sparse(sparse_dim)
            dist.all_reduce(x)
            results.append(x.to_dense())
    b = _input((5,), torch.bfloat16).to_sparse()
    dist.all_reduce(b)
    results.append(b.to_dense())
    y = torch.sparse_coo_tensor([list(range(rank + 1))], torch.ones(rank + 1), (5,))
    work = dist.all_reduce(y, async_op=True)
    (z,) = work.get_future().wait()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Embedding(10, 2, sparse=True))
    model(torch.tensor([rank, 3])).sum().backward()
    return results, y.to_dense(), z.to_dense(), model.module.weight.grad.to_dense()


def rooted() -> Any:
    rank, size, results = dist.get_rank(), dist.get_world_size(), []
    for root in range(size):
        for shape, dtype in _cases():
            x = _input(shape, dtype)
            dist.broadcast(x, root)
            y = _input(shape, dtype)
            dist.reduce(y, root)
            blocks = [torch.zeros(shape, dtype=dtype) for _ in range(size)] if rank == root else None
            dist.gather(_input(shape, dtype), blocks, dst=root)
            z = torch.zeros(shape, dtype=dtype)
            given = [_input(shape, dtype, seed) for seed in range(size)] if rank == root else None
            dist.scatter(z, given, src=root)
            results.append([x, y if rank == root else None, blocks, z])
    return results


def of_other_shapes() -> Any:
    """Gloo compares sizes alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(6.0).reshape((2, 3) if rank else (6,))
    dist.all_reduce(x)
    y = x.reshape((3, 2) if rank == size - 1 else (1, 6)) + rank
    dist.broadcast(y, 0)
    return x, y


def gathered() -> Any:
    size, results = dist.get_world_size(), []
    for shape, dtype in _cases():
        x = _input(shape, dtype)
        blocks = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
        dist.all_gather(blocks, x)
        whole = torch.zeros(size * x.numel(), dtype=dtype)
        dist.all_gather_into_tensor(whole, x.reshape(-1))
        results.append([blocks, whole])
        if shape:
            rows = torch.zeros((size * shape[0], *shape[1:]), dtype=dtype)
            work = dist.all_gather_into_tensor(rows, x, async_op=True)
            work.wait()
            results.append(rows)
    return results


def reduce_scattered() -> Any:
    size, results = dist.get_world_size(), []
    for shape, dtype in _cases():
        block = torch.zeros(shape, dtype=dtype)
        dist.reduce_scatter(block, [_input(shape, dtype, seed) for seed in range(size)])
        whole = _input((size * block.numel(),), dtype)
        part = torch.zeros(block.numel(), dtype=dtype)
        dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.MAX)
        results.append([block, part])
    return results


def exchanged() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    taken = torch.zeros(3 * size)
    dist.all_to_all_single(taken, _input((3 * size,), torch.float32))
    sizes = [1 + (rank + peer) % 3 for peer in range(size)]
    uneven = torch.zeros(sum(sizes), 2)
    dist.all_to_all_single(uneven, _input((sum(sizes), 2), torch.float32), sizes, sizes)
    return taken, uneven


def messages() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    results: list[Any] = []
    following, previous = (rank + 1) % size, (rank - 1) % size
    for number in (1, 40_000):
        taken = torch.zeros(number)
        ops = [
            dist.P2POp(dist.isend, _input((number,), torch.float32), following),
            dist.P2POp(dist.irecv, taken, previous),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        results.append(taken)
    if rank == 0:
        for _ in range(size - 1):
            x = torch.zeros(2)
            source = dist.recv(x, tag=5)
            results.append((source, x[0].item() == source))
        results.sort(key=str)
    else:
        dist.send(torch.full((2,), float(rank)), 0, tag=5)
    if rank == 0:
        works = [dist.isend(torch.full((1,), float(tag)), size - 1, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    elif rank == size - 1:
        for tag in (2, 1):
            x = torch.zeros(1)
            assert dist.recv(x, 0, tag=tag) == 0
            results.append(x)
    return results if rank else len(results)


def objects() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    sent = [rank, "of", rank] if rank == 0 else [None] * 3
    dist.broadcast_object_list(sent, 0)
    taken: list[Any] = [None]
    dist.scatter_object_list(taken, [f"for {each}" for each in range(size)] if rank == 0 else None, 0)
    return gathered, sent, taken


def groups() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    even = dist.new_group(range(0, size, 2))
    pair = dist.new_group([0, size - 1])
    x = _input((4,), torch.float32)
    if rank % 2 == 0:
        dist.all_reduce(x, group=even)
    if rank in (0, size - 1):
        dist.broadcast(x, size - 1, group=pair)
    dist.barrier()
    if rank % 2 == 0:
        dist.destroy_process_group(even)
    subgroup, _ = dist.new_subgroups(1)
    dist.all_reduce(x, group=subgroup)
    return x


def functional() -> Any:
    import torch.distributed._functional_collectives as funcol

    size, group = dist.get_world_size(), dist.group.WORLD
    x = _input((2 * size, 3), torch.float32)
    summed = funcol.all_reduce(x, "sum", group)
    gathered = funcol.all_gather_tensor(x, 0, group)
    scattered = funcol.reduce_scatter_tensor(x, "sum", 0, group)
    both = funcol.all_gather_into_tensor_coalesced([x, x + 1], group)
    exchanged = funcol.all_to_all_single(x, None, None, group)
    sent = funcol.broadcast(x, 0, group)
    return [each + 0 for each in (summed, gathered, scattered, *both, exchanged, sent)]


def compiled(compiler: str) -> Any:
    """Functional collectives and those of torch.distributed in a graph: what it gives, and what they give without."""
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        summed = funcol.all_reduce(2 * x, "sum", group)
        rows = funcol.reduce_scatter_tensor(funcol.all_gather_tensor(summed, 0, group), "max", 0, group)
        y = x + 1
        dist.all_reduce(y)  # the compiler makes it a functional one
        return rows + y, summed

    torch._dynamo.reset()
    x = _input((4, 3), torch.float32)
    in_graph = torch.compile(step, backend=compiler, fullgraph=True)(x)
    return [y.detach() for y in in_graph], list(step(x))


# ---- Training


class Net(nn.Module):
    """Two layers, whose widths 2 and 3 ranks can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.second = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def _trained(model: nn.Module, steps: int = 6, *, seed_of_rank: bool = True) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank() if seed_of_rank else 7)
    losses = []
    x = torch.randn(8, 6, generator=generator)
    for _ in range(steps):
        loss = (model(x) - x[:, :4]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp() -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    losses = []
    for options in ({}, {"bucket_cap_mb": 0.0001}, {"find_unused_parameters": True}, {"static_graph": True}):
        torch.manual_seed(dist.get_rank())  # the first rank's parameters count
        losses.append(_trained(DistributedDataParallel(Net(), **options)))
    torch.manual_seed(0)
    hooked = DistributedDataParallel(Net())
    hooked.register_comm_hook(None, fp16_compress_hook)
    return losses, _trained(hooked, 2)


def fsdp() -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trained(model)


def tensor_parallel() -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(Net(), mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return _trained(model, seed_of_rank=False)


def dtensor() -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(torch.arange(4.0 * size).reshape(size, 4), mesh, [Replicate(), Shard(0)])
    turned = x.redistribute(mesh, [Replicate(), Shard(1)])
    return turned.to_local(), turned.full_tensor(), x.sum().full_tensor()


# ---- Errors


def with_nccl_for_gpus() -> Any:
    """A group that is to have another backend for GPUs: what it gives on the CPU, and what it says elsewhere."""
    group = dist.new_group(backend="cpu:meshdist,cuda:nccl")
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    with pytest.raises(TypeError) as caught:
        dist.all_reduce(torch.ones(2, device="meta"), group=group)
    dist.destroy_process_group(group)
    return x.tolist(), str(caught.value)


def _sparse() -> None:
    dist.broadcast(torch.ones(3).to_sparse(), 0)


def _sparse_rows() -> None:
    dist.all_reduce(torch.eye(2).to_sparse_csr())


def _sparse_product() -> None:
    dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.PRODUCT)


def _on_meta() -> None:
    dist.broadcast(torch.ones(3, device="meta"), 0)


def _two_tensors() -> None:
    dist.group.WORLD.allreduce([torch.ones(1), torch.ones(1)])


def _other_timeout() -> None:
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=1))


def _options() -> None:
    dist.new_group(pg_options={})


def _initialize_meshdist() -> None:
    meshdist.init_process_group()


def _wrong_shape() -> None:
    dist.all_gather_into_tensor(torch.ones(3), torch.ones(2))


def _slice_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    meshdist.torch.from_torch(mesh["tp"])


def refused(name: str) -> tuple[str, str]:
    """Return the type and the text of the error of a call."""
    try:
        globals()[f"_{name}"]()
    except Exception as error:  # handed to the test
        return type(error).__name__, str(error)
    return "nothing", ""


def unsupported(change: str) -> str:
    """Return what is said where torch is of a different version, or lacks something, or is not there."""

    def not_there(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    with pytest.MonkeyPatch.context() as patch:
        if change == "without torch":
            patch.setattr(requirements, "import_module", not_there)
        elif change == "without Work":
            patch.delattr(dist, "Work")
            patch.setattr(torch, "__version__", "3.1.0")
        else:
            patch.setattr(torch, "__version__", change)
        with pytest.raises(ImportError) as caught:
            requirements.check_torch()
    return str(caught.value)


def usable() -> bool:
    x = torch.ones(2)
    dist.all_reduce(x)
    return x.tolist() == [dist.get_world_size()] * 2


def forked() -> str:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(torch.ones(2))
            text = "no error"
        except Exception as error:  # handed to the parent
            text = str(error)
        os.write(theirs, text.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    assert usable()
    return text


def wait_in_all_reduce() -> None:
    dist.all_reduce(torch.ones(2))
    report("ready")
    if dist.get_rank() == 2:
        signal.pause()
    dist.all_reduce(torch.ones(2))


def wait_for_future() -> None:
    dist.all_reduce(torch.ones(2))
    report("ready")
    if dist.get_rank() == 2:
        signal.pause()
    dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda done: done.value()).wait()


def wait_in_backward() -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Net())
    for _ in range(3):  # DDP arranges its buckets in the second
        model(torch.ones(2, 6)).sum().backward()
    report("ready")
    if dist.get_rank() == 2:
        signal.pause()
    model(torch.ones(2, 6)).sum().backward()


def callback_waits() -> str:
    def wait_for_another(_: Any) -> Any:
        return dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:  # it makes its call once the other rank has its callback, and then that of the callback
        store.wait(["has_callback"])
        for _ in range(2):
            dist.all_reduce(torch.ones(1))
        return ""
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(wait_for_another)
    store.set("has_callback", "")
    try:
        future.wait()
    except RuntimeError as error:
        return str(error)
    return ""


def single_forms() -> Any:
    """The methods of a group with tensors and plain options in place of lists and objects."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x, y, z = (_input((4,), torch.float32, seed) for seed in range(3))
    group.allreduce(x, dist.ReduceOp.MAX).wait()
    group.broadcast(y, 1).wait()
    group.reduce(z, 0).wait()
    blocks = [torch.zeros(4) for _ in range(size)]
    group.allgather(blocks, x + rank).wait()
    part = torch.zeros(4)
    group.reduce_scatter(part, [y + rank for _ in range(size)], dist.ReduceOp.SUM).wait()
    taken = torch.zeros(4)
    group.scatter(taken, [y + peer for peer in range(size)] if rank == 1 else [], 1).wait()
    group.barrier().wait()
    return x, y, z if rank == 0 else None, blocks, part, taken


def sizes_differ() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def both_libraries() -> tuple[float, float, bool]:
    x, y = torch.full((1,), 1.0 + dist.get_rank()), np.array([1.0 + meshdist.get_rank()])
    dist.all_reduce(x)
    meshdist.all_reduce(y)
    dist.destroy_process_group()
    meshdist.barrier()
    return x.item(), y.item(), meshdist.is_initialized()


# ---- Meshes and repeated worlds


def meshes() -> Any:
    size = dist.get_world_size()
    theirs = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    ours = meshdist.torch.from_torch(theirs)
    y = np.array([1.0 + dist.get_rank()])
    ours["tp"].all_reduce(y)
    back = meshdist.torch.to_torch(ours)
    x = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(x, group=back.get_group("tp"))
    return ours.mesh.tolist(), ours.mesh_dim_names, y.item(), back.mesh.tolist(), back.mesh_dim_names, x.item()


def distributed_tensors() -> Any:
    """Take a DTensor of torch through meshdist and back, and tell what became of it."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(18.0).reshape(6, 3)
    theirs = torch_tensor.distribute_tensor(whole, mesh, [torch_tensor.Replicate(), torch_tensor.Shard(0)])
    ours = meshdist.torch.from_torch(theirs)
    shared = np.shares_memory(ours.to_local(), theirs.to_local().numpy())
    columns = (ours * 2).redistribute({"tp": meshdist.tensor.Shard(1)})
    back = meshdist.torch.to_torch(columns)
    same_mesh = back.device_mesh is mesh
    uneven = meshdist.tensor.Shard(0, sizes=(6, *[0] * (size - 1)))
    with pytest.raises(ValueError, match="torch needs blocks of equal sizes"):
        meshdist.torch.to_torch(columns.redistribute({"tp": uneven}))
    with pytest.raises(TypeError, match="DeviceMesh or DTensor"):
        meshdist.torch.from_torch(whole)
    return shared, same_mesh, str(back.placements[1]), torch.equal(back.full_tensor(), 2 * whole)


def other_mesh_is_freed() -> bool:
    """Tell whether the mesh that was made for a DTensor of meshdist is freed with the DTensor's own."""
    mesh = meshdist.DeviceMesh("cpu", list(range(dist.get_world_size())))
    x = meshdist.tensor.zeros((4,), mesh=mesh, placements=[meshdist.tensor.Shard(0)])
    meshdist.torch.to_torch(x)
    freed = ref(mesh)
    del mesh, x
    gc.collect()
    return freed() is None


def in_many_worlds(meetings: list[str]) -> list[bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    assert not meshdist.is_initialized()
    results = []
    for meeting in meetings:
        dist.init_process_group("meshdist", meeting, rank=rank, world_size=size)
        group = dist.new_group(list(range(size)))
        dist.barrier(group)
        results.append(usable())
        dist.destroy_process_group()
    return results


def in_threads() -> Any:
    """Calls on one group for each thread, at the same time."""
    size = dist.get_world_size()
    members = [dist.new_group(list(range(size))) for _ in range(4)]
    tensors = [torch.full((1000,), float(number)) for number in range(4)]

    def reduce(number: int) -> None:
        for _ in range(25):
            dist.all_reduce(tensors[number], group=members[number])
            dist.all_reduce(torch.ones(1), group=members[number], async_op=True).get_future().wait()
            tensors[number] /= size

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(reduce, range(4)))
    return [x[0].item() for x in tensors]
