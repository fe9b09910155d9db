"""Places for the ranks of a job: a placement group of Ray with a bundle for each, all or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from meshdist.errors import DistTimeoutError
from meshdist.system.deadline import Deadline, Reminder
from meshdist.system.plurals import counted

_log = logging.getLogger("meshdist")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_SLICE_S = 1.0
_PAUSE_S = 0.02
_ROUNDING = 1e-6  # three ranks with 0.1 each fit into 0.3
_OWN_ARGUMENTS = {"CPU": "num_cpus", "GPU": "num_gpus"}


def bundle_of(num_cpus: float, num_gpus: float, resources: Mapping[str, float] | None) -> dict[str, float]:
    """Return the resources of a rank, as Ray writes them in a bundle.

    Raises:
        ValueError: An amount is negative, or `resources` has CPU or GPU; or nothing is asked for at all.
    """
    for name in _OWN_ARGUMENTS.keys() & (resources or {}).keys():
        raise ValueError(f"meshdist.ray.run: {name} in resources; pass {_OWN_ARGUMENTS[name]}, as to ray.remote")
    asked = {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}
    for name, amount in asked.items():
        if not amount >= 0:
            raise ValueError(f"meshdist.ray.run: a rank must have at least 0 of {name}, got {amount}")
    bundle = {name: amount for name, amount in asked.items() if amount}
    if not bundle:
        raise ValueError(
            "meshdist.ray.run: Ray places ranks by what they need; ask for num_cpus, num_gpus or resources, such as"
            " num_cpus=0.01"
        )
    return bundle


@contextmanager
def bundles(ranks: int, bundle: Mapping[str, float], strategy: str) -> Iterator[Any]:
    """Yield a placement group of equal bundles, which Ray may still be placing; remove it at the end of the block.

    Raises:
        ValueError: The strategy is unknown.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"meshdist.ray.run: unknown strategy {strategy!r}; choose from {', '.join(STRATEGIES)}")
    group = placement_group([dict(bundle)] * ranks, strategy=strategy)
    try:
        yield group
    finally:
        remove_placement_group(group)


def await_places(group: Any, bundle: Mapping[str, float], strategy: str, deadline: Deadline) -> None:
    """Wait until the bundles of a group have places; after some seconds, and then now and then, log for what.

    Raises:
        DistTimeoutError: They did not find them in time; says what was asked for, and what the cluster has.
    """
    ranks, reminder = group.bundle_count, Reminder()
    asked = f"meshdist.ray.run: {counted(ranks, 'rank')} with {_text(bundle, bundle)} each (strategy {strategy})"
    # Ray waits for whole seconds, and drops the rest of a second.
    while not group.wait(int(deadline.slice_s(_SLICE_S))):
        if deadline.expired():
            raise DistTimeoutError(
                f"{asked} found no place within {deadline.timeout_s:g} s; {_cluster(bundle)}. Ask for less, wait for"
                " other jobs to end, add nodes, or pass a longer start_timeout"
            )
        if (waited_s := reminder.due_s()) is not None:
            can_hold = fits([node["Resources"] for node in ray.nodes() if node["Alive"]], ranks, bundle, strategy)
            hint = "waiting" if can_hold else "these nodes can never hold them: waiting for other nodes to join,"
            _log.warning(
                "%s have found no place for %.0f s; %s; %s for up to %.0f s more",
                *(asked, waited_s, _cluster(bundle), hint, deadline.remaining_s()),
            )
        if deadline.remaining_s() < _SLICE_S:
            time.sleep(deadline.slice_s(_PAUSE_S))


def fits(nodes: Sequence[Mapping[str, float]], ranks: int, bundle: Mapping[str, float], strategy: str) -> bool:
    """Return whether nodes with these resources can hold so many bundles if nothing else uses them."""
    room = [min(int(node.get(name, 0.0) / amount + _ROUNDING) for name, amount in bundle.items()) for node in nodes]
    if strategy == "STRICT_PACK":
        return max(room, default=0) >= ranks
    return sum(min(number, 1) if strategy == "STRICT_SPREAD" else number for number in room) >= ranks


def nodes_of(group: Any) -> list[str]:
    """Return the node of each bundle of a group that has its places, by Ray's id."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[number] for number in range(group.bundle_count)]


def _cluster(bundle: Mapping[str, float]) -> str:
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    return (
        f"the cluster has {_text(ray.cluster_resources(), bundle)} on {counted(num_nodes, 'node')}, of which"
        f" {_text(ray.available_resources(), bundle)} are free"
    )


def _text(amounts: Mapping[str, float], names: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in names)
