"""Backend nccl on the stand-in: every call on arrays in device memory, and what is enqueued for it."""

import gc
import weakref

import calls
import device_programs as programs
import numpy as np
import pytest
from standin_cupy import MACHINE

import meshdist as dist
from meshdist.backends.nccl import library as nccl
from meshdist.backends.nccl import reductions

pytestmark = pytest.mark.timeout(60)
DTYPES = ("float32", "bool", "int16", "complex128", "bfloat16", "uint64")
# NCCL reduces these by itself, as it does float32; but uint16, which is widened as int16 is.
MORE_DTYPES = ("int8", "int32", "uint16", "float16", "float64")


def on_lanes(program, cupy, *args, **how):
    """Run a program on a group of backend nccl, each rank on a GPU of its own."""
    cupy.cuda.Device(dist.get_rank()).use()
    group = dist.new_group(backend="standin")
    program(cupy, group, *args, **how)
    group.barrier()
    with group:  # which ends it
        pass


def run(program, cupy, size, *args, **how):
    MACHINE.num_devices = max(size, 2)
    dist.run(lambda: on_lanes(program, cupy, *args, **how), size, timeout=20)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.slow
def test_every_collective(standin, cupy, size, dtype):
    run(programs.every_collective, cupy, size, dtype)
    assert standin.aborts == 0
    assert standin.ends >= size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [True, "F"])
def test_arrays_whose_elements_lie_apart(standin, cupy, dtype, strided):
    shapes, skipped = ((2, 3),) if strided == "F" else ((3,), (2, 3)), programs.OF_SEVERAL_GPUS
    run(programs.every_collective, cupy, 3, dtype, shapes, strided=strided, skipped=skipped)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ("dtype", "strided"), [("float32", False), ("float32", True), ("int16", False), ("bfloat16", False)]
)
def test_arrays_on_several_gpus_of_a_rank(standin, cupy, size, dtype, strided):
    MACHINE.num_devices = 2 * size
    dist.run(lambda: on_lanes(programs.over_several_gpus, cupy, dtype, strided), size, timeout=20)


@pytest.mark.parametrize("dtype", [*DTYPES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_DTYPES)])
def test_every_op(standin, cupy, dtype):
    run(programs.every_op, cupy, 3, dtype)


