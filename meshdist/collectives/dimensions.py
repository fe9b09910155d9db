"""The dimension along which the functional forms concatenate and cut, which collectives do along the first one."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from meshdist.arrays.device_types import new_empty, taken
from meshdist.arrays.host import describe_value
from meshdist.system.plurals import counted

if TYPE_CHECKING:
    from meshdist.runtime.interfaces import Group


def dimension(members: Group, of: str, array: Any, axis: int | None, dim: int | None) -> int:
    """Return the dimension that `axis` or `dim` gives, from 0 on; 0 if both are None.

    Raises:
        TypeError: It is not an integer.
        ValueError: Both are given, or the array lacks it; a 0-d array counts as one of one dimension.
    """
    prefix = members.error_prefix(of)
    if axis is not None and dim is not None:
        raise ValueError(f"{prefix}: pass axis or dim, which is torch's name for it, and not both")
    name, value = ("dim", dim) if axis is None else ("axis", axis)
    if value is None:
        return 0
    ndim = max(array.ndim, 1)
    try:
        place: int = index(value)
    except TypeError:
        raise TypeError(f"{prefix}: {name} must be an integer, got {describe_value(value)}") from None
    if not -ndim <= place < ndim:
        raise ValueError(
            f"{prefix}: {name} must be {-ndim} to {ndim - 1} for an array of shape {array.shape}, got {place}"
        )
    return place if place >= 0 else place + ndim


def joined_along(stack: Any, place: int) -> Any:
    """Return the arrays `stack[0]`, `stack[1]`, ... concatenated along dimension `place`; 0-d ones stacked."""
    size, *shape = stack.shape
    if not shape:
        return stack
    if place:
        stack = stack.transpose((*range(1, place + 1), 0, *range(place + 1, stack.ndim))).copy()
    return stack.reshape(*shape[:place], size * shape[place], *shape[place + 1 :])


def stacked_along(arrays: list[Any], like: Any, place: int) -> Any:
    """Return arrays of the shape of `like` concatenated along dimension `place`; 0-d ones stacked."""
    stack = new_empty((len(arrays), *like.shape), like)
    for number, array in enumerate(arrays):
        stack[number, ...] = array
    return joined_along(stack, place)


def check_even(members: Group, of: str, array: Any, place: int, advice: str = "") -> None:
    """Raise ValueError if dimension `place` of an array is not a multiple of the number of ranks."""
    size, shape = max(1, members.size()), array.shape
    if array.ndim == 0 or shape[place] % size:
        prefix = members.error_prefix(of)
        raise ValueError(f"{prefix}: dim {place} of x must be a multiple of {size} ranks, got {shape}{advice}")


def cut_evenly(members: Group, of: str, array: Any, place: int) -> Any:
    """Return the equal blocks of an array along dimension `place`, stacked along a new first dimension."""
    check_even(members, of, array, place)
    size, shape = max(1, members.size()), array.shape
    blocks = array.reshape(*shape[:place], size, shape[place] // size, *shape[place + 1 :])
    return blocks.transpose((place, *(other for other in range(blocks.ndim) if other != place))) if place else blocks


def cut_whole(members: Group, whole: Any, block: Any, place: int) -> list[Any]:
    """Return the blocks of `whole` along dimension `place`, each of the shape of `block`."""
    prefix, size = members.error_prefix("scatter"), max(1, members.size())
    array = members.named(prefix, taken, whole, "scatter_list") if members.rank() >= 0 else taken(whole)
    shape = block.shape
    if not shape:
        expected: tuple[int, ...] = (size,)
    else:
        expected = (*shape[:place], size * shape[place], *shape[place + 1 :])
    if array.shape != expected:
        raise ValueError(
            f"{prefix}: scatter_list must have shape {expected}, {counted(size, 'block')} of the shape of x along"
            f" dimension {place}, got {array.shape}"
        )
    length = shape[place] if shape else 1
    cut = [array[(slice(None),) * place + (slice(k * length, (k + 1) * length),)] for k in range(size)]
    return [part.reshape(shape) for part in cut]
