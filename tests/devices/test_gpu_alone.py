"""Backend nccl on one real GPU, by a rank alone: every call, dtype and rule of streams."""

import device_programs as programs
import numpy as np
import pytest

import meshdist as dist

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.fixture
def group(gpus, request):
    """The group of a world of one, on backend nccl."""
    gpus(1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=0)
    yield dist.new_group(backend="nccl", device_id=0)
    dist.destroy_process_group()


@pytest.fixture
def real(gpus):
    gpus(1)
    import cupy

    return cupy


@pytest.mark.parametrize("strided", [False, True, "F"])
@pytest.mark.parametrize("dtype", ["float32", "bool", "int16", "uint64", "complex128", "float16", "bfloat16"])
def test_every_collective(group, real, dtype, strided):
    programs.every_collective(real, group, dtype, strided=strided)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "int16", "int64", "bool", "complex64"])
def test_every_op(group, real, dtype):
    programs.every_op(real, group, dtype)


def test_everything_else(group, real):
    programs.every_other_call(real, group)
    programs.factors(real, group)
    programs.without_change(real, group)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo"])
def test_by_way_of_the_cpu(gpus, real, backend):
    gpus(1)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        programs.every_collective(real, dist.group.WORLD, "float32", strided=True)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def long_kernel(real):
    """A kernel that keeps the GPU busy for a good second."""
    spin = real.RawKernel(
        r"""extern "C" __global__ void spin(long long cycles) {
            long long begin = clock64();
            while (clock64() - begin < cycles) {}
        }""",
        "spin",
    )
    spin((1,), (1,), (1000,))
    real.cuda.Device().synchronize()
    return lambda: spin((1,), (1,), (2_000_000_000,))


def test_a_sync_call_does_not_wait_for_the_device(group, real, long_kernel):
    x = real.ones(1000, "float32")
    # Kernels are compiled at their first use, which takes longer than the long one.
    x *= 1
    x += 0
    group.all_reduce(x, op="avg")
    group.broadcast(x, group_src=0)
    stream = real.cuda.Stream(non_blocking=True)
    real.cuda.Device().synchronize()
    with stream:
        long_kernel()
        x *= 3
        assert group.all_reduce(x, op="avg") is x
        group.broadcast(x, group_src=0)
        x += 1
        # All of it is enqueued, and the kernel before it still runs.
        assert not stream.done
    stream.synchronize()
    assert (x.get() == 4).all()


def test_wait_makes_the_stream_wait_and_not_the_host(group, real, long_kernel):
    x, stream = real.ones(1000, "float32"), real.cuda.Stream(non_blocking=True)
    x += 0
    group.all_reduce(x)
    real.cuda.Device().synchronize()
    with stream:
        long_kernel()
        work = group.all_reduce(x, async_op=True)
        assert work.wait()
        x += 1
        assert not stream.done
        assert not work.is_completed()
        with pytest.raises(dist.DistTimeoutError, match="not done after 0.01 s"):
            work.wait(0.01)
    assert work.wait(60.0)
    stream.synchronize()
    assert (x.get() == 2).all()


def test_memory_is_not_given_away_while_a_call_uses_it(group, real, long_kernel):
    whole = real.zeros(1 << 20, "float32")
    group.all_gather_into_tensor(whole, real.full(1 << 20, 3, "float32"))
    real.cuda.Device().synchronize()
    for _ in range(3):
        long_kernel()
        part = real.full(1 << 20, 5, "float32")
        work = group.all_gather_into_tensor(whole, part, async_op=True)
        address = part.data.ptr
        del part
        other = real.full(1 << 20, 7, "float32")
        assert other.data.ptr != address
        work.wait()
        assert (whole.get() == 5).all()


def test_arrays_of_torch(group, torch):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.arange(5, device="cuda", dtype=dtype)
        torch.cuda.synchronize()
        assert group.all_reduce(x) is x
        assert x.tolist() == [0, 1, 2, 3, 4]


def test_a_gpu_that_is_not_there(group):
    with pytest.raises(dist.DistBackendError, match=r"there is no GPU 99 \(device_id\), this process sees"):
        dist.new_group(backend="nccl", device_id=99)


def test_numbers_are_those_of_numpy(group, real):
    x = np.random.default_rng(0).standard_normal(1000)
    assert np.array_equal(group.all_reduce(real.asarray(x)).get(), x)
