"""check_replicated: check that all ranks have the same array, to the last bit."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from meshdist.arrays.device_types import taken
from meshdist.arrays.host import AnyArray
from meshdist.collectives.objects import all_gather_object
from meshdist.errors import DistBackendError
from meshdist.groups.world import resolve
from meshdist.runtime.context import GroupLike
from meshdist.runtime.rank_text import call_ranks
from meshdist.system.name_hints import explaining


@explaining
def check_replicated(tensor: AnyArray, group: GroupLike = None, name: str = "tensor") -> None:
    """Check that all ranks of a group pass the same array: shape, dtype and every bit. All ranks call it.

    Use it for replicated data, such as parameters before a step, or the seed of a shuffle. It compares 32-bit
    checksums, so it moves a few bytes, and misses one difference in four billion.

    Args:
        tensor: An array of any shape and dtype.
        group: A ProcessGroup or a DeviceMesh; the world if None.
        name: Name of the array in error messages.

    Raises:
        DistBackendError: The arrays differ; raised on all ranks, with the ranks and the difference.
        TypeError: `tensor` is not an array.

    Example:
        >>> import numpy as np
        >>> import meshdist as dist
        >>> def main():
        ...     dist.check_replicated(np.arange(3))
        ...     try:
        ...         dist.check_replicated(np.array(dist.get_rank()), name="rank")
        ...     except dist.DistBackendError as error:
        ...         return str(error).partition(": ")[2]
        >>> dist.run(main, 2)[0]
        'rank must be the same on all ranks, and its content differs: rank 0; rank 1'
    """
    members = resolve(group)
    error_prefix = members.error_prefix("check_replicated")
    array = members.named(error_prefix, taken, tensor, name)
    array = array if isinstance(array, np.ndarray) else array.get()
    mine = f"{array.dtype.name}{list(array.shape)}", zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)
    found: list[Any] = [None] * members.size()
    all_gather_object(found, mine, members)
    ranks_of: dict[tuple[str, int], list[int]] = {}
    for place, seen in enumerate(found):
        ranks_of.setdefault(seen, []).append(place)
    if len(ranks_of) == 1:
        return
    kinds = len({kind for kind, _ in ranks_of}) > 1
    parts = []
    for (kind, _), places in ranks_of.items():
        has = f" {'has' if len(places) == 1 else 'have'} {kind}" if kinds else ""
        parts.append(f"{call_ranks(places, members.ranks)}{has}")
    raise DistBackendError(
        f"{error_prefix}: {name} must be the same on all ranks, and its {'dtype or shape' if kinds else 'content'}"
        f" differs: {'; '.join(parts)}"
    )
