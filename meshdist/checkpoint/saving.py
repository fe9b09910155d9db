"""save: the arrays of a tree as they lie on the ranks, copied and written behind the program's back if it wishes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, cast, overload

import numpy as np

from meshdist.checkpoint.direct_io import new_memory
from meshdist.checkpoint.planning import Options, Planner
from meshdist.checkpoint.rank_agreement import Peers
from meshdist.checkpoint.shares import Blocks, Share, as_array, exchanged
from meshdist.checkpoint.writing import write
from meshdist.debug.user_traceback import ending_at_the_call
from meshdist.groups.api import new_group
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import current_world, resolve
from meshdist.runtime.context import GroupLike

# Where blocks begin in the memory that asynchronous saves copy into: at lines of caches.
_ALIGNED_BYTES = 64


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
        planner: Plans the saves.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.pending: PendingSave | None = None
        self.seen: dict[Path, set[int]] = {}
        self.planner = Planner(group)
        self._group = group
        self._own_group: ProcessGroup | None = None
        self._copies: tuple[Share, Blocks] | None = None
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

    def copied(self, share: Share, blocks: Blocks) -> Blocks:
        """Return copies of the elements, in memory that is used again by the next save."""
        if self._copies is None or self._copies[0] is not share:
            self._copies = share, self._places(share, blocks)
        copies = self._copies[1]
        for copy, elements in zip([*copies.parts, *copies.exchanged], [*blocks.parts, *blocks.exchanged], strict=True):
            if elements is not None:
                np.copyto(copy, elements)
        return copies

    def _places(self, share: Share, blocks: Blocks) -> Blocks:
        """Return arrays in the saver's memory that are like the elements; those of a block have room for its rows."""
        sizes = [elements.nbytes for elements in blocks.parts]
        for exchange, block in zip(share.exchanges, blocks.exchanged, strict=True):
            sizes.append(0 if block is None else max(block.nbytes, exchange.num_bytes))
        begins = [0, *accumulate(-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes)]
        if self._memory.size < begins[-1]:
            self._copies, self._memory = None, np.empty(0, np.uint8)  # freed before there is more
            self._memory = new_memory(begins[-1])
        memory = [self._memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]
        made = [
            None if elements is None else as_array(part, elements.dtype.newbyteorder("="), elements.shape)
            for part, elements in zip(memory, [*blocks.parts, *blocks.exchanged], strict=True)
        ]
        num_parts = len(blocks.parts)
        return Blocks(made[:num_parts], made[num_parts:], memory[num_parts:])

    def start(self, pending: PendingSave, work: Callable[[Peers], object]) -> None:
        """Do the work of a save in a thread, whose messages go over a group of their own."""
        if self._own_group is None:
            made = new_group(self._group.ranks, group_desc="checkpoint", sort_ranks=False)
            self._own_group = cast("ProcessGroup", made)
        peers = Peers(self._own_group, f"asynchronous save to {pending.path}")
        self.pending = pending
        pending.start(lambda: work(peers))


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
    options = Options(step, format, keep, overwrite, max_file_bytes, directory)
    peers = Peers(members, f"save to {directory}", {**options._asdict(), "asynchronous": asynchronous})
    target, plan, share, blocks, structure = saver.planner.checked(peers, tree, options)

    def finish(peers: Peers, blocks: Blocks) -> Path:
        assert peers.group is not None
        mine = exchanged(share, blocks, peers.group)
        return write(peers, plan, mine, structure(peers), target, saver.seen)

    if not asynchronous:
        return finish(peers, blocks)
    pending = PendingSave(target.folder)
    copies = saver.copied(share, blocks)
    saver.start(pending, lambda peers: finish(peers, copies))
    return pending
