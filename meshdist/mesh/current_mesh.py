"""The mesh that `with mesh:` makes current: by thread and task, so ranks as threads do not see each other's."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshdist.mesh.device_mesh import DeviceMesh

# Immutable tuples, innermost mesh last: a task that inherits the context cannot change its parent's.
entered: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("meshdist_entered_meshes", default=())


def get_current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost `with mesh:` block around the caller.

    Raises:
        ValueError: There is no such block.
    """
    meshes = entered.get()
    if not meshes:
        raise ValueError("get_current_mesh: no mesh is current; call it inside `with mesh:`")
    return meshes[-1]
