"""What the layers of tensor and sequence parallelism check of their arguments before they send anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from meshdist.autograd.device_arrays import as_any_array
from meshdist.debug.debug_level import DebugLevel, get_debug_level
from meshdist.debug.replicated import check_replicated
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import resolve
from meshdist.runtime.context import GroupLike
from meshdist.system.plurals import counted


class LayerCall:
    """A call of a layer.

    Attributes:
        name: The layer.
        members: The ranks that share the layer; None for one rank alone.
        rank: This rank's place among them.
        size: Their number.
        prefix: The beginning of error messages.
    """

    def __init__(self, name: str, axis: GroupLike, with_dtensors: str) -> None:
        try:
            group: ProcessGroup | None = None if axis is None else resolve(axis)
        except TypeError:
            raise TypeError(
                f"{name}: axis must be a ProcessGroup, an axis of a mesh as mesh['tp'], or None, got {axis!r}"
            ) from None
        self.name = name
        self.prefix = name if group is None else group.error_prefix(name)
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.members = None if self.size == 1 else group
        self._with_dtensors = with_dtensors
        if self.rank < 0:
            raise ValueError(f"{self.prefix}: this rank is not in the group; leave the layer out here")

    def array(self, name: str, x: Any, *, ndim: int | None = None, least: int = 0) -> Any:
        """Return an argument that is an array of numbers, or a box of one.

        Raises:
            TypeError: No array, or a DTensor.
            ValueError: Another number of dimensions than `ndim`, or less than `least`.
        """
        value = getval(x)
        if hasattr(value, "placements"):
            raise TypeError(f"{self.prefix}: {name} is a DTensor, and the layer takes blocks; {self._with_dtensors}")
        if isinstance(value, (list, tuple, dict, str)) or value is None:
            raise TypeError(f"{self.prefix}: {name} must be an array, got a {type(value).__name__}")
        shape = np.shape(value)
        if (ndim is not None and len(shape) != ndim) or len(shape) < least:
            wanted = (
                f"{ndim} dimension{'s' * (ndim != 1)}"
                if ndim is not None
                else f"at least {counted(least, 'dimension')}"
            )
            raise ValueError(f"{self.prefix}: {name} must have {wanted}, got shape {shape}")
        return x if isbox(x) else as_any_array(value)

    def floating(self, name: str, x: Any, *, ndim: int | None = None, least: int = 0) -> Any:
        """Return an argument that is an array of a floating dtype.

        Raises:
            TypeError: `x` is not an array of such a dtype, or is a DTensor.
            ValueError: `x` does not have the required number of dimensions.
        """
        x = self.array(name, x, ndim=ndim, least=least)
        dtype = anp.result_type(x)
        if dtype.kind in "biuc":
            raise TypeError(f"{self.prefix}: {name} must be of a floating dtype, got {dtype}")
        return x

    def integers(self, name: str, x: Any, limit: int, what: str) -> Any:
        """Return an argument that is an array of integers from 0 to `limit` - 1.

        Raises:
            TypeError: No array of integers, or a DTensor.
            ValueError: An element is outside.
        """
        x = getval(self.array(name, x))
        if x.dtype.kind not in "iu":
            raise TypeError(f"{self.prefix}: {name} must be of an integer dtype, got {x.dtype}")
        outside = (x < 0) | (x >= limit)
        if outside.any():
            first = tuple(int(at) for at in np.argwhere(outside)[0])
            place = f"{name}[{', '.join(map(str, first))}]" if first else name
            raise ValueError(
                f"{self.prefix}: {place} is {int(x[first])}, and must be 0 to {limit - 1}, in {what};"
                f" {int(outside.sum())} of {x.size} are outside"
            )
        return x

    def check_shape(self, name: str, x: Any, shape: Sequence[int], why: str) -> None:
        """Check the shape of an argument.

        Raises:
            ValueError: It is another.
        """
        if np.shape(getval(x)) != tuple(shape):
            raise ValueError(f"{self.prefix}: {name} must have shape {tuple(shape)}, {why}; got {np.shape(getval(x))}")

    def sequence_dim(self, x: Any, dim: int, *, features: int = 1, divided: bool = False) -> int:
        """Return the dimension of the sequence, from 0 on; the last `features` dimensions are none.

        Args:
            x: The array.
            dim: The dimension, as the caller gives it.
            features: The number of last dimensions that are features.
            divided: Whether the ranks get equal blocks of it.

        Raises:
            TypeError: `dim` is not an integer.
            ValueError: There is no such dimension, or it is not divisible.
        """
        shape = np.shape(getval(x))
        try:
            place = index(dim)
        except TypeError:
            raise TypeError(f"{self.prefix}: sequence_dim must be an integer, got {dim!r}") from None
        place += len(shape) * (place < 0)
        if not 0 <= place < len(shape) - features:
            raise ValueError(
                f"{self.prefix}: sequence_dim must be a dimension before that of the features, got {dim} for an array"
                f" of shape {shape}"
            )
        if divided and shape[place] % self.size:
            raise ValueError(
                f"{self.prefix}: with sequence_parallel, dimension {place} of an array of shape {shape} is split into"
                f" {self.size} equal blocks; pad it to {math.ceil(shape[place] / self.size) * self.size}"
            )
        return place

    def check_replicated(self, name: str, x: Any) -> None:
        """With the debug level DETAIL, check that all ranks pass the same array.

        Raises:
            DistBackendError: They do not; on all ranks.
        """
        value = getval(x)
        if self.members is not None and get_debug_level() is DebugLevel.DETAIL and not isbox(value):
            check_replicated(as_any_array(value), self.members, f"{name} of {self.name}")
