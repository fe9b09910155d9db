"""A world of the ranks of several calls of `spawn`, on one host or on several.

Each call hosts a store for its own ranks. A larger world meets at the MASTER_ADDR and MASTER_PORT that the callers have
set, and its ranks need one secret, on which the calls cannot agree by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from meshdist.bootstrap.torchrun import AGENT_STORE_VARIABLE
from meshdist.security.credentials import SECRET_VARIABLE, secret_from_environment
from meshdist.security.handshake import job_id
from meshdist.system.env_flags import to_int

_SIZE = "MESHDIST_SPAWN_SIZE"
_ADDRESS = "MESHDIST_SPAWN_ADDRESS"
_OWN_SECRET = "MESHDIST_SPAWN_OWN_SECRET"

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
            f"{where}: world_size is {world_size}, and this spawn started {os.environ[_SIZE]} ranks; for a world of "
            "several spawns, set MASTER_ADDR and MASTER_PORT (rank 0's host and a free port there) and one "
            f"{SECRET_VARIABLE} before each of them"
        )
    return host.removeprefix("[").removesuffix("]"), to_int(port, "the environment variable MASTER_PORT")


def check_common_secret(where: str, world_size: int) -> None:
    """Raise ValueError if the ranks of other calls of `spawn` cannot have this rank's secret: this call created it."""
    own = os.environ.get(_OWN_SECRET)
    if own and exceeds_spawn(world_size) and job_id(secret_from_environment()).hex() == own:
        raise ValueError(
            f"{where}: world_size is {world_size}, and this spawn started {os.environ[_SIZE]} ranks, with a secret of "
            f"its own; for a world of several spawns, set {SECRET_VARIABLE} to one value before each of them: take "
            "that of `openssl rand -hex 32`"
        )
