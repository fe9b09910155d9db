"""What the values of meshrun's options mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdist.cluster.place import find_place
from meshdist.launch.env import LOOPBACK
from meshdist.launch.meeting import Meeting

if TYPE_CHECKING:
    from argparse import Namespace

DEFAULT_MEETING_PORT = 29400
_BACKENDS = ("c10d", "static")


def number_of_nodes(text: str) -> int:
    """Return the number of hosts; "4:4" is 4 as well.

    Raises:
        ValueError: It is no positive number, or a range.
    """
    least, _, most = text.partition(":")
    if not (least.isdecimal() and int(least) > 0 and (most or least).isdecimal()):
        raise ValueError(f"expected the number of hosts, got {text!r}")
    if most and int(most) != int(least):
        raise ValueError(
            f"a job cannot grow and shrink between {least} and {most} hosts: give one number, not {text!r}"
        )
    return int(least)


def whole_number(text: str) -> int:
    """Return a number that is not negative.

    Raises:
        ValueError: It is none.
    """
    if not text.isdecimal():
        raise ValueError(f"expected a whole number, at least 0, got {text!r}")
    return int(text)


def port_number(text: str) -> int:
    """Return a port, 0 for any.

    Raises:
        ValueError: It is none.
    """
    if not (text.isdecimal() and int(text) <= 65535):
        raise ValueError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def host_and_port(text: str) -> tuple[str, int | None]:
    """Return the host and the port, if any, of "host:port", "[ipv6]:port" or "host".

    Raises:
        ValueError: It is none of these.
    """
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, ""
    elif text.count(":") > 1 and not host.startswith("["):
        raise ValueError(f"write an IPv6 address in brackets, as in [::1]:29400, got {text!r}")
    if not host.strip("[]") or (colon and port == "" and not text.endswith("]")):
        raise ValueError(f"expected host:port, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), port_number(port) if port else None


def seconds(text: str) -> float:
    """Return a time in seconds.

    Raises:
        ValueError: It is none.
    """
    try:
        time_s = float(text)
    except ValueError:
        time_s = -1.0
    if not 0 <= time_s < float("inf"):
        raise ValueError(f"expected a number of seconds, at least 0, got {text!r}")
    return time_s


def rendezvous_backend(text: str) -> str:
    """Return the name of a way for launchers to meet, of those known to torchrun; here, all mean the same.

    Raises:
        ValueError: It is unknown.
    """
    if text not in _BACKENDS:
        raise ValueError(
            f"expected {' or '.join(_BACKENDS)} (the launchers meet at a store of their own), got {text!r}"
        )
    return text


def meeting_of(parsed: Namespace) -> Meeting | None:
    """Return where the launchers of several hosts meet; None where there is one host.

    Raises:
        ValueError: The options say too little, or contradict each other.
    """
    if parsed.nnodes == 1:
        if parsed.node_rank not in (None, 0):
            raise ValueError(f"--node-rank {parsed.node_rank}: with one host (--nnodes 1) it must be 0")
        return None
    if parsed.standalone:
        raise ValueError(f"--standalone means this host alone, --nnodes {parsed.nnodes} more: give one of them")
    node, (host, port) = parsed.node_rank, parsed.rdzv_endpoint or (parsed.master_addr, None)
    if parsed.rdzv_endpoint is None and host is not None:
        port = parsed.master_port
    if host is None:
        host, node = _from_launcher(parsed.nnodes, node)
    if node is not None and node >= parsed.nnodes:
        raise ValueError(f"--node-rank must be 0 to {parsed.nnodes - 1}, got {node}")
    return Meeting(host, port or DEFAULT_MEETING_PORT, parsed.nnodes, node, parsed.rdzv_id, parsed.rdzv_timeout)


def _from_launcher(num_nodes: int, node: int | None) -> tuple[str, int]:
    """Return the first host and the number of this one, where another launcher started one meshrun on each."""
    place = find_place(world_size=num_nodes)
    if place is None or place.address is None:
        raise ValueError(
            f"--nnodes {num_nodes}: the launchers need a place to meet: give all of them the same --rdzv-endpoint "
            f"HOST:PORT, with the name of one of the hosts{'' if place is None else f' ({place.no_address})'}"
        )
    if place.world_size != num_nodes:
        raise ValueError(
            f"--nnodes {num_nodes}, but {place.launcher.name} has started {place.world_size} processes: start one "
            "meshrun on each host, or give --rdzv-endpoint HOST:PORT"
        )
    if node not in (None, place.rank):
        raise ValueError(f"--node-rank {node}, but {place.launcher.name} says that this is number {place.rank}")
    return place.address, place.rank


def address_of_store(parsed: Namespace) -> tuple[str, int]:
    """Return where the ranks' store listens; its host is of no meaning where there are several."""
    if parsed.nnodes > 1:  # the endpoint's port is the launchers', and so is --master-port if there is no endpoint
        return "", parsed.master_port if parsed.rdzv_endpoint is not None else 0
    host, port = (None, None) if parsed.standalone or parsed.rdzv_endpoint is None else parsed.rdzv_endpoint
    return parsed.master_addr or host or LOOPBACK, parsed.master_port or port or 0
