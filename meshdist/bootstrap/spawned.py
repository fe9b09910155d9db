"""A world of the ranks of several calls of `spawn`, on one host or on several.

Each call hosts a store for its own ranks. A larger world meets at the MASTER_ADDR and MASTER_PORT that the callers have
set, and its ranks need one secret, on which the calls cannot agree by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from meshdist.bootstrap.torchrun import AGENT_STORE_VARIABLE
from meshdist.errors import DistError, DistStoreError
from meshdist.security.credentials import SECRET_VARIABLE, secret_from_environment
from meshdist.security.handshake import job_id
from meshdist.store import TCPStore
from meshdist.system.deadline import Deadline
from meshdist.system.env_flags import to_int
from meshdist.system.plurals import counted

_SIZE = "MESHDIST_SPAWN_SIZE"
_ADDRESS = "MESHDIST_SPAWN_ADDRESS"
_OWN_SECRET = "MESHDIST_SPAWN_OWN_SECRET"
_MET = "met"
_QUIET_S = 0.5  # calls that were started together refuse each other within that time

MEET_STRANGERS_S = 5.0
"""How long ranks without the common secret look for those that have it."""

NOT_SPAWNED = {_SIZE: "", _ADDRESS: "", _OWN_SECRET: ""}
"""The variables of a process that another launcher has started, perhaps in a rank of `spawn`."""


def spawn_variables(num_ranks: int, new_secret: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the `num_ranks` ranks of a call of `spawn` must know about the call.

    `new_secret` is the secret if the call has created it, else empty; `environ` is the environment of the caller.
    """
    address = f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
    is_of_a_launcher = address == environ.get(AGENT_STORE_VARIABLE) or "TORCHELASTIC_RUN_ID" in environ
    is_complete = bool(environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"))
    return {
        _SIZE: str(num_ranks),
        _ADDRESS: address if is_complete and not is_of_a_launcher else "",
        # Names the secret instead of repeating it: the rank may have been given another one since.
        _OWN_SECRET: job_id(new_secret.encode()).hex() if new_secret else "",
    }


def exceeds_spawn(world_size: int) -> bool:
    """Return True in a rank of `spawn` if the world has more ranks than that call has started."""
    size = os.environ.get(_SIZE)
    return bool(size) and world_size > int(size or 0)


def callers_address(where: str, world_size: int) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT of the caller of `spawn`.

    Raises:
        ValueError: They were not set, or the port is not a number.
    """
    host, _, port = os.environ.get(_ADDRESS, "").rpartition(":")
    if not host:
        raise ValueError(
            f"{where}: world_size is {world_size}, and this spawn started {counted(int(os.environ[_SIZE]), 'rank')};"
            " for a world of several spawns, set MASTER_ADDR and MASTER_PORT (rank 0's host and a free port there) and"
            f" one {SECRET_VARIABLE} before each of them"
        )
    return host.removeprefix("[").removesuffix("]"), to_int(port, "the environment variable MASTER_PORT")


def check_common_secret(where: str, world_size: int, meet: Callable[[], object] | None = None) -> None:
    """Raise ValueError if the ranks of other calls of `spawn` cannot have this rank's secret: this call created it.

    Before that, `meet` goes where the ranks meet, so that those of other calls get an error too.
    """
    own = os.environ.get(_OWN_SECRET)
    if own and exceeds_spawn(world_size) and job_id(secret_from_environment()).hex() == own:
        if meet is not None:
            with suppress(DistError, ValueError):  # what it raises follows from the secret
                meet()
        raise ValueError(
            f"{where}: world_size is {world_size}, and this spawn started {counted(int(os.environ[_SIZE]), 'rank')},"
            f" with its own secret; for a world of several spawns, set {SECRET_VARIABLE} to one value before each"
            " of them: take that of `openssl rand -hex 32`"
        )


def meet_strangers(host: str, port: int, is_host: bool) -> None:
    """Meet the ranks of other calls of `spawn`, whose secret this rank does not have, so that they get an error.

    Processes with different secrets refuse each other when they connect. So rank 0 hosts a store until it has refused
    some, and all others connect to the store that is there. The other ranks of this call stay until rank 0 is done,
    because the first that fails ends the rest.
    """
    deadline = Deadline(MEET_STRANGERS_S)
    with TCPStore(host, port, is_master=is_host, timeout=deadline.timeout_s, wait_for_workers=False) as store:
        if not is_host:
            store.wait([_MET], deadline.remaining_s())
            return
        num_refused = 0
        while not deadline.expired():
            with suppress(DistStoreError):  # no rank sets the key
                store.wait([_MET], deadline.slice_s(_QUIET_S))
            refused = store.take_refusals()
            if num_refused and not refused:
                break
            num_refused += len(refused)
        store.set(_MET, "")
