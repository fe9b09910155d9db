"""ReduceOp: the reductions, and the dtypes each is defined for; PREMUL_SUM and its factor."""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable
from enum import Enum, EnumMeta
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from meshdist import core
from meshdist.system.name_hints import missing_attribute

__all__ = [
    "Op",
    "PremulSum",
    "ReduceOp",
    "as_reduce_op",
    "check_op_dtype",
    "premul_sum",
    "reduce_op",
    "supports_complex",
]


class PremulSum:
    """A SUM with a factor of this rank, created by `premul_sum`.

    Attributes:
        factor: What this rank's arrays are multiplied by.

    Example:
        >>> from meshdist import premul_sum
        >>> premul_sum(0.5)
        premul_sum(0.5)
    """

    def __init__(self, factor: Any) -> None:
        # A copy, since the caller may change its array before the call runs.
        self.factor = np.array(factor.get() if hasattr(factor, "__cuda_array_interface__") else factor)
        if self.factor.dtype.kind not in "biufcV":
            raise TypeError(f"premul_sum: factor must be a number or an array, got {type(factor).__name__}")

    def __repr__(self) -> str:
        return f"premul_sum({self.factor.tolist()})"

    def check(self, array: np.ndarray[Any, Any], name: str) -> None:
        """Raise where `array` cannot be multiplied by the factor without changing dtype or shape.

        Raises:
            TypeError: A factor that the dtype cannot hold, such as a fraction for integers.
            ValueError: An array of factors that does not broadcast to the array.
        """
        if array.dtype.kind == "b" or _level(self.factor.dtype) > _level(array.dtype):
            raise TypeError(
                f"premul_sum: the factor is {self.factor.dtype}, by which {name} of {array.dtype} cannot be multiplied"
            )
        try:
            shape = np.broadcast_shapes(self.factor.shape, array.shape)
        except ValueError:
            shape = None
        if shape != array.shape:
            raise ValueError(
                f"premul_sum: the factor, of shape {self.factor.shape}, must broadcast to {name} of shape {array.shape}"
            )

    def scaled(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a new array of the same dtype: `array` times the factor."""
        product = np.empty(array.shape, array.dtype.newbyteorder("="))
        np.multiply(array, self.factor.astype(product.dtype), out=product)
        return product


def premul_sum(factor: Any) -> PremulSum:
    """Return the reduction PREMUL_SUM: each rank's array is multiplied by its own factor, and then summed.

    Args:
        factor: A number, or an array that broadcasts to the arrays of the call. It is converted to their dtype.

    Raises:
        TypeError: `factor` is neither a number nor an array.
    """
    return PremulSum(factor)


def _level(dtype: np.dtype[Any]) -> int:
    # bool, integers, floating (extension dtypes as well), complex
    return {"b": 0, "i": 1, "u": 1, "c": 3, "W": 3}.get(dtype.kind, 2)


class _NamingMembers(EnumMeta):
    """Names the members where one is misspelt, or has its name from another library."""

    def __getattr__(cls, name: str) -> Any:
        members = vars(cls).get("_member_map_", {})
        if name in members:  # Python 3.10 finds the members here
            return members[name]
        if name.startswith("_"):
            raise missing_attribute(cls, name)
        meant, logical = _meant(name), _logical(name)
        hint = "" if meant is None else f"; did you mean ReduceOp.{meant.upper()}?"
        if logical is not None:
            hint = f"; {logical}"
        choices = f"; it has {', '.join(members)} and PREMUL_SUM{hint}"
        raise missing_attribute(cls, name, known=(), otherwise=choices)


@core.compare_by_identity
class ReduceOp(Enum, metaclass=_NamingMembers):
    """The reductions.

    Every function that takes a ReduceOp takes its name in lower case as well: `op="max"`.

    SUM, PRODUCT, MIN and MAX are NumPy's `add`, `multiply`, `minimum` and `maximum`: integers wrap on overflow, a NaN
    in MIN or MAX propagates, and for `bool`, SUM is "or" and PRODUCT is "and". BAND, BOR and BXOR are for integers and
    bool. AVG is SUM divided by the group's size, for floating and complex dtypes. MIN and MAX are not for complex ones.
    `ReduceOp.PREMUL_SUM(factor)`, or `premul_sum(factor)`, is the SUM of arrays that each rank multiplies by its own
    factor first. It is not a member of the enum, since it needs a factor; a rank that passes SUM has factor 1.

    Example:
        >>> from meshdist import ReduceOp
        >>> ReduceOp.SUM
        <ReduceOp.SUM: 'sum'>
        >>> ReduceOp("max") is ReduceOp.MAX
        True
    """

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    AVG = "avg"

    PREMUL_SUM = staticmethod(premul_sum)

    if not TYPE_CHECKING:  # for type checkers, a name that is not there is an error

        def __getattr__(self, name: str) -> object:
            raise missing_attribute(self, name)

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        raise ValueError(_unknown(value))

    # Plans are looked up by op on every call: hash by identity.
    __hash__ = object.__hash__

    @property
    def ufunc(self) -> np.ufunc:
        """The NumPy ufunc that combines two arrays; AVG combines as SUM and divides at the end."""
        return _UFUNCS[self]

    def finish(self, total: np.ndarray[Any, Any], num_ranks: int) -> None:
        """Make the combination of all ranks' arrays the result, in place: AVG divides by `num_ranks`."""
        if self is not ReduceOp.AVG:
            return
        if total.dtype.isbuiltin == 2:
            # A dtype of few bits may not represent the number of ranks; round once.
            wide = np.complex64 if total.dtype.kind == "W" else np.float32
            total[...] = np.divide(total.astype(wide), wide(num_ranks)).astype(total.dtype)
            return
        # By parts: NumPy divides complex numbers by complex ones, which rounds more than once.
        parts = (total.real, total.imag) if total.dtype.kind == "c" else (total,)
        for part in parts:
            np.divide(part, part.dtype.type(num_ranks), out=part)


_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
    ReduceOp.AVG: np.add,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_NOT_FOR_COMPLEX = (ReduceOp.MIN, ReduceOp.MAX)


# What an `op` argument may be.
Op: TypeAlias = "ReduceOp | PremulSum | str"


class _DeprecatedReduceOp:
    """The older spelling of ReduceOp: the same values, with a warning."""

    def __getattr__(self, name: str) -> ReduceOp:
        if name not in ("SUM", "PRODUCT", "MIN", "MAX"):
            raise AttributeError(f"reduce_op has SUM, PRODUCT, MIN and MAX, not {name}; use ReduceOp")
        warnings.warn(f"reduce_op is deprecated; use ReduceOp.{name}", FutureWarning, stacklevel=2)
        return ReduceOp[name]


reduce_op = _DeprecatedReduceOp()


# Functions of NumPy and Python that reduce as an op does.
_LIKE = {
    **dict.fromkeys(("add", "sum", "fsum"), "SUM"),
    **dict.fromkeys(("multiply", "mul", "prod"), "PRODUCT"),
    **dict.fromkeys(("mean", "average"), "AVG"),
    **dict.fromkeys(("maximum", "fmax", "max"), "MAX"),
    **dict.fromkeys(("minimum", "fmin", "min"), "MIN"),
    **dict.fromkeys(("bitwise_and", "and_"), "BAND"),
    **dict.fromkeys(("bitwise_or", "or_"), "BOR"),
    **dict.fromkeys(("bitwise_xor", "xor"), "BXOR"),
}


def as_reduce_op(op: Op | Callable[[Any], PremulSum]) -> ReduceOp:
    """Return the ReduceOp that `op` is or names: SUM for a PREMUL_SUM, once the arrays are multiplied.

    Raises:
        ValueError: An unknown name, the message lists the known ones; or PREMUL_SUM without a factor.
        TypeError: The argument is neither a ReduceOp nor a string.
    """
    if isinstance(op, PremulSum):
        return ReduceOp.SUM
    if op is premul_sum or (isinstance(op, str) and op.lower() == "premul_sum"):
        raise ValueError("op PREMUL_SUM needs a factor: pass op=meshdist.premul_sum(2.0), or another factor")
    if not isinstance(op, (ReduceOp, str)):
        meant = _LIKE.get(getattr(op, "__name__", ""))
        hint = "" if meant is None else f" {op.__name__!r}; did you mean ReduceOp.{meant}?"
        if hasattr(op, "collective_group"):  # a group or a mesh
            hint = "; did you mean group=?"
        elif hasattr(op, "dtype") and hasattr(op, "shape"):
            hint = "; reductions are in place, and those of meshdist.functional return a new array"
        elif type(op).__module__.startswith("mpi4py"):
            hint = f" of mpi4py; pass the name of a reduction: {_known_names()}"
        elif logical := _logical(getattr(op, "__name__", "")):
            hint = f" {op.__name__!r}; {logical}"
        elif callable(op) and meant is None:
            hint = (
                "; functions are not supported: call functools.reduce(f, meshdist.functional.all_gather(x)), which"
                " gathers the arrays and combines them on each rank"
            )
        raise TypeError(f"op must be a ReduceOp or its name, got {type(op).__name__}{hint}")
    try:
        return ReduceOp(op.lower()) if isinstance(op, str) else op
    except ValueError:
        raise ValueError(_unknown(op)) from None


def _unknown(op: object) -> str:
    meant = _meant(op) if isinstance(op, str) else None
    hint = "" if meant is None else f"; did you mean {meant!r}?"
    if isinstance(op, str) and _is_of_locations(op):
        from meshdist._torch_names import NO_LOCATIONS  # which an error alone needs

        hint = f"; {NO_LOCATIONS}"
    elif isinstance(op, str) and (logical := _logical(op)):
        hint = f"; {logical}"
    elif isinstance(op, str) and meant is None and op.isidentifier():
        hint = f"; if it is an axis of a mesh, call the method of mesh[{op!r}]"
    return f"unknown op {op!r}; choose from {_known_names()}{hint}"


def _known_names() -> str:
    return ", ".join(member.value for member in ReduceOp)


def _logical(name: str) -> str | None:
    """Return what to write instead of a logical reduction of numbers; None if `name` is none."""
    ops = {
        "band": ("land", "logical_and", "all"),
        "bor": ("lor", "logical_or", "any"),
        "bxor": ("lxor", "logical_xor"),
    }
    lowered = name.strip().lower()
    found = next((op for op, names in ops.items() if lowered in names), None)
    return None if found is None else f"for a logical reduction, pass an array of bool, x != 0, and op={found!r}"


def _is_of_locations(name: str) -> bool:
    return name.strip().lower() in ("maxloc", "minloc", "argmax", "argmin")


def _meant(name: str) -> str | None:
    from difflib import get_close_matches

    other_names = {
        "sum": ("add", "plus", "+"),
        "avg": ("mean", "average"),
        "product": ("prod", "mul", "multiply", "times", "*"),
        "band": ("and", "&", "bitwise_and"),
        "bor": ("or", "|", "bitwise_or"),
        "bxor": ("xor", "^", "bitwise_xor"),
        "max": ("maximum", "amax", "fmax"),
        "min": ("minimum", "amin", "fmin"),
    }
    lowered = name.strip().lower()
    near = get_close_matches(lowered, [member.value for member in ReduceOp], 1)
    return next((op for op, names in other_names.items() if lowered in names), near[0] if near else None)


def supports_complex(reduceOp: Op) -> bool:
    """Return whether complex arrays can be reduced by an op.

    Args:
        reduceOp: A ReduceOp, or its name.

    Raises:
        ValueError: An unknown name; the message lists the known ones.
        TypeError: The argument is neither a ReduceOp nor a string.
    """
    op = as_reduce_op(reduceOp)
    return op not in _NOT_FOR_COMPLEX and op not in _BITWISE


def check_op_dtype(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Raise TypeError where `op` is not defined for `dtype`."""
    # ml_dtypes has integers of few bits, of kind void: a dtype that cannot represent 0.5 is an integer.
    is_integer = dtype.kind in "biu" or (dtype.kind == "V" and float(np.array(0.5).astype(dtype)) != 0.5)
    if dtype.kind in "cW" and op in _NOT_FOR_COMPLEX:
        raise TypeError(f"op {op.name} is not defined for {dtype}: complex numbers take SUM, PRODUCT and AVG")
    if op in _BITWISE and dtype.kind not in "biu":
        raise TypeError(f"op {op.name} is not defined for {dtype}: it takes integers and bool")
    if op is ReduceOp.AVG and is_integer:
        why = "truth values have no mean" if dtype.kind == "b" else "integers have no exact mean"
        raise TypeError(f"op AVG is not defined for {dtype}: {why}; use SUM, or a floating dtype")
    nothing = np.empty(0, dtype)
    try:
        op.ufunc(nothing, nothing, out=nothing)
    except TypeError as error:
        raise TypeError(f"op {op.name} is not defined for {dtype}: {error}") from None


def identity(op: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """Return the value that changes no other one that it is reduced with, in a dtype for which `op` is defined."""
    if op is ReduceOp.BAND:
        return ~dtype.type(0)
    if op.ufunc.identity is not None:
        return op.ufunc.identity
    least, greatest = _bounds(dtype)
    return least if op is ReduceOp.MAX else greatest


def _bounds(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the least and the greatest value of a dtype, infinite ones included."""
    if dtype.kind == "b":
        return False, True
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind in "iu":
        bounds: Any = np.iinfo(dtype)
        return bounds.min, bounds.max
    import ml_dtypes

    limits: Any = ml_dtypes
    try:
        bounds = limits.finfo(dtype)
    except (TypeError, ValueError):  # an integer of few bits
        bounds = limits.iinfo(dtype)
    else:
        if np.isinf(dtype.type(np.inf)):  # some have none
            return -np.inf, np.inf
    return bounds.min, bounds.max


# Since NumPy 2 the setting is a context variable.
_IN_CONTEXT = np.lib.NumpyVersion(np.__version__) >= "2.0.0"


def quiet_runner() -> Callable[..., Any]:
    """Return a function that calls its argument with floating-point warnings suppressed.

    For one thread at a time, and not for functions that need the caller's context variables.
    """
    if not _IN_CONTEXT:
        return _in_errstate
    # A context made once costs nothing to enter; `np.errstate` takes a microsecond.
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run


def quietly(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call a function with floating-point warnings suppressed."""
    return quiet_runner()(function, *args, **keywords)


def _in_errstate(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*args, **keywords)
