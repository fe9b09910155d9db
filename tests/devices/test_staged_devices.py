"""Arrays on a GPU, with a stand-in for CuPy, on backends for those on the CPU: copied there, and back."""

import threading
import types

import device_programs as programs
import numpy as np
import pytest
import standin_cupy
from standin_cupy import MACHINE

import meshdist as dist
from meshdist.arrays.device import as_device_array
from meshdist.backends import Wrapper

pytestmark = pytest.mark.timeout(60)


def on_own_gpu(program, size, cupy, *args, **how):
    """Run a program on the world's group, each rank on a GPU of its own."""
    MACHINE.num_devices = max(size, 2)

    def main():
        cupy.cuda.Device(dist.get_rank()).use()
        program(cupy, dist.group.WORLD, *args, **how)

    dist.run(main, size, timeout=20)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize(("size", "dtype", "strided"), [(1, "float32", "F"), (2, "bool", True), (3, "int16", False)])
def test_every_collective(cupy, size, dtype, strided):
    on_own_gpu(programs.every_collective, size, cupy, dtype, ((3,), (), (0,), (2, 3)), strided=strided)


@pytest.mark.parametrize("dtype", ["int16", "complex64"])
def test_every_op(cupy, dtype):
    on_own_gpu(programs.every_op, 2, cupy, dtype)


@pytest.mark.parametrize("program", ["factors", "messages", "without_change", "varying"])
def test_everything_else(cupy, program):
    on_own_gpu(getattr(programs, program), 3, cupy)


def in_processes(dtype):
    with standin_cupy.installed() as cupy:
        programs.every_collective(cupy, dist.group.WORLD, dtype, ((2, 3),), skipped=programs.OF_SEVERAL_GPUS)
        big = ((20_000,),)
        programs.every_collective(cupy, dist.group.WORLD, dtype, big, skipped=programs.OF_SEVERAL_GPUS, times=1)
        if dist.get_world_size() > 1:
            programs.messages(cupy, dist.group.WORLD)
        mixed(cupy)
        assert standin_cupy.MACHINE.races == []


def mixed(cupy):
    """Some ranks have their arrays on a GPU and some on the CPU."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.full(3, rank + 1.0)
    y = cupy.asarray(x) if rank % 2 else x
    assert dist.all_reduce(y) is y
    assert y.tolist() == [float(sum(range(1, size + 1)))] * 3


def test_ranks_that_are_processes(world_of_3):
    world_of_3.run(in_processes, "float64")


def test_the_host_waits_for_what_the_stream_was_asked_to_do(cupy):
    def main():
        x = cupy.zeros(3)
        hold = MACHINE.held(cupy.cuda.get_current_stream())
        hold.__enter__()
        x[...] = 2.0
        threading.Timer(0.05, hold.__exit__, (None, None, None)).start()
        dist.all_reduce(x)
        return x.tolist()

    assert dist.run(main, 1, timeout=20) == [[2.0] * 3]


def test_what_is_received_is_not_written_under_the_default_stream_of_another_gpu(cupy):
    MACHINE.num_devices = 2

    def main():
        if dist.get_rank() == 1:
            dist.barrier()
            dist.send(np.ones(3), 0)
            return
        with cupy.cuda.Device(1):
            x = cupy.zeros(3)
            asked = dict(MACHINE.null(1).clock)
        work = dist.irecv(x, 1)  # while GPU 0 is the current one
        number = MACHINE.null(1).number
        assert MACHINE.host[number] >= asked[number]
        dist.barrier()
        work.wait()
        assert x.tolist() == [1.0] * 3

    dist.run(main, 2, timeout=20)


def test_a_call_on_a_stream_of_its_own(cupy):
    def main():
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.ones(4)
            work = dist.all_reduce(x, async_op=True)
            y = cupy.zeros((2, 4))
            dist.all_gather_into_tensor(y, cupy.ones(4))
            work.wait()
            x[...] = cupy.add(x, 1.0)
            return x.tolist(), y.tolist()

    assert dist.run(main, 2, timeout=20) == [([3.0] * 4, [[1.0] * 4] * 2)] * 2


def test_callbacks_find_the_result(cupy):
    def main():
        x = cupy.ones(2)
        future = dist.all_reduce(x, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].tolist()).wait()

    assert dist.run(main, 2, timeout=20) == [[2.0, 2.0]] * 2


def test_who_watches_is_told_once(cupy):
    def main():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with mesh.account() as account:
            mesh["dp"].all_reduce(cupy.ones(2))
        volume = account.as_dict()["dp"]["all_reduce"]
        return volume["calls"], volume["nbytes"]

    assert dist.run(main, 2, timeout=20) == [(1, 16)] * 2


def test_what_is_refused(cupy):
    def main():
        x, wide = cupy.zeros(3), cupy.zeros((1, 3))
        where = r"on group 'world' \(rank 0 of 1\): "
        with pytest.raises(ValueError, match=f"all_reduce {where}tensor is read-only"):
            dist.all_reduce(Foreign(x, read_only=True))
        with pytest.raises(ValueError, match=f"all_gather {where}.*share memory"):
            dist.all_gather([x, x], x)
        with pytest.raises(TypeError, match=f"all_gather {where}tensor_list must be a list of arrays, got ndarray"):
            dist.all_gather(x, x)
        with pytest.raises(TypeError, match=f"all_reduce {where}tensor must be one array, got a list of 1 element"):
            dist.all_reduce([x])
        with pytest.raises(ValueError, match="several device types, cpu, cuda"):
            dist.all_gather_into_tensor(np.zeros(3), x)
        stretched = wide.seen_as(np.lib.stride_tricks.as_strided(wide._host, (4, 3), (0, 8)))
        with pytest.raises(ValueError, match="tensor repeats elements in memory"):
            dist.all_reduce(stretched)
        with pytest.raises(TypeError, match="op AVG is not defined for int64"):
            dist.all_reduce(cupy.zeros(1, "int64"), op="avg")
        dist.all_reduce(x)

    # In threads of their own, but one world: nothing is broken by what is refused.
    with pytest.raises(ValueError, match="share memory"):
        dist.run(lambda: dist.all_gather([shared := cupy.zeros(3), shared], cupy.zeros(3)), 2, timeout=20)
    dist.run(main, 1, timeout=20)


class Foreign:
    """Another library's array on a GPU."""

    def __init__(self, array, *, read_only=False):
        self.array, self.read_only = array, read_only

    @property
    def __cuda_array_interface__(self):
        interface = self.array.__cuda_array_interface__
        return {**interface, "data": (interface["data"][0], self.read_only)}


