"""ShardedOptimizer: each rank updates its part of the parameters, and has the state of that part only (ZeRO stage 1).

The parameters of one dtype are one flat array, split into equal blocks in rank order, of which the last ones may be
shorter or empty. A step is a reduce_scatter of the gradients, the update of one's own block, and an all_gather of the
parameters: as many bytes as an all_reduce of the gradients. Rajbhandari et al., "ZeRO", 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from meshdist.arrays.device_types import new_empty
from meshdist.arrays.host import consecutive_views
from meshdist.collectives.all_gather_into_tensor import all_gather_into_tensor
from meshdist.collectives.objects import all_gather_object
from meshdist.collectives.reduce_scatter_tensor import reduce_scatter_tensor
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import resolve
from meshdist.parallel.gradient_buckets import (
    FlatArrays,
    NamedViews,
    Parameter,
    agree_on,
    gradient_like,
    parameters_of,
)
from meshdist.parallel.join_context import Joinable, JoinHook
from meshdist.runtime.context import GroupLike

State = dict[str, Any]


class ShardedOptimizer(Joinable):
    """Updates parameters, with the optimizer state sharded over the ranks of a group.

    If the update is elementwise, as in SGD with momentum and Adam, the results are bitwise equal to those of the same
    update of all parameters on every rank. All ranks create the optimizer and make the same steps.

    Args:
        named_arrays: The parameters: a dict by name, or pairs (name, array). Floating or complex NumPy or CuPy arrays;
            the same on all ranks. They are copied.
        update: `update(parameters, gradients, state, **options)` changes `parameters` in place, or returns the new
            ones. `parameters` and `gradients` are flat arrays of shape `(elements,)`: this rank's block of those of one
            dtype. `state` is a dict in which the update keeps its state, empty in the first step.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        **options: Passed to `update`, such as a learning rate; `step` may change them.

    Attributes:
        parameters: By name, the parameters to compute with: views of the flat arrays.
        gradients: By name, arrays to write the gradients into.

    Raises:
        TypeError: A parameter is not a floating or complex array, or `update` is not callable.
        ValueError: There are no parameters, two have the same name, or this rank is not in the group.
        DistBackendError: The ranks' parameters differ; raised on all ranks with the first difference.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> from meshdist.parallel import ShardedOptimizer
        >>> def momentum(parameters, gradients, state, lr):
        ...     velocity = state.setdefault("velocity", np.zeros_like(parameters))
        ...     velocity += gradients
        ...     parameters -= lr * velocity
        >>> def main():
        ...     optimizer = ShardedOptimizer({"w": np.zeros((2, 2)), "b": np.ones(1)}, momentum, lr=0.5)
        ...     optimizer.step({"w": np.full((2, 2), 1.0 * dist.get_rank()), "b": np.zeros(1)})
        ...     return optimizer.parameters["w"][0, 0], [len(state["velocity"]) for state in optimizer.state]
        >>> dist.run(main, 2)
        [(np.float64(-0.25), [3]), (np.float64(-0.25), [2])]
    """

    def __init__(
        self,
        named_arrays: Mapping[str, Any] | Iterable[tuple[str, Any]],
        update: Callable[..., Any],
        group: GroupLike = None,
        **options: Any,
    ) -> None:
        self._group = members = resolve(group)
        self._prefix = members.error_prefix("ShardedOptimizer")
        if members.rank() < 0:
            raise ValueError(f"{self._prefix}: this rank is not in the group; make it only on ranks of the group")
        if not callable(update):
            raise TypeError(f"{self._prefix}: update must be callable, got {type(update).__name__}")
        parameters = parameters_of(self._prefix, named_arrays)
        agree_on(members, self._prefix, parameters)
        self._update = update
        self._options = self._last_options = options
        kinds: dict[Any, list[Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self._shards = [_Shard(members, some) for some in kinds.values()]
        names = [parameter.name for parameter in parameters]
        for attribute in ("parameters", "gradients"):
            views = {name: view for shard in self._shards for name, view in getattr(shard, attribute).views.items()}
            setattr(self, attribute, NamedViews({name: views[name] for name in names}))

    parameters: NamedViews
    gradients: NamedViews

    @property
    def state(self) -> list[State]:
        """The state of `update` on this rank, a dict for each dtype of the parameters."""
        return [shard.state for shard in self._shards]

    def step(self, gradients: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Average the gradients over the ranks, and update the parameters on all of them.

        Args:
            gradients: This rank's gradients by name, for all parameters, which are copied into `gradients`; None if
                they were written there.
            **options: Passed to `update`, instead of those of the optimizer.

        Raises:
            TypeError: A gradient is not an array.
            ValueError: A gradient is missing, or has a different shape or dtype; nothing is sent.
            DistBackendError: A rank failed.
        """
        if gradients is not None:
            self._copy_in(gradients)
        self.notify_join_context()
        self._last_options = {**self._options, **options}
        works = [reduce_scatter_tensor(*shard.scattered(), "avg", self._group, True) for shard in self._shards]
        factor = self.join_factor()
        gathers = []
        for shard, work in zip(self._shards, works, strict=True):
            work.wait()
            if factor != 1.0:
                shard.own_gradients *= factor
            updated = self._update(shard.own_parameters, shard.own_gradients, shard.state, **self._last_options)
            if updated is not None and updated is not shard.own_parameters:
                shard.own_parameters[...] = updated
            gathers.append(all_gather_into_tensor(*shard.gathered(), self._group, True))
        for work in gathers:
            work.wait()

    def zero(self) -> None:
        """Set all gradients to zero, for backward passes that add to them."""
        for shard in self._shards:
            shard.gradients.flat[...] = 0

    def consolidate_state_dict(self) -> State:
        """Return the whole state on all ranks, for a checkpoint; all ranks call it.

        Returns:
            For each key of the state: if its values are sharded arrays, a dict of the whole arrays by parameter, each
            in the shape of the parameter; otherwise the value of this rank, such as a number of steps. The result does
            not depend on the number of ranks.

        Raises:
            DistBackendError: A rank failed.
        """
        found: list[Any] = [None] * self._group.size()
        all_gather_object(found, self.state, self._group)
        whole: State = {}
        for number, shard in enumerate(self._shards):
            states = [states[number] for states in found]
            for key, value in states[self._group.rank()].items():
                blocks = [state.get(key) for state in states]
                if [getattr(block, "shape", None) for block in blocks] == [(size,) for size in shard.sizes]:
                    whole.setdefault(key, {}).update(shard.by_name(np.concatenate(blocks)))
                else:
                    whole[key] = value
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a state that `consolidate_state_dict` returned, on any number of ranks.

        Args:
            state_dict: The whole state, the same on all ranks.

        Raises:
            ValueError: An array is missing, or has a different shape from its parameter.
        """
        for shard in self._shards:
            shard.state.clear()
            for key, value in state_dict.items():
                if isinstance(value, Mapping):
                    shard.state[key] = shard.own_block(self._prefix, key, value)
                else:
                    shard.state[key] = value

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group of the optimizer."""
        return self._group

    def join_hook(self) -> JoinHook:
        """Return the hook that continues to update this rank's block, with gradients of zero."""
        return _ShadowUpdates(self)

    def shadow_step(self) -> None:
        """Make a step with gradients of zero, and the options of the last step."""
        self.zero()
        self.step(**self._last_options)

    def _copy_in(self, gradients: Mapping[str, Any]) -> None:
        missing = [name for name in self.gradients if name not in gradients]
        unknown = [name for name in gradients if name not in self.gradients]
        if missing or unknown:
            what = f"no gradient for {missing[0]!r}" if missing else f"one for {unknown[0]!r}, which is not a parameter"
            raise ValueError(f"{self._prefix}: step got {what}; pass a gradient for each parameter")
        for name, view in self.gradients.items():
            array = self._group.named(self._prefix, gradient_like, view, name, gradients[name])
            if array is not view:
                view[...] = array


