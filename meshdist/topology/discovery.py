"""Discover the topology: hosts from the world, cores and sockets from /sys, GPUs through CuPy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from meshdist.groups.world import current_world
from meshdist.runtime.context import current_slot
from meshdist.topology.part import Link, Links, Part, host_parts, network_part

NODES = Path("/sys/devices/system/node")
# Between GPUs with peer access: NVLink on common machines, within a factor of two.
PEER_LINK = Link(2e-6, 200e9)


class Machine(NamedTuple):
    """The parts of one host."""

    cores: int  # processors available to this process
    sockets: tuple[int, ...]  # the number of processors of each NUMA node; empty for fewer than two nodes
    gpus: int
    peers: bool  # all GPUs access each other's memory directly


def this_machine(gpus: bool | None) -> Machine:
    from meshdist.system.platform import available_cores

    sockets = numa_cores(NODES)
    return Machine(available_cores(), sockets if len(sockets) > 1 else (), *_gpus(gpus))


def numa_cores(nodes: Path) -> tuple[int, ...]:
    """Return the number of processors of each NUMA node that has any; empty without the /sys directory `nodes`."""
    numbered = sorted((int(path.name[4:]), path) for path in nodes.glob("node[0-9]*"))
    counts = [cores_in((path / "cpulist").read_text()) for _, path in numbered if (path / "cpulist").is_file()]
    return tuple(count for count in counts if count)


def cores_in(cpulist: str) -> int:
    count = 0
    for part in filter(None, cpulist.strip().split(",")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


def _gpus(wanted: bool | None) -> tuple[int, bool]:
    if wanted is False or (wanted is None and "cupy" not in sys.modules):
        return 0, False
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "Topology.find(gpus=True) asks CuPy for the GPUs, and it is not installed: pip install cupy-cuda12x"
        ) from error
    runtime: Any = cupy.cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        if wanted:
            raise
        return 0, False  # CuPy without a GPU
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    return count, bool(pairs) and all(runtime.deviceCanAccessPeer(*pair) for pair in pairs)


def find_parts(gpus: bool | None) -> list[Part]:
    """Return the parts of the current world, equal on all ranks: the ranks of a host are in ascending order."""
    world, dry = current_world(), current_slot().dry
    if dry is not None and dry.topology is not None:
        return cast("list[Part]", list(dry.topology.parts))
    machine = this_machine(gpus)
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(world.hosts(range(world.size))):
        hosts.setdefault(host, []).append(rank)
    shown = world.host_names() or tuple(hosts)
    names = unique([shown[ranks[0]] for ranks in hosts.values()])
    parts = network_part(len(hosts))
    for name, ranks in zip(names, hosts.values(), strict=True):
        parts += parts_found(name, ranks, machine, linked=len(hosts) > 1)
    return parts


def parts_found(name: str, ranks: Sequence[int], machine: Machine, *, linked: bool) -> list[Part]:
    """Return the parts of one host: one rank per GPU if there are enough GPUs, else all ranks on the host.

    The socket of a rank is unknown.
    """
    links = Links()
    host, *_ = host_parts(name, ranks, 0, 0, links, linked=linked)
    on_gpus = bool(machine.gpus) and len(ranks) <= machine.gpus
    parts = [replace(host, cores=machine.cores, ranks=() if on_gpus else host.ranks)]
    for index, cores in enumerate(machine.sockets):
        parts.append(Part(f"{name}/socket{index}", "socket", name, links.socket, links.memory, cores=cores))
    above, link = name, links.gpu
    if machine.peers:
        above, link = f"{name}/nvlink", PEER_LINK
        parts.append(Part(above, "switch", name, Link(links.gpu.latency_s, links.gpu.bandwidth * machine.gpus)))
    for index in range(machine.gpus):
        here = (ranks[index],) if on_gpus and index < len(ranks) else ()
        parts.append(Part(f"{name}/gpu{index}", "gpu", above, link, links.memory, here))
    return parts


def unique(names: Sequence[str]) -> list[str]:
    """Return the names with a number after repeated ones: containers may share the name of their host."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found
