"""MeshValue: meshes compared, stored, printed, and made current."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from meshdist.mesh.current_mesh import entered
from meshdist.mesh.layout import Layout
from meshdist.mesh.mesh_state import MeshState
from meshdist.mesh.render import hosts_text, position_text, ranks_text

if TYPE_CHECKING:
    from typing_extensions import Self

    from meshdist.mesh.rank_list import Ranks


class MeshValue(MeshState):
    """Make a mesh a value, equal to those of the same arrangement, and a context.

    Example:
        >>> import meshdist
        >>> issubclass(meshdist.DeviceMesh, MeshValue)
        True
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MeshValue):
            return NotImplemented
        return self is other or (
            self._device_type == other._device_type
            and self._plane_known == other._plane_known
            and self._layout == other._layout
        )

    def __hash__(self) -> int:
        return hash((self._device_type, self._layout))

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_pickle, (type(self), self._device_type, self.mesh, self.mesh_dim_names, self._backends)

    def __repr__(self) -> str:
        return f"DeviceMesh({', '.join(self._parts())})"

    def __str__(self) -> str:
        # Apart from repr, which debuggers and logs call at any moment: host names may have to be asked for.
        known = self._hosts() if self._plane_known else None
        hosts = None if known is None else hosts_text(self._layout, known)
        return f"DeviceMesh({', '.join(self._parts() if hosts is None else [*self._parts(), hosts])})"

    def _parts(self) -> list[str]:
        parts = [repr(self._device_type), self._layout.describe()]
        if self._world is not None:
            parts.append(position_text(self._layout, self._world, self._coordinate))
        if self._plane_known:
            parts.append(ranks_text(self._layout))
        return parts

    def __enter__(self) -> Self:
        """Make this the current mesh, which `get_current_mesh()` returns, until the block ends.

        Example:
            >>> import meshdist
            >>> def program():
            ...     with meshdist.init_device_mesh("cpu", (2,)) as mesh:
            ...         return meshdist.device_mesh.get_current_mesh() is mesh
            >>> meshdist.run(program, 2)
            [True, True]
        """
        entered.set((*entered.get(), self))  # type: ignore[arg-type]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the mesh of the block around this one current again."""
        entered.set(entered.get()[:-1])


def _from_pickle(
    kind: type[MeshValue],
    device_type: str,
    ranks: Ranks,
    names: tuple[str, ...] | None,
    backends: tuple[str | None, ...],
) -> MeshValue:
    """Make an equal mesh without a world: reading a file must not start a job. It takes the current one when used."""
    mesh = object.__new__(kind)
    mesh._store(device_type, Layout(ranks, names), backends, mesh)
    return mesh
