"""DeviceMesh: ranks along named axes; each axis has its process group, and collectives run on any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from meshdist import core
from meshdist.arrays.host import AnyArray
from meshdist.groups.world import current_world
from meshdist.mesh.given_groups import (
    check_inside,
    group_backend,
    groups_of,
    layout_of_groups,
    name_of_ranks,
    ranks_of_groups,
    universe_of,
)
from meshdist.mesh.layout.axes_and_chunks import described_axes
from meshdist.mesh.layout.layout import Layout
from meshdist.mesh.mesh_arguments import (
    BackendChoice,
    axis_backends,
    check_carried,
    checked_device_type,
    world_ended_on_refusal,
    world_or_init,
)
from meshdist.mesh.mesh_check import agree, refusals_reported, refusals_reported_in
from meshdist.mesh.mesh_exchanges import MeshExchanges
from meshdist.mesh.mesh_state import entered
from meshdist.mesh.sharding import shard, unshard
from meshdist.runtime.context import GroupLike
from meshdist.system.name_hints import explaining, naming_methods

if TYPE_CHECKING:
    from meshdist.profiler.accounting import Account


@core.compare_by_identity
@naming_methods
class DeviceMesh(MeshExchanges):
    """Arrange ranks along axes; every axis and every slice has its process group and all collectives.

    Every rank of the world must create the same meshes in the same order, including ranks outside them. Creating a mesh
    takes one request to the store, which compares the meshes of the ranks, and does not wait for other ranks; groups
    connect in their first call. A rank whose mesh differs from that of the first rank raises immediately; the others
    raise at the latest in the first call on a group of the mesh. If there is no default group, it is initialized by
    `init_process_group()`.

    `mesh["tp"]` is the row of this rank along that axis, `mesh["dp", "tp"]` its plane over both axes, in the given
    order; each is a DeviceMesh, and the same object each time. A collective on a mesh runs over all its ranks, numbered
    in row-major order of its axes; `src` and `dst` are such numbers.

    On a rank outside the mesh, `get_coordinate()` returns None, and groups and collectives raise ValueError.

    Args:
        device_type: "cpu" or "cuda", without an index.
        mesh: Global ranks, as nested lists or an integer array, in any arrangement; unique, and inside the world.
        mesh_dim_names: One unique name per axis.
        backend_override: A dict that maps an axis, by name or index, to the backend that its group uses in place of the
            world's, or to a pair of the backend and its options (`pg_options` of `new_group`).
        group: A process group or mesh that contains this mesh: only its ranks create the mesh. The world if None.

    Raises:
        ValueError: Ranks repeated or outside the world or the group, names that do not fit, an unknown device type, no
            default group and an incomplete environment to initialize it from; or another rank created a different mesh.
        TypeError: Ranks that are not integers, names that are not strings.

    Example:
        >>> import numpy as np, meshdist
        >>> def program():
        ...     mesh = meshdist.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        ...     x = np.array([float(mesh.get_rank())])
        ...     return mesh["tp"].all_reduce(x).item(), mesh["tp"].mesh.tolist()
        >>> meshdist.run(program, 4)
        [(1.0, [0, 1]), (1.0, [0, 1]), (5.0, [2, 3]), (5.0, [2, 3])]
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, BackendChoice] | None = None,
        group: GroupLike = None,
        _init_backend: bool = True,  # as below, ignored: for scripts that use this private name of torch
        _init_process_groups: bool = True,
    ) -> None:
        universe = universe_of(group)
        with world_ended_on_refusal(), refusals_reported(universe):
            checked_device_type(device_type, is_first=True)
            layout = Layout(mesh, mesh_dim_names)
            inherited = group_backend(universe)
            given = axis_backends(layout, backend_override)
            backends = tuple(inherited if backend is None else backend for backend in given)
            check_carried(device_type, backends)
            self._store(device_type, layout, backends, self)
            self._universe = universe
            world = self._bind(world_or_init())
            if universe is not None:
                check_inside(layout, universe)
        within = universe or world.default_group
        self._agreement = agree(world, within.name, within.size(), device_type, layout, backends)

    if not TYPE_CHECKING:  # for type checkers, a name that is not there is an error

        def __getattr__(self, name: str) -> object:
            if name.startswith("_"):
                raise AttributeError(f"DeviceMesh has no attribute {name!r}", name=name)
            from meshdist._torch_names import no_attribute

            axes = ""
            if "_layout" in self.__dict__:  # else it is being unpickled
                known = (*(self._layout.names or ()), *self._flattened_here())
                for axis in known:
                    if axis.lower() == name.lower():
                        text = f'DeviceMesh has no attribute {name!r}; for the axis, write mesh["{axis}"]'
                        raise AttributeError(text, name=name)
                axes = f"; {described_axes(self._layout.describe(), known)}" if known else ""
            raise no_attribute(self, "DeviceMesh.", "DeviceMesh", name, otherwise=axes)

    @staticmethod
    @explaining
    def from_group(
        group: GroupLike | Sequence[GroupLike],
        device_type: str,
        mesh: Any = None,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return a mesh whose axes use existing groups.

        All ranks of the mesh call it, each with its own groups.

        Args:
            group: A process group, whose ranks are the mesh in its order; or a list of groups, one per axis, each the
                calling rank's row along it.
            device_type: "cpu" or "cuda", without an index.
            mesh: Global ranks by axes, as nested lists or an integer array. Needed with several groups; with one, the
                ranks of the group, along any number of axes.
            mesh_dim_names: One unique name per axis.

        Raises:
            ValueError: The groups are not the rows of the mesh, the calling rank is not in them, or another rank
                created a different mesh; see DeviceMesh for the rest.
            TypeError: Arguments that are not groups; see DeviceMesh for the rest.

        Example:
            >>> import meshdist
            >>> def program():
            ...     pair, _ = meshdist.new_subgroups(2)
            ...     mesh = meshdist.DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("tp",))
            ...     return mesh.get_group("tp") is pair, mesh.mesh.tolist()
            >>> meshdist.run(program, 4)[3]
            (True, [2, 3])
        """
        groups = groups_of(group)
        ranks = ranks_of_groups(groups, mesh)
        universe = name_of_ranks(ranks)
        with refusals_reported_in(universe, ranks.size):
            checked_device_type(device_type)
            layout = layout_of_groups(groups, mesh, mesh_dim_names)
            backends = tuple(group_backend(one) for one in groups * (layout.ndim if len(groups) == 1 else 1))
            check_carried(device_type, backends)
        world = current_world()
        made = object.__new__(DeviceMesh)
        made._store(device_type, layout, backends, made)
        made._bind(world)
        made._agreement = agree(world, universe, layout.size, device_type, layout, backends)
        made._take_groups(groups)
        return made

    @staticmethod
    @explaining
    def concatenate(meshes: Sequence[DeviceMesh], axis: int | str | None = None) -> DeviceMesh:
        """Join the axes of several meshes, or append meshes along one axis.

        Args:
            meshes: Without `axis`: meshes derived from one, with axes that do not overlap; the result has all of these
                axes, in this order. With `axis`: meshes with equal axes and no common ranks, as from `split`.
            axis: The axis along which to append them, by name or index.

        Raises:
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.
            ValueError: Incompatible meshes.

        Example:
            >>> import meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            ...     assert meshdist.DeviceMesh.concatenate([mesh["tp"], mesh["dp"]]) is mesh["tp", "dp"]
            ...     return meshdist.DeviceMesh.concatenate(mesh.split("tp", 2), "dp").mesh.tolist()
            >>> meshdist.run(program, 4)[0]
            [[0], [2], [1], [3]]
        """
        given = list(meshes)
        if not given or not all(isinstance(mesh, DeviceMesh) for mesh in given):
            raise TypeError(f"concatenate: expected a list of at least one DeviceMesh, got {meshes!r}")
        return _concatenated_axes(given) if axis is None else _concatenated_ranks(given, axis)

    # ---- Blocks of arrays

    @explaining
    def shard(self, x: AnyArray, dims: Mapping[int | str, int]) -> AnyArray:
        """Return this rank's block of `x`; nothing is sent.

        Blocks are those of `torch.chunk`: of ceil(rows / ranks) rows, the last ones smaller or empty. If several
        axes shard one dimension, the first of the mesh splits outermost. Arrays of `meshdist.tensor` record this.

        Args:
            x: The whole array, the same on all ranks.
            dims: The dimension that each axis shards, by name or index of the axis.

        Returns:
            A view of `x`.

        Raises:
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.
            ValueError: A dimension that `x` does not have, or the caller is outside the mesh.

        Example:
            >>> import numpy as np, meshdist
            >>> def program():
            ...     mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            ...     block = mesh.shard(np.arange(8).reshape(2, 4), {"dp": 0, "tp": 1})
            ...     return block.tolist(), mesh.unshard(block, {"tp": 1}).tolist()
            >>> meshdist.run(program, 4)[3]
            ([[6, 7]], [[4, 5, 6, 7]])
        """
        return shard(self, x, dims)

    @explaining
    def unshard(self, block: AnyArray, dims: Mapping[int | str, int]) -> AnyArray:
        """Return the whole array that the ranks' blocks form, new on every rank; all ranks of the mesh call it.

        Args:
            block: This rank's block; the numbers of rows along the sharded dimensions may differ.
            dims: The dimension that each axis shards, as for `shard`.

        Raises:
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.
            ValueError: A dimension that the block does not have, or the caller is outside the mesh.
        """
        return unshard(self, block, dims)

    # ---- Drawings and accounts

    @explaining
    def show(self, form: str | None = None, axis: int | str | None = None, ax: Any = None) -> Any:
        """Draw this mesh: its ranks by axes, with the calling rank marked.

        Colours or letters name the hosts, if there are several. A mesh of up to 16 x 16 ranks along the last two axes,
        with up to 8 such panels along the others, is drawn completely. For a larger mesh, only the part around the
        calling rank is drawn: 14 x 8 ranks, or a few panels of 5 x 8. Text has as many columns as fit on the terminal,
        and is folded if it is wider.

        Args:
            form: "text" prints it; "html" returns a string of HTML; "plot", or "matplotlib", draws and returns the
                Axes. None: HTML in a notebook, else printed text.
            axis: Name or index of an axis whose groups to show instead of hosts; the calling rank's group is
                highlighted.
            ax: The matplotlib Axes for "plot"; all text stays inside them, except for one line of the title. None:
                those of a new figure.

        Raises:
            UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.
            ValueError: An unknown form, or this is a slice and the calling rank is outside the mesh.
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
            2 groups along tp; this rank's group is highlighted
            all ranks on ...
        """
        from meshdist.mesh.show import show

        return show(Layout(self.mesh, self.mesh_dim_names), self._hosts(), form, axis, ax)

    def _repr_html_(self) -> str:
        # Notebooks call this. On a rank outside the mesh, a slice has no row to draw.
        if not self._plane_known:
            from html import escape  # 2 ms, which most programs do not need

            return f"<code>{escape(repr(self))}</code>"
        html: str = self.show("html")
        return html

    def account(self) -> AbstractContextManager[Account]:
        """Count this rank's calls and their bytes by the axes of this mesh, until the block ends.

        The account includes all calls of the rank in its world, not only those on this mesh; see `Account`.

        Example:
            >>> import numpy as np, meshdist
            >>> with meshdist.dry_run(64, ranks_per_host=8):
            ...     mesh = meshdist.init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
            ...     with mesh.account() as account:
            ...         _ = mesh["dp"].all_reduce(np.zeros(1 << 20, np.uint8))
            ...     account.as_dict()
            {'dp': {'all_reduce': {'calls': 1, 'nbytes': 1048576, 'inside': 0, 'between': 1835008}}}
        """
        from meshdist.profiler.accounting import accounting

        hosts = self._hosts()
        return accounting(self._here(), self, None if hosts is None else hosts.of_group)

    # ---- Private names in torch

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:
        return self._rows(mesh_dim_name)

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: BackendChoice | None = None) -> DeviceMesh:
        return self.flatten(mesh_dim_name, backend_override)

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[int | str, BackendChoice] | None = None,
    ) -> DeviceMesh:
        return self.unflatten(dim, mesh_sizes, mesh_dim_names, backend_override)

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        return DeviceMesh.concatenate(device_mesh_list)

    _split = MeshExchanges.split
    _transpose = MeshExchanges.transpose


def _concatenated_axes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh with the axes of all `meshes`, in this order, that contains the calling rank."""
    first = meshes[0]
    strangers = [mesh for mesh in meshes if mesh._root is not first._root]
    if strangers:
        raise ValueError(
            f"concatenate: meshes must be slices of one mesh, but {first!r} and {strangers[0]!r} are of different"
            " meshes; give axis= to put meshes one after the other"
        )
    layouts = [mesh._layout for mesh in meshes]
    names = tuple(name for layout in layouts for name in layout.names or ())
    axes = tuple(axis for layout in layouts for axis in layout.axes)
    if names and any(layout.names is None for layout in layouts):
        raise ValueError("concatenate: some of the meshes have axis names, and some none; give all of them names")
    if len(set(names)) < len(names):
        raise ValueError(f"concatenate: a name can be used only once, got the axes {', '.join(map(repr, names))}")
    if not first._root._layout.holds(axes):
        described = " and ".join(layout.describe() for layout in layouts)
        raise ValueError(f"concatenate: the axes of {described} overlap, so that ranks would be in the mesh twice")
    return first._over(axes, names or None, tuple(backend for mesh in meshes for backend in mesh._backends))


