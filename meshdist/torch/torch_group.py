"""A process group of torch whose collectives are those of a group of meshdist.

torch calls it in two ways. Functions of `torch.distributed` call its methods directly, and wait for what they return.
The reducer of DDP, functional collectives and other C++ code call it through torch's trampolines, from any thread, and
use the Work or its Future. The options say by `asyncOp` whether the caller goes on before the call is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed import ProcessGroup as TorchProcessGroup

from meshdist.arrays.host import Array
from meshdist.arrays.reduce_op import Op, ReduceOp
from meshdist.groups.process_group import ProcessGroup
from meshdist.groups.world import World
from meshdist.lifecycle import abort_process_group, destroy_process_group
from meshdist.runtime.context import current_slot
from meshdist.runtime.work import Work
from meshdist.torch.handles import AsyncWork, DoneWork
from meshdist.torch.tensors import OPS, as_array, as_arrays, as_op, flat_pair, of_one_dtype

NAME = "meshdist"

_R = TypeVar("_R")


class TorchGroup(TorchProcessGroup):  # type: ignore[misc]
    """A group of torch over a group of meshdist.

    Tensors may be given one by one or as lists of one, options as torch's objects or as plain reductions and ranks:
    torch has both forms of each method.

    Attributes:
        group: The group that carries out the calls.
    """

    # What torch asks of a backend before it uses more of it.
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, store: Any, group: ProcessGroup, world: World, *, owns_world: bool) -> None:
        super().__init__(group.rank(), group.size())  # the form with a store is not for subclasses in Python
        self.group = group
        group.takes_any_shapes = True  # Gloo compares sizes
        self._store = store
        self._name = self._desc = ""
        self._world = world
        self._owns_world = owns_world
        self._done = DoneWork()

    def __repr__(self) -> str:
        return f"<TorchGroup of {self.group!r}>"

    # ---- Reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> Any:
        tensor = self._only("all_reduce", tensors)
        reduction, is_async = self._reduction("all_reduce", opts if op is None else op)
        if getattr(tensor, "is_sparse", False):
            _all_reduce_sparse(self.group, tensor, reduction)
            return DoneWork([tensor])
        array = self._named("all_reduce", as_array, tensor)
        if is_async:
            return AsyncWork(self.group.all_reduce(array, reduction, async_op=True), [tensor])
        self.group.all_reduce(array, reduction)
        return self._done

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        reduction, is_async = self._reduction("all_reduce_coalesced", opts)
        arrays = self._named("all_reduce_coalesced", as_arrays, tensors, "tensors")

        def reduce(places: list[int]) -> Any:
            if len(places) == 1:
                return self.group.all_reduce(arrays[places[0]], reduction, async_op=is_async)
            return self.group.all_reduce_coalesced([arrays[place] for place in places], reduction, async_op=is_async)

        return self._each_dtype(arrays, reduce, is_async, list(tensors))

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Any:
        tensor = self._only("reduce", tensors)
        reduction, is_async = self._reduction("reduce", opts if hasattr(opts, "reduceOp") else op)
        array = self._named("reduce", as_array, tensor)
        result = self.group.reduce(array, _root(opts if root is None else root), reduction, async_op=is_async)
        return self._handle(result, is_async, [tensor])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        output, blocks = self._only("reduce_scatter", outputs), _inner(inputs)
        reduction, is_async = self._reduction("reduce_scatter", opts)
        array = self._named("reduce_scatter", as_array, output, "output")
        arrays = self._named("reduce_scatter", as_arrays, blocks, "input_list")
        return self._handle(self.group.reduce_scatter(array, arrays, reduction, async_op=is_async), is_async, [output])

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        reduction, is_async = self._reduction("reduce_scatter_tensor", opts)
        block = self._named("reduce_scatter_tensor", as_array, output, "output")
        whole = self._named("reduce_scatter_tensor", as_array, input, "input")
        whole, block = flat_pair(whole, block, self.group.size())
        return self._handle(
            self.group.reduce_scatter_tensor(block, whole, reduction, async_op=is_async), is_async, [output]
        )

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        of = "reduce_scatter_tensor_coalesced"
        reduction, is_async = self._reduction(of, opts)
        pairs = self._flat_pairs(of, inputs, outputs, ("input_tensors", "output_tensors"))

        def scatter(places: list[int]) -> Any:
            if len(places) == 1:
                whole, block = pairs[places[0]]
                return self.group.reduce_scatter_tensor(block, whole, reduction, async_op=is_async)
            wholes, blocks = _unzipped(pairs, places)
            return self.group.reduce_scatter_tensor_coalesced(blocks, wholes, reduction, async_op=is_async)

        return self._each_dtype([block for _, block in pairs], scatter, is_async, list(outputs))

    # ---- Movement

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None) -> Any:
        tensor, is_async = self._only("broadcast", tensors), _is_async(opts)
        array = self._named("broadcast", as_array, tensor)
        result = self.group.broadcast(array, _root(opts if root is None else root), async_op=is_async)
        return self._handle(result, is_async, [tensor])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        tensor, blocks, is_async = self._only("all_gather", inputs), _inner(outputs), _is_async(opts)
        array = self._named("all_gather", as_array, tensor)
        arrays = self._named("all_gather", as_arrays, blocks, "tensor_list")
        return self._handle(self.group.all_gather(arrays, array, async_op=is_async), is_async, list(blocks))

    def allgather_coalesced(self, output_lists: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        of, is_async = "all_gather_coalesced", _is_async(opts)
        arrays = self._named(of, as_arrays, inputs, "input_tensor_list")
        lists = [self._named(of, as_arrays, each, "output_tensor_lists") for each in output_lists]
        result = self.group.all_gather_coalesced(lists, arrays, async_op=is_async)
        return self._handle(result, is_async, [list(each) for each in output_lists])

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        is_async = _is_async(opts)
        whole = self._named("all_gather_into_tensor", as_array, output, "output_tensor")
        block = self._named("all_gather_into_tensor", as_array, input, "input_tensor")
        whole, block = flat_pair(whole, block, self.group.size())
        return self._handle(self.group.all_gather_into_tensor(whole, block, async_op=is_async), is_async, [output])

    def all_gather_single_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        of, is_async = "all_gather_into_tensor_coalesced", _is_async(opts)
        pairs = self._flat_pairs(of, outputs, inputs, ("output_tensors", "input_tensors"))

        def gather(places: list[int]) -> Any:
            if len(places) == 1:
                return self.group.all_gather_into_tensor(*pairs[places[0]], async_op=is_async)
            return self.group.all_gather_into_tensor_coalesced(*_unzipped(pairs, places), async_op=is_async)

        return self._each_dtype([block for _, block in pairs], gather, is_async, list(outputs))

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Any:
        tensor, is_async = self._only("gather", inputs), _is_async(opts)
        blocks = _inner(outputs) if outputs else None
        array = self._named("gather", as_array, tensor)
        arrays = None if blocks is None else self._named("gather", as_arrays, blocks, "gather_list")
        result = self.group.gather(array, arrays, _root(opts if root is None else root), async_op=is_async)
        return self._handle(result, is_async, list(blocks or ()))

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Any:
        tensor, is_async = self._only("scatter", outputs), _is_async(opts)
        array = self._named("scatter", as_array, tensor)
        arrays = self._named("scatter", as_arrays, _inner(inputs), "scatter_list") if inputs else None
        result = self.group.scatter(array, arrays, _root(opts if root is None else root), async_op=is_async)
        return self._handle(result, is_async, [tensor])

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Any:
        is_async = _is_async(opts)
        taken = self._named("all_to_all", as_arrays, outputs, "output_tensor_list")
        given = self._named("all_to_all", as_arrays, inputs, "input_tensor_list")
        return self._handle(self.group.all_to_all(taken, given, async_op=is_async), is_async, list(outputs))

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        is_async = _is_async(opts)
        taken = self._named("all_to_all_single", as_array, output, "output")
        given = self._named("all_to_all_single", as_array, input, "input")
        splits = (list(output_split_sizes) or None, list(input_split_sizes) or None)
        return self._handle(self.group.all_to_all_single(taken, given, *splits, async_op=is_async), is_async, [output])

    # ---- Barriers

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        limit = timeout if opts is None else opts.timeout
        own = limit if limit is not None and limit > timedelta(0) else None  # torch has -1 ms for "none given"
        is_async = _is_async(opts)
        return self._handle(self.group.barrier(async_op=is_async, timeout=own), is_async, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.group.monitored_barrier(timeout=timeout, wait_all_ranks=wait_all_ranks)

    # ---- Messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        array = self._named("isend", as_array, self._only("isend", tensors))
        messages = self.group.messages
        return AsyncWork(messages.isend(array, messages.peer("isend", "dst", None, dst), tag), [])

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        return self._receive(tensors, self.group.messages.peer("irecv", "src", None, src), tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Any, src: int | None, tag: int) -> Any:
        tensor = self._only("irecv", tensors)
        array = self._named("irecv", as_array, tensor)
        return AsyncWork(self.group.messages.irecv(array, src, tag), [tensor], self.group.ranks.index)

    # ---- The names of these methods in C++ and in earlier versions of torch

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- The group

    def name(self) -> str:
        return NAME

    getBackendName = name

    def _get_backend_name(self) -> str:
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> TorchGroup:
        if torch.device(device).type != "cpu":
            # torch tries this for devices that a group may lack, and catches RuntimeError.
            raise RuntimeError(f"{self!r} is for CPU tensors, and has no backend for {device}")
        return self

    def get_group_store(self) -> Any:
        return self._store

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: torch allocates the tensors."""
        return False

    # torch keeps the name and description of a group in its C++ backends, of which this group has none.

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        if desc not in ("", "undefined", "default_pg"):
            self.group.relabel(desc)

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def _set_sequence_number_for_group(self) -> None:
        return  # the group counts its calls anyway

    def _get_sequence_number_for_group(self) -> int:
        return self.group.num_calls

    def set_timeout(self, timeout: timedelta) -> None:
        raise NotImplementedError(
            f"{self.group.error_prefix('set_timeout')}: backend meshdist cannot change the timeout of a group;"
            " pass it to init_process_group or new_group, or pass a timeout to barrier"
        )

    _set_default_timeout = set_timeout

    def _start_coalescing(self, device: torch.device) -> None:
        raise NotImplementedError(
            f"{self.group.error_prefix('_coalescing_manager')}: backend meshdist, like Gloo, joins calls of one kind;"
            " leave out the device"
        )

    def abort(self) -> None:
        """Make the calls of the other ranks that wait for this one fail."""
        if current_slot().world is not self._world:
            return
        if self._owns_world:
            abort_process_group()
        else:
            self.group.abort(f"rank {self._world.rank} aborted the process group of torch")

    def shutdown(self) -> None:
        """Close the group, and end the world if it began with this group; torch destroys groups by this."""
        if current_slot().world is not self._world:
            return  # the world was ended first, by meshdist or with the default group
        if self._owns_world:
            destroy_process_group()
        elif self._world.holds(self.group):
            self._world.drop(self.group)

    # ---- Arguments and results

    def _named(self, of: str, function: Callable[..., _R], *args: Any) -> _R:
        try:
            return function(*args)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.group.error_prefix(of)}: {error}") from error.__cause__

    def _only(self, of: str, tensors: Any) -> Any:
        if not isinstance(tensors, (list, tuple)):
            return tensors
        if len(tensors) != 1:
            raise ValueError(f"{self.group.error_prefix(of)}: expected one tensor for each rank, got {len(tensors)}")
        return tensors[0]

    def _reduction(self, of: str, opts: Any) -> tuple[Op, bool]:
        try:
            return OPS[opts.reduceOp], opts.asyncOp
        except (AttributeError, KeyError):  # a plain reduction, or one with a factor
            op = getattr(opts, "reduceOp", opts)
            return self._named(of, as_op, op), _is_async(opts)

    def _flat_pairs(
        self, of: str, wholes: Sequence[Any], blocks: Sequence[Any], names: tuple[str, str]
    ) -> list[tuple[Array, Array]]:
        if len(wholes) != len(blocks):
            raise ValueError(
                f"{self.group.error_prefix(of)}: {names[0]} and {names[1]} must be of one length, got {len(wholes)} and"
                f" {len(blocks)}"
            )
        each = (
            self._named(of, as_arrays, tensors, name) for tensors, name in zip((wholes, blocks), names, strict=True)
        )
        return [flat_pair(whole, block, self.group.size()) for whole, block in zip(*each, strict=True)]

    def _each_dtype(
        self, arrays: list[Array], call: Callable[[list[int]], Any], is_async: bool, outputs: list[Any]
    ) -> Any:
        # Coalesced calls of meshdist are of one dtype. Those of a group end in order.
        results = [call(places) for places in of_one_dtype(arrays)]
        return self._handle(results[-1], is_async, outputs) if results else self._done

    def _handle(self, result: Work | Any, is_async: bool, outputs: list[Any]) -> Any:
        return AsyncWork(result, outputs) if is_async else self._done


