"""save: the arrays of a tree as they lie on the ranks, copied and written behind the program's back if it wishes."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, overload

import numpy as np

from meshdist.checkpoint.block_owners import (
    Held,
    Mine,
    assign_pieces,
    check_alike,
    holders_of,
    index_at,
    written_layout,
)
from meshdist.checkpoint.byte_runs import Index, whole, within
from meshdist.checkpoint.commit import named_steps, step_folder
from meshdist.checkpoint.file_access import is_in_memory, local_path
from meshdist.checkpoint.manifest import FORMATS, MANIFEST
from meshdist.checkpoint.rank_agreement import Peers
from meshdist.checkpoint.replica_check import check_replicas
from meshdist.checkpoint.safetensors_files import nbytes_of
from meshdist.checkpoint.stored_types import name_of
from meshdist.checkpoint.tree_names import Named, PerRank, check_names, merged, per_rank_name
from meshdist.checkpoint.writing import Plan, Target, make_plan, write
from meshdist.debug.user_traceback import ending_at_the_call
from meshdist.groups.api import new_group
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import current_world, resolve
from meshdist.runtime.context import GroupLike
from meshdist.tensor.dtensor import DTensor, coordinate_in

# Where blocks begin in the memory that asynchronous saves copy into: at lines of caches.
_ALIGNED_BYTES = 64
# Where files are in memory, there are several once they have so many bytes, unless `max_file_bytes` is less.
_LEAST_FILE_BYTES = 32 << 20


class PendingSave:
    """An asynchronous save in progress.

    Attributes:
        path: The folder that the checkpoint will be.

    Example:
        >>> import numpy as np
        >>> import tempfile, meshdist
        >>> from meshdist.checkpoint import save
        >>> def program(directory):
        ...     pending = save(directory, {"w": np.ones(3)}, step=1, asynchronous=True)
        ...     return pending.wait().name
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     meshdist.run(program, 2, args=(directory,))
        ['step-1', 'step-1']
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_told = False  # the program has seen the error

    def start(self, work: Callable[[], object]) -> None:
        """Do the work of the save in a thread; what it raises is raised at the next call."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="meshdist-checkpoint")
        self._thread.start()

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "done" if self._error is None else "failed"
        return f"<PendingSave {self.path}: {state}>"

    def done(self) -> bool:
        """Return whether the save has ended on this rank, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    @ending_at_the_call
    def wait(self) -> Path:
        """Wait for the end of the save, and return the directory; raise its error on all ranks, at each call."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._is_told = True
            raise self._error
        return self.path

    def wait_unless_told(self) -> None:
        """Wait for the end of the save; raise its error unless it was raised before."""
        if not self._is_told:
            self.wait()


class Saver:
    """What a group keeps between its saves.

    Attributes:
        pending: The last asynchronous save.
        seen: The steps in each folder after the last save into it; on the first rank.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.pending: PendingSave | None = None
        self.seen: dict[Path, set[int]] = {}
        self._group = group
        self._own_group: ProcessGroup | None = None
        self._plan: tuple[Any, Plan] | None = None
        self._memory = np.empty(0, np.uint8)

    @staticmethod
    def of(group: ProcessGroup) -> Saver:
        """Return the group's, which goes with it."""
        saver = vars(group).get("checkpoint_saver")
        if saver is None:
            saver = vars(group)["checkpoint_saver"] = Saver(group)
            current_world().last_calls.append(saver.wait)
        return cast("Saver", saver)

    @staticmethod
    def wait_for(group: ProcessGroup | None) -> None:
        """Wait for an asynchronous save of the group, if any; raise its error unless the program has seen it."""
        saver = None if group is None else vars(group).get("checkpoint_saver")
        if saver is not None:
            saver.wait()

    def wait(self) -> None:
        """Wait for an asynchronous save; raise its error unless the program has seen it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait_unless_told()

    def plan(self, key: Any, held: dict[str, dict[int, Held]], format: str, most: int) -> Plan:
        """Return the plan of these arrays; that of the save before if they are the same."""
        if self._plan is None or self._plan[0] != key:
            check_alike(held)
            pieces = assign_pieces(held, self._group.size(), format == "zarr")
            plan = make_plan(format, held, pieces, most)
            plan.holders = {name: holders_of(by_rank) for name, by_rank in held.items()}
            self._plan = key, plan
        return self._plan[1]

    def copied(self, mine: list[Mine]) -> list[Mine]:
        """Return the blocks as copies, in memory that is used again by the next save."""
        begins, total = [], 0
        for one in mine:
            begins.append(total)
            total += -(-one.elements().nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if self._memory.size < total:
            self._memory = np.empty(total, np.uint8)
        copies = []
        for one, begin in zip(mine, begins, strict=True):
            elements = one.elements()
            copy = self._memory[begin : begin + elements.nbytes].view(elements.dtype).reshape(elements.shape)
            np.copyto(copy, elements)
            copies.append(one._replace(elements=partial(_same, copy)))
        return copies

    def start(self, pending: PendingSave, plan: Plan, mine: list[Mine], structure: Any, target: Target) -> None:
        """Write in a thread, whose messages go over a group of their own."""
        if self._own_group is None:
            made = new_group(self._group.ranks, group_desc="checkpoint", sort_ranks=False)
            self._own_group = cast("ProcessGroup", made)
        peers = Peers(self._own_group, f"asynchronous save to {target.folder}")

        self.pending = pending
        pending.start(lambda: write(peers, plan, mine, structure, target, self.seen))


@overload
def save(
    directory: str | Path,
    tree: Any,
    *,
    step: int | None = None,
    asynchronous: Literal[False] = False,
    keep: int | None = None,
    format: str = "safetensors",
    overwrite: bool = False,
    max_file_bytes: int = 4 << 30,
    group: GroupLike = None,
) -> Path: ...


@overload
def save(
    directory: str | Path,
    tree: Any,
    *,
    step: int | None = None,
    asynchronous: Literal[True],
    keep: int | None = None,
    format: str = "safetensors",
    overwrite: bool = False,
    max_file_bytes: int = 4 << 30,
    group: GroupLike = None,
) -> PendingSave: ...


@ending_at_the_call
def save(
    directory: str | Path,
    tree: Any,
    *,
    step: int | None = None,
    asynchronous: bool = False,
    keep: int | None = None,
    format: str = "safetensors",
    overwrite: bool = False,
    max_file_bytes: int = 4 << 30,
    group: GroupLike = None,
) -> Path | PendingSave:
    """Write a checkpoint to `directory/step-<n>`, whole or not at all; all ranks of the group call it.

    Every rank writes a part of the bytes. If it fails on any rank, all ranks raise the same error, and earlier
    checkpoints are unchanged.

    Args:
        directory: A directory that all ranks share; created if it does not exist.
        tree: DTensors, arrays, numbers, strings, bytes and None in dicts, lists, tuples and dataclasses. An array or
            value without a mesh is the same on all ranks, unless it is marked as `per_rank(array)`. Dicts may have
            different keys on different ranks, as those of pipeline stages have. A dataclass is saved as a dict and a
            named tuple as a tuple: `load` restores them if its `like` has them.
        step: The number in the name. None: one more than the highest there, or 0.
        asynchronous: Copy the arrays, and write them while the program continues. The next save or load of the group
            waits for this one, and raises its error; so does `destroy_process_group`.
        keep: The number of checkpoints to keep in `directory`, including this one; older ones are removed. None: keep
            all.
        format: "safetensors"; "npy", a file for each array; or "zarr" (extra `zarr`), an array for each.
        overwrite: Replace an existing checkpoint of this step.
        max_file_bytes: The largest number of bytes of arrays in one safetensors file; a larger array has a file of its
            own. Where files are in memory, as in /dev/shm, those of a large checkpoint are smaller, so that there are
            about twice as many as ranks.
        group: The ranks, a ProcessGroup or a DeviceMesh; the world if None. It has the ranks of all DTensors.

    Returns:
        The folder; with `asynchronous` a PendingSave.

    Raises:
        FileExistsError: There is a checkpoint of this step.
        CheckpointError: Another job is saving into the folder, or has saved into it since this job's last save.
        OSError: The disk is full, the folder cannot be written, and so on.
        ValueError: Arrays of one name that differ between ranks in shape, dtype or a sample of their elements, or two
            arrays of one name; a directory that is a URL; a dry run, which has no other ranks.
        TypeError: An object in the tree that is neither an array nor a small value, or an unsupported dtype.

    Example:
        >>> import tempfile, meshdist
        >>> from meshdist.checkpoint import load, save
        >>> from meshdist.tensor import Shard, arange
        >>> def program(directory):
        ...     mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     tree = {"w": arange(4, mesh=mesh, placements={"dp": Shard(0)}), "epoch": 7}
        ...     save(directory, tree, step=100)
        ...     return load(directory)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     meshdist.run(program, 2, args=(directory,))[1]
        {'w': array([0, 1, 2, 3]), 'epoch': 7}
    """
    if not isinstance(directory, (str, os.PathLike)):
        hint = "; did you swap directory and tree?" if isinstance(tree, (str, os.PathLike)) else ""
        raise TypeError(f"save: directory must be the path of a folder, got {type(directory).__name__}{hint}")
    members = resolve(group)
    saver = Saver.of(members)
    saver.wait()
    options = _Options(step, format, keep, overwrite, max_file_bytes, directory)
    peers = Peers(members, f"save to {directory}", {**options._asdict(), "asynchronous": asynchronous})
    target, plan, mine, structure = _planned(peers, saver, tree, options)
    if not asynchronous:
        return write(peers, plan, mine, structure, target, saver.seen)
    pending = PendingSave(target.folder)
    saver.start(pending, plan, saver.copied(mine), structure, target)
    return pending


class _Options(NamedTuple):
    step: int | None
    format: str
    keep: int | None
    overwrite: bool
    max_file_bytes: int
    directory: str | Path

    def check(self) -> None:
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


class _Look(NamedTuple):
    """What a rank says of its tree: equal digests are equal trees, but for the values in them."""

    digest: bytes
    next_step: int
    in_memory: bool  # where the checkpoint goes, as the first rank finds it


def _planned(peers: Peers, saver: Saver, tree: Any, options: _Options) -> tuple[Target, Plan, list[Mine], list[Any]]:
    """Return where to write, the plan, what this rank writes, and the structure of the tree."""
    found: list[tuple[Named, dict[str, Held]]] = []

    def look() -> _Look:
        options.check()
        named = Named(tree)
        held = {name: _held(name, array, peers, options.format) for name, array in named.arrays.items()}
        held = {_name_on(peers.rank, name, named.arrays[name]): how for name, how in held.items()}
        found.append((named, held))
        ranks = [how.ranks for _, how in sorted(held.items())]
        digest = hashlib.sha256(repr((sorted(held.items()), _skeleton(named.structure), ranks)).encode())
        steps = named_steps(Path(options.directory)) if peers.rank == 0 and options.step is None else {}
        return _Look(digest.digest(), max(steps, default=-1) + 1, _goes_to_memory(Path(options.directory)))

    looks = peers.together(look)
    named, held = found[0]
    held_by, structure = _united(peers, held, named.structure, is_alike=len({one.digest for one in looks}) == 1)
    most = options.max_file_bytes
    if looks[0].in_memory:  # where the ranks write files at the same time, but not one file
        num_bytes = sum(nbytes_of(first.shape, first.dtype) for of in held_by.values() for first in [*of.values()][:1])
        most = min(most, max(_LEAST_FILE_BYTES, num_bytes // (2 * peers.size)))
    key = ([other.digest for other in looks], options.format, most)
    plans: list[Plan] = []

    def plan() -> None:
        check_names(structure)
        plans.append(saver.plan(key, held_by, options.format, most))

    peers.together(plan)
    blocks = _blocks(named, held, peers.rank)
    check_replicas(peers, plans[0].holders, blocks, held_by)
    step = looks[0].next_step if options.step is None else int(options.step)
    folder = step_folder(Path(options.directory).absolute(), step)
    return (
        Target(folder, step, options.overwrite, options.keep),
        plans[0],
        _pieces(peers.rank, plans[0], blocks),
        structure,
    )


def _united(
    peers: Peers, held: dict[str, Held], structure: list[Any], is_alike: bool
) -> tuple[dict[str, dict[int, Held]], list[Any]]:
    """Return how each rank holds each array, and the tree of all ranks; `is_alike` where all are as on this one."""
    by_rank = [held] * peers.size
    if not is_alike:
        told = peers.gather((held, structure))
        by_rank = [of for of, _ in told]
        trees: list[list[Any]] = []
        peers.together(lambda: trees.append(merged([of for _, of in told])))
        structure = trees[0]
    held_by = {
        name: {rank: of[name] for rank, of in enumerate(by_rank) if name in of}
        for name in sorted({name for of in by_rank for name in of})
    }
    return held_by, structure


def _goes_to_memory(directory: Path) -> bool:
    there = next((folder for folder in (directory, *directory.absolute().parents) if folder.exists()), directory)
    return is_in_memory(there)


def _same(elements: Any) -> Any:
    return elements


def _skeleton(structure: list[Any]) -> Any:
    """Return a structure without its values, which may differ between ranks; None stands for what a rank lacks."""
    kind, content = structure
    if kind == "dict":
        return kind, [(key, _skeleton(part)) for key, part in content]
    if kind in ("list", "tuple"):
        return kind, [_skeleton(part) for part in content]
    return kind, content is None if kind == "value" else content


def _name_on(rank: int, name: str, array: Any) -> str:
    """Return the name under which an array is stored: one for each rank where each has its own."""
    return per_rank_name(name, rank) if isinstance(array, PerRank) else name


def _held(name: str, array: Any, peers: Peers, format: str) -> Held:
    if not isinstance(array, DTensor):
        array = array.array if isinstance(array, PerRank) else array
        return Held(tuple(array.shape), name_of(array.dtype))
    coordinate_in(array.mesh)
    ranks = [int(rank) for rank in np.asarray(array.mesh.mesh).reshape(-1)]
    members = {rank: place for place, rank in enumerate(peers.group.ranks)} if peers.group is not None else {}
    if missing := [rank for rank in ranks if rank not in members]:
        raise ValueError(f"{name!r} is on a mesh with rank {missing[0]}, which is not in the group that saves")
    layout = written_layout(array.layout, array.itemsize, format == "zarr")
    return Held(array.shape, name_of(array.dtype), layout, tuple(members[rank] for rank in ranks))


def _blocks(named: Named, held: dict[str, Held], rank: int) -> dict[str, tuple[Index, Any]]:
    """Return this rank's block of each array; ranks of a mesh exchange rows where these are not written as they lie."""
    blocks: dict[str, tuple[Index, Any]] = {}
    for name in sorted(named.arrays):
        array = named.arrays[name]
        stored_name = _name_on(rank, name, array)
        how = held[stored_name]
        elements, block = array.array if isinstance(array, PerRank) else array, whole(how.shape)
        if isinstance(array, DTensor) and how.layout is not None:
            elements = array._moved(how.layout)
            elements = elements.get() if array.mesh.device_type == "cuda" else elements
            block = index_at(how.layout, coordinate_in(array.mesh))
        blocks[stored_name] = block, elements
    return blocks


def _pieces(rank: int, plan: Plan, blocks: dict[str, tuple[Index, Any]]) -> list[Mine]:
    """Return the pieces that this rank writes."""
    mine = []
    for name, (block, elements) in blocks.items():
        for number, piece in enumerate(plan.pieces[name]):
            if piece.owner == rank:
                mine.append(Mine(name, number, piece, partial(_same, elements[within(piece.block, block)])))
    return mine
