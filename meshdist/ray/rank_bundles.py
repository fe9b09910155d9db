"""Places for the ranks of a job: a placement group of Ray with a bundle for each, all or none."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from meshdist.errors import DistTimeoutError
from meshdist.system.deadline import Deadline
from meshdist.system.plurals import counted

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_SLICE_S = 1.0
_PAUSE_S = 0.02
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
    """Wait until the bundles of a group have places.

    Raises:
        DistTimeoutError: They did not find them in time; says what was asked for, and what the cluster has.
    """
    # Ray waits for whole seconds, and drops the rest of a second.
    while not group.wait(int(deadline.slice_s(_SLICE_S))):
        if deadline.expired():
            raise DistTimeoutError(_no_place(group.bundle_count, bundle, strategy, deadline.timeout_s))
        if deadline.remaining_s() < _SLICE_S:
            time.sleep(deadline.slice_s(_PAUSE_S))


def nodes_of(group: Any) -> list[str]:
    """Return the node of each bundle of a group that has its places, by Ray's id."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[number] for number in range(group.bundle_count)]


def _no_place(ranks: int, bundle: Mapping[str, float], strategy: str, timeout_s: float) -> str:
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    return (
        f"meshdist.ray.run: {counted(ranks, 'rank')} with {_text(bundle, bundle)} each (strategy {strategy}) found no"
        f" place within {timeout_s:g} s; the cluster has {_text(ray.cluster_resources(), bundle)} on {num_nodes}"
        f" node{'s' * (num_nodes != 1)}, of which {_text(ray.available_resources(), bundle)} are free. Ask for less,"
        " wait for other jobs to end, add nodes, or pass a longer start_timeout"
    )


def _text(amounts: Mapping[str, float], names: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in names)
