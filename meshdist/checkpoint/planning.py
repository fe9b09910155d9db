"""Planning a save: what the ranks agree on before they write.

Saves of the same arrays reuse the plan, and take one exchange.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshdist.checkpoint.block_owners import Held, assign_pieces, check_alike, written_layout
from meshdist.checkpoint.commit import named_steps, step_folder
from meshdist.checkpoint.file_access import is_in_memory, local_path
from meshdist.checkpoint.manifest import FORMATS, MANIFEST
from meshdist.checkpoint.rank_agreement import Peers
from meshdist.checkpoint.replica_check import Digests, Shared, check_replicas, digests_of, shared_blocks
from meshdist.checkpoint.safetensors_files import nbytes_of
from meshdist.checkpoint.shares import Blocks, Share, share_of
from meshdist.checkpoint.stored_types import name_of
from meshdist.checkpoint.tree_names import Named, PerRank, check_names, merged, per_rank_name
from meshdist.checkpoint.writing import Plan, Target, make_plan
from meshdist.groups.process_group import ProcessGroup
from meshdist.runtime.plan_cache import remember
from meshdist.tensor.dtensor import DTensor, coordinate_in

# Where files are in memory, there are several once they have so many bytes, unless `max_file_bytes` is less.
_LEAST_FILE_BYTES = 32 << 20


class Options(NamedTuple):
    """The arguments of a save, the same on all ranks."""

    step: int | None
    format: str
    keep: int | None
    overwrite: bool
    max_file_bytes: int
    directory: str | Path

    def check(self) -> None:
        """Raise ValueError or TypeError if a save cannot have these arguments."""
        if not os.fspath(self.directory):
            raise TypeError(f"directory must be the path of a folder, got {self.directory!r}")
        if (local_path(self.directory) / MANIFEST).exists():
            raise ValueError(f"{self.directory} is a checkpoint; pass the folder above it")
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {self.format!r}")
        if self.format == "zarr":
            from meshdist.checkpoint.zarr_files import zarr_module

            zarr_module()
        for name, value, least in (
            ("step", self.step, 0),
            ("keep", self.keep, 1),
            ("max_file_bytes", self.max_file_bytes, 1),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


class Planned(NamedTuple):
    """Who writes what, for the next save of the same arrays as well.

    Attributes:
        key: A digest of what it depends on: the trees of all ranks and options.
        digest: That of this rank's tree.
        plan: The files.
        share: What this rank writes.
        shared: Which of its blocks others hold as well.
    """

    key: bytes
    digest: bytes
    plan: Plan
    share: Share
    shared: Shared


class Checked(NamedTuple):
    """A save that all ranks have agreed on.

    Attributes:
        target: Where it goes.
        plan: The files.
        share: What this rank writes.
        blocks: The elements of it.
        structure: Returns the structure of the tree; the ranks exchange their own if they differ.
    """

    target: Target
    plan: Plan
    share: Share
    blocks: Blocks
    structure: Callable[[Peers], list[Any]]


class Planner:
    """Plans the saves of a group, and keeps the last plan."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._planned: Planned | None = None
        self._held: dict[Any, Held] = {}

    def checked(self, peers: Peers, tree: Any, options: Options) -> Checked:
        """Return what to save; raise on all ranks what is wrong with the tree of any.

        The ranks make one exchange, and others if the arrays are not those of the save before, or if some are moved in
        the call: see `_OwnTree.elements`.
        """
        found: list[_OwnTree] = []

        def look() -> _Look:
            options.check()
            found.append(self._own_tree(tree, options.format))
            return self._look(found[0], options)

        looks = peers.together(look)
        own, structure = found[0], found[0].structure  # not the arrays, which the program may drop meanwhile
        is_alike = len({one.digest for one in looks}) == 1
        key = _digest(([one.digest for one in looks], options.format, options.max_file_bytes, looks[0].in_memory))
        samples = [one.samples for one in looks]
        if self._planned is None or any(one.planned != key for one in looks):
            self._planned, samples = self._made_plan(peers, own, is_alike, options, looks[0].in_memory, key)
        _, _, plan, share, shared = self._planned
        elements = own.elements()
        told = [digests for digests in samples if digests is not None]
        if len(told) < peers.size:
            told = peers.gather(digests_of(shared, elements))
        check_replicas(peers, told, shared, elements, own.held)
        step = looks[0].next_step if options.step is None else int(options.step)
        target = Target(step_folder(Path(options.directory).absolute(), step), step, options.overwrite, options.keep)
        blocks = share.blocks(elements)
        return Checked(
            target, plan, share, blocks, lambda peers: structure if is_alike else merged(peers.gather(structure))
        )

    def _own_tree(self, tree: Any, format: str) -> _OwnTree:
        named = Named(tree)
        rank = self._group.rank()
        arrays, held = {}, {}
        for name, x in sorted(named.arrays.items()):
            stored_name = per_rank_name(name, rank) if isinstance(x, PerRank) else name
            arrays[stored_name] = array = x.array if isinstance(x, PerRank) else x
            held[stored_name] = self._how_held(name, array, format)
        return _OwnTree(named.structure, arrays, held)

    def _how_held(self, name: str, array: Any, format: str) -> Held:
        if not isinstance(array, DTensor):
            return Held(tuple(array.shape), name_of(array.dtype))
        key = array.mesh, array.layout, array.dtype, format
        found = self._held.get(key)
        if found is None:
            found = _held_over_mesh(name, array, self._group, format)
            remember(self._held, key, found)
        return found

    def _look(self, own: _OwnTree, options: Options) -> _Look:
        planned, directory = self._planned, Path(options.directory)
        samples = own.samples(planned.shared) if planned is not None and planned.digest == own.digest else None
        steps = named_steps(directory) if self._group.rank() == 0 and options.step is None else {}
        key = b"" if planned is None else planned.key
        return _Look(own.digest, max(steps, default=-1) + 1, _goes_to_memory(directory), key, samples)

    def _made_plan(
        self, peers: Peers, own: _OwnTree, is_alike: bool, options: Options, in_memory: bool, key: bytes
    ) -> tuple[Planned, list[Digests | None]]:
        """Return a new plan, and the samples of all ranks; raise what is wrong with their trees together."""
        told = [(own.held, own.structure)] * peers.size if is_alike else peers.gather((own.held, own.structure))
        plans: list[Planned] = []

        def plan() -> Digests | None:
            check_names(merged([structure for _, structure in told]))
            names = sorted({name for held, _ in told for name in held})
            held_by = {name: {rank: of[name] for rank, (of, _) in enumerate(told) if name in of} for name in names}
            check_alike(held_by)
            pieces = assign_pieces(held_by, peers.size, options.format == "zarr")
            made = make_plan(options.format, held_by, pieces, _most_file_bytes(options, in_memory, held_by, peers.size))
            share, shared = share_of(peers.rank, pieces, held_by), shared_blocks(peers.rank, held_by)
            plans.append(Planned(key, own.digest, made, share, shared))
            return own.samples(shared)

        samples = peers.together(plan)
        return plans[0], samples


