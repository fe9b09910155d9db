"""The parts of a host: ranks spread over its sockets and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshdist.topology.link import GPU_LINK, MEMORY, NETWORK, SOCKET_LINK, Link
from meshdist.topology.part import Part

ROOT = "network"


class Links(NamedTuple):
    """The links of a host."""

    memory: Link = MEMORY
    socket: Link = SOCKET_LINK
    gpu: Link = GPU_LINK
    network: Link = NETWORK


def network_part(num_hosts: int) -> list[Part]:
    """Return the root above several hosts; a host alone is the root itself."""
    return [Part(ROOT, "network")] if num_hosts > 1 else []


def host_parts(name: str, ranks: Sequence[int], sockets: int, gpus: int, links: Links, *, linked: bool) -> list[Part]:
    """Return a host and what is in it.

    Args:
        name: Of the host; its sockets are `<name>/socket0` and on, its GPUs `<name>/gpu0` and on.
        ranks: They run on the GPUs, else on the sockets, else on the host, in blocks of equal size.
        sockets: How many, 0 for a host that is not divided.
        gpus: How many, spread over the sockets in blocks; 0 for none.
        links: The links inside, and to the network.
        linked: Whether there is a network above.

    Raises:
        ValueError: What is to be spread evenly cannot be.
    """
    on_host = () if sockets or gpus else tuple(ranks)
    parent, link = (ROOT, links.network) if linked else (None, None)
    parts = [Part(name, "host", parent, link, links.memory, on_host)]
    if sockets:
        _check_spread(name, "GPUs" if gpus else "ranks", gpus or len(ranks), "sockets", sockets)
    if gpus:
        _check_spread(name, "ranks", len(ranks), "GPUs", gpus)
    for index in range(sockets):
        here = () if gpus else _block(ranks, index, sockets)
        parts.append(Part(f"{name}/socket{index}", "socket", name, links.socket, links.memory, here))
    for index in range(gpus):
        parent = f"{name}/socket{index * sockets // gpus}" if sockets else name
        here = _block(ranks, index, gpus)
        parts.append(Part(f"{name}/gpu{index}", "gpu", parent, links.gpu, links.memory, here))
    return parts


def _check_spread(host: str, what: str, count: int, over: str, places: int) -> None:
    if places < 0 or count % places:
        raise ValueError(
            f"topology: host {host!r}: {count} {what} cannot be spread evenly over {places} {over};"
            f" make {what} a multiple of {over}"
        )


def _block(ranks: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    size = len(ranks) // count
    return tuple(ranks[index * size : (index + 1) * size])
