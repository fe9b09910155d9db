"""Writes the tables of backends.md that come from the code: `python docs/write_backends.py`."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import numpy as np

import meshdist as dist
from meshdist.arrays.reduce_op import check_op_dtype
from meshdist.backends.base import Backend as Engine
from meshdist.backends.mpi.cuda_aware import PASSED
from meshdist.backends.nccl.dtypes import reduction_of
from meshdist.backends.registry import DEVICE_TYPES, entry_of
from meshdist.collectives.definition import Collective
from meshdist.collectives.methods import CollectiveMethods

PAGE = Path(__file__).parent / "backends.md"
ENGINES = {
    "gloo": ("meshdist.backends.gloo.backend", "GlooBackend"),
    "threads": ("meshdist.backends.threads", "ThreadsBackend"),
    "mpi": ("meshdist.backends.mpi.backend", "MpiBackend"),
    "nccl": ("meshdist.backends.nccl.backend", "NcclBackend"),
}
OWN, MESSAGES, STAGED, PASSED_OR_STAGED, NOT = "own", "messages", "staged", "passed or staged", "-"
DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


def engine_of(name: str) -> type[Engine]:
    """Return the class of a backend's engine; importing it loads no library."""
    module, cls = ENGINES[name]
    found: type[Engine] = getattr(import_module(module), cls)
    return found


def collectives() -> list[Collective]:
    """Return the collectives of groups, in the order of their list, each once."""
    found = [value for value in vars(CollectiveMethods).values() if isinstance(value, Collective)]
    return list(dict.fromkeys(found))


def how(name: str, device: str, collective: Collective) -> str:
    """Return how a backend carries a collective of arrays on a device."""
    entry, engine = entry_of(name), engine_of(name)
    if device in entry.stages:
        return PASSED_OR_STAGED if name == "mpi" and collective.native in PASSED else STAGED
    if device not in entry.devices:
        return NOT
    by_itself = collective.composition is None or engine.has_own(collective.name)
    if by_itself:
        native = collective.name if collective.composition is not None else collective.native
        if engine.has_own(native):
            return OWN
    elif collective.composition is not None and device == "cpu":
        return how(name, device, collective.composition.inner)
    sends = engine.send is not Engine.send
    return MESSAGES if sends else NOT


def collective_table() -> str:
    """Return which backend carries which collective, on the CPU and on a GPU."""
    columns = [(name, device) for name in ENGINES for device in DEVICE_TYPES if carried(name, device)]
    lines = [f"| | {' | '.join(f'{name}, {device}' for name, device in columns)} |"]
    lines.append(f"| --- |{' --- |' * len(columns)}")
    rows: dict[tuple[str, ...], list[str]] = {}
    for collective in collectives():
        rows.setdefault(tuple(how(*column, collective) for column in columns), []).append(f"`{collective.name}`")
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return "\n".join(lines)


def carried(name: str, device: str) -> bool:
    """Return whether a backend takes arrays on a device."""
    entry = entry_of(name)
    return device in (*entry.devices, *entry.stages)


def dtype_of(name: str) -> np.dtype:
    """Return a dtype of NumPy or of ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def reduction_words(dtype: np.dtype, op: dist.ReduceOp) -> str:
    """Return how NCCL reduces a dtype by an op."""
    try:
        check_op_dtype(op, dtype)
    except TypeError:
        return NOT
    reduction = reduction_of(dtype, op)
    if reduction is None:
        return "gathered"
    if reduction.wide is not None:
        return f"as {reduction.wide}"
    if reduction.parts == 2:
        return "as two numbers"
    return "as uint8" if dtype.kind == "b" else "own"


def premul_words(dtype: np.dtype) -> str:
    """Return how NCCL reduces a dtype by PREMUL_SUM with a number."""
    try:
        dist.premul_sum(2).check(np.empty(1, dtype), "an array")
    except TypeError:
        return NOT
    reduction = reduction_of(dtype, dist.ReduceOp.SUM)
    return "own" if reduction is not None and reduction.takes_factor else "multiplied before"


def dtype_table() -> str:
    """Return how the nccl backend reduces which dtype."""
    ops = list(dist.ReduceOp)
    lines = [f"| | {' | '.join(op.name for op in ops)} | PREMUL_SUM |", f"| --- |{' --- |' * (len(ops) + 1)}"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in DTYPES:
        cells = [*(reduction_words(dtype_of(name), op) for op in ops), premul_words(dtype_of(name))]
        rows.setdefault(tuple(cells), []).append(name)
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return "\n".join(lines)


def written(text: str) -> str:
    """Return the page with its tables as the code has them."""
    for name, table in (("collectives", collective_table()), ("reductions", dtype_table())):
        begin, end = f"<!-- {name}: written by write_backends.py -->", f"<!-- end of {name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"{PAGE.name}: expected a table between {begin} and {end}")
        text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", f"{begin}\n{table}\n{end}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