class _Look(NamedTuple):
    """What a rank says of its tree: equal digests are equal trees, but for the elements and values in them."""

    digest: bytes
    next_step: int
    in_memory: bool  # where the checkpoint goes, as the first rank finds it
    planned: bytes  # the key of the last plan
    samples: Digests | None  # of the blocks that ranks share by the last plan; None: not yet taken


class _OwnTree:
    """A rank's tree.

    Attributes:
        structure: Its structure.
        arrays: The arrays by the names that they are stored under: DTensors, and NumPy arrays.
        held: How the rank holds each.
        digest: Of all this, without elements and values.
    """

    def __init__(self, structure: list[Any], arrays: dict[str, Any], held: dict[str, Held]) -> None:
        self.structure = structure
        self.arrays = arrays
        self.held = held
        self.digest = _digest(([(name, _described(how)) for name, how in held.items()], _skeleton(structure)))
        self._elements: dict[str, Any] | None = None

    def samples(self, shared: Shared) -> Digests | None:
        """Return digests of samples of this rank's blocks; None if arrays are moved first: see `elements`."""
        return None if any(map(_is_moved_in_call, self.arrays.values())) else digests_of(shared, self.elements())

    def elements(self) -> dict[str, Any]:
        """Return this rank's block of each array, without a copy.

        The ranks of a mesh reduce arrays that are pending, and redistribute those on devices: all ranks must have
        arrived.
        """
        if self._elements is None:
            self._elements = {name: self._block(array, self.held[name]) for name, array in self.arrays.items()}
        return self._elements

    def _block(self, array: Any, held: Held) -> Any:
        if not isinstance(array, DTensor) or held.source is None:
            return array
        moved = array._moved(held.source)
        return moved.get() if array.mesh.device_type == "cuda" else moved


def _most_file_bytes(options: Options, in_memory: bool, held_by: dict[str, dict[int, Held]], num_ranks: int) -> int:
    if not in_memory:
        return options.max_file_bytes
    # There the ranks write files at the same time, but not one file.
    num_bytes = sum(nbytes_of(first.shape, first.dtype) for of in held_by.values() for first in [*of.values()][:1])
    return min(options.max_file_bytes, max(_LEAST_FILE_BYTES, num_bytes // (2 * num_ranks)))


def _digest(x: Any) -> bytes:
    return hashlib.sha256(repr(x).encode()).digest()


@lru_cache(maxsize=10_000)
def _described(held: Held) -> str:
    return repr((held, held.ranks, held.source and held.source.placements))


def _goes_to_memory(directory: Path) -> bool:
    there = next((folder for folder in (directory, *directory.absolute().parents) if folder.exists()), directory)
    return is_in_memory(there)


def _skeleton(structure: list[Any]) -> Any:
    """Return a structure without its values, which may differ between ranks; None stands for what a rank lacks."""
    kind, content = structure
    if kind == "dict":
        return kind, [(key, _skeleton(part)) for key, part in content]
    if kind in ("list", "tuple"):
        return kind, [_skeleton(part) for part in content]
    return kind, content is None if kind == "value" else content


def _is_moved_in_call(array: Any) -> bool:
    """Return whether the ranks of the mesh reduce the array, or redistribute it on devices, before it is copied."""
    return isinstance(array, DTensor) and (bool(array.layout.pending) or array.mesh.device_type == "cuda")


def _held_over_mesh(name: str, array: DTensor, group: ProcessGroup, format: str) -> Held:
    coordinate_in(array.mesh)
    ranks = [int(rank) for rank in np.asarray(array.mesh.mesh).reshape(-1)]
    members = {rank: place for place, rank in enumerate(group.ranks)}
    if missing := [rank for rank in ranks if rank not in members]:
        raise ValueError(f"{name!r} is on a mesh with rank {missing[0]}, which is not in the group that saves")
    layout = written_layout(array.layout, array.itemsize, format == "zarr")
    source = layout if _is_moved_in_call(array) else array.layout
    return Held(array.shape, name_of(array.dtype), layout, tuple(members[rank] for rank in ranks), source)