def test_arrays_of_other_libraries(cupy):
    def main():
        x = cupy.ones(3)
        assert dist.all_reduce(foreign := Foreign(x)) is foreign
        return x.tolist()

    assert dist.run(main, 2, timeout=20) == [[2.0] * 3] * 2
    with pytest.raises(TypeError, match="x: Shy does not share its memory with CuPy: hidden"):
        as_device_array(Shy(), "x")


class Shy:
    @property
    def __cuda_array_interface__(self):
        raise AttributeError("hidden")


def test_who_has_no_cupy_is_told(monkeypatch):
    import sys

    array = types.SimpleNamespace  # whose class says that it is on a GPU
    on_gpu = type("OnGpu", (array,), {"__cuda_array_interface__": property(lambda self: {})})()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(dist.DistBackendError, match=r"all_reduce .*need CuPy: `pip install cupy-cuda12x`"):
        dist.run(lambda: dist.all_reduce(on_gpu), 1, timeout=20)


# ---- Device strings


def test_a_backend_that_stages_may_be_named_for_gpus(cupy):
    def main():
        for name in ("cpu:threads,cuda:threads", "cuda:threads", "cpu:threads", "threads"):
            with dist.new_group(backend=name) as group:
                x, y = cupy.ones(1), np.ones(1)
                group.all_reduce(x)
                group.all_reduce(y)
                assert x.tolist() == y.tolist() == [2.0]

    dist.run(main, 2, timeout=20)


def test_what_is_staged_goes_by_the_backend_of_the_cpu():
    with pytest.raises(ValueError, match=r"mpi stages 'cuda' arrays through the CPU.*'cpu:mpi,cuda:mpi'"):
        dist.Backend("cpu:gloo,cuda:mpi")


def test_an_engine_for_the_cpu_that_is_named_for_gpus_alone(cupy):
    around = Wrapper.around("threads")
    dist.Backend.register_backend("on_cards", around, extended_api=True, devices=["cpu", "cuda"])

    def main():
        with dist.new_group(backend="on_cards") as group:
            assert group.all_reduce(cupy.ones(1)).tolist() == [2.0]
        with dist.new_group(backend="cuda:on_cards") as group:
            assert group.all_reduce(cupy.ones(1)).tolist() == [2.0]
        with dist.new_group(backend="cpu:threads,cuda:on_cards") as group:
            with pytest.raises(ValueError, match="create the group with 'cpu:on_cards,cuda:on_cards'"):
                group.all_reduce(cupy.ones(1))
            group.all_reduce(np.ones(1))

    dist.run(main, 2, timeout=20)


def test_a_mesh_of_gpus_over_a_backend_that_stages(cupy):
    def main():
        mesh = dist.init_device_mesh("cuda", (2,), mesh_dim_names=("dp",), backend_override={"dp": "cuda:threads"})
        return mesh["dp"].all_reduce(cupy.ones(2)).tolist()

    assert dist.run(main, 2, timeout=20) == [[2.0, 2.0]] * 2
