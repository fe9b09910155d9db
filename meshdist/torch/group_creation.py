"""From a group that torch makes to one of meshdist: the ranks meet through torch's store.

Under meshrun it is the other way round: the store at MASTER_ADDR:MASTER_PORT is one of meshdist, in which the ranks
find a store of torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as torch_dist

from meshdist.backends.gloo.tcp.listen_addresses import LOOPBACK, listen_addresses
from meshdist.bootstrap.rendezvous import is_launchers_store, rendezvous
from meshdist.errors import DistError, DistNetworkError, DistStoreError, DistTimeoutError
from meshdist.groups.world import World, world_in
from meshdist.lifecycle import check_environment, enter_owned_world
from meshdist.runtime.context import WorldSlot, current_slot
from meshdist.runtime.host_identity import network_id
from meshdist.runtime.rank_text import ranks_text
from meshdist.store import HashStore, TCPStore
from meshdist.system.deadline import Deadline, default_pg_timeout
from meshdist.system.platform import check_processes
from meshdist.system.plurals import counted
from meshdist.torch.torch_group import NAME, TorchGroup

_BACKEND = "gloo"  # of meshdist: shared memory, and TCP between hosts
_REFUSED = "refused "
# torch takes 0 for no limit.
_LEAST_S = 0.001


def register() -> None:
    """Make `meshdist` a backend of torch.distributed for CPU tensors."""
    torch_dist.Backend.register_backend(NAME, create_group, extended_api=True, devices=["cpu"])


def create_group(options: Any, backend_options: Any) -> TorchGroup:
    """Return the group that torch asks for, one of the world of meshdist.

    The world is the one that `meshdist.init_process_group` has made, if it has been called. Otherwise it is made here,
    and ends with the group; this needs a group of all ranks.

    Args:
        options: The store, rank, size, timeout and global ranks of the group; torch's DistributedBackendOptions.
        backend_options: `pg_options`, which must be None.

    Raises:
        TypeError: There are `pg_options`.
        ValueError: The world of meshdist is not that of torch.
        DistError: The ranks did not meet.
    """
    if backend_options is not None:
        raise TypeError(f"backend meshdist has no pg_options, got {type(backend_options).__name__}")
    slot = current_slot()
    is_default = not options.global_ranks_in_group
    torch_size = options.group_size if is_default else torch_dist.get_world_size()
    torch_rank = options.group_rank if is_default else torch_dist.get_rank()
    ranks = tuple(range(torch_size) if is_default else options.global_ranks_in_group)
    world = world_in(slot)
    if world is None:
        if ranks != tuple(range(torch_size)):
            raise ValueError(
                "new_group(backend='meshdist') of some of the ranks needs a world of meshdist; call"
                " torch.distributed.init_process_group('meshdist') or meshdist.init_process_group() first"
            )
        world = _meet(slot, options)
        return TorchGroup(options.store, world.default_group, world, owns_world=True)
    _check_same_world(world, torch_rank, torch_size)
    group = world.new_group(ranks, world.backend_name, options.timeout.total_seconds(), f"torch {options.group_id}")
    return TorchGroup(options.store, group, world, owns_world=False)


def _check_same_world(world: World, rank: int, size: int) -> None:
    if not world.ranks_are_processes:
        raise ValueError(
            "the ranks of meshdist are threads of this process, and those of torch.distributed are processes; start the"
            " script with meshrun or torchrun"
        )
    if (world.rank, world.size) != (rank, size):
        raise ValueError(
            f"this process is rank {world.rank} of {world.size} in meshdist, and rank {rank} of {size} in"
            " torch.distributed; initialize both with the same ranks, or torch.distributed alone, which initializes"
            " meshdist as well"
        )


def _meet(slot: WorldSlot, options: Any) -> World:
    check_processes("init_process_group")
    check_environment()
    meeting = _Meeting(options.store, options.group_rank, options.group_size, Deadline(options.timeout))
    return enter_owned_world(
        slot, meeting.store_of_ranks(), options.group_rank, options.group_size, _BACKEND, meeting.deadline
    )


class _Meeting:
    """The ranks of a new world, in torch's store.

    torch's store only passes on the address of a store of meshdist. A waiting call of torch's store blocks the other
    threads of its process that use it, and does not notice that a rank has ended.
    """

    def __init__(self, store: Any, rank: int, size: int, deadline: Deadline) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self.deadline = deadline
        # A store can outlive a world: ranks that destroy their groups and make new ones meet again.
        self._prefix = f"meshdist/{store.add(f'meshdist/num_worlds/{rank}', 1)}"

    def store_of_ranks(self) -> TCPStore:
        """Return the store that rank 0 hosts; at a loopback address if all ranks are on one host."""
        self._set(f"network/{self._rank}", network_id())
        networks = {self._get(f"network/{rank}", rank) for rank in range(self._size)}
        if self._rank:
            return self._connect(len(networks) == 1)
        try:
            host = LOOPBACK if len(networks) == 1 else listen_addresses(HashStore(), one_machine=False)[0]
            store = TCPStore(host, 0, is_master=True, timeout=self.deadline.remaining_s(), wait_for_workers=False)
        except DistError as error:
            self._set("store", f"{_REFUSED}{error}")
            raise
        self._set("store", f"{host} {store.port}")
        return store

    def _connect(self, one_network: bool) -> TCPStore:
        place = self._get("store", 0)
        if place.startswith(_REFUSED):
            raise DistNetworkError(f"{self._where}: rank 0: {place.removeprefix(_REFUSED)}", peer_failed=True)
        host, port = place.rsplit(" ", 1)
        return TCPStore(host, int(port), timeout=self.deadline.remaining_s(), wait_for_workers=False)

    @property
    def _where(self) -> str:
        return f"init_process_group (rank {self._rank} of {self._size})"

    def _set(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def _get(self, key: str, setter: int) -> str:
        """Return the value of a key as soon as rank `setter` has set it."""
        name = f"{self._prefix}/{key}"
        try:
            self._store.wait([name], timedelta(seconds=max(_LEAST_S, self.deadline.remaining_s())))
            value: bytes = self._store.get(name)
        except RuntimeError as error:  # the errors of torch's stores
            if not self.deadline.expired():
                raise DistStoreError(f"{self._where}: torch's store failed: {error}") from error
            missing = [
                rank for rank in range(self._size) if not self._store.check([f"{self._prefix}/network/{rank}"])
            ] or [setter]
            raise DistTimeoutError(
                f"{self._where}: {self._size - len(missing)} of {counted(self._size, 'rank')} joined within"
                f" {self.deadline.timeout_s:g} s; {ranks_text(missing)} did not call init_process_group('meshdist')"
            ) from None
        return value.decode()


def use_launchers_store() -> None:
    """Let `init_process_group` of torch find the ranks of meshrun by `env://`, its default; with any backend."""
    if is_launchers_store():
        # The function to register handlers refuses schemes that torch has.
        # The module; the package has a function of the same name.
        import_module("torch.distributed.rendezvous")._rendezvous_handlers["env"] = _meet_by_env


def _meet_by_env(url: str, timeout: timedelta = default_pg_timeout, **others: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield a store of torch that rank 0 hosts, the rank and the world size; the launcher's store has the port."""
    # torch adds its arguments rank and world_size by urllib, which drops the slashes: "env:?rank=0&world_size=2".
    store, rank, size = rendezvous(url.replace("env:?", "env://?", 1), timeout=timeout)
    with store:
        host = os.environ["MASTER_ADDR"]
        # Ranks that destroy their groups and make new ones meet again.
        key = f"torch/store/{store.add(f'torch/num_stores/{rank}', 1)}"
        if rank == 0:
            hosted = torch_dist.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
            store.set(key, str(hosted.port))
        else:
            hosted = torch_dist.TCPStore(host, int(store.get(key)), size, is_master=False, timeout=timeout)
    yield hosted, rank, size
    raise RuntimeError("the ranks of meshrun do not change after the rendezvous")
