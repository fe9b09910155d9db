"""Parse the values of meshrun's options; the parsers raise ValueError."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from meshdist.launch.worker_env import LOOPBACK
from meshdist.system.platform import parse_num_ranks
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping

    from meshdist.launch.node_rendezvous import NodeRendezvous

DEFAULT_MEETING_PORT = 29400
_OPTIONS_OF_VARIABLES = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "rdzv_endpoint")
DEFAULT_LAST_CALL_S = 10.0
_BACKENDS = ("c10d", "static")
_T = TypeVar("_T")


class Count(NamedTuple):
    """A number of hosts or of ranks, or the fewest and the most of them."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


def as_argument(convert: Callable[[str], _T]) -> Callable[[str], _T]:
    """Let argparse show the message of a ValueError from `convert`."""
    from argparse import ArgumentTypeError

    def converted(text: str) -> _T:
        try:
            return convert(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return converted


def number_of_nodes(text: str) -> Count:
    """Return the numbers of hosts of "4", or of "2:4"."""
    least, colon, most = text.partition(":")
    most = most if colon else least
    if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise ValueError(f"expected the number of hosts, or the fewest and the most of them as in 2:4, got {text!r}")
    return Count(int(least), int(most))


def number_of_ranks(text: str) -> Count:
    """Return the numbers of ranks of "4", "gpu" and so on, or of "2:4"."""
    least, colon, most = text.partition(":")
    if text == "p":
        raise ValueError("-np is an option of mpirun: write -n")
    if not colon:
        num_ranks = parse_num_ranks(text)
        return Count(num_ranks, num_ranks)
    if not (least.isdecimal() and 0 < int(least) <= (num_ranks := parse_num_ranks(most))):
        raise ValueError(f"expected the fewest and the most ranks, as in 2:4, got {text!r}")
    return Count(int(least), num_ranks)


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the options for which variables of torchrun stand, as text: PET_NNODES and others, of Kubeflow Trainer."""
    found = {option: environ.get(f"PET_{option.upper()}") for option in _OPTIONS_OF_VARIABLES}
    return {option: text for option, text in found.items() if text}


def whole_number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"expected a whole number, at least 0, got {text!r}")
    return int(text)


def truth(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"expected True or False, got {text!r}")
    return text == "True"


def port_number(text: str) -> int:
    """Return a port, 0 for any."""
    if not (text.isdecimal() and int(text) <= 65535):
        raise ValueError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def host_and_port(text: str) -> tuple[str, int | None]:
    """Return the host and the port, if any, of "host:port", "[ipv6]:port" or "host"."""
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, ""
    elif text.count(":") > 1 and not host.startswith("["):
        raise ValueError(f"write an IPv6 address in brackets, as in [::1]:29400, got {text!r}")
    if not host.strip("[]") or (colon and port == "" and not text.endswith("]")):
        raise ValueError(f"expected host:port, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), port_number(port) if port else None


def seconds(text: str) -> float:
    try:
        time_s = float(text)
    except ValueError:
        time_s = -1.0
    if not 0 <= time_s < float("inf"):
        raise ValueError(f"expected a number of seconds, at least 0, got {text!r}")
    return time_s


def rendezvous_backend(text: str) -> str:
    """Return a name that torchrun knows for a way for launchers to meet; here, all mean the same."""
    if text not in _BACKENDS:
        raise ValueError(
            f"expected {' or '.join(_BACKENDS)} (the launchers meet at a store of their own), got {text!r}"
        )
    return text


def rendezvous_of(parsed: Namespace) -> NodeRendezvous | None:
    """Return where the launchers of several hosts meet; None on a single host."""
    least, most = parsed.nnodes
    if most == 1:
        if parsed.node_rank not in (None, 0):
            raise ValueError(f"--node-rank {parsed.node_rank}: with one host (--nnodes 1) it must be 0")
        return None
    if parsed.standalone:
        raise ValueError(f"--standalone means this host alone, --nnodes {parsed.nnodes} means more: pass one of them")
    node, (host, port) = parsed.node_rank, parsed.rdzv_endpoint or (parsed.master_addr, None)
    if parsed.rdzv_endpoint is None and host is not None:
        port = parsed.master_port
    if host is None:
        host, port, node = _from_launcher(parsed.nnodes, node)
    if node is not None and node >= most:
        raise ValueError(f"--node-rank must be 0 to {most - 1}, got {node}")
    from meshdist.launch.node_rendezvous import NodeRendezvous  # with what one host alone does not need

    met = NodeRendezvous(host, port or DEFAULT_MEETING_PORT, most, node, parsed.rdzv_id, parsed.rdzv_timeout)
    return met if least == most else met._replace(least_nodes=least, last_call_s=parsed.rdzv_last_call)


def _from_launcher(num_nodes: Count, node: int | None) -> tuple[str, int | None, int]:
    """Return the first host, a port of this start, and the number of this host, where a launcher started meshrun.

    The port is None where the launcher does not distinguish one start from another.
    """
    from meshdist.cluster.place import DEFAULT_PORT, find_place

    place = find_place(world_size=num_nodes.most)
    if place is None or place.address is None:
        raise ValueError(
            f"--nnodes {num_nodes}: the launchers need a rendezvous endpoint: pass all of them the same"
            " --rdzv-endpoint HOST:PORT, with the name of one of the hosts"
            f"{'' if place is None else f' ({place.no_address})'}"
        )
    if not num_nodes.least <= place.world_size <= num_nodes.most:
        raise ValueError(
            f"--nnodes {num_nodes}, but {place.launcher.name} has started"
            f" {counted(place.world_size, 'process', 'processes')}: start one meshrun on each host, or"
            " pass --rdzv-endpoint HOST:PORT"
        )
    if node not in (None, place.rank):
        raise ValueError(f"--node-rank {node}, but {place.launcher.name} reports number {place.rank}")
    # Jobs that share the first host must not meet each other.
    return place.address, None if place.port == DEFAULT_PORT else place.port, place.rank


def address_of_store(parsed: Namespace) -> tuple[str, int]:
    """Return the address of the ranks' store; with several hosts, only its port is used."""
    if parsed.nnodes.most > 1:  # the endpoint's port, or --master-port without an endpoint, belongs to the launchers
        return "", parsed.master_port if parsed.rdzv_endpoint is not None else 0
    host, port = (None, None) if parsed.standalone or parsed.rdzv_endpoint is None else parsed.rdzv_endpoint
    return parsed.master_addr or host or LOOPBACK, parsed.master_port or port or 0