class _Shard:
    """The parameters of one dtype, and this rank's block of them."""

    def __init__(self, group: ProcessGroup, parameters: list[Parameter]) -> None:
        size = sum(int(parameter.array.size) for parameter in parameters)
        rows = -(-size // group.size())
        padding = rows * group.size() - size
        self.parameters = FlatArrays(group, parameters, extra=padding)
        self.gradients = FlatArrays(group, parameters, extra=padding)
        for parameter in parameters:
            self.parameters.views[parameter.name][...] = parameter.array
        begin = group.rank() * rows
        self._block = slice(begin, begin + rows)
        self._received = new_empty((rows,), self.gradients.flat)
        self.sizes = [min(rows, max(0, size - rank * rows)) for rank in range(group.size())]
        own = self.sizes[group.rank()]
        self._begin, self._end = begin, begin + own
        self.own_gradients = self._received[:own]
        self.own_parameters = self.parameters.flat[begin : begin + own]
        self.state: State = {}

    def scattered(self) -> tuple[Any, Any]:
        """Return output and input of the reduce_scatter of the gradients."""
        return self._received, self.gradients.flat

    def gathered(self) -> tuple[Any, Any]:
        """Return output and input of the all_gather of the parameters, in place."""
        return self.parameters.flat, self.parameters.flat[self._block]

    def by_name(self, flat: Any) -> dict[str, Any]:
        """Return an array of all elements split into arrays of the shapes of the parameters."""
        views = self.parameters.views
        return dict(zip(views, consecutive_views(flat, (view.shape for view in views.values())), strict=True))

    def own_block(self, prefix: str, key: str, arrays: Mapping[str, Any]) -> Any:
        """Return this rank's block of arrays of the shapes of the parameters."""
        for name, view in self.parameters.views.items():
            shape = getattr(arrays.get(name), "shape", None)
            if shape != view.shape:
                due = f"an array of shape {view.shape}, got {shape}"
                raise ValueError(f"{prefix}: load_state_dict: {key!r} of {name!r} must be {due}")
        flat = np.concatenate([arrays[name].reshape(-1) for name in self.parameters.views])
        return flat[self._begin : self._end].copy()


class _ShadowUpdates(JoinHook):
    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer.shadow_step()
