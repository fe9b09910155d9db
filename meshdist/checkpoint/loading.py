"""load: the arrays of a checkpoint as they are wanted on this rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshdist.checkpoint.block_owners import index_at, is_held_once
from meshdist.checkpoint.manifest import MANIFEST
from meshdist.checkpoint.opening import Opened
from meshdist.checkpoint.partial_checksums import PartSums, first_damaged, grid_of
from meshdist.checkpoint.rank_agreement import CheckpointError, Peers
from meshdist.checkpoint.saving import Saver
from meshdist.checkpoint.stored_types import name_of
from meshdist.checkpoint.tree_names import (
    PerRank,
    filled,
    names_of,
    on_host,
    own_arrays,
    per_rank_name,
    rebuilt,
    values_of,
    visit,
)
from meshdist.debug.user_traceback import ending_at_the_call
from meshdist.runtime.context import GroupLike
from meshdist.runtime.log import RankLog
from meshdist.system.plurals import counted
from meshdist.tensor.distribution import as_block
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.moves import move

# How many names a message lists.
_FEW = 5

_log = RankLog()


@ending_at_the_call
def load(
    path: str | Path, like: Any = None, *, strict: bool = True, in_place: bool = False, group: GroupLike = None
) -> Any:
    """Return the tree of a checkpoint; all ranks of the group call it.

    Args:
        path: A checkpoint, a directory of checkpoints, of which the newest is loaded, or safetensors files of any
            program: one file, an index, or a directory.
        like: A tree that describes the result. DTensors are loaded onto the same mesh with the same placements,
            whatever the placements in the checkpoint, and each rank reads only the bytes of its block. Arrays and NumPy
            scalars are loaded as new ones of the same shape and dtype, `per_rank(array)` as this rank's own array, and
            small values as those of the checkpoint; lists and dicts without arrays are loaded unchanged. Entries are
            matched by name, not by the type of the container; dataclasses and named tuples are restored. `like` is not
            changed, unless `in_place`. None: the whole tree on each rank, as NumPy arrays, with lists indexed by rank
            for `per_rank` arrays, and None for ranks that had none; arrays of format "npy" are mapped from their files,
            copy-on-write. For files of other programs: a dict by name.
        strict: Raise if entries of `like` are missing in the checkpoint, or if the checkpoint has entries that no rank
            asks for: None in `like` asks for a value, and not for an array. False: missing entries keep their values
            from `like`, and additional ones are ignored; a warning is logged if no entries match.
        in_place: Read into the NumPy arrays of `like`, those of `per_rank` too, and the blocks of its DTensors, which
            takes no other memory, and put them into the tree that is returned. If reading fails, some of them have
            changed.
        group: The ranks, a ProcessGroup or a DeviceMesh; the world if None, or this process alone without one.

    Raises:
        FileNotFoundError: There is no checkpoint.
        Exception: What failed in an asynchronous save of the group, for which `load` waits; raised once.
        CheckpointError: It is damaged, or does not match `like` in names, shapes or dtypes. All ranks raise the same
            error.
        ValueError: `in_place` with a read-only array, or with a DTensor that has Partial placements; a path that is a
            URL; a dry run, which has no other ranks.

    Example:
        >>> import tempfile, meshdist
        >>> from meshdist.checkpoint import load, save
        >>> from meshdist.tensor import Shard, arange, empty
        >>> def program(directory):
        ...     one = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     save(directory, {"w": arange(6, mesh=one, placements=[Shard(0)]).reshape((2, 3))})
        ...     like = {"w": empty((2, 3), int, mesh=one, placements=[Shard(1)])}
        ...     return load(directory, like)["w"].to_local().tolist()
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     meshdist.run(program, 2, args=(directory,))
        [[[0, 1], [3, 4]], [[2], [5]]]
    """
    if not isinstance(strict, bool):
        raise TypeError(f"load: strict must be True or False, got {strict!r}")
    peers = Peers.of(group, f"load from {path}", {"strict": strict, "like": "given" if like is not None else None})
    Saver.wait_for(peers.group)
    opened = peers.by_first(lambda: Opened.at(path))
    wanted = _Wanted(opened, peers, strict, in_place)
    results: list[Any] = []

    if like is None:
        peers.together(lambda: results.append(wanted.all()))
        return results[0]
    asked = peers.together(lambda: wanted.checked_names(like))
    peers.by_first(lambda: wanted.check_rest({name for names in asked for name in names}))
    wanted.check_parts(peers.together(lambda: wanted.read_like(like, results)))
    return _with_pending(results[0], like)


class _Wanted:
    """What this rank takes of a checkpoint."""

    def __init__(self, opened: Opened, peers: Peers, strict: bool, in_place: bool) -> None:
        self._opened = Opened(opened.folder, opened.manifest)  # ranks that are threads share no memory to read into
        self._arrays = opened.manifest.arrays
        self._own = own_arrays(self._arrays)
        self._peers = peers
        self._strict = strict
        self._in_place = in_place
        structure = opened.manifest.structure
        self._values = {} if structure is None else values_of(structure)

    def all(self) -> Any:
        is_npy, shared = self._opened.manifest.format == "npy", self._peers.size > 1
        read: Callable[[str], Any] = self._opened.mapped if is_npy else partial(self._opened.read, shared=shared)

        def array(kind: str, name: str) -> Any:
            if kind == "per_rank":
                stored = self._own[name]
                return [read(stored[rank]) if rank in stored else None for rank in range(max(stored) + 1)]
            return read(name)[()] if kind == "scalar" else read(name)

        structure = self._opened.manifest.structure
        return {name: read(name) for name in self._arrays} if structure is None else rebuilt(structure, array)

    def read_like(self, like: Any, results: list[Any]) -> list[PartSums]:
        """Add what `like` asks for to `results`; return the sums of the pieces that this rank has read in part."""

        def array(name: str, leaf: Any) -> Any:
            stored_name = self._stored_name(name, leaf)
            return self._array(stored_name, leaf) if stored_name in self._arrays else leaf

        value = lambda name, leaf: self._values.get(name, leaf)  # noqa: E731
        results.append(filled(like, array, value, self._values.__contains__))
        return self._opened.parts

    def check_parts(self, by_rank: list[list[PartSums]]) -> None:
        """Raise CheckpointError on all ranks alike where the parts of a piece are not what was written."""
        damaged = first_damaged(self._arrays, by_rank)
        if damaged is not None:
            raise CheckpointError(f"{self._peers.what}: {self._opened.damage(*damaged)}")

    def checked_names(self, like: Any) -> list[str]:
        """Return the names of what `like` asks for; raise CheckpointError if it does not fit the checkpoint.

        None asks for a value, and for no array: it also stands for the arrays of other ranks.
        """
        self._check_names(like)
        names: list[str] = []

        def note(name: str, leaf: Any) -> None:
            if leaf is not None or name in self._values:
                names.extend({name, self._stored_name(name, leaf)})

        visit(like, note, note, self._values.__contains__)
        return names

    def _stored_name(self, name: str, leaf: Any) -> str:
        return per_rank_name(name, self._peers.rank) if isinstance(leaf, PerRank) else name

    def _check_names(self, like: Any) -> None:
        """Raise CheckpointError where names are missing, or stand for a value here and an array there."""
        arrays: dict[str, Any] = {}
        others: dict[str, Any] = {}
        values, folder = self._values, self._opened.folder
        arrays_there = self._arrays.keys() | self._own.keys()
        visit(like, arrays.__setitem__, others.__setitem__, values.__contains__)
        for name in others:
            if name in arrays_there and others[name] is not None:
                raise CheckpointError(f"{name!r} is an array in {folder}, and {type(others[name]).__name__} in like")
        for name in arrays:
            if name in values:
                raise CheckpointError(f"{name!r} is the value {values[name]!r} in {folder}, and an array in like")
            self._check_array(name, arrays[name])
        if not self._strict:
            return
        stored = {self._stored_name(name, leaf) for name, leaf in arrays.items()}
        missing = sorted(stored - self._arrays.keys())
        lost = sorted(name for name, leaf in others.items() if not self._has(name, leaf))
        if lost and self._opened.manifest.structure is None:
            raise CheckpointError(
                f"{folder} lacks {_listed(lost)}: without {MANIFEST}, safetensors files have arrays alone; pass"
                " strict=False to leave other values as they are in like"
            )
        if missing := missing + lost:
            of_ranks = f" (saved by {counted(self._num_ranks(), 'rank')})" if stored != arrays.keys() else ""
            own = [name for name in missing if name in self._own]
            hint = f"; {own[0]!r} was saved as per_rank: put per_rank(array) into like" if own else ""
            raise CheckpointError(
                f"{folder} lacks {_listed(missing)}{of_ranks}; it has {_listed(sorted(self._arrays))}{hint}; pass"
                " strict=False to leave them as they are in like"
            )

    def _has(self, name: str, leaf: Any) -> bool:
        """Return whether the checkpoint has what `like` has for a value; None stands for a part of the tree as well."""
        if name in self._values or leaf is not None:
            return name in self._values
        is_foreign = self._opened.manifest.structure is None  # then None is a value that no file has
        return is_foreign or any(f"{known}.".startswith(f"{name}.") for known in self._known())

    def _known(self) -> set[str]:
        """Return the names of the arrays and values of the checkpoint."""
        structure = self._opened.manifest.structure
        return set(self._arrays) if structure is None else names_of(structure, self._values)

    def check_rest(self, asked: set[str]) -> None:
        """Raise CheckpointError if the checkpoint has names that no rank asks for; warn if no rank asks for any.

        If `strict` is False, only warn.
        """
        known = self._known()
        if not self._strict:
            if asked and not asked & (known | self._arrays.keys() | self._values.keys()):
                _log.warning(
                    "%s has nothing of what like has: it has %s, like has %s; load returns the values of like",
                    *(self._opened.folder, _listed(sorted(known)), _listed(sorted(asked))),
                )
            return
        if rest := sorted(known - asked):
            raise CheckpointError(
                f"{self._opened.folder} has {_listed(rest)}, which like lacks, or has as None, on all ranks; add it to"
                " like, or pass strict=False to leave it out"
            )
        own = {stored for name in asked for stored in self._own.get(name, {}).values()}
        if rest := sorted(own - asked):
            raise CheckpointError(
                f"{self._opened.folder} was saved by {counted(self._num_ranks(), 'rank')}, and has {_listed(rest)},"
                f" which like lacks on all of the {self._peers.size} that load; pass strict=False to leave that out"
            )

    def _num_ranks(self) -> int:
        """Return how many ranks saved; after a conversion, which one process writes, how many it can tell."""
        ranks = (rank for of in self._own.values() for rank in of)
        return int(max(self._opened.manifest.writer.get("ranks", 1), max(ranks, default=0) + 1))

    def _check_array(self, name: str, leaf: Any) -> None:
        stored = self._arrays.get(self._stored_name(name, leaf))
        if stored is None:
            return
        if isinstance(leaf, PerRank):
            name, leaf = self._stored_name(name, leaf), leaf.array
            given = on_host(leaf, name)
        else:
            given = leaf if isinstance(leaf, DTensor) else on_host(leaf, name)
        if (stored.shape, stored.dtype) != (given.shape, name_of(given.dtype)):
            raise CheckpointError(
                f"{self._opened.folder / stored.file}: array {name!r} is {stored.dtype} of shape {stored.shape}, but"
                f" like has {given.dtype} of shape {given.shape}; describe in like what the checkpoint has, and convert"
                " the loaded array"
            )
        if self._in_place:
            self._check_memory(name, leaf)

    def _check_memory(self, name: str, leaf: Any) -> None:
        if isinstance(leaf, DTensor):
            if leaf.layout.pending:
                raise ValueError(
                    f"in_place=True cannot read into {name!r}, a DTensor with Partial placements; pass in_place=False,"
                    " or one with Replicate in place of Partial"
                )
            leaf = leaf.to_local()
        if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
            raise ValueError(
                f"in_place=True cannot read into {name!r}, which is read-only; pass in_place=False, or a copy of it,"
                " which can be written"
            )

    def _array(self, name: str, leaf: Any) -> Any:
        if isinstance(leaf, PerRank):
            own = self._opened.read(name, into=self._memory(leaf.array))
            return leaf if own is leaf.array else PerRank(own)
        if isinstance(leaf, DTensor):
            layout, into = leaf.layout.resolved(), self._memory(leaf.to_local())
            index, shared = index_at(layout, coordinate_in(leaf.mesh)), not is_held_once(layout)
            block = self._opened.read(name, index, into, shared=shared, grid=grid_of(layout))
            return leaf if into is not None else wrap(as_block(block, leaf.mesh), layout, leaf.mesh)
        array = self._opened.read(name, into=self._memory(leaf), shared=self._peers.size > 1)
        return array[()] if isinstance(leaf, np.generic) else array

    def _memory(self, array: Any) -> Any:
        """Return the array to read into; None for a new one."""
        return array if self._in_place and type(array) is np.ndarray else None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(map(repr, names[:_FEW])) + more if names else "nothing"


def _with_pending(tree: Any, like: Any) -> Any:
    """Return a tree with those of its DTensors pending that are in `like`: a sum is the array on the first rank."""
    placements: dict[str, Any] = {}
    visit(like, placements.__setitem__, lambda name, leaf: None, lambda name: False)

    def array(name: str, leaf: Any) -> Any:
        wanted = placements[name]
        if not isinstance(wanted, DTensor) or wanted.layout is leaf.layout:
            return leaf
        return wrap(move(leaf.to_local(), leaf.layout, wanted.layout, leaf.mesh), wanted.layout, leaf.mesh)

    return filled(tree, array, lambda name, leaf: leaf, lambda name: True)
