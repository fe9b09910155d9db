"""The import path that scripts know from torch: `from meshdist.device_mesh import init_device_mesh, DeviceMesh`."""

from meshdist.errors import UnknownAxisError
from meshdist.mesh.device_mesh import DeviceMesh, get_current_mesh
from meshdist.mesh.factory import init_device_mesh

__all__ = ["DeviceMesh", "UnknownAxisError", "get_current_mesh", "init_device_mesh"]


def __dir__() -> list[str]:
    return sorted(__all__)
