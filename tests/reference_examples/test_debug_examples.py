"""The documented ways to find what is wrong: monitored barriers, debug levels, mismatched calls, breakpoints."""

import os
import re
from datetime import timedelta

import numpy as np
import pytest
from documented import check, place
from scripts import run_script
from worlds import WorkerSet, worker_rank

import meshdist as dist

pytestmark = pytest.mark.timeout(90)
SIZES = [2, 3, 4]
SOON = timedelta(seconds=0.5)

MISSING = """
import os
import subprocess
from datetime import timedelta

import meshdist as dist


def worker(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    group_gloo = dist.new_group(backend="gloo")
    if rank not in [1]:
        dist.monitored_barrier(group=group_gloo, timeout=timedelta(seconds=2))
    else:
        subprocess.run(["sleep", "60"])  # busy elsewhere, and ended with the script


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29501"
    dist.spawn(worker, nprocs={size}, args=({size},))
"""


@pytest.mark.parametrize("size", SIZES)
def test_script_with_a_missing_rank(tmp_path, size):
    status, _, err = run_script(tmp_path, MISSING.replace("{size}", str(size)))
    assert status != 0
    assert re.search(r"Dist\w+Error: monitored_barrier on group .* waiting for rank 1 \(pid", err), err


def one_missing(name):
    group = dist.new_group(backend="gloo")
    if dist.get_rank() != 1:
        with pytest.raises(dist.DistError, match=rf"{name}.*ranks? \[?1\b"):
            getattr(dist, name)(group, timeout=SOON)


@pytest.mark.parametrize("name", ["monitored_barrier", "barrier"])
def test_barrier_names_the_missing_rank(initialised, name):
    initialised.run(one_missing, name)


def missing_ranks(error):
    """Return the ranks that an error says have not come."""
    return [
        int(rank) for rank in re.findall(r"rank (\d+) \(pid", str(error).partition("waiting for")[2].partition("\n")[0])
    ]


def two_calls_in_a_row(init_method, size):
    dist.init_process_group("gloo", init_method, timeout=SOON * 2, rank=worker_rank(), world_size=size)
    dist.barrier()
    named = []
    if dist.get_rank() != 1:
        with pytest.raises(RuntimeError) as caught:
            dist.monitored_barrier()  # raises exception indicating that rank 1 did not call into monitored_barrier
        named.append(missing_ranks(caught.value))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.monitored_barrier(wait_all_ranks=True)
        named.append(missing_ranks(caught.value))
    return named


def test_both_calls_of_the_page_name_the_missing_ranks(bare, tmp_path):
    bare.start(two_calls_in_a_row, f"file://{tmp_path}/store", bare.size)
    assert bare.gather() == [[[1], list(range(1, bare.size))], [], *[[[1]]] * (bare.size - 2)]


def all_but_one_missing():
    group = dist.new_group(backend="gloo")
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.monitored_barrier(group, SOON, wait_all_ranks=True)
        return missing_ranks(caught.value)
    return None


def test_barrier_names_all_missing_ranks(initialised):
    size = initialised.size
    check(initialised, all_but_one_missing, [list(range(1, size)), *[None] * (size - 1)])


def on_the_default_group(init_method, size):
    dist.init_process_group("gloo", init_method, timeout=SOON * 4, rank=worker_rank(), world_size=size)
    dist.barrier()
    if dist.get_rank() == 1:
        return None
    with pytest.raises(dist.DistError) as caught:
        dist.monitored_barrier()
    return missing_ranks(caught.value)


def test_barrier_of_the_world_has_the_timeout_of_the_world(bare, tmp_path):
    bare.start(on_the_default_group, f"file://{tmp_path}/store", bare.size)
    assert bare.gather() == [[1], None, *[[1]] * (bare.size - 2)]


MISMATCH = """
import os

import numpy as np

import meshdist as dist


def worker(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    tensor = np.random.default_rng(rank).standard_normal(10 if rank == 0 else 20)
    dist.all_reduce(tensor)


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29501"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "INFO"
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.spawn(worker, nprocs={size}, args=({size},))
"""


