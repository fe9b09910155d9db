"""A world keeps to the secret of its store, whatever is in the environment: a process may be in worlds of several."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from worlds import WorkerSet, needs_linux, worker_rank

import meshdist

pytestmark = [needs_linux, pytest.mark.timeout(60)]

SECRET = b"that of the store"


def sum_over_tcp(port: int, size: int) -> Any:
    os.environ["MESHDIST_SECRET"] = f"of rank {worker_rank()} alone"
    store = meshdist.TCPStore("127.0.0.1", port, is_master=False, timeout=20, secret=SECRET)
    meshdist.init_process_group("gloo", store=store, rank=worker_rank(), world_size=size, timeout=20)
    x = np.array([worker_rank()])
    meshdist.all_reduce(x)
    meshdist.destroy_process_group()
    return x.tolist()


def test_ranks_connect_with_the_secret_of_their_store(tcp_workers: Callable[..., WorkerSet]) -> None:
    with meshdist.TCPStore("127.0.0.1", 0, is_master=True, secret=SECRET) as store:
        workers = tcp_workers(3, join=False)
        workers.start(sum_over_tcp, store.port, 3)
        assert workers.gather() == [[3], [3], [3]]
