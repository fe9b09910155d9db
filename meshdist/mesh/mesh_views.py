"""MeshViews: meshes drawn, and what is sent along their axes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from html import escape
from typing import Any

from meshdist.mesh.layout import Layout
from meshdist.mesh.mesh_state import MeshState
from meshdist.profiler.accounting import Account, accounting


class MeshViews(MeshState):
    """Show a mesh and count its calls.

    Example:
        >>> import meshdist
        >>> issubclass(meshdist.DeviceMesh, MeshViews)
        True
    """

    def show(self, form: str | None = None, axis: int | str | None = None, ax: Any = None) -> Any:
        """Draw this mesh: its ranks by axes, coloured or lettered by host, with the calling rank marked.

        Args:
            form: "text" prints it; "html" returns a string of HTML; "plot" draws with matplotlib and returns the Axes.
                None shows it where the user looks: as HTML in a notebook, else as printed text.
            axis: Name or index of an axis whose groups are shown instead of the hosts; the calling rank's is marked.
            ax: The matplotlib Axes that "plot" draws into; new ones where it is None.

        Raises:
            UnknownAxisError: There is no such axis (a KeyError and a ValueError).
            ValueError: An unknown form, or the calling rank is outside the slice that this mesh is.
            ImportError: "plot" without matplotlib.

        Example:
            >>> import meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            ...     if mesh.get_rank() == 6:
            ...         mesh.show("text", axis="tp")
            >>> _ = meshdist.run(program, 8)  # doctest: +ELLIPSIS
            mesh (dp=2, tp=4), rank 6 at (dp=1, tp=2)
            <BLANKLINE>
                  tp=0 tp=1 tp=2 tp=3
             dp=0   0    1    2    3
             dp=1  (4)  (5)  [6]  (7)
            <BLANKLINE>
            2 groups along tp; this rank's is marked
            all ranks on ...
        """
        from meshdist.mesh.show import show

        return show(Layout(self.mesh, self.mesh_dim_names), self._world, form, axis, ax)

    def _repr_html_(self) -> str:
        # What a notebook shows of a cell that ends in a mesh. On a rank outside, a slice has no row to draw.
        if not self._plane_known:
            return f"<code>{escape(repr(self))}</code>"
        html: str = self.show("html")
        return html

    def account(self) -> AbstractContextManager[Account]:
        """Count this rank's calls and their bytes by the axes of this mesh, until the block ends.

        All calls count that the rank makes in its world, by way of this mesh or not; see `Account`.

        Example:
            >>> import numpy as np, meshdist
            >>> with meshdist.dry_run(64, ranks_per_host=8):
            ...     mesh = meshdist.init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
            ...     with mesh.account() as account:
            ...         _ = mesh["dp"].all_reduce(np.zeros(1 << 20, np.uint8))
            ...     account.as_dict()
            {'dp': {'all_reduce': {'calls': 1, 'nbytes': 1048576, 'inside': 0, 'between': 1835008}}}
        """
        return accounting(self._here(), self)