@pytest.mark.parametrize("size", SIZES)
def test_script_with_arrays_that_do_not_fit(tmp_path, size):
    status, _, err = run_script(tmp_path, MISMATCH.replace("{size}", str(size)))
    assert status != 0
    assert "all_reduce(float64[10]" in err
    assert "all_reduce(float64[20]" in err


def arrays_that_do_not_fit(init_method, size):
    dist.init_process_group("gloo", init_method, rank=worker_rank(), world_size=size, timeout=30)
    with pytest.raises(RuntimeError, match=r"(?s)\[10\].*\[20\]"):
        dist.all_reduce(np.zeros(10 if worker_rank() == 0 else 20))


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
@pytest.mark.parametrize("size", SIZES)
def test_arrays_that_do_not_fit_are_an_error_on_every_rank(worlds, tmp_path, size, level):
    with WorkerSet(worlds.nursery, size, {"TORCH_DISTRIBUTED_DEBUG": level}) as workers:
        workers.start(arrays_that_do_not_fit, f"file://{tmp_path}/store", size)
        assert workers.gather() == [None] * size


def train_two_layers():
    # The page's two linear layers without bias, their gradients written out, averaged as DistributedDataParallel does.
    rank, size = place()
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((10, 10)), rng.standard_normal((10, 1))
    x = np.random.default_rng(rank).standard_normal((10, 10))
    for _ in range(20):
        hidden = x @ a
        upstream = np.ones((10, 1))  # of the sum of both outputs
        gradients = [x.T @ (np.ones((10, 10)) + upstream @ b.T), hidden.T @ upstream]
        works = [dist.all_reduce(gradient, op="avg", async_op=True) for gradient in gradients]
        for weight, gradient, work in zip((a, b), gradients, works, strict=True):
            work.wait()
            weight -= 1e-3 * gradient
    everyone = [None] * size
    dist.all_gather_object(everyone, (a.tobytes(), b.tobytes()))
    return len(set(everyone)), bool(np.isfinite(a).all())


def train_in_a_world(init_method, size):
    dist.init_process_group("gloo", init_method, rank=worker_rank(), world_size=size, timeout=30)
    found = train_two_layers()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_training_under_the_highest_level(worlds, tmp_path, size):
    with WorkerSet(
        worlds.nursery, size, {"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    ) as workers:
        workers.start(train_in_a_world, f"file://{tmp_path}/store", size)
        assert workers.gather() == [(1, True)] * size


def levels():
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    chosen = dist.get_debug_level()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
    dist.set_debug_level_from_env()
    return before.name, chosen.name, dist.get_debug_level().name


def test_debug_levels(bare):
    bare.start(levels)
    assert bare.gather() == [("OFF", "DETAIL", "INFO")] * bare.size


def test_errors_are_runtime_errors():
    for error in (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError):
        assert issubclass(error, dist.DistError)
    assert issubclass(dist.DistError, RuntimeError)


STOPPED: list[int] = []


def note_stop(*args, **kwargs):
    STOPPED.append(dist.get_rank())


def stop_on_one_rank(rank):
    STOPPED.clear()
    os.environ["PYTHONBREAKPOINT"] = f"{__name__}.note_stop"
    dist.breakpoint(rank)
    return STOPPED


def test_breakpoint_on_one_rank(initialised):
    last = initialised.size - 1
    expected = [[] for _ in range(last)] + [[last]]
    check(initialised, stop_on_one_rank, expected, args=(last,))
    check(initialised, stop_on_one_rank, [[0], *[[] for _ in range(last)]], args=(0,))


@pytest.mark.skipif(not hasattr(dist, "profile"), reason="there is no profiler yet")
def test_profile(initialised, tmp_path):
    initialised.run(profiled, str(tmp_path))


def profiled(directory):
    with dist.profile() as profile:
        dist.all_reduce(np.random.default_rng(0).standard_normal((20, 10)))
    path = f"{directory}/trace{dist.get_rank()}.json"
    profile.export_chrome_trace(path)
    with open(path) as file:
        assert "all_reduce" in file.read()