def _concatenated_ranks(meshes: Sequence[DeviceMesh], axis: int | str) -> DeviceMesh:
    """Return the mesh that appends the ranks of `meshes` along one axis; the same object each time."""
    first = meshes[0]
    number = first._layout.axis(axis)
    for mesh in meshes:
        _check_alike(mesh, first)

    def make() -> list[DeviceMesh]:
        layout = Layout.concatenate([mesh._known("concatenate") for mesh in meshes], number)
        return [first._new_root(layout, first._backends), *meshes]  # keeps the meshes alive: their ids are the key

    return first._kept(("concatenate", number, *map(id, meshes)), make)[0]


def _check_alike(mesh: DeviceMesh, first: DeviceMesh) -> None:
    if (mesh.ndim, mesh.mesh_dim_names) != (first.ndim, first.mesh_dim_names):
        raise ValueError(
            f"concatenate: meshes must have the same axes, got {first._layout.describe()} and {mesh._layout.describe()}"
        )
    for what, given, wanted in (
        ("device type", mesh.device_type, first.device_type),
        ("backends", mesh._backends, first._backends),
    ):
        if given != wanted:
            raise ValueError(f"concatenate: meshes must have the same {what}, got {wanted!r} and {given!r}")


def get_current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost enclosing `with mesh:` block.

    Raises:
        ValueError: There is no such block.
    """
    meshes = entered.get()
    if not meshes:
        raise ValueError("get_current_mesh: no mesh is current; call it inside `with mesh:`")
    return cast("DeviceMesh", meshes[-1])
