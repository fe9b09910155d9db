"""column_parallel, row_parallel and layer_norm: the layers of Megatron-LM as functions of blocks of plain arrays.

A pair of products y = act(x @ a) @ b is sharded in the middle: each rank has columns of `a` and the same rows of `b`,
computes its columns of act(x @ a), and its term of the sum that y is. Only that sum is sent, and in the backward pass
the sum that is the gradient of x. With sequence parallelism, the activations between such pairs are sharded along the
sequence: the sum becomes a reduce_scatter, and x is gathered. Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models", section 4.2.
"""

from __future__ import annotations

import math
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defvjp, primitive
from autograd.tracer import getval

from meshdist.arrays.host import AnyArray
from meshdist.autograd.collectives import all_gather, all_reduce, copy, reduce_scatter
from meshdist.parallel.layer_arguments import LayerCall
from meshdist.runtime.context import GroupLike


def column_parallel(
    x: AnyArray,
    weight: AnyArray,
    bias: AnyArray | None = None,
    *,
    axis: GroupLike,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
) -> AnyArray:
    """Return this rank's columns of `x @ weight + bias`, where the weight is sharded by columns.

    The forward pass sends nothing; the backward pass computes the gradient of `x` by an all_reduce. With
    `sequence_parallel`, the forward pass makes an all_gather, and the backward pass a reduce_scatter.

    Args:
        x: Shape (..., features), of a floating dtype; the same on all ranks of the axis. With `sequence_parallel` this
            rank's block of it along `sequence_dim`, all blocks equal.
        weight: This rank's columns, shape (features, block). The blocks may be of any sizes.
        bias: This rank's block, shape (block,), or None.
        axis: The ProcessGroup or the axis of a mesh, as `mesh["tp"]`, whose ranks share the layer. None: one rank.
        sequence_parallel: Whether `x` is sharded along the sequence.
        sequence_dim: The dimension of the sequence.

    Returns:
        Shape (..., block). Differentiable by `meshdist.autograd`, as all layers here.

    Raises:
        TypeError: An argument is not an array of a floating dtype, or is a DTensor, for which `x @ weight` does the
            same.
        ValueError: Shapes do not fit, or `x` has no such dimension.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.parallel import column_parallel, row_parallel
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     x, a, b = np.ones((3, 2)), np.ones((2, 4)), np.ones((4, 2))
        ...     mine = slice(2 * mesh.get_rank(), 2 * mesh.get_rank() + 2)
        ...     hidden = np.tanh(column_parallel(x, a[:, mine], axis=mesh["tp"]))
        ...     y = row_parallel(hidden, b[mine], axis=mesh["tp"])
        ...     return hidden.shape, np.allclose(y, np.tanh(x @ a) @ b)
        >>> meshdist.run(program, 2)[0]
        ((3, 2), True)
    """
    call = LayerCall("column_parallel", axis, "write x @ weight + bias, with weight placed Shard(1) and bias Shard(0)")
    x, weight, bias = _checked(call, x, weight, bias, "columns")
    if sequence_parallel:
        place = call.sequence_dim(x, sequence_dim)
        if call.members is not None:
            x = all_gather(x, call.members, axis=place)
    elif call.members is not None:
        call.check_replicated("x", x)
        x = copy(x, call.members)
    product = _product(x, weight)
    return product if bias is None else product + bias


def row_parallel(
    x: AnyArray,
    weight: AnyArray,
    bias: AnyArray | None = None,
    *,
    axis: GroupLike,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
) -> AnyArray:
    """Return `x @ weight + bias`, where `x` is sharded by columns, and the weight by the same rows.

    The forward pass sums the ranks' products by an all_reduce; the backward pass sends nothing. With
    `sequence_parallel`, the forward pass makes a reduce_scatter, and the backward pass an all_gather, and an all_reduce
    of the gradient of `bias`.

    Args:
        x: This rank's columns, shape (..., block), as `column_parallel` returns them.
        weight: This rank's rows, shape (block, outputs).
        bias: The same on all ranks, shape (outputs,), added once; or None.
        axis: The ranks that share the layer, as in `column_parallel`.
        sequence_parallel: Whether the result is sharded along the sequence.
        sequence_dim: The dimension of the sequence, whose length is a multiple of the number of ranks.

    Returns:
        Shape (..., outputs), the same on all ranks. With `sequence_parallel` this rank's block of it along
        `sequence_dim`.

    Raises:
        TypeError: An argument is not an array of a floating dtype, or is a DTensor.
        ValueError: Shapes do not fit, or the sequence cannot be split into equal blocks.
    """
    call = LayerCall(
        "row_parallel", axis, "write (x @ weight).redistribute() + bias, with weight placed Shard(0), bias Replicate()"
    )
    x, weight, bias = _checked(call, x, weight, bias, "rows")
    if bias is not None:
        call.check_replicated("bias", bias)
    place = call.sequence_dim(x, sequence_dim, divided=True) if sequence_parallel else 0
    product = _product(x, weight)
    if call.members is not None and sequence_parallel:
        product = reduce_scatter(product, "sum", call.members, axis=place)
        bias = None if bias is None else copy(bias, call.members)  # each rank adds it to its own block
    elif call.members is not None:
        product = all_reduce(product, "sum", call.members)
    return product if bias is None else product + bias


