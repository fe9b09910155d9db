"""Checks of arguments in the definitions of collectives, and the values that all ranks must agree on.

They run once per plan: everything they read is part of the plan's key. An error names the collective, the group and the
    rank, and the expected and the actual value.
"""

from __future__ import annotations

from typing import Any, NoReturn

from meshdist.arrays.host import Array, describe_array
from meshdist.arrays.reduce_op import check_op_dtype
from meshdist.runtime.call import Call, Elements, each, hint_at_swapped_sides
from meshdist.system.plurals import counted

# What to call on a rank that has no list to pass.
_WITHOUT_LISTS = {
    "gather": "; meshdist.functional.gather(x, group=..., group_dst={root}) returns a new list",
    "scatter": "; meshdist.functional.scatter(blocks, group=..., group_src={root}) takes the list alone",
}


def refuse(call: Call, sentence: str) -> NoReturn:
    raise ValueError(f"{call.error_prefix}: {sentence}")


def one(call: Call, side: str) -> Array:
    """Return the array of a side, `send` or `recv`; raise TypeError for a list."""
    value = getattr(call, side)
    if value is None or isinstance(value, list):
        got = "None" if value is None else f"a list{hint_at_swapped_sides(call.collective, call.send, call.recv)}"
        raise TypeError(f"{call.error_prefix}: {_name(call, side)} must be one array, got {got}")
    array: Array = value
    return array


def many(call: Call, side: str) -> list[Array]:
    """Return the arrays of a side, one per rank; raise for a single array or a list of a different length."""
    value = getattr(call, side)
    if not isinstance(value, list):
        got = "None" if value is None else f"one array{hint_at_swapped_sides(call.collective, call.send, call.recv)}"
        hint = _WITHOUT_LISTS.get(call.collective.name, "") if value is None else ""
        raise TypeError(
            f"{call.error_prefix}: {_name(call, side)} must be a list of {counted(call.size, 'array')}, got"
            f" {got}{hint.format(root=call.root)}"
        )
    if len(value) != call.size:
        refuse(
            call, f"{_name(call, side)} must hold {counted(call.size, 'array')}, one for each rank, got {len(value)}"
        )
    return value


def several(call: Call, side: str) -> list[Array]:
    """Return the arrays of a side, a list of any length but 0; raise for a single array or an empty list."""
    value = getattr(call, side)
    if not isinstance(value, list):
        got = "None" if value is None else "one array"
        raise TypeError(f"{call.error_prefix}: {_name(call, side)} must be a list of arrays, got {got}")
    if not value:
        refuse(call, f"{_name(call, side)} must hold at least one array, got an empty list")
    return value


def check_nothing(call: Call) -> None: ...


def check_one(call: Call) -> None:
    one(call, "recv")


def check_reducible(call: Call) -> None:
    for array in each(call.send):
        check_reduction_dtype(call, array)


def check_reduction_dtype(call: Call, array: Array) -> None:
    if call.op is None:
        raise TypeError(f"{call.error_prefix}: op must be a ReduceOp or its name, got None")
    try:
        check_op_dtype(call.op, array.dtype)
    except TypeError as error:
        raise TypeError(f"{call.error_prefix}: {error}") from None


def check_one_dtype(call: Call) -> None:
    arrays = each(call.send) + each(call.recv)
    other = next((array for array in arrays if array.dtype != arrays[0].dtype), None)
    if other is not None:
        send, recv = call.collective.names
        raise TypeError(
            f"{call.error_prefix}: {send} and {recv} must have one dtype, got {arrays[0].dtype} and {other.dtype}"
        )


def check_stacked(call: Call, whole_side: str, block_side: str) -> None:
    """Check that one side has the blocks of all ranks, concatenated along dim 0 or stacked along a new one."""
    names = _name(call, whole_side), _name(call, block_side)
    check_stacked_pair(call, one(call, whole_side), one(call, block_side), names)


def check_stacked_pair(call: Call, whole: Array, block: Array, names: tuple[str, str]) -> None:
    """Check that `whole` has one block per rank, concatenated along dim 0 or stacked along a new one."""
    stacked = (call.size, *block.shape)
    concatenated = (call.size * block.shape[0], *block.shape[1:]) if block.ndim else stacked
    if whole.shape not in (concatenated, stacked):
        expected = f"{concatenated}" if concatenated == stacked else f"{concatenated} or {stacked}"
        are_swapped = whole.size * call.size == block.size > whole.size
        hint = f"; did you swap {names[0]} and {names[1]}?" if are_swapped else ""
        refuse(
            call,
            f"{names[0]} must have shape {expected} (world size {call.size} x {names[1]} shape"
            f" {block.shape}), got {whole.shape}{hint}",
        )


def agree_on_array(call: Call) -> tuple[Any, ...]:
    """The array has the same shape on every rank."""
    array = one(call, "recv")
    return (Elements([array], is_elementwise=True),)


def agree_on_one(call: Call, side: str) -> tuple[Any, ...]:
    array = one(call, side)
    return (Elements([array]),)


def agree_on_block(call: Call, side: str) -> tuple[Any, ...]:
    array = one(call, side)
    return (Elements([array], f"{call.size} x "),)


def agree_on_blocks(call: Call, side: str) -> tuple[Any, ...]:
    """All ranks know the size of every rank's block."""
    counts = Elements(many(call, side))
    counts.shaped = str(counts)  # the blocks of a rank may have any shape
    return (counts,)


def agree_on_list(call: Call, side: str, *, is_elementwise: bool = False) -> tuple[Any, ...]:
    arrays = several(call, side)
    return (Elements(arrays, f"{counted(len(arrays), 'array')} ", is_elementwise=is_elementwise),)


def check_same_shape(call: Call, array: Array, block: Array, names: tuple[str, str], hint: str = "") -> None:
    if array.shape != block.shape:
        expected = f"{names[0]} must have the shape of {names[1]}, {describe_array(block)}"
        refuse(call, f"{expected}, got {describe_array(array)}{hint}")


def check_blocks_alike(call: Call, blocks: list[Array], list_name: str, block: Array, name: str) -> None:
    is_gather = call.collective.name == "gather"
    form = "gather(x, dst, uneven=True)" if is_gather else "scatter(blocks), with a list of them on the source alone"
    hint = f"; for blocks of different lengths, call meshdist.functional.{form}"
    for place, array in enumerate(blocks):
        check_same_shape(call, array, block, (f"{list_name}[{place}]", name), hint)


def check_no_list(call: Call, side: str, root: str) -> None:
    given = getattr(call, side)
    if given is not None and not (isinstance(given, list) and not given):
        refuse(
            call,
            f"{_name(call, side)} is for the rank that is {root}, rank {call.root} of the group; pass None on the"
            " others",
        )


def _name(call: Call, side: str) -> str:
    return call.collective.names[0 if side == "send" else 1]
