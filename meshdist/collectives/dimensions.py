"""The arrays that the functional forms take, and the dimension along which they concatenate and cut them.

Collectives concatenate and cut along the first dimension.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from meshdist.arrays.device_types import new_empty, taken
from meshdist.arrays.host import describe_value
from meshdist.runtime.context import GroupLike, resolve

if TYPE_CHECKING:
    from meshdist.runtime.interfaces import Group


# The ends of errors about arguments that are no arrays, by function: what it takes.
_TAKES = {
    "broadcast": (
        "; every rank passes an array or tree with the structure, shapes and dtypes of the source's; where only the"
        " source knows them, write [x] = broadcast_object_list([x], src)"
    ),
    "scatter": (
        "; pass the list of blocks as x on the source, and None on the other ranks; or, on all ranks, an array of the"
        " shape and dtype of one block as x, and the blocks as scatter_list, on the source"
    ),
    "reduce_scatter": (
        "; x is a list of arrays, one for each rank; functional.reduce_scatter_tensor(np.array(x)) splits one array"
    ),
    "all_to_all": (
        "; x is a list of arrays, one for each rank; functional.all_to_all_single(np.array(x)) splits one array"
    ),
}
_TAKES_ALONG = "; axis= and dim= split one array; a list of arrays, one for each rank, goes without them"


def given_array(x: Any, of: str, group: GroupLike, name: str = "x", hint: str = "") -> Any:
    """Return the array that the user's function `of` got; `hint` says what it takes instead of what is no array."""
    end = hint or _TAKES.get(of)
    try:
        return taken(x, name, (lambda value, name: end) if end else None)
    except TypeError as error:
        raise TypeError(f"{resolve(group).error_prefix(of)}: {error}") from None


def check_list(x: Any, of: str, group: GroupLike) -> None:
    """Raise TypeError if `x` is neither a list of blocks nor an array whose rows are the blocks."""
    if not hasattr(x, "__len__") or isinstance(x, dict):
        what = f"x must be a list of arrays, one for each rank, got {type(x).__name__}"
        raise TypeError(f"{resolve(group).error_prefix(of)}: {what}")


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


def cut_along(array: Any, place: int, num: int) -> list[Any]:
    """Return `num` equal blocks of an array along dimension `place`: views."""
    length = array.shape[place] // num
    return [array[(slice(None),) * place + (slice(k * length, (k + 1) * length),)] for k in range(num)]


def check_even(members: Group, of: str, array: Any, place: int, advice: str = "") -> None:
    """Raise ValueError if dimension `place` of an array is not a multiple of the number of ranks."""
    size, shape = max(1, members.size()), array.shape
    if array.ndim == 0 or shape[place] % size:
        prefix = members.error_prefix(of)
        raise ValueError(f"{prefix}: dim {place} of x must be a multiple of {size} ranks, got {shape}{advice}")


def equal_blocks(x: Any, group: GroupLike, axis: int | None, dim: int | None, of: str) -> tuple[Any, int]:
    """Return the ranks' equal blocks of `x`, stacked, for the user's function `of`, and the dimension that it cuts."""
    array, members = given_array(x, of, group, hint=_TAKES_ALONG if of in _TAKES else ""), resolve(group)
    place = dimension(members, of, array, axis, dim)
    check_even(members, of, array, place)
    size, shape = max(1, members.size()), array.shape
    blocks = array.reshape(*shape[:place], size, shape[place] // size, *shape[place + 1 :])
    if place:
        blocks = blocks.transpose((place, *(other for other in range(blocks.ndim) if other != place)))
    return blocks, place