def _is_async(opts: Any) -> bool:
    # Calls without options come from C++, or from users who wait for the Work.
    return getattr(opts, "asyncOp", True)


def _root(opts: Any) -> int:
    root = getattr(opts, "rootRank", opts)
    return 0 if root is None else root


def _inner(lists: Any) -> Any:
    """Return the list of tensors in a list of one list; a list of tensors is returned as it is."""
    return lists[0] if len(lists) == 1 and isinstance(lists[0], (list, tuple)) else lists


def _unzipped(pairs: list[tuple[Array, Array]], places: list[int]) -> tuple[list[Array], list[Array]]:
    chosen = [pairs[place] for place in places]
    return [whole for whole, _ in chosen], [block for _, block in chosen]


# ---- Sparse tensors


def _all_reduce_sparse(group: ProcessGroup, tensor: Any, op: Op) -> None:
    """Replace a tensor of layout `torch.sparse_coo` by its sum over the group.

    Each rank may have other entries, and a different number of them. The sum is made in the order of the ranks.

    Raises:
        ValueError: The reduction is not SUM.
        TypeError: The tensor is not in CPU memory.
    """
    if op is not ReduceOp.SUM:
        raise ValueError(f"{group.error_prefix('all_reduce')}: sparse tensors can be reduced only by SUM, got {op}")
    mine = tensor.detach().coalesce()
    places, values = mine.indices().T.contiguous(), mine.values()
    counts = np.empty(group.size(), np.int64)
    group.all_gather_into_tensor(counts, np.array([len(values)], np.int64))
    all_places, all_values = (_gathered(group, rows, counts.tolist()) for rows in (places, values))
    with torch.no_grad():
        tensor.copy_(torch.sparse_coo_tensor(all_places.T, all_values, mine.shape).coalesce())


def _gathered(group: ProcessGroup, rows: Any, counts: list[int]) -> Any:
    """Return the rows of all ranks, in their order."""
    whole = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype)
    group.all_gather(as_arrays(whole.split(counts), "rows"), as_array(rows))
    return whole
