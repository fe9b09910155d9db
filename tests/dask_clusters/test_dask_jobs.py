"""Jobs on the workers of a Dask cluster: results, arrays, failures, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from until import until
from worlds import needs_linux

import meshdist as dist
from meshdist.system.deadline import Deadline

pytestmark = [
    needs_linux,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(find_spec("distributed") is None, reason="distributed is not installed: 'meshdist[dask]'"),
]
if find_spec("distributed") is not None or TYPE_CHECKING:
    import dask
    import dask.array as da
    import dask_ranks
    from distributed import Client, Future, LocalCluster

    import meshdist.dask
    from meshdist.dask import dask_job
    from meshdist.dask.client_calls import called
    from meshdist.dask.seat import Reserved, Seat, Ticket, _seats, drop_seat, reserve_seat

RANKS = 2
PROGRAM = (Path(__file__).parents[2] / "docs" / "dask.md").read_text().split("``` py\n")[1].split("```")[0]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with (
        # Dask's profiler may hang a worker: python/cpython issue 106883, in Python 3.10, and 3.11 before 3.11.9. And
        # some time after a worker was killed, the cluster takes it for lost if all are just being restarted.
        dask.config.set({"distributed.worker.profile.enabled": False, "distributed.deploy.lost-worker-timeout": "1h"}),
        LocalCluster(n_workers=RANKS, threads_per_worker=2, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_results_come_by_rank_and_nothing_is_left(client: Any) -> None:
    assert meshdist.dask.run(client, dask_ranks.sums, offset=1.0) == [(0, [3.0, 3.0]), (1, [3.0, 3.0])]
    assert meshdist.dask.run(client, dask_ranks.sums, ranks=1) == [(0, [0.0, 0.0])]
    for left in client.run(dask_ranks.left_overs).values():
        assert left == (False, [], [])


def receive_from_each_other() -> None:
    dist.recv(np.empty(1), 1 - dist.get_rank())


def test_beside_a_local_cluster_a_circle_of_threads_is_proven(client: Any) -> None:
    assert client.submit(abs, -1).result(timeout=60) == 1
    with pytest.raises(dist.DistBackendError, match="deadlock: the ranks wait for each other"):
        dist.run(receive_from_each_other, 2, timeout=40)


@pytest.mark.parametrize("dim", [0, 1])
def test_arrays_come_as_dtensors_and_go_back(client: Any, dim: int) -> None:
    whole = np.arange(70.0).reshape(10, 7)
    x = meshdist.dask.from_dask(da.from_array(whole, chunks=(3, 4)), dim=dim)
    results = meshdist.dask.run(client, dask_ranks.doubled, x, "other")
    assert [other for _, _, other, _ in results] == ["other"] * RANKS
    assert [total for *_, total in results] == [whole.sum()] * RANKS
    shapes = [shape for shape, *_ in results]
    assert sum(shape[dim] for shape in shapes) == whole.shape[dim]
    back = results[0][1]
    assert back.chunks[dim] == tuple(shape[dim] for shape in shapes)
    np.testing.assert_array_equal(back.compute(), whole * 2)


def test_collections_may_be_anywhere_in_the_arguments(client: Any) -> None:
    x, ones = da.arange(6, chunks=2), da.ones(5, chunks=1)
    pair = dask_ranks.Pair(x, meshdist.dask.from_dask(ones))
    results = meshdist.dask.run(client, dask_ranks.nested_sums, pair, more={"more": [x * 2]})
    assert results == [[("DTensor", 15.0), ("DTensor", 5.0), ("DTensor", 30.0)]] * RANKS


def test_an_array_of_one_chunk_is_split(client: Any) -> None:
    results = meshdist.dask.run(client, dask_ranks.doubled, da.arange(5, chunks=5), None)
    assert [shape for shape, *_ in results] == [(3,), (2,)]
    np.testing.assert_array_equal(results[1][1].compute(), np.arange(5) * 2)


def test_a_pending_sum_is_not_returned(client: Any) -> None:
    with pytest.raises(meshdist.dask.RankError) as info:
        meshdist.dask.run(client, dask_ranks.pending_sum, da.ones((4, 2), chunks=(2, 2)))
    assert str(info.value) == (
        f"run: rank {info.value.rank} of 2, on worker {info.value.worker}, raised TypeError: a DTensor with placements"
        " [Partial('sum')] cannot become a Dask array; redistribute it to Shard or Replicate before it is returned"
    )


def test_dataframes_are_their_numbers(client: Any) -> None:
    pandas = pytest.importorskip("pandas")
    dataframe = pytest.importorskip("dask.dataframe")
    table = pandas.DataFrame({"n": range(7), "x": np.linspace(0, 1, 7), "name": list("abcdefg")})
    frame = dataframe.from_pandas(table, npartitions=3)
    with pytest.raises(TypeError, match=r"these columns are not: 'name' \("):
        meshdist.dask.run(client, dask_ranks.doubled, frame, None)
    results = meshdist.dask.run(client, dask_ranks.doubled, frame[["n", "x"]], None)
    np.testing.assert_allclose(results[0][1].compute(), table[["n", "x"]].to_numpy() * 2)


def test_what_cannot_be_a_dtensor_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a Dask array or dataframe, got ndarray"):
        meshdist.dask.from_dask(np.ones(3))
    with pytest.raises(TypeError, match="a DTensor consists of numbers, and the array has dtype <U1"):
        meshdist.dask.from_dask(da.from_array(np.array(["a"])))
    for delayed in (dask.delayed(sum)([1, 2]), dask.delayed(5)):
        with pytest.raises(TypeError, match=r"a dask\.delayed value cannot be a DTensor; .*compute\(\) it first"):
            meshdist.dask.from_dask(delayed)
    with pytest.raises(ValueError, match="the array has 1 dimension, and no dim 1"):
        meshdist.dask.from_dask(da.arange(3), dim=1)


def test_too_few_workers_are_said_before_anything_starts(client: Any) -> None:
    with pytest.raises(dist.DistError, match=rf"9 ranks need as many workers, one each, and the cluster has {RANKS};"):
        meshdist.dask.run(client, dask_ranks.sums, ranks=9)
    with pytest.raises(
        dist.DistError, match=r"no worker 'tcp://127\.0\.0\.1:1' after 0\.1 s; it has tcp:.* \(name 0\)"
    ):
        meshdist.dask.run(client, dask_ranks.sums, workers=["tcp://127.0.0.1:1", 0], wait_for_workers=0.1)


def test_wrong_names_of_workers_are_refused(client: Any) -> None:
    run, address = meshdist.dask.run, min(client.scheduler_info()["workers"])
    with pytest.raises(TypeError, match=r"write workers=\['w1'\]"):
        run(client, dask_ranks.sums, workers="w1")
    with pytest.raises(TypeError, match=r"workers must be a list of addresses or names, such as \[0, 1\], got 1"):
        run(client, dask_ranks.sums, workers=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"workers has 'w1' twice, and a worker is one rank"):
        run(client, dask_ranks.sums, workers=["w1", "w2", "w1"])
    with pytest.raises(ValueError, match=r"3 ranks need as many workers, one each, and workers names 1; name more"):
        run(client, dask_ranks.sums, ranks=3, workers=["w1"])
    name = client.scheduler_info()["workers"][address]["name"]
    with pytest.raises(ValueError, match=f"{address!r} and {name!r} of workers are the same one"):
        run(client, dask_ranks.sums, workers=[address, name])
    assert run(client, dask_ranks.sums, workers=[name]) == [(0, [0.0, 0.0])]


def test_what_cannot_be_pickled_is_told_in_a_sentence(client: Any) -> None:
    with pytest.raises(meshdist.dask.RankError) as info:
        meshdist.dask.run(client, dask_ranks.one_returns_a_lock)
    assert str(info.value) == (
        f"run: rank 1 of 2, on worker {info.value.worker}, raised TypeError: the result of rank 1, of type dict, cannot"
        " be pickled: TypeError: cannot pickle '_thread.lock' object; return arrays, numbers and other plain values"
    )
    with pytest.raises(meshdist.dask.RankError, match=r"^run: rank \d .* cannot be unpickled here: TypeError: "):
        meshdist.dask.run(client, dask_ranks.returns_workers_only)
    with pytest.raises(TypeError, match=r"^run: sums or its arguments cannot be pickled: TypeError: "):
        meshdist.dask.run(client, dask_ranks.sums, threading.Lock())


def test_arrays_of_a_result_belong_to_the_client(client: Any) -> None:
    for rank, result in enumerate(meshdist.dask.run(client, dask_ranks.big, 1 << 20)):
        assert result["array"].sum() == rank << 20
        assert result["array"].flags.writeable
        assert result["strided"].tolist() == [[0, 2], [4, 6], [8, 10]]


def test_wrong_arguments_are_refused(client: Any) -> None:
    with pytest.raises(TypeError, match=r"client must be a distributed\.Client, got str"):
        meshdist.dask.run("scheduler:8786", dask_ranks.sums)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fn must be callable"):
        meshdist.dask.run(client, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        meshdist.dask.run(client, dask_ranks.sums, ranks=0)


def test_the_error_is_that_of_the_first_rank_that_failed(client: Any) -> None:
    with pytest.raises(
        meshdist.dask.RankError, match=r"rank 1 of 2, on worker tcp:.*ValueError: no such batch"
    ) as info:
        meshdist.dask.run(client, dask_ranks.one_raises)
    assert info.value.rank == 1
    assert info.value.worker in client.scheduler_info()["workers"]
    assert isinstance(info.value.__cause__, ValueError)
    assert meshdist.dask.run(client, dask_ranks.sums)[1][0] == 1


def test_two_jobs_at_once_run_one_after_the_other(client: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(meshdist.dask.run, client, dask_ranks.sums, offset) for offset in (0.0, 1.0)]
        assert [job.result(60)[0] for job in jobs] == [(0, [1.0, 1.0]), (0, [3.0, 3.0])]


def test_a_cancelled_job_frees_the_workers(client: Any, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def job() -> None:
        try:
            meshdist.dask.run(client, dask_ranks.computes_for_long, str(tmp_path))
        except meshdist.dask.RankError as error:
            failures.append(error)

    thread = threading.Thread(target=job)
    thread.start()
    until(lambda: len(list(tmp_path.iterdir())) == RANKS, "all ranks compute", 60)
    keys = [key for keys in client.processing().values() for key in keys if "computes_for_long" in key]
    client.cancel([Future(key, client) for key in keys])
    thread.join(30)
    assert len(failures) == 1
    assert re.fullmatch(r"run: rank \d of 2, on worker tcp://[\d.:]+, had its task cancelled.*", str(failures[0]))
    assert meshdist.dask.run(client, dask_ranks.sums)[1][0] == 1


def test_workers_that_a_cancelled_rank_has_released_hide_no_failure(client: Any) -> None:
    def fails() -> None:
        with dask_job._reserved(client, [*client.scheduler_info()["workers"]], Deadline(30)) as lock:
            client.sync(client.scheduler.multi_lock_release, id=lock)
            raise RuntimeError("the failure")

    with pytest.raises(RuntimeError, match="the failure"):
        fails()


def test_a_client_that_goes_away_frees_the_workers(client: Any, tmp_path: Path) -> None:
    other = Client(client.scheduler.address, set_as_default=False)
    failures: list[BaseException] = []

    def job() -> None:
        try:
            meshdist.dask.run(other, dask_ranks.computes_for_long, str(tmp_path))
        except ConnectionError as error:
            failures.append(error)

    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    until(lambda: len(list(tmp_path.iterdir())) == RANKS, "all ranks compute", 60)
    other.close()
    assert meshdist.dask.run(client, dask_ranks.sums, start_timeout=40)[1][0] == 1
    thread.join(30)
    assert [str(error) for error in failures] == ["run: the client was closed"]


def test_a_call_that_a_stopped_event_loop_has_lost_ends() -> None:
    loop, is_begun = asyncio.new_event_loop(), []
    client = SimpleNamespace(status="running", loop=SimpleNamespace(asyncio_loop=loop))
    with closing(loop), pytest.raises(ConnectionError, match="run: the client was closed"):
        called(client, is_begun.append, 1)
    assert not is_begun


OF_NO_DEFAULT_CLIENT = """
import sys, distributed, meshdist.dask
with distributed.Client(sys.argv[1], set_as_default=False) as client:
    print(meshdist.dask.run(client, int))
