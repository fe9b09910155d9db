"""The rendezvous of torch under meshrun, whose store listens at MASTER_ADDR:MASTER_PORT and is not one of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as torch_dist

from meshdist.bootstrap.rendezvous import is_launchers_store, rendezvous
from meshdist.system.deadline import default_pg_timeout


def use_launchers_store() -> None:
    """Let `init_process_group` of torch find the ranks of meshrun by `env://`, its default; with any backend."""
    if is_launchers_store():
        # The function to register handlers refuses schemes that torch has.
        # The module; the package has a function of the same name.
        import_module("torch.distributed.rendezvous")._rendezvous_handlers["env"] = _meet_by_env


def _meet_by_env(url: str, timeout: timedelta = default_pg_timeout, **others: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield a store of torch that rank 0 hosts, the rank and the world size; the launcher's store has the port."""
    store, rank, size = rendezvous(url, timeout=timeout)
    with store:
        host = os.environ["MASTER_ADDR"]
        # Ranks that destroy their groups and make new ones meet anew.
        key = f"torch/store/{store.add(f'torch/num_stores/{rank}', 1)}"
        if rank == 0:
            hosted = torch_dist.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
            store.set(key, str(hosted.port))
        else:
            hosted = torch_dist.TCPStore(host, int(store.get(key)), size, is_master=False, timeout=timeout)
    yield hosted, rank, size
    raise RuntimeError("the ranks of meshrun do not change after the rendezvous")