@pytest.mark.parametrize("size", [1, 3])
def test_objects_barriers_and_lists_of_several_sizes(standin, cupy, size):
    run(programs.every_other_call, cupy, size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_factors(standin, cupy, size):
    run(programs.factors, cupy, size)


@pytest.mark.parametrize("size", [2, 3])
def test_messages(standin, cupy, size):
    run(programs.messages, cupy, size)


@pytest.mark.parametrize("size", [1, 3])
def test_the_functional_forms(standin, cupy, size):
    run(programs.without_change, cupy, size)


# ---- What is enqueued


def enqueued(standin, cupy, call):
    """Return what one rank of two enqueues for a call."""
    run(lambda cupy, group: call(group), cupy, 2)
    return [entry[:1] + entry[2:] for entry in standin.log if entry[1] == 1][:-1]  # without the barrier


def test_counts_dtypes_and_ops(standin, cupy):
    def calls(group):
        for dtype, op in (("bool", "sum"), ("bool", "product"), ("bool", "bxor"), ("int16", "sum"), ("int64", "min")):
            group.all_reduce(cupy.zeros((2, 3), dtype), op=op)
        for dtype, op in (("float16", "avg"), ("complex64", "sum"), ("complex128", "avg"), ("float64", "product")):
            group.all_reduce(cupy.zeros((2, 3), dtype), op=op)

    assert enqueued(standin, cupy, calls) == [
        ("all_reduce", 6, nccl.UINT8, nccl.MAX),
        ("all_reduce", 6, nccl.UINT8, nccl.MIN),
        ("all_reduce", 6, nccl.UINT8, nccl.SUM),
        ("all_reduce", 6, nccl.INT32, nccl.SUM),
        ("all_reduce", 6, nccl.INT64, nccl.MIN),
        ("all_reduce", 6, nccl.FLOAT16, nccl.AVG),
        ("all_reduce", 12, nccl.FLOAT32, nccl.SUM),
        ("all_reduce", 12, nccl.FLOAT64, nccl.AVG),
        ("all_reduce", 6, nccl.FLOAT64, nccl.PROD),
    ]


def test_what_moves_goes_as_bytes(standin, cupy):
    def calls(group):
        group.broadcast(cupy.zeros(3, "complex64"), group_src=1)
        group.all_gather_into_tensor(cupy.zeros(6, "int16"), cupy.zeros(3, "int16"))
        group.all_to_all_single(cupy.zeros((4, 2)), cupy.zeros((4, 2)))
        group.broadcast(cupy.zeros((0, 3)), group_src=0)

    assert enqueued(standin, cupy, calls) == [
        ("broadcast", 24, nccl.UINT8, 1),
        ("all_gather", 6, nccl.UINT8),
        ("send", 32, nccl.UINT8),
        ("recv", 32, nccl.UINT8),
    ]


def test_the_bits_of_integers_are_gathered(standin, cupy):
    def calls(group):
        x = cupy.asarray(np.array([1, 2, 4]) << group.rank())
        assert group.all_reduce(x, op="bor").tolist() == [3, 6, 12]
        with pytest.raises(TypeError, match=r"all_reduce_coalesced .*NCCL does not reduce int64 by BXOR.*each array"):
            group.all_reduce_coalesced([x], op="bxor")

    assert enqueued(standin, cupy, calls)[0] == ("all_gather", 24, nccl.UINT8)


def test_a_block_in_its_place_is_not_copied(standin, cupy):
    def calls(group):
        whole = cupy.zeros(6)
        mine = whole[3 * group.rank() : 3 * group.rank() + 3]
        mine[...] = 1.0 + group.rank()
        group.all_gather_into_tensor(whole, mine)
        assert whole.tolist() == [1.0] * 3 + [2.0] * 3
        # Anywhere else it is.
        group.all_gather_into_tensor(whole, whole[1:4])
        assert whole.tolist() == [1.0, 1.0, 2.0] * 2

    enqueued(standin, cupy, calls)


def test_shapes_that_never_come_again_keep_no_memory(standin, cupy, monkeypatch):
    monkeypatch.setattr("meshdist.runtime.plan_cache.MOST_PLANS", 8)
    made = []

    def count(call):
        made.append(weakref.ref(plan := reductions.reduction_plan(call)))
        return plan

    monkeypatch.setattr("meshdist.backends.nccl.calls.reduction_plan", count)

    def churn(cupy, group):
        for number in range(1, 101):
            group.all_reduce(cupy.zeros(number))
            group.all_reduce(cupy.zeros(100))
        gc.collect()
        assert 2 <= sum(ref() is not None for ref in made) <= 20

    run(churn, cupy, 1)


# ---- What is refused


def refused(cupy, group):
    x = cupy.zeros(3)
    with pytest.raises(ValueError, match=r"all_reduce on group .*: the array is on device type 'cpu'.*cuda:standin"):
        group.all_reduce(np.zeros(3))
    with pytest.raises(ValueError, match=r"irecv on group .*NCCL receives from a given rank only.*pass src"):
        group.irecv(x)
    with pytest.raises(ValueError, match=r"isend on group .*NCCL has no tags.*got tag 3"):
        group.isend(x, 1 - group.rank(), tag=3)
    with pytest.raises(TypeError, match=r"op AVG is not defined for int32"):
        group.all_reduce(cupy.zeros(3, "int32"), op="avg")
    with pytest.raises(ValueError, match=r"all_gather on group .*tensor_list\[0\] and tensor_list\[1\] share memory"):
        group.all_gather([x, x], cupy.zeros(3))
    with pytest.raises(ValueError, match=r"output_tensor must have shape \(6,\) or \(2, 3\).*got \(4,\)"):
        group.all_gather_into_tensor(cupy.zeros(4), x)
    half = cupy.zeros(3, calls.dtype_of("bfloat16"))
    with pytest.raises(
        TypeError, match=r"all_reduce_multigpu on .*: CuPy does not reduce the bfloat16 arrays of a rank"
    ):
        group.all_reduce_multigpu([half])
    with pytest.raises(dist.DistBackendError, match=r"scan on .*NCCL does not have scan; .*backend='cuda:gloo'"):
        group.scan(x)
    with pytest.raises(ValueError, match="all_reduce_multigpu"):
        group.all_reduce_multigpu([])
    with cupy.cuda.Device(2):
        elsewhere = cupy.zeros(3)
    group.all_reduce(x)
    with pytest.raises(
        ValueError, match=r"all_reduce on group .*the array is on GPU 2.*are on GPU [01]; a rank has one"
    ):
        group.all_reduce(elsewhere)
    with pytest.raises(ValueError, match=r"the arrays are on several GPUs, [01], 2"):
        group.all_gather([x, elsewhere], cupy.zeros(3))
    assert group.all_reduce(x) is x  # nothing was sent, and nothing is broken


def test_what_is_refused_before_anything_is_sent(standin, cupy):
    MACHINE.num_devices = 3
    dist.run(lambda: on_lanes(refused, cupy), 2, timeout=20)