def layer_norm(
    x: AnyArray, gain: AnyArray, bias: AnyArray | None = None, *, eps: float = 1e-5, axis: GroupLike = None
) -> AnyArray:
    """Return `x` normalized to mean 0 and variance 1 over its last dimension, times `gain`, plus `bias`.

    Args:
        x: Shape (..., features), of a floating dtype.
        gain: Shape (features,).
        bias: Shape (features,), or None.
        eps: Added to the variance.
        axis: With sequence parallelism the axis that shards `x` along the sequence, as in `column_parallel`: `gain` and
            `bias` are the same on all ranks, and their gradients are added along it, by one all_reduce of both. None:
            each rank's gradients are those of its own rows. Use None if all ranks have the same `x`, or if the
            gradients are added later, with others.

    Returns:
        The shape of `x`.

    Raises:
        TypeError: An argument is not an array of a floating dtype, or is a DTensor.
        ValueError: Shapes do not fit.

    Example:
        >>> import numpy as np, meshdist
        >>> from meshdist.autograd import grad
        >>> from meshdist.parallel import layer_norm
        >>> def program():
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     x = np.array([[0.0, 2.0], [4.0, 6.0]])[mesh.get_rank()]  # one row on each rank
        ...     gradient = grad(lambda gain: layer_norm(x, gain, axis=mesh["tp"]).sum())(np.ones(2))
        ...     return gradient.round(3).tolist()
        >>> meshdist.run(program, 2)
        [[-2.0, 2.0], [-2.0, 2.0]]
    """
    call = LayerCall(
        "layer_norm", axis, "write (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * gain"
    )
    x = call.floating("x", x, least=1)
    parameters = [call.floating("gain", gain)]
    if bias is not None:
        parameters.append(call.floating("bias", bias))
    for name, parameter in zip(("gain", "bias"), parameters, strict=False):
        call.check_shape(name, parameter, np.shape(getval(x))[-1:], f"the last dimension of x {np.shape(getval(x))}")
        call.check_replicated(name, parameter)
    if call.members is not None:
        together = copy(anp.stack(parameters), call.members)  # one all_reduce for the gradients of both
        parameters = [together[number] for number in range(len(parameters))]
    scaled = _normalized(x, eps) * parameters[0]
    return scaled if bias is None else scaled + parameters[1]


def _checked(call: LayerCall, x: Any, weight: Any, bias: Any, cut: str) -> tuple[Any, Any, Any]:
    x = call.floating("x", x, least=1)
    weight = call.floating("weight", weight, ndim=2)
    shape, (inputs, outputs) = np.shape(getval(x)), np.shape(getval(weight))
    if shape[-1] != inputs:
        held = "this rank's columns of all inputs" if cut == "columns" else "this rank's rows, one for each column of x"
        raise ValueError(
            f"{call.prefix}: x of shape {shape} has {shape[-1]} features, and weight of shape {(inputs, outputs)} takes"
            f" {inputs}; weight must be {held}, of shape ({shape[-1]}, outputs)"
        )
    if bias is not None:
        bias = call.floating("bias", bias)
        call.check_shape("bias", bias, (outputs,), f"one for each column of weight {(inputs, outputs)}")
    return x, weight, bias


@primitive
def _product(x: Any, weight: Any) -> Any:
    """Return `x @ weight` as one product of matrices; NumPy's of stacks is one for each, and so is its gradient."""
    return (_matrix(x) @ weight).reshape(*x.shape[:-1], weight.shape[1])


def _matrix(x: Any) -> Any:
    return x if x.ndim == 2 else anp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _as(dtype: Any, x: Any) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)


_product.__name__ = "product of a layer"
defvjp(
    _product,
    lambda y, x, weight: lambda g: _as(x.dtype, _product(g, weight.T)),
    lambda y, x, weight: lambda g: _as(weight.dtype, anp.dot(_matrix(x).T, _matrix(g))),
)


@primitive
def _normalized(x: Any, eps: float) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * _inverse_deviation(centred, eps)


def _inverse_deviation(centred: Any, eps: float) -> Any:
    return 1 / anp.sqrt(anp.mean(centred * centred, -1, keepdims=True) + eps)


def _pull_normalized(g: Any, x: Any, y: Any, eps: float) -> Any:
    inverse = _inverse_deviation(x - anp.mean(x, -1, keepdims=True), eps)
    along = anp.mean(g * y, -1, keepdims=True)
    return inverse * (g - anp.mean(g, -1, keepdims=True) - y * along)


_normalized.__name__ = "layer_norm"
defvjp(_normalized, lambda y, x, eps: lambda g: _pull_normalized(g, x, y, eps))
