"""Who a rank is to its peers, and which ranks are on one host.

Every rank writes a card to the store when it joins. Two ranks are on one host, and can share memory, if boot id, pid
namespace and network namespace are equal; `MESHDIST_HOST_ID` overrides that, and `MESHDIST_DISABLE_SHM=1` makes every
rank a host of its own.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import NamedTuple

from meshdist.system.env_flags import DISABLE_SHM, switch
from meshdist.system.processes import started_at


class Card(NamedTuple):
    """The address of a rank for its peers."""

    host: str  # equal for ranks that can share memory
    host_name: str  # for messages
    pid: int  # the process, in the pid namespace of the host
    started: int  # start of the process in clock ticks, to tell it from a later one of the same pid; 0 if unknown
    bells: str  # base of the addresses of the rank's doorbells; empty if it has no such addresses
    network: str = ""  # equal for ranks that reach each other by loopback addresses

    def encode(self) -> str:
        import json

        return json.dumps(self._asdict())

    @classmethod
    def decode(cls, text: bytes) -> Card:
        import json

        return cls(**json.loads(text))


def my_card(bells: str) -> Card:
    pid, started = os.getpid(), started_at(os.getpid())
    # Without shared memory, every rank is a host of its own.
    alone = f" {pid} {started}" if switch(DISABLE_SHM) else ""
    return Card(f"{host_id()}{alone}", platform.node(), pid, started, bells, network_id())


def host_id() -> str:
    """Return an id that is equal for ranks that can share memory."""
    given = os.environ.get("MESHDIST_HOST_ID")
    if given:
        return given
    return _machine("pid", "net")


def network_id() -> str:
    """Return an id that is equal for ranks that reach each other by loopback addresses."""
    return _machine("net")


def _machine(*namespaces: str) -> str:
    if sys.platform != "linux":
        return platform.node()
    own = [os.readlink(f"/proc/self/ns/{kind}") for kind in namespaces]
    with open("/proc/sys/kernel/random/boot_id") as file:
        return " ".join([file.read().strip(), *own])