"""


def test_the_client_need_not_be_the_default_one(client: Any) -> None:
    program = [sys.executable, "-c", OF_NO_DEFAULT_CLIENT, client.scheduler.address]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0, 0]\n", done


def test_threads_as_workers_are_refused() -> None:
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        pytest.raises(dist.DistError, match="threads of the client, and a rank is a process"),
    ):
        meshdist.dask.run(client, dask_ranks.sums)


def test_a_killed_worker_is_named(client: Any) -> None:
    before = set(client.scheduler_info()["workers"])
    with pytest.raises(meshdist.dask.WorkerLostError, match=r"the worker of rank 1 of 2, tcp://.*, ended") as info:
        meshdist.dask.run(client, dask_ranks.one_dies)
    assert info.value.rank == 1
    assert info.value.worker in before
    assert meshdist.dask.run(client, dask_ranks.sums, ranks=RANKS, wait_for_workers=120)[1][0] == 1


def test_a_restart_of_all_workers_is_no_failure_of_the_function(client: Any, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(meshdist.dask.run, client, dask_ranks.computes_for_long, str(tmp_path))
        until(lambda: len(list(tmp_path.iterdir())) == RANKS, "all ranks compute", 60)
        client.restart(timeout=60)
        with pytest.raises(
            meshdist.dask.WorkerLostError, match=r"the worker of rank 0 of 2, tcp://.*, ended, restarted"
        ):
            job.result(60)
    assert meshdist.dask.run(client, dask_ranks.sums, ranks=RANKS, wait_for_workers=120)[1][0] == 1


@pytest.mark.parametrize(
    ("rank", "holds_gil", "why"),
    [(0, False, "still runs rank 0 of an earlier job"), (1, True, "has not answered for 15 s")],
)
def test_a_stuck_worker_is_left_out_where_others_are_free(
    client: Any, tmp_path: Path, rank: int, holds_gil: bool, why: str
) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    with pytest.raises(meshdist.dask.RankError, match=rf"timed out after 1 s waiting for rank {rank}") as info:
        meshdist.dask.run(client, dask_ranks.one_is_stuck, fifo, rank, holds_gil, timeout=1)
    stuck = re.findall(rf"; rank {rank}, on (tcp://[\d.:]+), could not be ended", str(info.value))
    assert stuck == [sorted(client.scheduler_info()["workers"])[rank]]  # a job takes the first one if all are free
    assert meshdist.dask.run(client, dask_ranks.sums, ranks=1) == [(0, [0.0, 0.0])]
    with pytest.raises(dist.DistError, match=rf"worker {stuck[0]} cannot start rank {rank}: it {why}"):
        meshdist.dask.run(client, dask_ranks.sums)
    os.close(os.open(fifo, os.O_WRONLY))
    assert meshdist.dask.run(client, dask_ranks.sums)[1][0] == 1


def test_a_seat_may_be_dropped_while_the_next_job_waits_for_its_rank() -> None:
    worker: Any = SimpleNamespace(address="tcp://127.0.0.1:1")
    before = Seat(worker, Ticket("before", (worker.address,), b"", None, 1.0, 1.0, ""))
    before.is_running = True
    _seats(worker)["before"] = before

    async def reserve() -> Reserved:
        ticket = Ticket("next", ("tcp://127.0.0.1:2", worker.address), b"", None, 1.0, 1.0, "")
        reserving = asyncio.create_task(reserve_seat(ticket, worker))
        await asyncio.sleep(0)  # it waits now
        before.is_running = False
        drop_seat("before", worker)
        return await asyncio.wait_for(reserving, 20)

    assert asyncio.run(reserve()).refusal is None
    assert list(_seats(worker)) == ["next"]


def test_the_program_of_the_documentation_runs(tmp_path: Path) -> None:
    script = tmp_path / "centre.py"
    script.write_text(PROGRAM)
    root = str(Path(__file__).parents[2])
    said = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert "[0.0, 0.0]" in said.stdout
