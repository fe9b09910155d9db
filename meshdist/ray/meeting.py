"""How the ranks of a group or a job find each other: through the key-value store of the Ray cluster.

Rank 0 hosts a store of meshdist and puts its address, with a secret made for this group alone, under the group's name.
The others take it from there. Before anyone goes on, rank 0 has seen all of them and removed the entry, so that a group
that is made again under the same name never meets the one before.
"""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.util import get_node_ip_address

from meshdist.backends.device_backends import backend_name
from meshdist.errors import DistError, DistNetworkError, DistStoreError, DistTimeoutError
from meshdist.groups.world import World
from meshdist.lifecycle import check_environment, enter_owned_world
from meshdist.runtime.context import WorldSlot
from meshdist.runtime.rank_text import ranks_text
from meshdist.store import TCPStore
from meshdist.system.deadline import Deadline
from meshdist.system.plurals import counted

DEFAULT_JOIN_TIMEOUT_S = 180.0
_NAMESPACE = "meshdist"  # of the cluster's key-value store
_BY_ALL = "gloo"
_REFUSED = "refused "
# The cluster's store has no call that waits for a key.
_PAUSE_S = 0.02
# An entry may be left over from a rank 0 that was killed.
_CONNECT_S = 1.0
_LAST_WORDS_S = 5.0


def entry_key(name: str) -> str:
    """Return the key of the entry of a group or job, which is unique in the namespace of the Ray job."""
    return json.dumps([ray.get_runtime_context().namespace, name])


def entry_of(name: str) -> bytes | None:
    """Return the entry under a name, if there is one."""
    entry: bytes | None = _internal_kv_get(entry_key(name), namespace=_NAMESPACE)
    return entry


def put_entry(name: str, entry: bytes) -> None:
    """Make an entry, or replace it."""
    _internal_kv_put(entry_key(name), entry, overwrite=True, namespace=_NAMESPACE)


def remove_entry(name: str) -> None:
    """Remove an entry, such as that of a rank 0 that was killed."""
    _internal_kv_del(entry_key(name), namespace=_NAMESPACE)


class Meeting:
    """The ranks of a new world.

    Args:
        name: Of the group or job, unique in the namespace of the Ray job.
        rank: This rank.
        size: The number of ranks.
        deadline: Of the meeting.
        call: The call in which the ranks meet, for errors.
        advice: What to look at if a rank does not come.
    """

    def __init__(self, name: str, rank: int, size: int, deadline: Deadline, call: str, advice: str) -> None:
        self._rank = rank
        self._size = size
        self.deadline = deadline
        self._name = name
        self._advice = advice
        self._where = f"{call} (rank {rank} of {size})"

    def enter_world(self, slot: WorldSlot, timeout_s: float) -> World:
        """Meet the other ranks, and put their world into `slot`, with `timeout_s` for its calls.

        Raises:
            DistError: The ranks did not meet.
            ValueError: A variable of the environment has a wrong value.
        """
        check_environment()
        store, backend = self.meet()
        world = enter_owned_world(slot, store, self._rank, self._size, backend, self.deadline)
        world.timeout_s = world.default_group.timeout_s = timeout_s
        return world

    def meet(self) -> tuple[TCPStore, str]:
        """Return the store of the group, and the name of the backend that all ranks have.

        Raises:
            DistTimeoutError: A rank did not come; names it.
            DistNetworkError: Rank 0 ended, or its host cannot be reached.
        """
        # CuPy and NCCL may be there for some ranks only.
        mine = backend_name(None)
        return self._host(mine) if self._rank == 0 else self._join(mine)

    def _host(self, mine: str) -> tuple[TCPStore, str]:
        secret = secrets.token_hex(32)
        store = TCPStore(
            get_node_ip_address(),
            0,
            is_master=True,
            timeout=self.deadline.remaining_s(),
            wait_for_workers=False,
            secret=secret.encode(),
        )
        entry = json.dumps([store.host, store.port, secret]).encode()
        put_entry(self._name, entry)
        try:
            store.set("came/0", mine)
            self._wait_for_all(store)
        except BaseException:
            store.close()
            raise
        finally:
            if entry_of(self._name) == entry:
                remove_entry(self._name)
        keys = [f"came/{rank}" for rank in range(self._size)]
        backends = {name.decode() for name in store.multi_get(keys)}
        backend = mine if backends == {mine} else _BY_ALL
        store.set("go", backend)
        return store, backend

    def _wait_for_all(self, store: TCPStore) -> None:
        try:
            store.wait([f"came/{rank}" for rank in range(self._size)], self.deadline.remaining_s())
        except DistStoreError:
            words = self._shortfall(store)
            store.set("go", f"{_REFUSED}{words}")
            came = [rank for rank in range(1, self._size) if store.check([f"came/{rank}"])]
            with suppress(DistStoreError):  # the store ends with this call
                store.wait([f"read/{rank}" for rank in came], _LAST_WORDS_S)
            raise DistTimeoutError(f"{self._where}: {words}") from None

    def _join(self, mine: str) -> tuple[TCPStore, str]:
        store = self._connect()
        try:
            store.set(f"came/{self._rank}", mine)
            answer = self._answer(store)
            if answer.startswith(_REFUSED):
                raise DistTimeoutError(f"{self._where}: {answer.removeprefix(_REFUSED)}")
        except DistNetworkError as error:
            store.close()
            raise DistNetworkError(
                f"{self._where}: rank 0 ended while the ranks met: {error}", peer_failed=True
            ) from None
        except BaseException:
            with suppress(DistError):
                store.set(f"read/{self._rank}", "")
            store.close()
            raise
        return store, answer

    def _answer(self, store: TCPStore) -> str:
        """Return what rank 0 says when all ranks have come, or the time is over."""
        try:
            store.wait(["go"], self.deadline.remaining_s())
        except DistStoreError:
            raise DistTimeoutError(f"{self._where}: {self._shortfall(store)}") from None
        return store.get("go").decode()

    def _connect(self) -> TCPStore:
        failure: DistError | None = None
        while True:
            entry = entry_of(self._name)
            if entry is not None:
                host, port, secret = json.loads(entry)
                try:
                    return TCPStore(
                        host,
                        port,
                        timeout=self.deadline.slice_s(_CONNECT_S),
                        wait_for_workers=False,
                        secret=secret.encode(),
                    )
                except DistNetworkError as error:
                    failure = error  # rank 0 may come again, with another entry
            if self.deadline.expired():
                raise self._no_host(failure)
            time.sleep(self.deadline.slice_s(_PAUSE_S))

    def _no_host(self, failure: DistError | None) -> DistError:
        if failure is not None:
            return DistNetworkError(f"{self._where}: the store of rank 0 does not answer: {failure}", peer_failed=True)
        return DistTimeoutError(
            f"{self._where}: rank 0 did not join within {self.deadline.timeout_s:g} s; {self._advice}"
        )

    def _shortfall(self, store: TCPStore) -> str:
        missing = [rank for rank in range(self._size) if not store.check([f"came/{rank}"])]
        return (
            f"{self._size - len(missing)} of {counted(self._size, 'rank')} joined within {self.deadline.timeout_s:g} s;"
            f" {ranks_text(missing)} did not join: {self._advice}"
        )
