"""What brings DTensors to other placements, or to plain arrays and back, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from autograd.extend import defvjp, primitive
from autograd.tracer import getval

from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.distribution import as_block
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.placements import Partial, Placements, Replicate


def settled(gradient: Any, layout: ArrayLayout, mesh: DeviceMesh, linear: bool = False) -> Any:
    """Return the gradient of an array of this layout as an operation takes it, which is differentiated.

    It is sharded as the array is, and further, where it was, along axes that do not shard the array. Pending sums are
    computed: once, and not by every product that it is used in. What is `linear` leaves those along axes that do not
    shard the array.
    """
    if not isinstance(getval(gradient), DTensor):
        whole = ArrayLayout.of_cuts(layout.shape, layout.mesh_shape, (None,) * layout.ndim, {})
        return from_block(gradient, whole, mesh)
    found: ArrayLayout = gradient.layout
    if found is layout and not layout.pending:
        return gradient
    cuts = list(layout.cuts)
    busy = {axis for cut in cuts if cut is not None for axis in cut.axes}
    for dim, cut in enumerate(found.cuts):
        if cuts[dim] is None and cut is not None and busy.isdisjoint(cut.axes):
            cuts[dim] = cut
            busy.update(cut.axes)
    pending = {axis: op for axis, op in found.pending.items() if linear and axis not in busy}
    target = ArrayLayout.of_cuts(layout.shape, layout.mesh_shape, cuts, pending)
    return gradient if target is found else redistribute(gradient, target.placements)


# ---- Placements


@primitive
def _redistributed(x: DTensor, placements: Placements | None) -> DTensor:
    return x.redistribute(placements)


_redistributed.__name__ = "redistribute"
# The same array: the gradient may lie as it does, until an operation needs it otherwise.
defvjp(_redistributed, lambda y, x, placements: lambda g: g)


def redistribute(x: Any, placements: Placements | None = None) -> Any:
    """Return the array with other placements; see `DTensor.redistribute`."""
    return _redistributed(x, placements)


# ---- Blocks and whole arrays


@primitive
def from_block(block: Any, layout: ArrayLayout, mesh: DeviceMesh) -> DTensor:
    """Return the DTensor of this rank's block of a layout."""
    return wrap(as_block(block, mesh), layout, mesh)


@primitive
def block_of(x: DTensor, layout: ArrayLayout) -> Any:
    """Return this rank's block of the array in a layout without pending sums."""
    return x.redistribute(layout.placements).to_local()


def _gradient_layout(layout: ArrayLayout, grad: str) -> ArrayLayout:
    """Return the layout of a gradient whose blocks are the ranks' gradients of their blocks of an array."""
    placements = [
        Replicate() if isinstance(placement, Partial)
        else Partial() if isinstance(placement, Replicate) and grad == "reduce"
        else placement
        for placement in layout.placements
    ]  # fmt: skip
    return ArrayLayout.of(layout.shape, layout.mesh_shape, placements)


def checked_grad(prefix: str, grad: str) -> str:
    """Return the argument `grad` of a call.

    Raises:
        ValueError: Neither "reduce" nor "identity".
    """
    if grad not in ("reduce", "identity"):
        raise ValueError(f"{prefix}: grad must be 'reduce' or 'identity', got {grad!r}")
    return grad


@primitive
def _local(x: DTensor, grad: str) -> Any:
    return x.to_local()


_local.__name__ = "to_local"


@primitive
def _whole(x: DTensor, grad: str) -> Any:
    return x.full()


_whole.__name__ = "full"


def _pull_whole(x: Any, grad: str, g: Any) -> Any:
    if isinstance(getval(g), DTensor):  # the whole array was used beside DTensors
        return g
    layout: ArrayLayout = x.layout
    whole = ArrayLayout.of_cuts(layout.shape, layout.mesh_shape, (None,) * layout.ndim, {})
    return from_block(g, _gradient_layout(whole, grad), x.mesh)


defvjp(from_block, lambda y, block, layout, mesh: lambda g: block_of(g, layout.resolved()))
defvjp(block_of, lambda y, x, layout: lambda g: from_block(g, layout, x.mesh))
defvjp(_local, lambda y, x, grad: lambda g: from_block(g, _gradient_layout(x.layout, grad), x.mesh))
defvjp(_whole, lambda y, x, grad: lambda g: _pull_whole(x, grad, g))


def to_local(x: Any, *, grad: str = "identity") -> Any:
    """Return this rank's block of a DTensor, with a gradient.

    Args:
        x: The DTensor. Its gradient is sharded as it is.
        grad: Along axes that replicate: "identity" if all ranks use the block in the same way, so that their gradients
            are equal; "reduce" if each uses it for its own part, so that the gradients are added. Of a pending sum, it
            is the gradient of the sum, which is equal on all ranks.

    Raises:
        ValueError: `grad` is unknown.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import all_reduce, grad, to_local
        >>> from meshdist.tensor import Shard, distribute_tensor
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     x = distribute_tensor(np.arange(3.0), mesh, {"dp": Shard(0)})
        ...     return grad(lambda x: all_reduce((to_local(x) ** 2).sum(), group=mesh))(x).full().tolist()
        >>> meshdist.run(program, 2)[0]
        [0.0, 2.0, 4.0]
    """
    return _local(x, checked_grad("to_local", grad))


def full(x: Any, *, grad: str = "identity") -> Any:
    """Return the whole array of a DTensor, a plain one on every rank, with a gradient.

    Args:
        x: The DTensor.
        grad: "identity" if all ranks use the whole array in the same way, so that their gradients are equal; "reduce"
            if each uses it for its own part, so that the gradients are added.

    Raises:
        ValueError: `grad` is unknown.
    """
    return _whole(x, checked_grad("full", grad))


def from_local(
    local: Any, mesh: DeviceMesh, placements: Placements | None = None, shape: Sequence[int] | None = None
) -> Any:
    """Return the DTensor whose block on this rank is `local`, with a gradient; see `DTensor.from_local`.

    The gradient of `local` is this rank's block of the gradient of the array; along axes that replicate, or with a
    pending sum, it is the same on all ranks.
    """
    made = DTensor.from_local(_plain(local), mesh, placements, shape)
    return from_block(local, made.layout, mesh)


def _plain(x: Any) -> Any:
    value = getval(x)
    return np.asarray(value) if isinstance(value, (int, float, complex)) else value
