"""Parameters in place: copied from one rank to all, or averaged, now and then by `PeriodicAverager`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshdist.arrays.host import check_writable
from meshdist.arrays.reduce_op import ReduceOp
from meshdist.arrays.trees import Tree
from meshdist.collectives.all_reduce import all_reduce
from meshdist.collectives.broadcast import broadcast
from meshdist.collectives.tree_calls import reduced
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import resolve
from meshdist.parallel.gradient_buckets import checked_count
from meshdist.runtime.context import GroupLike


class PeriodicAverager:
    """Averages parameters over a group in every `period`-th step, after some steps of warm-up.

    torch's `PeriodicModelAverager`. In the steps of warm-up, average the gradients over all ranks; afterwards average
    them over a subgroup, or not at all: `communication_hooks.post_local_sgd` does both.

    Args:
        period: The number of steps between averages.
        warmup_steps: Do nothing in the first steps.
        group: A ProcessGroup or a DeviceMesh; the world if None.

    Attributes:
        step: How often `average_parameters` was called; a checkpoint keeps it.

    Raises:
        TypeError: A number that is not an integer.
        ValueError: `period` is less than 1, or `warmup_steps` negative.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> from meshdist.parallel import PeriodicAverager
        >>> def main():
        ...     averager, w = PeriodicAverager(period=2, warmup_steps=1), np.zeros(1)
        ...     for _ in range(3):
        ...         w += 1 + dist.get_rank()  # a step of training
        ...         averager.average_parameters([w])  # does something in the second step
        ...     return float(w[0])
        >>> dist.run(main, 2)
        [4.0, 5.0]
    """

    def __init__(self, period: int, warmup_steps: int = 0, group: GroupLike = None) -> None:
        self._group = resolve(group)
        self._period = checked_count("PeriodicAverager", "period", period, 1)
        self._warmup_steps = checked_count("PeriodicAverager", "warmup_steps", warmup_steps, 0)
        self.step = 0

    def average_parameters(self, tree: Any) -> None:
        """Count a step and, in every `period`-th one, replace the arrays by their mean over the group, in place.

        Args:
            tree: Dicts, lists and tuples of arrays, as for `average_parameters`.
        """
        past = self.step - self._warmup_steps
        self.step += 1
        if past >= 0 and past % self._period == 0:
            average_parameters(tree, self._group)


class HierarchicalAverager:
    """Averages parameters over several groups, the larger ones more rarely; torch's `HierarchicalModelAverager`.

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, section on hierarchical local SGD.

    Args:
        groups: The group for each period: `{4: mesh["tp"], 16: mesh}` averages along axis tp in every fourth step, and
            in every sixteenth over the whole mesh instead. The group of a longer period contains those of the shorter
            ones.
        warmup_steps: Do nothing in the first steps.

    Attributes:
        step: How often `average_parameters` was called; a checkpoint keeps it.

    Raises:
        ValueError: No groups, a period that is not positive, negative `warmup_steps`, or a group of a longer period
            that does not contain one of a shorter.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> from meshdist.parallel import HierarchicalAverager
        >>> def main():
        ...     mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
        ...     averager, w = HierarchicalAverager({1: mesh["ranks"], 2: mesh}), np.array([1.0 * dist.get_rank()])
        ...     averager.average_parameters([w])  # step 0 is the turn of both: the larger one
        ...     w += dist.get_rank()
        ...     averager.average_parameters([w])  # step 1 is that of the pairs
        ...     return float(w[0])
        >>> dist.run(main, 4)
        [2.0, 2.0, 4.0, 4.0]
    """

    def __init__(self, groups: Mapping[int, GroupLike], warmup_steps: int = 0) -> None:
        if not groups or min(groups) < 1:
            raise ValueError(f"HierarchicalAverager: groups must have positive periods as keys, got {list(groups)}")
        self._groups: dict[int, ProcessGroup] = {period: resolve(groups[period]) for period in sorted(groups)}
        inner: ProcessGroup | None = None
        for period, group in self._groups.items():
            if inner is not None and not set(inner.ranks) <= set(group.ranks):
                raise ValueError(
                    f"HierarchicalAverager: the group of period {period}, {group.label!r}, must contain the ranks of "
                    f"that with a shorter period, {inner.label!r}"
                )
            inner = group
        self._warmup_steps = checked_count("HierarchicalAverager", "warmup_steps", warmup_steps, 0)
        self.step = 0

    def average_parameters(self, tree: Any) -> None:
        """Count a step and average over the group of the longest period that divides its number, in place.

        Args:
            tree: Dicts, lists and tuples of arrays, as for `average_parameters`.
        """
        step, self.step = self.step, self.step + 1
        if step < self._warmup_steps:
            return
        turns = [group for period, group in self._groups.items() if step % period == 0]
        if turns:
            average_parameters(tree, turns[-1])


def broadcast_parameters(tree: Any, group: GroupLike = None, src: int = 0) -> Any:
    """Copy the arrays of one rank into those of all others, in place; all ranks call it, before training.

    Args:
        tree: Arrays of any dtypes, in nested dicts, lists and tuples; None is ignored. All ranks must
            pass the same structure, with the same dtypes and shapes.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        src: Global rank of the source.

    Returns:
        `tree`.

    Raises:
        TypeError: A number, which cannot be written in place, or another object that is not an array.
        ValueError: An array is read-only, or `src` is not in the group.
        DistBackendError: The ranks' trees differ, or a rank failed.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> from meshdist.parallel import broadcast_parameters
        >>> def main():
        ...     layers = [{"w": np.full(2, dist.get_rank()), "b": np.full(1, 0.5 * dist.get_rank())}]
        ...     broadcast_parameters(layers, src=1)
        ...     return layers
        >>> dist.run(main, 2)[0]
        [{'w': array([1, 1]), 'b': array([0.5])}]
    """
    members = resolve(group)
    root = members.root("broadcast_parameters", "src", src, None)
    leaves = _writable_leaves(members, "broadcast_parameters", tree)
    result = reduced(broadcast, tree, None, members, root)
    if members.rank() != root:
        _write(leaves, result)
    return tree


def average_parameters(tree: Any, group: GroupLike = None) -> Any:
    """Replace the arrays of all ranks by their mean over the group, in place; all ranks call it.

    Args:
        tree: The parameters, as for `broadcast_parameters`; the arrays are floating or complex.
        group: A ProcessGroup or a DeviceMesh; the world if None.

    Returns:
        `tree`.

    Raises:
        TypeError: A number, an array of integers, or another object that is not an array.
        ValueError: An array is read-only.
        DistBackendError: The ranks' trees differ, or a rank failed.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> from meshdist.parallel import average_parameters
        >>> dist.run(lambda: average_parameters({"w": np.full(2, 1.0 * dist.get_rank())}), 2)[1]
        {'w': array([0.5, 0.5])}
    """
    members = resolve(group)
    leaves = _writable_leaves(members, "average_parameters", tree)
    _write(leaves, reduced(all_reduce, tree, ReduceOp.AVG, members))
    return tree


def _writable_leaves(members: ProcessGroup, of: str, tree: Any) -> list[Any]:
    prefix = members.error_prefix(of)
    taken: Tree = members.named(prefix, Tree, tree, "tree")
    for name, given in _given(tree, "tree"):
        if isinstance(given, (bool, int, float, complex, np.generic)):
            raise TypeError(f"{prefix}: {name} is a number, which cannot be written in place; pass an array of it")
    for leaf, name in zip(taken.leaves, taken.names, strict=True):
        if isinstance(leaf, np.ndarray):
            members.named(prefix, check_writable, leaf, name)
    return taken.leaves


def _given(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return the leaves of a tree as they were given, with their names."""
    if isinstance(tree, dict):
        return [pair for key, value in tree.items() for pair in _given(value, f"{name}[{key!r}]")]
    if isinstance(tree, (list, tuple)):
        return [pair for number, value in enumerate(tree) for pair in _given(value, f"{name}[{number}]")]
    return [(name, tree)]


def _write(leaves: list[Any], result: Any) -> None:
    for leaf, new in zip(leaves, Tree(result).leaves, strict=True):
        leaf[...] = new
