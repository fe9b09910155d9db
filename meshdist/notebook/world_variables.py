"""Which variables of a cell belong to its world, and are of no use in the next one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import islice
from types import ModuleType
from typing import Any

from meshdist.groups.process_group import ProcessGroup
from meshdist.mesh.device_mesh import DeviceMesh

# Of a list or another container, so many items are looked at.
_MOST_ITEMS = 64


def variables_of_the_world(variables: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the variables that are groups, meshes or arrays over a mesh, or hold some.

    What is hidden deeper is not found; its first use raises, and says that its world has ended.
    """
    module = sys.modules.get("meshdist.tensor.dtensor")  # imported by programs that use it
    kinds = (ProcessGroup, DeviceMesh, *([] if module is None else [module.DTensor]))
    return tuple(
        name
        for name, value in variables.items()
        if not name.startswith("_") and any(isinstance(one, kinds) for one in (value, *_held_by(value)))
    )


def _held_by(value: Any) -> list[Any]:
    """Return the items of a container, or the attributes of an object that is no module and no class."""
    if isinstance(value, (ModuleType, type)):
        return []
    if type(value) in (list, tuple, set):
        return list(islice(value, _MOST_ITEMS))
    held = value if type(value) is dict else getattr(value, "__dict__", {})
    return list(islice(held.values(), _MOST_ITEMS)) if type(held) is dict else []
